"""Every dialect of the wire, and the errors for invalid payloads."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents import codec
from kvevents.codec import decode, encode
from kvevents.errors import KVEventsError, MalformedBatch
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
    TierBlocksCleared,
)
from router.cli.recordings import Query, RecordingReader
from tests.support import wire_samples

STREAMS = sorted((Path(__file__).parent.parent / "conformance" / "streams").glob("*.jsonl.gz"))

POSITIONS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
"""Fields of `BlockStored` in the order in which the positional form grew, release by release."""

WHOLE = BlockStored(
    block_hashes=[11, 12],
    parent_block_hash=10,
    token_ids=[1, 2, 3, 4],
    medium="GPU",
    group_idx=2,
    lora_name="sql",
    extra_keys=[["sql"], None],
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=64,
    block_size=2,
    lora_id=7,
)

names = st.text(max_size=20)
hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=32)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=12)
groups = st.none() | st.integers(0, 255)
extra_key_items = (
    names | st.binary(max_size=8) | st.tuples(names, st.integers(-(2**31), 2**31)).map(list)
)
extra_keys = st.none() | st.lists(st.none() | st.lists(extra_key_items, max_size=3), max_size=4)

stored_events = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=4),
    parent_block_hash=st.none() | hashes,
    token_ids=tokens,
    medium=st.none() | names,
    group_idx=groups,
    lora_name=st.none() | names,
    extra_keys=extra_keys,
    kv_cache_spec_kind=st.none() | names,
    kv_cache_spec_sliding_window=st.none() | st.integers(0, 2**31),
    block_size=st.none() | st.integers(0, 2**31),
    lora_id=st.none() | st.integers(-1, 2**31),
)
salted_events = st.builds(replace, stored_events, cache_salt=names, lora_name=st.none())
native_stored_events = st.builds(
    replace,
    stored_events,
    lookahead_token_ids=st.none()
    | st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=2), max_size=4),
    cache_salt=st.none() | names,
    locality=st.none() | names,
    ownership=st.none() | names,
)
removed_events = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, max_size=4),
    medium=st.none() | names,
    group_idx=groups,
)
placed_removals = st.builds(
    replace, removed_events, locality=st.none() | names, ownership=st.none() | names
)
group_specs = st.builds(
    GroupSpec,
    kind=names,
    block_size=st.integers(0, 64),
    sliding_window=st.none() | st.integers(0, 64),
    attention_chunk_size=st.none() | st.integers(0, 64),
)
layouts = st.builds(
    CacheLayout,
    publisher_id=names,
    groups=st.lists(group_specs, max_size=3),
    hash_block_size=st.integers(1, 64),
    scheduler_block_size=st.integers(1, 64),
    hash_algorithm=st.none() | names,
    none_hash=st.none() | st.binary(max_size=32),
    eagle=st.booleans(),
    retention_hints=st.integers(0, 2),
)
ranks = st.none() | st.integers(0, 2**31)
timestamps = st.floats(allow_nan=False)
unknown_events = (
    st.just(["BlockMoved", [1, 2], "GPU"])
    | st.just({"type": "BlockPinned", "hash": b"x"})
    | st.just(["BlockTouched"])
)


def stored_array(event: BlockStored) -> list[Any]:
    """The event in vLLM's positional form, defaults at the end left out."""
    array = ["BlockStored", *(getattr(event, name) for name in POSITIONS)]
    while array[-1] is None and len(array) > 4:
        array.pop()
    return array


def salted_array(event: BlockStored) -> list[Any]:
    """The event as SGLang 0.5.18 writes it."""
    array = ["BlockStored", *(getattr(event, name) for name in POSITIONS[:6])]
    return [*array, {"cache_salt": event.cache_salt}]


def removed_array(event: BlockRemoved) -> list[Any]:
    return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]


