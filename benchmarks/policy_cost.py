"""What a decision costs in the compiled core and in Python, and how much memory the mirror takes.

A decision is the index's look-up, and what the router does from there to the ranking: candidates
are made of replicas, hits, loads and what the mirror says, and the policy orders them. Replicas are
busy: each has requests in prefill and in decode, and evicts. `--hit` bounds how much of the prompt
they hold: the look-up alone is measured in `index_match`. The core and Python decide in turn.
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
from typing import cast

from benchmarks.figures import report
from kvevents.events import BlockStored, EventBatch
from router.config import ReplicaConfig
from router.index import PrefixIndex, SourceId
from router.mirror import STEP, Mirror
from router.replicas.health import HealthRecord
from router.replicas.load import LoadTracker
from router.replicas.replica import Replica
from router.routing.planner import RoutePlanner
from router.routing.recent_prefixes import RecentPrefixes
from router.scoring import LEAST_DELAY, PolicySettings, RouteRequest, make_policy
from router.scoring.policies import BUILT_IN
from tests.oracle.load import ReferenceLoad

PROMPT_TOKENS = 4096
_BLOCK = 16
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
    parser.add_argument("--hit", type=int, default=PROMPT_TOKENS, help="tokens, at most")
    options = parser.parse_args()
    # First: memory that the rest has given back would be taken again, and not be seen to grow.
    _report_memory()
    for replicas in options.replicas:
        decisions = max(options.decisions // replicas, 20)
        for policy in BUILT_IN:
            deciders = [_decider(policy, replicas, options.hit, each) for each in (False, True)]
            costs = [
                [_microseconds(decide, decisions) for decide in deciders]
                for _ in range(options.repeats)
            ]
            in_python, in_core = (min(each) for each in zip(*costs, strict=True))
            report(
                "policy_cost",
                policy=policy,
                replicas=replicas,
                decision_us=round(in_core, 2),
                in_python_us=round(in_python, 2),
            )


def _microseconds(decide: Callable[[], object], decisions: int) -> float:
    """Of process time for one decision."""
    decide()
    started = time.process_time()
    for _ in range(decisions):
        decide()
    return (time.process_time() - started) / decisions * 1e6


def _decider(policy: str, count: int, most_hit: int, in_core: bool) -> Callable[[], object]:
    random, index = Random(1), PrefixIndex()
    names = [f"replica-{number:03}" for number in range(count)]
    load = LoadTracker() if in_core else cast(LoadTracker, ReferenceLoad())
    mirror = Mirror()
    is_new = policy == LEAST_DELAY
    planner = RoutePlanner(
        make_policy(policy, PolicySettings(random=Random(1))),
        load,
        None if is_new else RecentPrefixes(),
        (),
        mirror=mirror if is_new else None,
    )
    prompt = _tokens(random)
    flights = []
    for number_of, name in enumerate(names):
        index.apply(SourceId(name), _stored(prompt, random.randrange(most_hit + 1), number_of))
        for number in range(4):
            sent = index.prepare(_tokens(random), extra_steps=(STEP,))
            visit = mirror.begin(MODEL, index, SourceId(name), [sent], PROMPT_TOKENS, PROMPT_TOKENS)
            flights.append(load.started(name, PROMPT_TOKENS, PROMPT_TOKENS, visit=visit))
            planner.remember([sent], SourceId(name))
            if number:
                flights[-1].first_token()
    prompts = [index.prepare(prompt, extra_steps=(STEP,))]
    request = RouteRequest(model=MODEL, prompt_tokens=PROMPT_TOKENS, session="a session")
    replicas = [_replica(name) for name in names]

    def decide() -> object:
        assert len(flights) == 4 * count, "they are under way as long as they are known"
        return planner.rank(request, index, prompts, replicas)

    return decide


def _stored(prompt: array[int], tokens: int, number: int) -> EventBatch:
    """A replica holds the beginning of a prompt, and one block of another."""
    blocks = max(tokens // _BLOCK, 1)
    held = prompt[: blocks * _BLOCK] if tokens >= _BLOCK else array("I", range(_BLOCK))
    event = BlockStored(
        block_hashes=[(number << 40) + block for block in range(1, blocks + 1)],
        parent_block_hash=None,
        token_ids=list(held),
        medium="GPU",
        block_size=_BLOCK,
    )
    return EventBatch(0.0, [event])


def _tokens(random: Random) -> array[int]:
    return array("I", random.randbytes(4 * PROMPT_TOKENS))


def _replica(name: str) -> Replica:
    record = HealthRecord(1, 1)
    record.check_passed()
    return Replica(ReplicaConfig(url="http://127.0.0.1:1", id=name), record, time.monotonic())


def _report_memory() -> None:
    """Bytes for each key, with a cache full of prompts that share nothing."""
    random, index, mirror = Random(2), PrefixIndex(), Mirror()
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
