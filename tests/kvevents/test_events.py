"""Events as values, their equality and hash, and the form in which they are written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.codec import encode
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
    KVEventAggregator,
    TierBlocksCleared,
    pack_tokens,
    unpack_tokens,
)

STORED = BlockStored([1, 2], None, [10, 11, 12, 13], "GPU", group_idx=0)
REMOVED = BlockRemoved([1], "GPU", 0)
LAYOUT = CacheLayout("publisher-1", [GroupSpec("full_attention", 16)], 16, 16)

OTHER_VALUES: list[tuple[Event, str, Any]] = [
    (STORED, "block_hashes", [1, 3]),
    (STORED, "parent_block_hash", 9),
    (STORED, "token_ids", [10, 11, 12, 14]),
    (STORED, "medium", "CPU"),
    (STORED, "group_idx", None),
    (STORED, "group_idx", 1),
    (STORED, "lora_name", "sql"),
    (STORED, "extra_keys", [["salt"], None]),
    (STORED, "kv_cache_spec_kind", "mamba"),
    (STORED, "kv_cache_spec_sliding_window", 64),
    (STORED, "block_size", 2),
    (STORED, "lora_id", 1),
    (STORED, "lookahead_token_ids", [[1], [2]]),
    (REMOVED, "block_hashes", [2]),
    (REMOVED, "medium", None),
    (REMOVED, "group_idx", None),
    (LAYOUT, "publisher_id", "publisher-2"),
    (LAYOUT, "groups", [GroupSpec("full_attention", 32)]),
    (LAYOUT, "eagle", True),
    (LAYOUT, "retention_hints", 1),
    (LAYOUT, "eagle_groups", [0]),
]
ONE_OF_EACH: list[Event] = [STORED, REMOVED, AllBlocksCleared(), LAYOUT]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_equal_events_have_equal_hashes(event: Event) -> None:
    """The aggregator counts by hash and equality; events carry lists, which Python cannot hash."""
    copy = msgspec.convert(msgspec.to_builtins(event), type(event))
    assert copy is not event
    assert copy == event
    assert hash(copy) == hash(event)


@pytest.mark.parametrize(
    ("event", "field", "value"), OTHER_VALUES, ids=lambda value: str(value)[:24]
)
def test_every_field_takes_part_in_equality_and_hash(event: Event, field: str, value: Any) -> None:
    """Group 0 and no group are different events, and so are two media."""
    other = replace(event, **{field: value})
    assert other != event
    assert hash(other) != hash(event)


def test_events_of_different_types_are_never_equal() -> None:
    """A removal must not cancel the store of the same blocks."""
    assert len(set(ONE_OF_EACH)) == 4
    stored, removed = BlockStored([1], None, [], "GPU", 0), BlockRemoved([1], "GPU", 0)
    assert len({stored, removed}) == 2


def test_extra_keys_of_any_depth_can_be_hashed() -> None:
    """They nest: a list per block of `(id, offset)` pairs."""
    nested = replace(STORED, extra_keys=[[["image", 3], "salt"], None])
    assert hash(nested) == hash(replace(STORED, extra_keys=[[["image", 3], "salt"], None]))
    assert hash(nested) != hash(replace(STORED, extra_keys=[[["image", 4], "salt"], None]))


# --- the aggregator -------------------------------------------------------------------------------


def test_only_events_that_every_worker_reported_are_common() -> None:
    """A block is usable when every tensor-parallel worker has its part of it."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, REMOVED])
    assert aggregator.get_common_events() == []
    aggregator.add_events(1, [STORED])
    assert aggregator.get_common_events() == [STORED]
    assert aggregator.get_all_events() == [STORED, STORED, REMOVED]


def test_the_same_event_of_another_group_does_not_count() -> None:
    """Worker 0 may have finished group 0 while worker 1 has finished group 1."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED])
    aggregator.add_events(1, [replace(STORED, group_idx=None), replace(STORED, group_idx=1)])
    assert aggregator.get_common_events() == []


def test_popping_removes_common_events_and_keeps_the_others() -> None:
    """A worker that is behind completes the event in a later step."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, REMOVED])
    aggregator.add_events(1, [STORED])
    assert aggregator.pop_common_events() == [STORED]
    assert aggregator.pop_common_events() == []
    aggregator.add_events(1, [REMOVED])
    assert aggregator.pop_common_events() == [REMOVED]
    assert aggregator.get_all_events() == []


def test_popping_an_event_that_one_worker_reported_twice_leaves_its_second_copy() -> None:
    """Stored, evicted and stored again: the second store needs the other worker's second store."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, STORED])
    aggregator.add_events(1, [STORED])
    assert aggregator.pop_common_events() == [STORED]
    assert aggregator.get_all_events() == [STORED]


def test_two_reports_of_one_worker_are_not_those_of_two_workers() -> None:
    """A worker that stored a block twice says nothing of the other, which may never have it."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, STORED])
    assert aggregator.get_common_events() == []
    aggregator.add_events(1, [REMOVED])
    assert aggregator.pop_common_events() == []