def event_map(event: Event) -> dict[str, Any]:
    """The event as vLLM >= 0.24 writes it, with the fields that newer versions add."""
    return {
        **msgspec.to_builtins(event, builtin_types=(bytes,)),
        "session_id": "x",
        "new": [1, {"a": 2}],
    }


arrays = (
    stored_events.map(stored_array)
    | salted_events.map(salted_array)
    | removed_events.map(removed_array)
    | st.just(["AllBlocksCleared"])
    | names.map(lambda medium: ["TierBlocksCleared", medium])
)
counted_removals = st.lists(st.tuples(hashes, st.integers(0, 2**31)), max_size=4).map(
    lambda pairs: BlockRemoved(
        [each for each, _ in pairs], "GPU", remaining_copy_counts=[count for _, count in pairs]
    )
)
clears = st.builds(AllBlocksCleared, st.none() | names) | st.builds(TierBlocksCleared, names)
maps = (native_stored_events | placed_removals | counted_removals | layouts | clears).map(event_map)
wire_batches = st.tuples(
    timestamps,
    st.lists(arrays, max_size=4)
    | st.lists(maps, max_size=4)
    | st.lists(arrays | maps | unknown_events, max_size=4),
    ranks,
)


def wire(*events: Any, tail: tuple[Any, ...] = (0,)) -> bytes:
    """A payload with events in the form in which they are given."""
    return msgspec.msgpack.encode([1.5, list(events), *tail])


# --- the native form ------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    timestamps,
    st.lists(
        native_stored_events | placed_removals | counted_removals | layouts | clears, max_size=5
    ),
    ranks,
)
def test_what_we_write_we_read_again(ts: float, events: list[Event], rank: int | None) -> None:
    """Nothing is lost between our publisher and our subscriber."""
    batch = EventBatch(ts, events, rank)
    assert decode(encode(batch)) == batch


def test_a_heartbeat_is_a_batch_without_events() -> None:
    """It makes a loss at the tail visible, and must not be taken for a malformed batch."""
    assert decode(encode(EventBatch(1.5, [], 3))) == EventBatch(1.5, [], 3)


@pytest.mark.parametrize(
    "block_hash", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), b"\x00", b"\xff" * 32]
)
def test_a_hash_is_any_64_bit_integer_or_bytes(block_hash: int | bytes) -> None:
    """vLLM up to 0.10.1 sent Python's `hash()`, which is negative half of the time."""
    stored = BlockStored([block_hash], block_hash, [1], "GPU")
    events: list[Event] = [stored, BlockRemoved([block_hash], "GPU")]
    assert decode(encode(EventBatch(0.0, events))).events == events


# --- vLLM, old and new ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(3, len(POSITIONS) + 1))
def test_a_positional_store_of_every_age_is_read(count: int) -> None:
    """A field was added in 9 of 24 releases; those an engine does not know yet are None."""
    array = ["BlockStored", *(getattr(WHOLE, name) for name in POSITIONS[:count])]
    older = replace(WHOLE, **dict.fromkeys(POSITIONS[count:]))
    assert decode(wire(array)).events == [older]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_positional_removal_of_every_age_is_read(count: int) -> None:
    """Only hashes, with the medium, with the group."""
    fields: list[Any] = [[1, b"two"], "CPU", 4]
    expected = BlockRemoved(*fields[:count], *[None] * (2 - count if count < 2 else 0))
    assert decode(wire(["BlockRemoved", *fields[:count]])).events == [expected]


def test_elements_after_the_known_ones_are_ignored() -> None:
    """The next release adds one."""
    whole = [*stored_array(WHOLE), "tomorrow", [1, 2], {"a": 1}]
    removed = ["BlockRemoved", [1], "GPU", 0, None, "tomorrow"]
    batch = decode(
        wire(whole, removed, ["AllBlocksCleared", "tomorrow"], tail=(3, "tomorrow", [1], {"b": 2}))
    )
    assert batch == EventBatch(1.5, [WHOLE, BlockRemoved([1], "GPU", 0), AllBlocksCleared()], 3)


