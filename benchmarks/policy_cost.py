"""Measures what a decision costs by each policy and by plug-ins, and how much memory the mirror
takes.

A decision is the index's look-up, and what the router does from there to the ranking: the core
finds hits, loads and what the mirror says of each replica, and orders them, or a plug-in does.
Replicas are busy: each has requests in prefill and in decode, and evicts. `--hit` bounds how much
of the prompt they hold: the look-up alone is measured in `index_match`. The plug-ins choose the
longest hit: one gets an object for each replica, one the columns, and one the columns with what
each cache is doing. All decide in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from benchmarks.figures import report
from kvevents.events import BlockStored, EventBatch
from router.config.replica import ReplicaConfig
from router.fleet.health import HealthRecord
from router.fleet.load import LoadTracker
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.index.mirror_types import STEP
from router.policies import (
    LEAST_DELAY,
    Candidate,
    Order,
    Policy,
    PolicySettings,
    Ranked,
    RouteRequest,
    Standings,
    make_policy,
)
from router.policies.policies import BUILT_IN
from router.routing.planner import Known, RoutePlanner
from router.routing.question import RankQuestion
from router.routing.recent_prefixes import RecentPrefixes

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
        deciders = {
            name: _decider(name, policy, replicas, options.hit)
            for name, policy in _policies().items()
        }
        costs: dict[str, list[float]] = {name: [] for name in deciders}
        for _ in range(options.repeats):
            for name, decide in deciders.items():
                costs[name].append(_microseconds(decide, decisions))
        for name, found in costs.items():
            cost = round(min(found), 2)
            report("policy_cost", policy=name, replicas=replicas, decision_us=cost)


class _Longest:
    """The longest hit, as a plug-in that gets candidates."""

    def rank(self, _request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order them."""
        ordered = sorted(candidates, key=lambda each: -each.gpu_cached_tokens)
        return [Ranked(each, place, "by its hit") for place, each in enumerate(ordered)]


class _LongestOfColumns(_Longest):
    """The same by columns."""

    def __init__(self, needs_outlook: bool) -> None:
        self.needs_outlook = needs_outlook

    def order(self, _request: RouteRequest, standings: Standings) -> Order:
        """Order them."""
        costs = [-float(tokens) for tokens in standings.gpu_cached_tokens]
        return Order(costs, lambda number: number, lambda _each, _cost, _place: "by its hit")


def _policies() -> dict[str, Policy]:
    built_in = {name: make_policy(name, PolicySettings(random=Random(1))) for name in BUILT_IN}
    return built_in | {
        "plug-in, candidates": _Longest(),
        "plug-in, columns": _LongestOfColumns(False),
        "plug-in, columns with outlooks": _LongestOfColumns(True),
    }


def _microseconds(decide: Callable[[], object], decisions: int) -> float:
    """Return the process time of one decision."""
    decide()
    started = time.process_time()
    for _ in range(decisions):
        decide()
    return (time.process_time() - started) / decisions * 1e6


def _decider(name_of: str, policy: Policy, count: int, most_hit: int) -> Callable[[], object]:
    random, index = Random(1), PrefixIndex()
    names = [f"replica-{number:03}" for number in range(count)]
    mirror = Mirror()
    load = LoadTracker(mirror.books)
    recent = None if name_of == LEAST_DELAY else RecentPrefixes(load.books)
    planner = RoutePlanner(policy, Known(load, recent=recent, mirror=mirror))
    prompt = _tokens(random)
    flights = []
    for number_of, name in enumerate(names):
        index.apply(SourceId(name), _stored(prompt, random.randrange(most_hit + 1), number_of))
        for number in range(4):
            sent = index.prepare(_tokens(random), extra_steps=(STEP,))
            visit = mirror.begin(MODEL, index, SourceId(name), [sent], PROMPT_TOKENS, PROMPT_TOKENS)
            flights.append(load.started(name, PROMPT_TOKENS, PROMPT_TOKENS, visit=visit))
            planner.visits.remember([sent], SourceId(name))
            if number:
                flights[-1].first_token()
    prompts = [index.prepare(prompt, extra_steps=(STEP,))]
    request = RouteRequest(model=MODEL, prompt_tokens=PROMPT_TOKENS, session="a session")
    replicas = [_replica(name) for name in names]

    def decide() -> object:
        assert len(flights) == 4 * count, "they are under way as long as they are known"
        return planner.rank(RankQuestion(request, index, prompts), replicas)

    return decide


def _stored(prompt: array[int], tokens: int, number: int) -> EventBatch:
    """Return the batch of a replica that holds the beginning of a prompt, and one block of
    another."""
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