def test_a_block_that_every_worker_stored_removed_and_stored_again_is_stored_at_the_end() -> None:
    """The second store follows the removal; told only once, the block would seem to be gone."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, REMOVED, STORED])
    aggregator.add_events(1, [STORED])
    aggregator.add_events(1, [REMOVED, STORED])
    assert aggregator.pop_common_events() == [STORED, REMOVED, STORED]
    assert aggregator.get_all_events() == []


def test_common_events_keep_the_order_of_their_first_report() -> None:
    """A removal must not overtake the store it undoes."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, REMOVED, AllBlocksCleared()])
    aggregator.add_events(1, [AllBlocksCleared(), REMOVED, STORED])
    assert aggregator.pop_common_events() == [STORED, REMOVED, AllBlocksCleared()]


def test_a_worker_can_take_back_what_is_not_common_yet() -> None:
    """It evicted the block before the others had stored theirs: nobody must be told of it."""
    aggregator = KVEventAggregator(num_workers=2)
    aggregator.add_events(0, [STORED, STORED])
    assert aggregator.withdraw_event(0, STORED)
    aggregator.add_events(1, [STORED])
    assert aggregator.get_workers(STORED) == {0, 1}
    assert aggregator.withdraw_event(0, STORED)
    assert not aggregator.withdraw_event(0, STORED)
    assert not aggregator.withdraw_event(0, REMOVED)
    assert (aggregator.pop_common_events(), aggregator.get_workers(STORED)) == ([], {1})
    aggregator.add_events(0, [STORED])
    assert aggregator.pop_common_events() == [STORED]
    assert (aggregator.get_all_events(), aggregator.get_workers(STORED)) == ([], set())


def test_workers_can_join_and_the_count_can_be_reset() -> None:
    """The number of workers is known only once they have reported."""
    aggregator = KVEventAggregator(num_workers=1)
    aggregator.add_events(0, [STORED])
    aggregator.increment_workers(2)
    assert aggregator.get_number_of_workers() == 3
    assert aggregator.get_common_events() == []
    aggregator.reset_workers()
    assert aggregator.get_number_of_workers() == 1
    assert aggregator.get_common_events() == [STORED]
    aggregator.increment_workers()
    assert aggregator.get_number_of_workers() == 2


def test_clearing_forgets_every_event() -> None:
    """After a reset of the cache no half-reported event may reappear."""
    aggregator = KVEventAggregator(num_workers=1)
    aggregator.add_events(0, [STORED])
    aggregator.clear_events()
    assert aggregator.pop_common_events() == []


@pytest.mark.parametrize("count", [0, -1])
def test_an_invalid_number_of_workers_is_refused(count: int) -> None:
    """With zero workers every event would be common."""
    with pytest.raises(ValueError, match=f"num_workers is {count}"):
        KVEventAggregator(count)
    with pytest.raises(ValueError, match=f"count is {count}"):
        KVEventAggregator(1).increment_workers(count)


@given(st.integers(1, 4), st.data())
def test_an_event_is_popped_as_often_as_the_worker_that_reported_it_least(
    num_workers: int, data: st.DataObject
) -> None:
    """Against counting by hand, for workers that report the same event again and again, in any
    order and with pops in between."""
    report = st.tuples(st.integers(0, num_workers - 1), st.lists(st.integers(0, 3), max_size=6))
    aggregator = KVEventAggregator(num_workers)
    counted = [Counter[int]() for _ in range(num_workers)]
    popped = Counter[int]()
    for worker, numbers in data.draw(st.lists(report, max_size=12)):
        aggregator.add_events(worker, [BlockRemoved([number], "GPU", 0) for number in numbers])
        counted[worker].update(numbers)
        if data.draw(st.booleans()):
            popped.update(map(_number, aggregator.pop_common_events()))
    popped.update(map(_number, aggregator.pop_common_events()))
    expected = {
        number: min(counts[number] for counts in counted)
        for number in range(4)
        if all(counts[number] for counts in counted)
    }
    assert popped == expected
    waiting = sum(counts.total() for counts in counted) - popped.total() * num_workers
    assert len(aggregator.get_all_events()) == waiting


def _number(event: Event) -> int:
    assert isinstance(event, BlockRemoved)
    (number,) = event.block_hashes
    assert isinstance(number, int)
    return number


# --- the written form -----------------------------------------------------------------------------


def test_an_event_is_written_as_a_map_with_a_type_and_without_defaults() -> None:
    """The form of vLLM >= 0.24: fields at their default are absent, others may be nil."""
    assert _written(BlockStored([1], None, [5, 6], None)) == {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5, 6],
        "medium": None,
    }
    assert _written(BlockRemoved([1], "CPU")) == {
        "type": "BlockRemoved",
        "block_hashes": [1],
        "medium": "CPU",
    }
    assert _written(AllBlocksCleared()) == {"type": "AllBlocksCleared"}