def test_a_batch_may_lack_its_rank() -> None:
    """It is a trailing default, and trailing defaults may be trimmed."""
    assert decode(wire(["AllBlocksCleared"], tail=())) == EventBatch(
        1.5, [AllBlocksCleared()], None
    )


def test_unknown_fields_of_a_map_are_ignored() -> None:
    """Three releases in a row each brought one. `session_id` is known and left out: it says who
    stored a block first, and anyone may reuse it."""
    events: list[Event] = [WHOLE, BlockRemoved([1], "GPU", 0), AllBlocksCleared()]
    assert decode(wire(*map(event_map, events))).events == events


def test_where_a_tier_is_and_whose_is_read_of_stores_and_removals() -> None:
    """vLLM >= 0.26 and >= 0.29: a block on shared storage is no replica's own."""
    said = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "tier-1"}
    stored, removed = decode(
        wire(STORED_FIELDS | said, {"type": "BlockRemoved", "block_hashes": [1]} | said)
    ).events
    assert isinstance(stored, BlockStored)
    assert (stored.locality, stored.ownership) == ("REMOTE", "tier-1")
    assert removed == BlockRemoved([1], "STORAGE", locality="REMOTE", ownership="tier-1")
    assert removed != BlockRemoved([1], "STORAGE")


def test_a_map_may_lack_every_field_but_its_hashes() -> None:
    """Fields without a value may be absent or nil; both mean the same."""
    assert decode(wire({"type": "BlockStored", "block_hashes": [1]})).events == [
        BlockStored([1], None, [], None)
    ]
    assert decode(wire({"type": "BlockRemoved", "block_hashes": [1]})).events == [
        BlockRemoved([1], None)
    ]
    assert decode(wire({"type": "BlockStored", "block_hashes": [1], "token_ids": None})).events[
        0
    ] == BlockStored([1], None, [], None)


def test_the_type_of_a_map_may_come_last() -> None:
    """A map has no order."""
    assert decode(wire({"medium": "GPU", "block_hashes": [1], "type": "BlockRemoved"})).events == [
        BlockRemoved([1], "GPU")
    ]


@pytest.mark.parametrize("block_size", [None, 0, 16])
def test_the_block_size_may_be_absent_zero_or_given(block_size: int | None) -> None:
    """Ours leaves it out, an offload tier writes 0."""
    stored = BlockStored([1], None, [], "CPU", block_size=block_size)
    assert decode(wire(event_map(stored))).events == [stored]


# --- SGLang ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail", [(0, None, None), (0, 1, 2, 3), (None, 1, "two", [3], {})], ids=len
)
@pytest.mark.parametrize("medium", ["GPU", "CPU_PINNED", "DISK"])
def test_an_sglang_batch_is_read(medium: str, tail: tuple[Any, ...]) -> None:
    """Arrays, media of its own, and more elements after the rank."""
    stored = ["BlockStored", [-5, 6], None, [1, 2], 1, None, medium]
    batch = decode(wire(stored, ["BlockRemoved", [-5], medium], tail=tail))
    expected: list[Event] = [
        BlockStored([-5, 6], None, [1, 2], medium, block_size=1),
        BlockRemoved([-5], medium),
    ]
    assert batch == EventBatch(1.5, expected, tail[0])


