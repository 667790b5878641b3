"""Two hundred thousand payloads that no engine would send: none may crash, hang, grow or
half-apply."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvevents.codec import encode
from kvevents.errors import MalformedBatch
from kvevents.events import BlockRemoved, BlockStored, CacheLayout, Event, EventBatch, GroupSpec
from router.cli.recordings import Query, RecordingReader
from router.index.base import SourceId, SourceLimits, SourceStatistics
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.support import wire_samples
from tests.support.blocks import FULL, Prefix, tokens, window

STREAMS = sorted((Path(__file__).parent.parent / "conformance" / "streams").glob("*.jsonl.gz"))
SAMPLE_BYTES = 330
"""Small payloads fail in the same ways as large ones, and faster."""
PAYLOADS = 200_000
LIMITS = SourceLimits(
    blocks=133, tiers=3, waiting_runs=20, waiting_tokens=1000, waiting_batches=2000, forgotten=100
)
RESTART_EVERY = 5000
"""Payloads after which a source starts over: a layout learned from garbage would make everything
that follows easy."""
LEARNING, ANNOUNCED = SourceId("learning"), SourceId("announced")

encode_any = msgspec.msgpack.encode
decode_any = msgspec.msgpack.decode


# --- the raw material -----------------------------------------------------------------------------


def recorded_payloads() -> list[bytes]:
    """Short payloads that real engines of many versions sent."""
    payloads = {
        message.payload
        for engine in ("vllm", "sglang", "tokenspeed")
        for version in wire_samples.versions(engine)
        for message in wire_samples.live(version, engine)
    }
    for path in STREAMS:
        with RecordingReader(path) as reader:
            payloads.update(record for record in reader if not isinstance(record, Query))
    short = sorted(payload for payload in payloads if len(payload) <= SAMPLE_BYTES)
    resets = [payload for payload in short if b"AllBlocksCleared" in payload]
    return [payload for payload in short if payload not in resets[2:]]


def our_payloads() -> list[bytes]:
    """Payloads of our own publisher, layouts included."""
    prompt = Prefix(tokens(48), as_int=False)
    groups = [
        GroupSpec("full_attention", 16),
        GroupSpec("sliding_window", 16, 64),
        GroupSpec("mamba", 32),
    ]
    layout = CacheLayout("publisher-1", groups, 16, 32, "sha256_cbor", b"r" * 32, eagle=True)
    behind = BlockStored([1], None, tokens(16), "GPU", 0, lookahead_token_ids=[[5, 6]])
    events: list[Event] = [
        layout,
        prompt.stored(0, FULL),
        prompt.kept(1, window(64), [48]),
        prompt.removed(0, [16]),
        behind,
    ]
    return [encode(EventBatch(1.5, [event], 0)) for event in events]


# --- ways to break it -----------------------------------------------------------------------------


def _flipped(rng: random.Random, payload: bytes, _other: bytes) -> bytes:
    damaged = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 5))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _cut(rng: random.Random, payload: bytes, _other: bytes) -> bytes:
    return payload[: rng.randrange(len(payload))]


def _spliced(rng: random.Random, payload: bytes, other: bytes) -> bytes:
    return payload[: rng.randrange(len(payload))] + other[rng.randrange(len(other)) :]


def _with_noise(rng: random.Random, payload: bytes, _other: bytes) -> bytes:
    at = rng.randrange(len(payload))
    return payload[:at] + rng.randbytes(rng.randint(1, 9)) + payload[at + rng.randint(0, 9) :]


def _random(rng: random.Random, _payload: bytes, _other: bytes) -> bytes:
    return rng.randbytes(rng.randrange(80))


def _random_batch(rng: random.Random, _payload: bytes, _other: bytes) -> bytes:
    return (
        b"\x93\xcb"
        + rng.randbytes(8)
        + bytes([0x90 + rng.randrange(4)])
        + rng.randbytes(rng.randrange(40))
        + b"\x00"
    )


def _exchanged(rng: random.Random, payload: bytes, _other: bytes) -> bytes:
    """A well-formed payload with another value somewhere."""
    batch = decode_any(payload)
    event = rng.choice(batch[1]) if batch[1] else batch
    places = list(event) if isinstance(event, dict) else list(range(len(event)))
    event[rng.choice(places)] = rng.choice(ODD_VALUES)
    return encode_any(batch)


def _untouched(_rng: random.Random, payload: bytes, _other: bytes) -> bytes:
    return payload


WAYS: list[Callable[[random.Random, bytes, bytes], bytes]] = [
    _flipped,
    _flipped,
    _cut,
    _spliced,
    _with_noise,
    _random,
    _random_batch,
    _exchanged,
    _exchanged,
    _untouched,
    _untouched,
]
ODD_VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        1,
        -1,
        7,
        255,
        256,
        2**31,
        2**32,
        2**63,
        2**64 - 1,
        -(2**63),
        1.5,
        float("nan"),
        float("inf"),
    ),
    *("", "GPU", "CPU", "mamba", "sliding_window", "BlockStored", "x" * 300, b"", b"\xff" * 40),
    *(
        [],
        [None],
        [1],
        [1, 2, 3],
        [[1, 2], [3, 4]],
        ["x"],
        [[]],
        [[["x", 0]]],
        [[["x", 2**40]]],
        [[["x", -1]], None],
        [{}],
    ),
    *(
        {},
        {"type": "CacheLayout"},
        {"type": 5},
        [[5] * 40],
        [16] * 16,
        list(range(64)),
        msgspec.msgpack.Ext(5, b"x"),
    ),
]


def hostile_payloads(count: int, samples: list[bytes], seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        way = rng.choice(WAYS)
        yield way(rng, rng.choice(samples), rng.choice(samples))


# --- the tests ------------------------------------------------------------------------------------


def test_two_hundred_thousand_hostile_payloads_are_applied_or_refused_and_nothing_else() -> None:
    """A replica that sends garbage is refused, counted, and costs the others nothing."""
    recorded = recorded_payloads()
    assert len(recorded) > 500
    index, seen = PrefixIndex(limits=LIMITS), Seen()
    gc.collect()
    for seed, (source, samples) in enumerate(
        {LEARNING: recorded, ANNOUNCED: recorded[::5] + our_payloads() * 20}.items()
    ):
        for number, payload in enumerate(hostile_payloads(PAYLOADS // 2, samples, seed)):
            if number % RESTART_EVERY == 0:
                seen.restart(index, source)
            seen.outcomes[_apply(index, source, payload, is_watched=number % 20 == 0)] += 1
            if number % 250 == 249:
                _expect_bounded(index, source)
                seen.look(index, source)
    assert seen.outcomes.total() == PAYLOADS
    assert min(seen.outcomes["applied"], seen.outcomes["refused"]) > PAYLOADS // 10
    assert largest_rise(seen.allocated[1:]) < 60_000
    # If no limit was ever reached and no layout ever known, the test would show little.
    assert seen.most_blocks == LIMITS.blocks
    assert seen.most_waiting == LIMITS.waiting_runs
    assert len(seen.layouts) > 20


def largest_rise(counts: list[int]) -> int:
    """How far a count ever rises above an earlier one.

    A fall is no growth: what earlier tests left behind may be freed while this one runs.
    """
    lowest = itertools.accumulate(counts, min)
    return max(count - low for count, low in zip(counts, lowest, strict=True))


@dataclass
class Seen:
    """What the test saw on the way."""

    outcomes: Counter[str] = field(default_factory=Counter)
    allocated: list[int] = field(default_factory=list)
    layouts: set[str] = field(default_factory=set)
    most_blocks: int = 0
    most_waiting: int = 0

    def restart(self, index: PrefixIndex, source: SourceId) -> None:
        self.allocated.append(sys.getallocatedblocks())
        index.add(source, LayoutHints(hash_seeds=("0",)))

    def look(self, index: PrefixIndex, source: SourceId) -> None:
        statistics = index.statistics()[source]
        self.layouts.add(repr(statistics.layout))
        self.most_blocks = max(self.most_blocks, *blocks_by_tier(statistics).values(), 0)
        self.most_waiting = max(self.most_waiting, statistics.waiting.runs)


def _apply(index: PrefixIndex, source: SourceId, payload: bytes, is_watched: bool) -> str:
    """Apply or refuse a payload; any other exception fails the test."""
    before = index.statistics().get(source) if is_watched else None
    try:
        index.apply(source, payload)
    except MalformedBatch:
        if is_watched:
            assert index.statistics().get(source) == before
        return "refused"
    return "applied"


def blocks_by_tier(statistics: SourceStatistics) -> Counter[str]:
    """Each tier has the limit for itself."""
    blocks: Counter[str] = Counter()
    for (_, tier), count in statistics.blocks.items():
        blocks[tier] += count
    return blocks


def _expect_bounded(index: PrefixIndex, source: SourceId) -> None:
    """Check that its limits hold and that it still predicts."""
    statistics = index.statistics()[source]
    assert max(blocks_by_tier(statistics).values(), default=0) <= LIMITS.blocks
    assert len({tier for _, tier in statistics.blocks}) <= LIMITS.tiers
    assert statistics.waiting.runs <= LIMITS.waiting_runs
    assert statistics.waiting.tokens <= LIMITS.waiting_tokens
    assert index.core.contradictions() == []
    for hit in index.match(tokens(100, first=0), "sql", "salt").values():
        assert 0 <= hit.gpu_cached_tokens <= hit.cached_tokens <= 100
    index.explain(index.prepare(tokens(40)), source)


def test_an_unreadable_event_costs_no_other_and_is_reported() -> None:
    """Which blocks the bad one took away is not known: what is left may be too much."""
    prompt = Prefix(tokens(64))
    removed = msgspec.to_builtins(BlockRemoved(prompt.hashes[2:], "GPU", 0))
    for bad, takes_away in (
        ({"type": "BlockRemoved", "block_hashes": 5}, True),
        (7, True),
        (["BlockStored", [1], None, [-1], 16], False),
        ([], True),
        ({"type": None}, True),
    ):
        index = PrefixIndex()
        index.apply(LEARNING, encode(EventBatch(0.0, [prompt.stored(0, FULL)])))
        result = index.apply(LEARNING, encode_any([0.0, [bad, removed], None]))
        assert (result.removed, result.unreadable, result.is_incomplete) == (2, 1, takes_away)
        assert index.statistics()[LEARNING].is_incomplete is takes_away
        assert index.match([*prompt.tokens, 1])[LEARNING].gpu_cached_tokens == 32


def test_a_source_is_not_made_known_by_a_payload_that_is_refused() -> None:
    """Otherwise garbage under many names would grow the index."""
    index = PrefixIndex()
    with pytest.raises(MalformedBatch):
        index.apply(LEARNING, b"\xc1")
    assert index.statistics() == {}


# --- bombs ----------------------------------------------------------------------------------------

HUGE = b"\xff\xff\xff\xff"
NESTED = 100_000
HEAD = b"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
"""`[0.0, ..., ...]`: the events and the rank follow."""


def _field(name: str, value: bytes) -> bytes:
    return encode_any(name) + value


def _event(**fields: bytes) -> bytes:
    """A batch with one event, as a map of raw values."""
    whole = {
        "type": encode_any("BlockStored"),
        "block_hashes": b"\x91\x01",
        "medium": b"\xc0",
    } | fields
    return (
        HEAD
        + b"\x91"
        + bytes([0x80 + len(whole)])
        + b"".join(_field(*item) for item in whole.items())
        + b"\x00"
    )


def _nested(opening: bytes) -> bytes:
    return opening * NESTED + b"\xc0"


BOMBS: dict[str, bytes] = {
    "an array of 2^32": b"\xdd" + HUGE,
    "a map of 2^32": b"\xdf" + HUGE,
    "a string of 2^32": b"\xdb" + HUGE,
    "bytes of 2^32": b"\xc6" + HUGE,
    "an extension of 2^32": b"\xc9" + HUGE + b"\x01",
    "2^32 events": HEAD + b"\xdd" + HUGE,
    "an event of 2^32": HEAD + b"\x91\xdd" + HUGE,
    "an event of 2^32 fields": HEAD + b"\x91\xdf" + HUGE,
    "2^32 hashes": _event(block_hashes=b"\xdd" + HUGE),
    "2^32 tokens": _event(token_ids=b"\xdd" + HUGE),
    "2^32 extra keys": _event(extra_keys=b"\xdd" + HUGE),
    "a medium of 2^32": _event(medium=b"\xdb" + HUGE),
    "a hash of 2^32": _event(block_hashes=b"\x91\xc6" + HUGE),
    "an unknown field of 2^32": _event(tomorrow=b"\xdf" + HUGE),
    "arrays in arrays": _nested(b"\x91"),
    "maps in maps": _nested(b"\x81\x01"),
    "maps as keys of maps": _nested(b"\x81"),
    "events in events": HEAD + b"\x91" + _nested(b"\x91") + b"\x00",
    "extra keys in extra keys": _event(extra_keys=_nested(b"\x91")),
    "maps in extra keys": _event(extra_keys=b"\x91" + _nested(b"\x81\x01")),
    "hashes in hashes": _event(block_hashes=_nested(b"\x91")),
    "tokens in tokens": _event(token_ids=_nested(b"\x91")),
    "depth in an unknown event": _event(type=encode_any("Tomorrow"), what=_nested(b"\x91")),
    "depth in an array": HEAD
    + b"\x91\x9d"
    + encode_any("BlockStored")
    + _nested(b"\x91") * 12
    + b"\x00",
}


@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_at_once_and_without_the_memory_it_asks_for(payload: bytes) -> None:
    """Five bytes can claim four billion elements; a hundred thousand can nest as deep."""
    index = PrefixIndex()
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(MalformedBatch):
            index.apply(LEARNING, payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1
    assert peak < 10 * len(payload) + 1_000_000


@pytest.mark.parametrize(
    "place", ["extra_keys", "tomorrow", "token_ids", "block_hashes", "lookahead_token_ids"]
)
def test_no_depth_of_nesting_reaches_the_recursion_limit_half_way(place: str) -> None:
    """What the decoder accepted must not be too deep for the code that follows."""
    index = PrefixIndex()
    for depth in range(1, sys.getrecursionlimit() + 50):
        value = b"\x91" * depth + b"\xa1x"
        payload = _event(
            **{"token_ids": encode_any([1, 2]), "parent_block_hash": b"\xc0", place: value}
        )
        try:
            index.apply(LEARNING, payload)
        except MalformedBatch:
            continue


def test_a_batch_of_a_million_hashes_stays_within_the_limits() -> None:
    """It is well-formed, but far over the limits of a source."""
    index = PrefixIndex(limits=LIMITS)
    hashes = list(range(1_000_000))
    result = index.apply(LEARNING, encode_any([0.0, [["BlockStored", hashes, None, hashes, 1]]]))
    assert (result.stored, result.overflow) == (LIMITS.blocks, 1_000_000 - LIMITS.blocks)
    assert index.statistics()[LEARNING].blocks == {(0, "GPU"): LIMITS.blocks}
    assert index.statistics()[LEARNING].is_incomplete
