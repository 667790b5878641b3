"""The payloads of a cache's stream, for readers that ask for more than ours need."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvevents.cache_source import CacheSource, EngineStep
from kvevents.events import BlockRemoved, BlockStored, Event, TierBlocksCleared
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from tests.support.blocks import Prefix, tokens

FULL = KVCacheGroup(GroupKind.FULL, 16)
STATES = KVCacheGroup(GroupKind.MAMBA, 32)
LAYOUT = KVCacheLayout.build([FULL, STATES], hash_block_size=16)
PROMPT = Prefix(tokens(64))
OURS = replace(PROMPT.stored(0, FULL), block_size=None)
WITH_HOLES = replace(PROMPT.kept(1, STATES, [64]), block_size=None)
OFFLOADED = replace(PROMPT.offloaded(0, [16]), block_size=None)
REQUIRED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name")
"""By vLLM's class for a stored event."""


@pytest.mark.parametrize(
    ("event", "block_size"),
    [(OURS, 16), (WITH_HOLES, 32), (OFFLOADED, 0), (replace(OURS, group_idx=7), 16)],
    ids=["dense", "with holes", "without tokens", "of an unknown group"],
)
def test_a_stored_event_has_every_field_for_readers_that_require_them(
    event: BlockStored, block_size: int
) -> None:
    """The size of a run with holes is its group's; a tier without tokens has none to tell."""
    (stored,) = written([event], with_block_size=True)
    assert stored["block_size"] == block_size
    assert set(REQUIRED) <= set(stored)
    expected = msgspec.to_builtins(event) | {"block_size": block_size}
    assert {name: stored[name] for name in expected} == expected


def test_without_the_option_defaults_are_left_out() -> None:
    """Bytes are the price of every field."""
    (stored,) = written([OURS], with_block_size=False)
    assert not {"block_size", "lora_id"} & set(stored)


def test_other_events_are_written_as_ever_and_a_snapshot_as_the_stream() -> None:
    """A late joiner is the same reader."""
    removed = BlockRemoved([1], "GPU", 0)
    assert written([removed], with_block_size=True) == written([removed], with_block_size=False)
    source = CacheSource(announce(LAYOUT), 0, with_block_size=True)
    source.note(EngineStep(0.0, (OURS,), None))
    snapshot = source.snapshot(5)
    assert snapshot is not None
    _, (stored,) = [msgspec.msgpack.decode(payload)[1] for payload in snapshot]
    assert stored["block_size"] == 16


def test_an_event_that_cannot_be_written_costs_no_other() -> None:
    """Also where its size has to be found first."""
    broken = replace(OURS, token_ids=5)  # type: ignore[arg-type]
    source = CacheSource(announce(LAYOUT), 0, with_block_size=True)
    payload = source.payload(EngineStep(0.0, (broken, OURS), None))
    (stored,) = msgspec.msgpack.decode(payload)[1]
    assert stored["block_size"] == 16
    assert source.rejected_events >= 1


class Unknown(msgspec.Struct, tag=True, tag_field="type"):
    """An event of an engine's own."""


COPIES = BlockRemoved(list(PROMPT.stored(0, FULL).block_hashes), "GPU", 0, [1])
ODD_TIER = replace(OURS, medium=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "with_block_size"),
    [
        (COPIES, False),
        (ODD_TIER, False),
        (TierBlocksCleared(None), False),  # type: ignore[arg-type]
        (replace(OFFLOADED, token_ids=None), True),  # type: ignore[arg-type]
        (Unknown(), False),
    ],
    ids=["fewer counts than hashes", "a number as tier", "no tier", "no tokens", "an unknown type"],
)
def test_an_odd_event_does_not_end_the_stream(event: Any, with_block_size: bool) -> None:
    """It is an engine's mistake, and must not cost it its publisher."""
    source = CacheSource(announce(LAYOUT), 0, with_block_size)
    source.payload(EngineStep(0.0, (OURS,), None))
    source.payload(EngineStep(0.0, (event,), None))
    snapshot = source.snapshot(1)
    assert (snapshot is None) is (not source.state.is_complete)
    assert snapshot is None or list(snapshot)
    payload = source.payload(EngineStep(0.0, (OFFLOADED,), None))
    assert len(msgspec.msgpack.decode(payload)[1]) == 1


def test_a_block_that_cannot_be_told_is_not_in_a_snapshot_and_costs_no_other() -> None:
    """It was joined there with its chain, and all of that was left out."""
    prefix, source = Prefix(tokens(80)), CacheSource(announce(LAYOUT), 0)
    blocks = [
        replace(prefix.stored(0, FULL, at, at + 16), block_size=None) for at in range(0, 80, 16)
    ]
    blocks[2] = replace(blocks[2], lora_name=object())  # type: ignore[arg-type]
    for block in blocks:
        source.payload(EngineStep(0.0, (block,), None))
    assert source.rejected_events == 1
    snapshot = source.snapshot(5)
    assert snapshot is not None
    events = [event for payload in snapshot for event in msgspec.msgpack.decode(payload)[1]]
    told = [each for event in events for each in event.get("block_hashes", ())]
    assert len(told) == 4


def test_after_each_loss_the_whole_state_is_due() -> None:
    """`losses` says so to the publisher."""
    source = CacheSource(announce(LAYOUT), 0)
    source.payload(EngineStep(0.0, (replace(OURS, block_hashes=[[1]]),), None))  # type: ignore[list-item]
    assert source.losses == 1
    assert not source.state.is_complete
    source.payload(EngineStep(0.0, (), (OURS,), source.losses))
    assert source.state.is_complete
    assert source.state.blocks == len(OURS.block_hashes)


def written(events: list[Event], with_block_size: bool) -> list[dict[str, Any]]:
    source = CacheSource(announce(LAYOUT), 0, with_block_size)
    batch: list[Any] = msgspec.msgpack.decode(source.payload(EngineStep(0.0, tuple(events), None)))
    found: list[dict[str, Any]] = batch[1]
    return found