def test_the_first_of_a_token_pair_is_the_prompts_token() -> None:
    """SGLang with EAGLE writes `(token, next token)`: the last of a block's goes into its hash."""
    pairs = [[10, 11], [11, 12], [12, 13], [13, 14]]
    for size, lookahead in ((1, [[11], [12], [13], [14]]), (2, [[12], [14]]), (4, [[14]])):
        hashes = list(range(4 // size))
        batch = decode(wire(["BlockStored", hashes, None, pairs, size, None, "GPU"]))
        expected = BlockStored(hashes, None, [10, 11, 12, 13], "GPU", block_size=size)
        assert batch.events == [msgspec.structs.replace(expected, lookahead_token_ids=lookahead)]


def test_token_pairs_of_no_whole_blocks_show_no_lookahead() -> None:
    """Which block ends where is unknown then."""
    pairs = [[10, 11], [11, 12], [12, 13]]
    for hashes in ([], [1, 2]):
        batch = decode(wire(["BlockStored", hashes, None, pairs, 2, None, "GPU"]))
        assert batch.events == [BlockStored(hashes, None, [10, 11, 12], "GPU", block_size=2)]


def test_the_salt_that_sglang_writes_in_a_map_is_read() -> None:
    """Since 0.5.18 a client that sends `cache_salt` puts a map where vLLM has the adapter's name;
    the events beside it are read as ever."""
    salted = ["BlockStored", [-5], None, [1], 1, None, "GPU", {"cache_salt": "tenant", "new": 1}]
    plain = ["BlockStored", [6], -5, [2], 1, None, "GPU"]
    expected = BlockStored([-5], None, [1], "GPU", block_size=1, cache_salt="tenant")
    batch = decode(wire(salted, plain, ["BlockRemoved", [-5], "GPU"]))
    assert batch.events == [
        expected,
        BlockStored([6], -5, [2], "GPU", block_size=1),
        BlockRemoved([-5], "GPU"),
    ]
    assert decode(wire(salted, event_map(expected))).events == [expected, expected]


def test_the_salt_of_a_map_is_read() -> None:
    """SGLang >= 0.5.20 writes maps, as vLLM does, with a field for the salt."""
    stored = {**STORED_FIELDS, "cache_salt": "tenant", "session_id": "s", "lora_id": None}
    assert decode(wire(stored)).events == [
        BlockStored([1], None, [1], "GPU", cache_salt="tenant"),
    ]


# --- clears and copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("medium", [None, "GPU", "CPU"])
def test_a_clear_names_its_tier(medium: str | None) -> None:
    """Without a name it is the GPU's."""
    cleared = {"type": "AllBlocksCleared", "medium": medium}
    assert decode(wire(cleared)).events == [AllBlocksCleared(medium)]
    assert decode(wire(cleared, ["AllBlocksCleared"])).events == [
        AllBlocksCleared(medium),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    "event", [{"type": "TierBlocksCleared", "medium": "cpu"}, ["TierBlocksCleared", "cpu", "new"]]
)
def test_the_clear_of_one_tier_is_read(event: Any) -> None:
    """vLLM may come to send it instead of `AllBlocksCleared`."""
    (cleared,) = decode(wire(event)).events
    assert isinstance(cleared, TierBlocksCleared)
    assert cleared.tier == "CPU"
    assert codec._read_batch(wire(event)).events == [cleared]


def test_a_removal_may_tell_how_many_copies_are_left() -> None:
    """vLLM may come to send it, one count for each hash."""
    removed = BlockRemoved([1, 2], "GPU", 0, remaining_copy_counts=[2, 0])
    assert decode(wire(event_map(removed))).events == [removed]
    assert decode(wire(event_map(removed), stored_array(WHOLE))).events == [removed, WHOLE]


# --- batches of several kinds ---------------------------------------------------------------------


def test_an_event_of_unknown_type_is_skipped_and_counted_and_nothing_else() -> None:
    """A new kind of event must not cost the known ones around it."""
    batch = decode(
        wire(
            {"type": "BlockPinned", "block_hashes": [1]},
            stored_array(WHOLE),
            ["BlockMoved", 5],
            event_map(WHOLE),
        )
    )
    assert batch == EventBatch(1.5, [WHOLE, WHOLE], 0, skipped=2)


def test_maps_and_arrays_may_be_mixed_in_one_batch() -> None:
    """Two engines behind one relay."""
    batch = decode(
        wire(stored_array(WHOLE), event_map(BlockRemoved([1], None)), ["AllBlocksCleared"])
    )
    assert batch.events == [WHOLE, BlockRemoved([1], None), AllBlocksCleared()]


@settings(deadline=None)
@given(wire_batches)
def test_the_fast_path_and_the_slow_path_read_the_same(batch: Any) -> None:
    """The typed decoder is only an optimisation."""
    payload = msgspec.msgpack.encode(batch)
    patient = codec._read_batch(payload)
    assert decode(payload) == patient
    assert codec._decode_maps(payload) in (None, patient)


def test_the_fast_path_reads_what_engines_send() -> None:
    """If it refused them, results would still be right, but slow."""
    of_maps = [payload for payload in _recorded(30) if _has_maps(payload)]
    assert len(of_maps) > 100
    for payload in of_maps:
        assert codec._decode_maps(payload) == codec._read_batch(payload)


def test_the_arrays_of_old_engines_are_read() -> None:
    """Engines of that age are still in service."""
    of_arrays = [payload for payload in _recorded(30) if not _has_maps(payload)]
    for payload in (*of_arrays, *(message.payload for message in wire_samples.live("0.9.2"))):
        batch = decode(payload)
        assert batch.events
        assert (batch.skipped, batch.unreadable) == (0, 0)


# --- malformed ------------------------------------------------------------------------------------

STORED_FIELDS: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1],
    "token_ids": [1],
    "medium": "GPU",
}

