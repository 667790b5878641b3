"""Shared by the benchmarks: one line per figure, a timer, and caches to measure on."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvevents.events import BlockRemoved, BlockStored, Event, EventBatch
from router.index.base import SourceId
from router.index.index import PrefixIndex

BLOCK_SIZE = 16


_listeners: list[Callable[[dict[str, Any]], None]] = []


def listen(listener: Callable[[dict[str, Any]], None]) -> None:
    """Hand every figure to *listener* as well."""
    _listeners.append(listener)


def report(question: str, **figures: Any) -> None:
    """Print one figure as a JSON line."""
    figure = {"benchmark": question, **figures}
    print(json.dumps(figure), flush=True)
    for listener in _listeners:
        listener(figure)


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the median time of *action* over *repeats* runs."""
    return statistics.median(_timed(action) for _ in range(repeats))


def processor_seconds(action: Callable[[], object]) -> float:
    """Return the time that the processor spends on *action*: other processes do not count."""
    start = time.process_time()
    action()
    return time.process_time() - start


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through *points*."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def prompt_tokens(count: int, seed: int = 0) -> list[int]:
    """Return a prompt of *count* tokens that shares no block with another seed's."""
    return [(seed * 1_000_003 + position * 7919) % 128_000 for position in range(count)]


def stored_events(
    tokens: list[int], blocks_per_event: int, group: int = 0, seed: int = 0
) -> Iterator[BlockStored]:
    """Yield events without holes that announce a prompt in runs of *blocks_per_event*."""
    total = len(tokens) // BLOCK_SIZE
    for first in range(0, total, blocks_per_event):
        last = min(first + blocks_per_event, total)
        yield BlockStored(
            block_hashes=[block_hash(seed, index) for index in range(first, last)],
            parent_block_hash=block_hash(seed, first - 1) if first else None,
            token_ids=tokens[first * BLOCK_SIZE : last * BLOCK_SIZE],
            medium="GPU",
            group_idx=group,
            extra_keys=[None] * (last - first),
            kv_cache_spec_kind="sliding_window" if group else "full_attention",
            kv_cache_spec_sliding_window=128 if group else None,
            block_size=BLOCK_SIZE,
        )


def removed_events(
    tokens: list[int], blocks_per_event: int, group: int = 0, seed: int = 0
) -> Iterator[BlockRemoved]:
    """Yield the removals of the blocks that `stored_events` announces."""
    total = len(tokens) // BLOCK_SIZE
    for first in range(0, total, blocks_per_event):
        yield BlockRemoved(
            [
                block_hash(seed, index)
                for index in range(first, min(first + blocks_per_event, total))
            ],
            "GPU",
            group,
        )


def block_hash(seed: int, index: int) -> int:
    """Return a 64-bit hash, as an engine would compute it for the block."""
    return hash((seed, index, "block")) & (2**64 - 1)


def filled_index(
    replicas: int,
    tokens: list[int],
    groups: int = 2,
) -> PrefixIndex:
    """Return an index in which replica i holds the first (i + 1) / replicas of a prompt, in every
    group.

    Args:
        replicas: How many.
        tokens: The prompt.
        groups: The first of full attention, the others with a window.
    """
    index = PrefixIndex()
    for replica in range(replicas):
        held = tokens[: len(tokens) * (replica + 1) // replicas]
        events: list[Event] = [
            event for group in range(groups) for event in stored_events(held, 64, group)
        ]
        index.apply(SourceId(f"replica-{replica}"), EventBatch(0.0, events))
    return index
