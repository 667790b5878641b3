"""Inside the reference: what one source keeps, and how much memory that takes."""

from __future__ import annotations

import tracemalloc

import pytest
from msgspec.structs import replace

from kvevents.codec import decode, encode
from kvevents.events import CPU, GPU, BlockHash, BlockRemoved, BlockStored, Event, EventBatch
from router.index.base import SourceLimits, WaitingStatistics
from router.index.layout_learner import LayoutHints
from tests.oracle.index.keys import KeySpace
from tests.oracle.index.source import SourceCache
from tests.support.blocks import FULL, Prefix, tokens

PROMPT = Prefix(tokens(160))


def source_with(**limits: int) -> SourceCache:
    """A source whose hash function cannot be found, so that only its events place blocks."""
    return SourceCache(KeySpace(), LayoutHints(hash_seeds=()), SourceLimits(**limits))


def apply(source: SourceCache, *events: Event) -> None:
    source.apply(EventBatch(0.0, list(events)))


def test_a_hash_with_copies_left_anywhere_is_found_by_its_key() -> None:
    """Only the last copy of all groups and tiers takes the key along."""
    source = source_with()
    apply(
        source,
        PROMPT.stored(0, FULL),
        PROMPT.offloaded(0, [16]),
        PROMPT.removed(0, range(16, 161, 16)),
    )
    assert list(source.table.hash_by_key.values()) == [PROMPT.hash_at(16)]


def test_a_place_is_remembered_only_while_its_block_is_gone() -> None:
    """What is held knows its place itself."""
    source = source_with(forgotten=4)
    apply(source, PROMPT.stored(0, FULL), PROMPT.removed(0, range(16, 161, 16)))
    assert [found for found, _ in source.table.forgotten()] == PROMPT.hashes[-4:]
    apply(source, PROMPT.offloaded(0, range(16, 161, 16)))
    assert source.table.forgotten() == []
    apply(source, PROMPT.removed(0, range(16, 161, 16), medium=CPU))
    assert len(source.table.forgotten()) == 4
    assert_empty(source)


def assert_empty(source: SourceCache) -> None:
    table = source.table
    assert (table.held, table.hash_by_key, len(table), table.unplaced) == ({}, {}, 0, 0)


def nonsense(name: str, number: int) -> BlockStored:
    """A run that waits for a parent, small in tokens and large in something else."""
    run = BlockStored([number], 7, tokens(16), GPU, 0, block_size=16)
    if name == "more extra keys than blocks":
        return replace(run, extra_keys=[[f"key {key}"] for key in range(1000)])
    if name == "many extra keys in one block":
        return replace(run, extra_keys=[[f"key {key}" for key in range(1000)]])
    return replace(run, block_hashes=[number] * 1000, token_ids=[5] * 1000, block_size=1)


@pytest.mark.parametrize(
    "name",
    [
        "more extra keys than blocks",
        "many extra keys in one block",
        "runs shorter than what their hashes cover",
    ],
)
def test_what_waits_is_bounded_in_memory_and_not_only_in_tokens(name: str) -> None:
    """A publisher that sends nonsense must not fill the router with it: 100 tokens may wait here,
    not megabytes."""
    source = source_with(waiting_tokens=100)
    wide = [[5] * 2000] if name.startswith("runs") else None
    apply(
        source, BlockStored([0], None, tokens(16), GPU, 0, block_size=16, lookahead_token_ids=wide)
    )
    payloads = [
        encode(EventBatch(0.0, [nonsense(name, 2000 + number), BlockRemoved([], GPU)]))
        for number in range(40)
    ]
    tracemalloc.start()
    try:
        for payload in payloads:
            source.apply(decode(payload))
        waiting, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert waiting < 150_000


@pytest.mark.parametrize(
    "first", [b"\xff", b"\xff" * 20_000], ids=["the first one short", "all of them long"]
)
def test_the_names_of_blocks_are_bounded_in_memory(first: bytes) -> None:
    """A count of blocks bounds nothing if one name may be as long as a message."""
    source = source_with()
    hashes: list[BlockHash] = [first, *(bytes([number]) * 20_000 for number in range(200))]
    stored = BlockStored(hashes, b"p" * 20_000 if len(first) > 1 else 5, [], GPU, 0)
    payload = encode(EventBatch(0.0, [stored]))
    tracemalloc.start()
    try:
        source.apply(decode(payload))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(names) for names in source.table.held.values()) == 201
    assert held < 200_000


def test_blocks_that_came_and_went_leave_nothing_but_the_bounded_memory_of_places() -> None:
    """Memory follows what a replica holds, not what it ever held."""
    source = source_with(forgotten=100)
    for number in range(300):
        hashes: list[BlockHash] = list(range(number * 500, number * 500 + 500))
        apply(
            source,
            BlockStored(hashes, None, tokens(500, number), GPU, 0, block_size=1),
            BlockRemoved(hashes, GPU, 0),
        )
    assert_empty(source)
    assert len(source.table.forgotten()) == 100
    assert source.statistics().waiting == WaitingStatistics(0, 0, 0)
