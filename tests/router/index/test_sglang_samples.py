"""What six versions of SGLang wrote predicts what their history left."""

from __future__ import annotations

import pytest

from kvevents.codec import decode
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from router.index.base import Hit
from router.index.index import PrefixIndex
from tests.support.blocks import SOURCE
from tests.support.wire_samples import (
    END_OF_REPLAY,
    live,
    number,
    replay_frames,
    replayed,
    versions,
)

VERSIONS = versions("sglang")
SALTS_SINCE, MAPS_SINCE, ADAPTERS_SINCE = (0, 5, 18), (0, 5, 20), (0, 5, 22)
HOST_TIER_SINCE, TOPIC_IN_REPLIES_SINCE = (0, 5, 9), (0, 5, 23)

# The prompts of the history; pages have 4 tokens.
FIRST = [*range(100, 124)]
"""Stored whole, its last two pages evicted from the GPU again; the host tier has all of it."""
SECOND = [*FIRST[:12], *range(200, 212)]
"""Shares three pages with the first; of its own three the last two were evicted."""
THIRD = [*range(300, 316)]
"""Still there; the host tier lost the last two of its four pages."""
CONTINUED = [*FIRST, 1, 2, 3, 4]
"""What tenant-a asked in a second turn. Of the third prompt, tenant-b has the first two pages."""


def test_there_are_samples_of_every_form_of_the_wire() -> None:
    """Arrays without a medium, with one, with a map for the salt, and maps."""
    assert VERSIONS == ["0.4.10", "0.5.9", "0.5.17", "0.5.18", "0.5.20", "0.5.23"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_event_of_a_sample_is_read(version: str) -> None:
    """Nothing is skipped or unreadable, and all that a replay brings is what came live."""
    batches = [decode(message.payload) for message in live(version, "sglang")]
    events = [event for batch in batches for event in batch.events]
    assert {(batch.skipped, batch.unreadable, batch.data_parallel_rank) for batch in batches} == {
        (0, 0, 0)
    }
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert replayed(version, "sglang") == live(version, "sglang")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_replay_ends_with_minus_one(version: str) -> None:
    """The marker has an empty topic where replies have one."""
    *replies, end = replay_frames(version, "sglang")
    expected = 4 if number(version) >= TOPIC_IN_REPLIES_SINCE else 3
    assert {len(frames) for frames in [*replies, end]} == {expected}
    assert end[-2:] == [END_OF_REPLAY, b""]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sample_predicts_what_its_history_left(version: str, index: PrefixIndex) -> None:
    """A salted tenant's blocks are his alone, an adapter's are its own; the last batch is that of a
    flush, which empties the host tier as well."""
    *history, clear = live(version, "sglang")
    for message in history:
        index.apply(SOURCE, message.payload)
    has_salts, has_adapters = number(version) >= SALTS_SINCE, number(version) >= ADAPTERS_SINCE
    has_host_tier = number(version) >= HOST_TIER_SINCE
    assert hit(index, FIRST) == Hit(16, 24 if has_host_tier else 16)
    assert hit(index, SECOND) == Hit(16, 16)
    assert hit(index, THIRD) == Hit(16, 16)
    assert hit(index, CONTINUED, cache_salt="tenant-a") == of_gpu(28 * has_salts)
    assert hit(index, THIRD, cache_salt="tenant-b") == of_gpu(8 * has_salts)
    assert hit(index, FIRST, cache_salt="tenant-b") == of_gpu(0)
    assert hit(index, FIRST, lora_name="sql") == of_gpu(24 * has_adapters)
    index.apply(SOURCE, clear.payload)
    assert hit(index, FIRST) == hit(index, THIRD) == of_gpu(0)
    assert hit(index, CONTINUED, cache_salt="tenant-a") == of_gpu(0)
    assert index.statistics()[SOURCE].blocks == {}


def hit(index: PrefixIndex, tokens: list[int], **extras: str) -> Hit:
    """Of the prompt and one more token, which is always computed."""
    return Hit(*index.match([*tokens, 9], **extras)[SOURCE][:2])  # type: ignore[arg-type]


def of_gpu(tokens: int) -> Hit:
    return Hit(tokens, tokens)
