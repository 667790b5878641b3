"""What a decision costs, and how much memory the mirror takes.

A decision is what the router does between the index's answer and the ranking: candidates are made
of replicas, hits, loads and what the mirror says, and the policy orders them. The index's own
look-up is measured in `index_match`. Replicas are busy: each has requests in prefill and in decode,
and evicts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.figures import report
from router.config import ReplicaConfig
from router.index import HashedPrompt, Hit, SourceId, choose_index, create_index
from router.mirror import STEP, create_mirror
from router.replicas.health import HealthRecord
from router.replicas.load import LoadTracker
from router.replicas.replica import Replica
from router.routing.planner import RoutePlanner
from router.routing.recent_prefixes import RecentPrefixes
from router.scoring import LEAST_DELAY, PolicySettings, RouteRequest, make_policy
from router.scoring.policies import BUILT_IN

PROMPT_TOKENS = 4096
MODEL = "m"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument(
        "--decisions", type=int, default=20_000, help="times the number of replicas"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    # First: memory that the rest has given back would be taken again, and not be seen to grow.
    _report_memory()
    for replicas in options.replicas:
        decisions = max(options.decisions // replicas, 20)
        for policy in BUILT_IN:
            decide = _decider(policy, replicas)
            costs = [_microseconds(decide, decisions) for _ in range(options.repeats)]
            report(
                "policy_cost", policy=policy, replicas=replicas, decision_us=round(min(costs), 2)
            )


class _KnownHits:
    """An index whose answer is ready: what is measured is all but the look-up."""

    def __init__(self, hits: dict[SourceId, Hit]) -> None:
        self._index = create_index()
        self._hits = hits

    def match_prompt(self, _prompt: HashedPrompt) -> dict[SourceId, Hit]:
        return self._hits

    def __getattr__(self, name: str) -> object:
        return getattr(self._index, name)


def _microseconds(decide: Callable[[], object], decisions: int) -> float:
    """Of process time for one decision."""
    decide()
    started = time.process_time()
    for _ in range(decisions):
        decide()
    return (time.process_time() - started) / decisions * 1e6


def _decider(policy: str, count: int) -> Callable[[], object]:
    random = Random(1)
    names = [f"replica-{number:03}" for number in range(count)]
    hits = {SourceId(name): _hit(random) for name in names}
    index = _KnownHits(hits)
    load, mirror = LoadTracker(), create_mirror(choose_index())
    is_new = policy == LEAST_DELAY
    planner = RoutePlanner(
        make_policy(policy, PolicySettings(random=Random(1))),
        load,
        None if is_new else RecentPrefixes(),
        (),
        mirror=mirror if is_new else None,
    )
    for name in names:
        for number in range(4):
            prompt = index._index.prepare(_tokens(random), extra_steps=(STEP,))
            visit = mirror.begin(
                MODEL, index._index, SourceId(name), [prompt], PROMPT_TOKENS, PROMPT_TOKENS
            )
            flight = load.started(name, PROMPT_TOKENS, PROMPT_TOKENS, visit=visit)
            planner.remember([prompt], SourceId(name))
            if number:
                flight.first_token()
    prompts = [index._index.prepare(_tokens(random), extra_steps=(STEP,))]
    request = RouteRequest(model=MODEL, prompt_tokens=PROMPT_TOKENS, session="a session")
    replicas = [_replica(name) for name in names]
    return lambda: planner.rank(request, index, prompts, replicas)


def _hit(random: Random) -> Hit:
    tokens = random.randrange(0, PROMPT_TOKENS, 16)
    return Hit(tokens, tokens)


def _tokens(random: Random) -> array[int]:
    return array("I", random.randbytes(4 * PROMPT_TOKENS))


def _replica(name: str) -> Replica:
    record = HealthRecord(1, 1)
    record.check_passed()
    return Replica(ReplicaConfig(url="http://127.0.0.1:1", id=name), record, time.monotonic())


def _report_memory() -> None:
    """Bytes for each key, with a cache full of prompts that share nothing."""
    random, index, mirror = Random(2), create_index(), create_mirror(choose_index())
    before = _resident_bytes()
    for _ in range(2000):
        prompt = index.prepare(_tokens(random), extra_steps=(STEP,))
        mirror.begin(MODEL, index, SourceId("r0"), [prompt], PROMPT_TOKENS, PROMPT_TOKENS).ended()
    del prompt
    taken, keys = _resident_bytes() - before, mirror.statistics().keys
    report("policy_cost", mirror_keys=keys, bytes_per_key=round(taken / keys))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
