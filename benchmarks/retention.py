"""What does sparse retention cost in hits, and what does it save in memory?

Conversations with shared system prompts run one after the other through the cache manager, once
with room for everything and once under pressure. The peer in the same run is dense caching, which
keeps every block that can serve a hit.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.figures import report
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.request import CacheRequest, RequestHasher

FULL = KVCacheGroup(GroupKind.FULL, 16)
LAYOUTS: dict[str, list[KVCacheGroup]] = {
    "full, window 128": [FULL, KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=128)],
    "full, 5 x window 512": [FULL]
    + [KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=512)] * 5,
    "full, mamba": [KVCacheGroup(GroupKind.FULL, 256), KVCacheGroup(GroupKind.MAMBA, 256)],
}
STEP_TOKENS = 2048


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    hit_share: float
    sparse_blocks: int
    """The peak number of cached blocks in the sparsely kept groups."""
    evicted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--intervals", type=int, nargs="+", default=[0, 1024, 4096])
    parser.add_argument(
        "--pressure",
        type=float,
        default=0.25,
        help="cache under pressure, as a share of what all needs",
    )
    options = parser.parse_args()
    for name, groups in LAYOUTS.items():
        ample = sum(4000 * options.conversations // group.block_size for group in groups)
        for label, num_blocks in (("ample", ample), ("pressure", int(ample * options.pressure))):
            dense = run(groups, num_blocks, None, options)
            for interval in options.intervals:
                sparse = run(groups, num_blocks, interval, options)
                report(
                    "retention",
                    layout=name,
                    cache=label,
                    interval=interval,
                    hit_share=round(sparse.hit_share, 4),
                    dense_hit_share=round(dense.hit_share, 4),
                    sparse_blocks=sparse.sparse_blocks,
                    dense_blocks=dense.sparse_blocks,
                    blocks_ratio=round(sparse.sparse_blocks / dense.sparse_blocks, 4),
                    evicted=sparse.evicted,
                    dense_evicted=dense.evicted,
                )


def run(
    groups: list[KVCacheGroup], num_blocks: int, interval: int | None, options: argparse.Namespace
) -> Outcome:
    """Run every turn of every conversation, in a random order that is the same each time."""
    size = math.lcm(*(group.block_size for group in groups))
    config = CacheConfig.build(
        groups,
        num_blocks=num_blocks,
        scheduler_block_size=size,
        hash_block_size=size,
        max_model_len=100_000,
        max_in_flight_tokens=STEP_TOKENS,
        enable_events=False,
        retention_interval=interval,
    )
    cache, hasher, most = CacheManager(config, size), RequestHasher(HashChain.from_seed(), size), 0
    for index, (prompt, answer) in enumerate(turns(options.conversations, options.turns)):
        compute(cache, CacheRequest(str(index), prompt, hasher), answer, size)
        most = max(most, sum(group.cached for group in cache.statistics().pool.groups[1:]))
    statistics = cache.statistics()
    evicted = sum(group.evicted for group in statistics.pool.groups)
    return Outcome(statistics.counts.hit_tokens / statistics.counts.queried_tokens, most, evicted)


def turns(conversations: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompt and response of each turn; a prompt contains everything before it."""
    rng = random.Random(0)
    systems = [[rng.randrange(1000) for _ in range(1500)] for _ in range(4)]
    histories = [list(rng.choice(systems)) for _ in range(conversations)]
    order = [index for index in range(conversations) for _ in range(count)]
    rng.shuffle(order)
    for index in order:
        histories[index] += [rng.randrange(1000) for _ in range(rng.randrange(20, 600))]
        answer = [rng.randrange(1000) for _ in range(rng.randrange(20, 300))]
        yield list(histories[index]), answer
        histories[index] += answer


def compute(cache: CacheManager, request: CacheRequest, answer: list[int], block_size: int) -> None:
    """Prefill in chunks that end at block boundaries, then one token at a time."""
    cache.start_step()
    computed = cache.get_computed_blocks(request)
    if (
        cache.allocate_slots(request, chunk(request, computed.num_tokens, block_size), computed)
        is None
    ):
        return
    request.num_computed_tokens = computed.num_tokens + chunk(
        request, computed.num_tokens, block_size
    )
    for token in [None] * (request.num_tokens // STEP_TOKENS + 1) + answer:
        if token is not None:
            request.append([token])
        if request.num_computed_tokens == request.num_tokens:
            continue
        cache.start_step()
        new = chunk(request, request.num_computed_tokens, block_size)
        if cache.allocate_slots(request, new) is None:
            break
        request.num_computed_tokens += new
    cache.free(request.request_id)


def chunk(request: CacheRequest, start: int, block_size: int) -> int:
    """Return how many tokens the next step computes: up to the end of a block where possible."""
    end = min(start + STEP_TOKENS, request.num_tokens)
    aligned = end // block_size * block_size
    return (aligned if aligned > start else end) - start


if __name__ == "__main__":
    main()
