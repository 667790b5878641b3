"""Streams of one and the same run, sent by seven versions, decode to the same events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvevents.codec import decode, encode
from kvevents.events import BlockRemoved, BlockStored, Event, EventBatch
from tests.support.wire_samples import (
    END_OF_REPLAY,
    FOLDER,
    live,
    messages,
    number,
    packed,
    replay_frames,
    replayed,
    versions,
)

VERSIONS = versions()
NEWEST = VERSIONS[-1]

SINCE = {
    "medium": (0, 10, 2),
    "lora_name": (0, 14),
    "extra_keys": (0, 17),
    "group_idx": (0, 20),
    "kv_cache_spec_kind": (0, 22),
    "kv_cache_spec_sliding_window": (0, 22),
}
"""The first version that puts a field on the wire."""


def test_there_are_samples_of_every_form_of_the_wire() -> None:
    """Arrays without a medium, with one, with groups, and maps: a missing file must fail."""
    assert VERSIONS == ["0.9.2", "0.12.0", "0.16.0", "0.20.0", "0.24.0", "0.26.0", "0.32.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_live_stream_decodes_to_the_newest_versions_events_but_for_fields_it_does_not_send(
    version: str,
) -> None:
    """The form changes with nearly every release; the events do not."""
    newest = [_seen_by(batch, version) for batch in _decoded(live(NEWEST))]
    assert _decoded(live(version)) == newest


@pytest.mark.parametrize("version", VERSIONS)
def test_a_replay_brings_the_live_batches_again(version: str) -> None:
    """A loss is repaired with the very same events, under the same sequence numbers."""
    assert replayed(version) == live(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_live_stream_is_numbered_without_a_gap_from_0(version: str) -> None:
    """The comparisons above do not detect lost messages."""
    assert [message.seq for message in live(version)] == list(range(45))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_replay_ends_with_an_empty_payload_under_seq_minus_one(version: str) -> None:
    """The marker has one more frame since 0.26, as every reply has."""
    *batches, end = replay_frames(version)
    assert end[-2:] == [END_OF_REPLAY, b""]
    assert {len(frames) for frames in [*batches, end]} == {4 if number(version) >= (0, 26) else 3}
    assert all(frames[0] == b"" for frames in [*batches, end])


@pytest.mark.parametrize("version", VERSIONS)
def test_samples_hold_stores_and_removals_of_known_types_only(version: str) -> None:
    """If they were empty, or skipped as unknown, all comparisons above would hold too."""
    batches = _decoded(live(version))
    events = [event for batch in batches for event in batch.events]
    assert sum(isinstance(event, BlockStored) for event in events) > 50
    assert sum(isinstance(event, BlockRemoved) for event in events) > 5
    assert {batch.skipped for batch in batches} == {0}
    assert {batch.data_parallel_rank for batch in batches} == {0}


@pytest.mark.parametrize("version", VERSIONS)
def test_events_of_an_engine_survive_our_own_form(version: str) -> None:
    """A relay may write what it read."""
    for batch in _decoded(live(version)):
        assert decode(encode(batch)) == batch


def _decoded(messages: list[Any]) -> list[EventBatch]:
    return [decode(message.payload) for message in messages]


def _seen_by(batch: EventBatch, version: str) -> EventBatch:
    return replace(batch, events=[_older(event, version) for event in batch.events])


def _older(event: Event, version: str) -> Event:
    """The event as *version* would have sent it, without fields that were added later."""
    missing = [
        name for name, first in SINCE.items() if number(version) < first and hasattr(event, name)
    ]
    return replace(event, **dict.fromkeys(missing))


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.32.0"), ("sglang", "0.5.23")])
def test_the_session_that_stored_a_block_first_is_read_over(engine: str, version: str) -> None:
    """Anyone may reuse the block, so nothing that is kept of an event depends on its session."""
    sessions = 0
    for message in live(version, engine):
        ts, events, *rest = msgspec.msgpack.decode(message.payload)
        sessions += sum("session_id" in event for event in events)
        without = [
            {name: value for name, value in event.items() if name != "session_id"}
            for event in events
        ]
        assert decode(msgspec.msgpack.encode([ts, without, *rest])) == decode(message.payload)
    assert sessions > 0


def test_a_packed_sample_has_the_frames_it_was_given(tmp_path: Path) -> None:
    """With it the sample of another engine is written."""
    frames = list(messages(FOLDER / f"vllm-{NEWEST}.raw.gz"))
    (tmp_path / "again").write_bytes(packed(frames))
    assert frames
    assert list(messages(tmp_path / "again")) == frames
