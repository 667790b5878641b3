"""What TokenSpeed wrote predicts what its history left."""

from __future__ import annotations

from kvevents.codec import decode
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from router.index.base import Hit
from router.index.index import PrefixIndex
from tests.support.blocks import SOURCE
from tests.support.wire_samples import END_OF_REPLAY, live, replay_frames, replayed, versions

VERSION = "0.1.0"

# The prompts of the history; pages have 4 tokens.
FIRST = [*range(100, 124)]
"""Stored whole; its last two pages were evicted again."""
SECOND = [*FIRST[:12], *range(200, 212)]
"""Shares three pages with the first; of its own three the last two were evicted."""
THIRD = [*range(300, 316)]


def test_every_event_of_the_sample_is_read() -> None:
    """Arrays as vLLM's first ones, hashes of 64 bits without a sign; a replay brings the same."""
    assert versions("tokenspeed") == [VERSION]
    batches = [decode(message.payload) for message in live(VERSION, "tokenspeed")]
    events = [event for batch in batches for event in batch.events]
    assert {(batch.skipped, batch.unreadable, batch.data_parallel_rank) for batch in batches} == {
        (0, 0, 0)
    }
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert replayed(VERSION, "tokenspeed") == live(VERSION, "tokenspeed")
    assert replay_frames(VERSION, "tokenspeed")[-1] == [b"", END_OF_REPLAY, b""]


def test_the_sample_predicts_what_its_history_left(index: PrefixIndex) -> None:
    """Until its last batch clears all."""
    *history, clear = live(VERSION, "tokenspeed")
    for message in history:
        index.apply(SOURCE, message.payload)
    found = [index.match([*prompt, 9])[SOURCE] for prompt in (FIRST, SECOND, THIRD)]
    assert [hit[:2] for hit in found] == [(16, 16), (16, 16), (16, 16)]
    index.apply(SOURCE, clear.payload)
    assert index.match([*THIRD, 9])[SOURCE] == Hit(0, 0)