def test_group_0_is_written() -> None:
    """The default means no group; 0 is a group."""
    assert _written(STORED)["group_idx"] == 0
    assert _written(REMOVED)["group_idx"] == 0


def test_an_event_of_ours_carries_no_block_size() -> None:
    """The quotient of tokens and hashes is the block size; a consumer must not find two that
    differ."""
    assert "block_size" not in _written(STORED)


def test_a_layout_is_written_with_its_groups_without_defaults() -> None:
    """It is sent first, and with every snapshot."""
    assert _written(LAYOUT) == {
        "type": "CacheLayout",
        "publisher_id": "publisher-1",
        "groups": [{"kind": "full_attention", "block_size": 16}],
        "hash_block_size": 16,
        "scheduler_block_size": 16,
    }


def test_a_batch_is_written_as_timestamp_events_rank() -> None:
    """Three elements, positional; an empty list of events is a heartbeat."""
    assert msgspec.msgpack.decode(encode(EventBatch(1.5, [], 2))) == [1.5, [], 2]
    assert msgspec.msgpack.decode(encode(EventBatch(1.5, [AllBlocksCleared()]))) == [
        1.5,
        [{"type": "AllBlocksCleared"}],
        None,
    ]


class _ConsumersStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """What a consumer of vLLM's events declares, with the block size optional."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    medium: str | None
    block_size: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _ConsumersRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class _ConsumersBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ConsumersStored | _ConsumersRemoved]
    data_parallel_rank: int | None = None


def test_a_consumer_that_tolerates_a_missing_block_size_reads_our_batches() -> None:
    """Existing consumers of vLLM's stream can follow ours."""
    stored = BlockStored(
        [b"\x01" * 32],
        b"\x02" * 32,
        [5, 6],
        "GPU",
        3,
        "sql",
        [["sql", "salt"]],
        "sliding_window",
        64,
    )
    read = msgspec.msgpack.decode(
        encode(EventBatch(1.0, [stored, REMOVED], 1)), type=_ConsumersBatch
    )
    assert read == _ConsumersBatch(
        1.0,
        [
            _ConsumersStored(
                [b"\x01" * 32],
                b"\x02" * 32,
                [5, 6],
                "GPU",
                lora_name="sql",
                extra_keys=[["sql", "salt"]],
                group_idx=3,
            ),
            _ConsumersRemoved([1], "GPU", 0),
        ],
        1,
    )


def _written(event: Event) -> Any:
    return msgspec.msgpack.decode(encode(EventBatch(0.0, [event])))[1][0]


# --- block sizes and tiers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "hashes", "count", "announced", "dense"),
    [
        (16, 2, 32, 16, 16),
        (None, 2, 32, 16, 16),
        (0, 2, 32, 16, 16),
        (16, 1, 32, 16, 0),
        (16, 0, 32, 16, 0),
        (None, 3, 32, 0, 0),
        (None, 0, 32, 0, 0),
        (0, 3, 0, 0, 0),
        (16, 3, 0, 16, 0),
        (None, 3, 0, 0, 0),
    ],
)
def test_a_block_size_is_stated_or_follows_from_a_dense_event(
    block_size: int | None, hashes: int, count: int, announced: int, dense: int
) -> None:
    """Only where hashes and tokens line up does an event say which tokens a hash covers."""
    event = BlockStored(list(range(hashes)), None, list(range(count)), "GPU", block_size=block_size)
    assert (event.block_size or event.tokens_per_block) == announced
    assert event.tokens_per_block == dense


@pytest.mark.parametrize(
    ("medium", "tier"), [(None, "GPU"), ("GPU", "GPU"), ("cpu", "CPU"), ("Storage", "STORAGE")]
)
def test_a_tier_has_one_spelling_whatever_an_engine_writes(medium: str | None, tier: str) -> None:
    """A removal must find a block whose store spelled the tier differently."""
    assert BlockStored([1], None, [], medium).tier == tier
    assert BlockRemoved([1], medium).tier == tier
    assert AllBlocksCleared(medium).tier == tier


@pytest.mark.parametrize(("medium", "tier"), [("cpu", "CPU"), ("GPU", "GPU"), ("", "")])
def test_a_tier_that_is_cleared_by_name_is_that_one(medium: str, tier: str) -> None:
    """An empty name must not empty the GPU, as it does where no tier is named."""
    assert TierBlocksCleared(medium).tier == tier


# --- packed tokens --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60))
def test_tokens_are_packed_big_endian_in_32_bits(token_ids: list[int]) -> None:
    """The key is the number that these bytes are, on every machine."""
    packed = pack_tokens(token_ids)
    assert packed == b"".join(token.to_bytes(4, "big") for token in token_ids)
    assert unpack_tokens(packed) == token_ids


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_32_bits_is_not_packed(token: int) -> None:
    """Cut to 32 bits it would be mistaken for another one."""
    with pytest.raises(OverflowError):
        pack_tokens([token])