MALFORMED: list[tuple[str, bytes, list[str]]] = [
    ("empty", b"", ["payload of 0 bytes", "not msgpack"]),
    ("cut off", wire(stored_array(WHOLE))[:-3], ["not msgpack"]),
    ("more after the end", wire() + b"\x00", ["not msgpack"]),
    ("a number", msgspec.msgpack.encode(5), ["not a [ts, events, rank] array"]),
    ("a map", msgspec.msgpack.encode({"ts": 1.0}), ["not a [ts, events, rank] array"]),
    ("no events", msgspec.msgpack.encode([1.0]), ["not a [ts, events, rank] array"]),
    ("time is text", msgspec.msgpack.encode(["now", []]), ["float", "$[0]"]),
    ("events are a number", msgspec.msgpack.encode([1.0, 7]), ["array", "$[1]"]),
    ("rank is text", wire(tail=("zero",)), ["int", "$[2]"]),
]


@pytest.mark.parametrize(
    ("payload", "parts"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED]
)
def test_a_malformed_batch_is_refused_with_place_and_rule(payload: bytes, parts: list[str]) -> None:
    """The operator reads one line and knows which field of which event broke which rule."""
    with pytest.raises(MalformedBatch) as caught:
        decode(payload)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


UNREADABLE: list[tuple[str, bytes, list[str]]] = [
    (
        "event is a number",
        wire(["AllBlocksCleared"], 7),
        ["events[1]", "map or a non-empty array", "int"],
    ),
    ("event is empty", wire([]), ["events[0]", "non-empty array"]),
    ("type is a number", wire([7, [1]]), ["events[0]", "type must be a string", "int"]),
    ("map without a type", wire({"block_hashes": [1]}), ["events[0]", "type must be a string"]),
    ("no hashes", wire({"type": "BlockRemoved"}), ["events[0] (BlockRemoved)", "block_hashes"]),
    (
        "hashes are text",
        wire(["BlockRemoved", "1"]),
        ["events[0] (BlockRemoved)", "$.block_hashes"],
    ),
    (
        "hash is a float",
        wire(["BlockRemoved", [1.5]]),
        ["events[0] (BlockRemoved)", "int | bytes", "$.block_hashes[0]"],
    ),
    ("hash is true", wire(["BlockRemoved", [True]]), ["events[0] (BlockRemoved)", "bool"]),
    (
        "token is text",
        wire(["BlockStored", [1], None, ["hi"], 1]),
        ["events[0] (BlockStored)", "$.token_ids[0]"],
    ),
    (
        "token is negative",
        wire(["BlockStored", [1], None, [5, -1], 1]),
        ["events[0].token_ids", "[0, 4294967295]"],
    ),
    (
        "token is too large",
        wire(["BlockStored", [1], None, [5, 2**32], 1]),
        ["events[0].token_ids", "[0, 4294967295]"],
    ),
    (
        "pairs mixed with tokens",
        wire(["BlockStored", [1], None, [[1, 2], 3], 1]),
        ["events[0].token_ids", "must not be mixed"],
    ),
    (
        "empty pair",
        wire(["BlockStored", [1], None, [[], [1]], 1]),
        ["events[0].token_ids", "must not be mixed"],
    ),
    (
        "tokens are text",
        wire(STORED_FIELDS | {"token_ids": ""}),
        ["events[0] (BlockStored)", "$.token_ids"],
    ),
    (
        "tokens are false",
        wire(STORED_FIELDS | {"token_ids": False}),
        ["events[0] (BlockStored)", "$.token_ids"],
    ),
    (
        "group is negative",
        wire(["BlockRemoved", [1], "GPU", -1]),
        ["events[0].group_idx", "[0, 255]"],
    ),
    (
        "group is too large",
        wire(STORED_FIELDS | {"group_idx": 256}),
        ["events[0].group_idx", "[0, 255]"],
    ),
    (
        "block size is negative",
        wire(STORED_FIELDS | {"block_size": -1}),
        ["events[0].block_size", "[0, 2147483648]"],
    ),
    (
        "medium is too long",
        wire(["BlockRemoved", [1], "G" * 257]),
        ["events[0].medium", "257 characters", "at most 256"],
    ),
    (
        "locality is too long",
        wire(STORED_FIELDS | {"locality": "x" * 257}),
        ["events[0].locality", "257 characters", "at most 256"],
    ),
    (
        "ownership is too long",
        wire({"type": "BlockRemoved", "block_hashes": [1], "ownership": "x" * 257}),
        ["events[0].ownership", "257 characters", "at most 256"],
    ),
    (
        "adapter is too long",
        wire(STORED_FIELDS | {"lora_name": "x" * 257}),
        ["events[0].lora_name", "at most 256"],
    ),
    (
        "window is negative",
        wire(STORED_FIELDS | {"kv_cache_spec_sliding_window": -1}),
        ["events[0].kv_cache_spec_sliding_window"],
    ),
    (
        "next token is negative",
        wire(STORED_FIELDS | {"lookahead_token_ids": [[-1]]}),
        ["events[0].lookahead_token_ids"],
    ),
    (
        "layout without groups",
        wire({"type": "CacheLayout", "publisher_id": "p"}),
        ["events[0] (CacheLayout)", "groups"],
    ),
    (
        "the third of three",
        wire(["AllBlocksCleared"], ["BlockMoved"], ["BlockRemoved", 1]),
        ["events[2] (BlockRemoved)"],
    ),
    (
        "salt is a number",
        wire(["BlockStored", [1], None, [1], 1, None, "GPU", {"cache_salt": 7}]),
        ["events[0] (BlockStored)", "$.cache_salt"],
    ),
    (
        "tier to clear is missing",
        wire({"type": "TierBlocksCleared"}),
        ["events[0] (TierBlocksCleared)", "medium"],
    ),
    (
        "two copies left of three hashes",
        wire({"type": "BlockRemoved", "block_hashes": [1, 2, 3], "remaining_copy_counts": [1, 0]}),
        ["events[0].remaining_copy_counts has 2 entries", "each of 3 hashes"],
    ),
    (
        "copies left are negative",
        wire({"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [-1]}),
        ["events[0].remaining_copy_counts", "[0, 2147483648]"],
    ),
]


@pytest.mark.parametrize(
    ("payload", "parts"), [case[1:] for case in UNREADABLE], ids=[case[0] for case in UNREADABLE]
)
def test_an_event_that_breaks_the_format_is_counted_and_left_out_alone(
    payload: bytes, parts: list[str]
) -> None:
    """A batch that is refused for one event comes again in every replay: the source would stay
    suspect for good, and the events beside it would be lost."""
    ts, events, *tail = msgspec.msgpack.decode(payload)
    around = msgspec.msgpack.encode([ts, [*events, stored_array(WHOLE)], *tail])
    batch = decode(around)
    assert batch.unreadable == 1
    assert batch.events[-1] == WHOLE
    assert all(part in (batch.problem or "") for part in parts), batch.problem


@pytest.mark.parametrize(
    ("event", "is_hidden"),
    [
        (STORED_FIELDS | {"token_ids": ["hi"]}, False),
        (["BlockStored", [1], None, [5, -1], 1], False),
        (["BlockRemoved", [1.5], "GPU"], True),
        ({"type": "AllBlocksCleared", "medium": 3}, True),
        ({"type": "TierBlocksCleared", "medium": None}, True),
        ({"type": "CacheLayout", "publisher_id": "p"}, True),
        (
            {
                "type": "CacheLayout",
                "publisher_id": "p",
                "groups": [],
                "hash_block_size": 16,
                "scheduler_block_size": 16,
                "retention_hints": -1,
            },
            True,
        ),
        ({"block_hashes": [1]}, True),
        (5, True),
        ({"type": "BlockPinned"}, False),
        ({"type": "PrefixCacheReset"}, True),
        ({"type": "blocks_flushed"}, True),
        (["GroupBlocksCleared", 3], True),
        (["BlocksEvicted", [1]], True),
    ],
    ids=str,
)
def test_a_batch_says_when_what_was_left_out_may_have_taken_blocks_away(
    event: Any, is_hidden: bool
) -> None:
    """A store that is missing costs hits; a removal or a clear that is missing makes hits up."""
    batch = decode(wire(event))
    assert (batch.events, batch.skipped + batch.unreadable) == ([], 1)
    assert batch.hides_removals is is_hidden
    assert (batch.problem is None) is (event == {"type": "BlockPinned"})


def test_the_type_of_an_event_with_broken_text_is_read_all_the_same() -> None:
    """A store whose adapter is not UTF-8 has lost no removal."""
    good = wire(STORED_FIELDS | {"lora_name": "sql"}, ["BlockStored", [1], None, [1], 1, 0, "sql"])
    batch = decode(good.replace(b"sql", b"s\xffl"))
    assert (batch.unreadable, batch.hides_removals) == (2, False)


def test_of_many_unreadable_events_one_message_is_kept() -> None:
    """What a peer sends does not decide how much is kept."""
    batch = decode(wire(*[["BlockRemoved", 1]] * codec.MAX_UNREADABLE))
    assert batch.unreadable == codec.MAX_UNREADABLE
    assert len(batch.problem or "") < 200


def test_a_batch_of_too_many_unreadable_events_is_refused_as_a_whole() -> None:
    """Millions of them fit into a message, and each takes its time: the others would wait."""
    events = [["BlockRemoved", 1]] * (codec.MAX_UNREADABLE + 1)
    with pytest.raises(MalformedBatch, match=r"events\[1000\]"):
        decode(wire(*events))
    began = time.process_time()
    with pytest.raises(MalformedBatch):
        decode(wire(*[7] * 1_000_000))
    assert time.process_time() - began < 5


ONE_GROUP = [GroupSpec("full_attention", 16)]
UNBOUNDED: dict[str, bytes] = {
    "a kind of 10,000 characters": wire(STORED_FIELDS | {"kv_cache_spec_kind": "k" * 10_000}),
    "a layout of 257 groups": wire(event_map(CacheLayout("p", ONE_GROUP * 257, 16, 16))),
    "a publisher's name of 10,000 characters": wire(
        event_map(CacheLayout("p" * 10_000, ONE_GROUP, 16, 16))
    ),
    "a root hash of 64 KiB": wire(
        event_map(CacheLayout("p", ONE_GROUP, 16, 16, "sha256", b"n" * 65536))
    ),
}


def test_a_layout_may_have_as_many_groups_as_there_are_numbers() -> None:
    """0 to 255."""
    event = CacheLayout("p", ONE_GROUP * 256, 16, 16)
    assert decode(wire(event_map(event))).events == [event]


@pytest.mark.parametrize("payload", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_what_the_router_would_have_to_keep_is_bounded(payload: bytes) -> None:
    """Counting groups and sources bounds memory only if their names are bounded, too."""
    assert (decode(payload).events, decode(payload).unreadable) == ([], 1)


# --- nothing of a prompt in an error --------------------------------------------------------------

SECRET_TOKEN = 3_141_592_653
SECRET_TEXT = "what the user asked"

secrets = st.sampled_from(
    [
        SECRET_TOKEN,
        -SECRET_TOKEN,
        float(SECRET_TOKEN),
        SECRET_TEXT,
        SECRET_TEXT * 20,
        SECRET_TEXT.encode() + b"\xff",
        [SECRET_TOKEN, SECRET_TEXT],
        [[SECRET_TOKEN, "x"], SECRET_TOKEN],
        {SECRET_TEXT: SECRET_TOKEN},
        {"type": SECRET_TEXT},
    ]
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(arrays | maps, st.data())
def test_no_token_and_no_text_from_the_wire_is_in_an_error(event: Any, data: st.DataObject) -> None:
    """Token ids are prompts: an error is logged, a prompt never is."""
    places = list(event) if isinstance(event, dict) else list(range(len(event)))
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        event[place] = data.draw(secrets)
    payload = msgspec.msgpack.encode([1.5, [event], data.draw(st.none() | secrets)])
    _expect_no_secret(payload)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_no_text_is_in_the_error_of_a_damaged_payload(position: int, value: int) -> None:
    """Neither in the decoder's own message nor in the errors that ours is chained to."""
    stored = BlockStored(
        [1],
        None,
        [SECRET_TOKEN] * 5,
        SECRET_TEXT,
        lora_name=SECRET_TEXT,
        extra_keys=[[SECRET_TEXT]],
    )
    damaged = bytearray(wire(event_map(stored)))
    damaged[position % len(damaged)] = value
    _expect_no_secret(bytes(damaged))
    _expect_no_secret(bytes(damaged[:position]))


def test_text_that_is_not_utf_8_is_not_quoted() -> None:
    """Python's own error quotes the bytes it could not read."""
    broken = wire(["BlockRemoved", [1], SECRET_TEXT]).replace(
        SECRET_TEXT[-3:].encode(), b"\xff\xfe\xfd"
    )
    assert decode(broken).unreadable == 1
    _expect_no_secret(broken, SECRET_TEXT[:-3])


def _expect_no_secret(payload: bytes, text: str = SECRET_TEXT) -> None:
    try:
        problem = decode(payload).problem or ""
        assert text not in problem
        assert str(SECRET_TOKEN) not in problem
    except MalformedBatch as error:
        said = "\n".join([*traceback.format_exception(error), *map(str, _chain(error))])
        lines = [line for line in said.splitlines() if text in line or str(SECRET_TOKEN) in line]
        assert lines == []


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from _chain(error.__cause__)
        error = error.__context__


def test_every_error_of_the_codec_is_one_of_ours() -> None:
    """A caller catches one type."""
    assert issubclass(MalformedBatch, KVEventsError)


def _recorded(batches: int) -> Iterator[bytes]:
    """The first payloads of every recorded stream."""
    for path in STREAMS:
        with RecordingReader(path) as reader:
            frames = (record for record in reader if not isinstance(record, Query))
            yield from (payload for payload, _ in zip(frames, range(batches), strict=False))


def _has_maps(payload: bytes) -> bool:
    return all(isinstance(event, dict) for event in msgspec.msgpack.decode(payload)[1])
