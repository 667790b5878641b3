"""How many accesses hit under each eviction policy of the CPU tier, and how far is that from the
best possible?

A trace is a list of prompts, each a list of blocks; a synthetic prompt is one block. The blocks of
a prompt that the tier has are touched, and the rest are stored in one call. The peer in the same
run is Belady's OPT, which knows the future and evicts the block needed last: no policy that stores
every miss has more hits. `prefix_hit_ratio` counts only hits without a miss before them in their
prompt: those that full attention can use.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from benchmarks.figures import report
from kvevents.events import GroupIdx
from offload.base import LookupResult, OffloadKey, RequestContext, pack_offload_key
from offload.cpu.manager import CPUOffloadingManager

Trace = list[list[int]]
REQUEST = RequestContext("benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--capacity",
        type=int,
        nargs="+",
        default=[256, 1024, 4096],
        help="blocks, for synthetic traces",
    )
    parser.add_argument("--accesses", type=int, default=100_000, help="length of a synthetic trace")
    parser.add_argument(
        "--blocks", type=int, default=20_000, help="different blocks of the zipf traces"
    )
    parser.add_argument("--policy", nargs="+", default=["lru", "arc"])
    parser.add_argument(
        "--trace", type=Path, help="recorded prompts: JSON lines with hash_ids, plain or .gz"
    )
    parser.add_argument("--trace-capacity", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument(
        "--trace-requests",
        type=int,
        default=None,
        help="only so many prompts of the recorded trace",
    )
    options = parser.parse_args()
    for capacity in options.capacity:
        for name, make in SYNTHETIC.items():
            _measure(
                name, make(options.accesses, options.blocks, capacity), capacity, options.policy
            )
    if options.trace is not None:
        trace = _recorded(options.trace, options.trace_requests)
        for capacity in options.trace_capacity:
            _measure(options.trace.name, trace, capacity, options.policy)


# --- traces ---------------------------------------------------------------------------------------


def _zipf(accesses: int, blocks: int, _capacity: int) -> Trace:
    """Block i is accessed in proportion to 1 / i."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, blocks + 1)))
    return [[block] for block in Random(1).choices(range(blocks), cum_weights=weights, k=accesses)]


def _zipf_with_scans(accesses: int, blocks: int, capacity: int) -> Trace:
    """Half of the accesses are scans of twice the capacity whose blocks are never accessed
    again."""
    popular = iter(_zipf(accesses, blocks, capacity))
    fresh = itertools.count(blocks)
    turns = itertools.cycle(["popular", "scan"])
    trace: Trace = []
    while len(trace) < accesses:
        source: Iterator[list[int]] = (
            popular if next(turns) == "popular" else ([block] for block in fresh)
        )
        trace.extend(itertools.islice(source, min(2 * capacity, accesses - len(trace))))
    return trace


def _loop(accesses: int, _blocks: int, capacity: int) -> Trace:
    """A quarter more blocks than fit are accessed in turn."""
    return [[turn % (capacity * 5 // 4)] for turn in range(accesses)]


def _shifting(accesses: int, blocks: int, capacity: int) -> Trace:
    """Five working sets are accessed in turn, each as large as the capacity, with a tenth of
    one-time blocks."""
    draw = Random(2)
    passing = itertools.count(10 * capacity + blocks)
    phases = (turn * 5 // accesses for turn in range(accesses))
    return [
        [next(passing) if draw.random() < 0.1 else phase * capacity + draw.randrange(capacity)]
        for phase in phases
    ]


SYNTHETIC: dict[str, Callable[[int, int, int], Trace]] = {
    "zipf": _zipf,
    "zipf_with_scans": _zipf_with_scans,
    "loop_larger_than_the_cache": _loop,
    "shifting_working_set": _shifting,
}


def _recorded(path: Path, requests: int | None) -> Trace:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line)["hash_ids"] for line in content.splitlines()[:requests]]


# --- policies -------------------------------------------------------------------------------------


def _measure(name: str, trace: Trace, capacity: int, policies: list[str]) -> None:
    accesses = sum(map(len, trace))
    best = _belady_hits([block for prompt in trace for block in prompt], capacity) / accesses
    for policy in policies:
        start = time.perf_counter()
        hits, prefix_hits = _tier_hits(trace, capacity, policy)
        elapsed_s = time.perf_counter() - start
        report(
            "eviction_policies",
            trace=name,
            accesses=accesses,
            capacity=capacity,
            policy=policy,
            hit_ratio=round(hits / accesses, 4),
            prefix_hit_ratio=round(prefix_hits / accesses, 4),
            best_possible_hit_ratio=round(best, 4),
            microseconds_per_access=round(elapsed_s / accesses * 1e6, 2),
        )


def _tier_hits(trace: Trace, capacity: int, policy: str) -> tuple[int, int]:
    """Count the hits, and those without a miss before them in their prompt."""
    tier = CPUOffloadingManager(capacity, policy, enable_events=False)
    hits = prefix_hits = 0
    for prompt in trace:
        keys = [_key(block) for block in prompt]
        held = [tier.lookup(key, REQUEST) is LookupResult.HIT for key in keys]
        hits += sum(held)
        prefix_hits += sum(itertools.accumulate(held, lambda so_far, here: so_far and here))
        _use(tier, keys)
    return hits, prefix_hits


def _use(tier: CPUOffloadingManager, keys: list[OffloadKey]) -> None:
    """Touch the blocks that are present, from the tail to the head, and store as many of the rest
    as fit."""
    tier.touch(reversed(keys), REQUEST)
    output = tier.prepare_store(keys, REQUEST)
    if output is not None:
        tier.complete_store(output.keys_to_store, REQUEST)


def _key(block: int) -> OffloadKey:
    return pack_offload_key(block.to_bytes(8, "big"), GroupIdx(0))


def _belady_hits(accesses: list[int], capacity: int) -> int:
    """Count the hits of a cache that evicts the block accessed last (L. A. Belady, IBM Systems
    Journal 5(2), 1966)."""
    next_use: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for block, later in zip(accesses, _next_uses(accesses), strict=True):
        if block in next_use:
            hits += 1
        elif len(next_use) == capacity:
            _evict_furthest(next_use, furthest)
        next_use[block] = later
        heapq.heappush(furthest, (-later, block))
    return hits


def _evict_furthest(next_use: dict[int, int], furthest: list[tuple[int, int]]) -> None:
    """The heap keeps entries of earlier uses; they are older than the block's own and are
    skipped."""
    while True:
        later, block = heapq.heappop(furthest)
        if next_use.get(block) == -later:
            del next_use[block]
            return


def _next_uses(accesses: list[int]) -> list[int]:
    """Return for every access the index of the next one to its block; past the end if there is
    none."""
    following: dict[int, int] = {}
    uses = []
    for now in range(len(accesses) - 1, -1, -1):
        uses.append(following.get(accesses[now], len(accesses)))
        following[accesses[now]] = now
    return uses[::-1]


if __name__ == "__main__":
    main()
