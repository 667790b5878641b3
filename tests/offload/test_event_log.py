"""What a step changed in the cache, reported presence-exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvevents.events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event, GroupIdx
from kvevents.hashing import ExtraKeys
from kvevents.layout import KVCacheGroup
from offload.event_log import EventLog
from offload.request import CacheRequest
from tests.offload.small_cache import GROUP_0, GROUP_1, request
from tests.support.cache_layouts import chunked, full, mamba, window

PROMPT = request("a", range(100, 140))
HASHES = PROMPT.block_hashes


def store(
    log: EventLog, first_block: int, appeared: Sequence[bool], group_idx: GroupIdx = GROUP_0
) -> None:
    """Add a run of `PROMPT`'s blocks of four tokens to the log; *appeared* has a flag for each."""
    log.start_run(group_idx, first_block, PROMPT)
    for block_hash, has_appeared in zip(HASHES[first_block:], appeared, strict=False):
        log.add_stored(block_hash, has_appeared)


def reported(events: Sequence[Event]) -> list[tuple[object, ...]]:
    """Events in a readable form: what, which group, which of `PROMPT`'s blocks."""
    return [
        ("cleared",)
        if not isinstance(event, (BlockStored, BlockRemoved))
        else (
            "stored" if isinstance(event, BlockStored) else "removed",
            event.group_idx,
            *(HASHES.index(block_hash) for block_hash in event.block_hashes),  # type: ignore[arg-type]
        )
        for event in events
    ]


@pytest.fixture
def log() -> EventLog:
    return EventLog([full(), window(9)])


def test_a_step_in_which_nothing_happened_reports_nothing(log: EventLog) -> None:
    """Heartbeats are the publisher's."""
    assert log.take() == []


def test_a_run_is_one_event_with_all_that_identifies_it(log: EventLog) -> None:
    """A router learns hash -> prefix from tokens and parent, and needs no block size to do so."""
    store(log, 0, [True] * 3)
    assert log.take() == [
        BlockStored(
            block_hashes=[*HASHES[:3]],
            parent_block_hash=None,
            token_ids=list(range(100, 112)),
            medium=GPU,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    assert log.take() == []


def test_a_later_run_names_the_hash_before_it(log: EventLog) -> None:
    """Without its parent a late joiner could not place the run."""
    store(log, 3, [True] * 2, GROUP_1)
    assert log.take() == [
        BlockStored(
            block_hashes=[*HASHES[3:5]],
            parent_block_hash=HASHES[2],
            token_ids=list(range(112, 120)),
            medium=GPU,
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=9,
        )
    ]


@pytest.mark.parametrize(
    ("group", "kind", "sliding_window"),
    [
        (full(), "full_attention", None),
        (window(9), "sliding_window", 9),
        (chunked(16), "chunked_local_attention", None),
        (mamba(), "mamba", None),
    ],
)
def test_every_event_carries_the_kind_of_its_group(
    group: KVCacheGroup, kind: str, sliding_window: int | None
) -> None:
    """A reader that never saw the layout judges hits by these fields."""
    log = EventLog([group])
    store(log, 0, [True])
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (kind, sliding_window)
    assert event.block_size is None


def test_a_group_with_larger_blocks_uses_every_second_hash_and_its_own_parent() -> None:
    """Two groups have the same hash at the same boundary; the parent is the one before the run."""
    log = EventLog([full(4), mamba(8)])
    log.start_run(GROUP_1, 1, PROMPT)
    for end in (16, 24):
        log.add_stored(PROMPT.hash_at(end), True)
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [HASHES[3], HASHES[5]]
    assert event.parent_block_hash == HASHES[1]
    assert event.token_ids == list(range(108, 124))
    assert event.group_idx == 1


@pytest.mark.parametrize(
    ("appeared", "runs"),
    [
        ([False, True, True], [(1, 2)]),
        ([True, True, False], [(0, 1)]),
        ([True, False, True], [(0,), (2,)]),
        ([True, False, False, True, True], [(0,), (3, 4)]),
        ([False, False], []),
    ],
)
def test_a_run_is_split_where_a_block_was_there_already(
    log: EventLog, appeared: list[bool], runs: list[tuple[int, ...]]
) -> None:
    """A hash whose tokens are left out would shift all tokens behind it."""
    store(log, 2, appeared)
    events = log.take()
    assert reported(events) == [("stored", 0, *(block + 2 for block in run)) for run in runs]
    for event, run in zip(events, runs, strict=True):
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash == HASHES[run[0] + 1]
        assert event.token_ids == list(range(108 + 4 * run[0], 108 + 4 * (run[-1] + 1)))


def test_removals_of_a_group_travel_together_and_name_it(log: EventLog) -> None:
    """Group 0 is a group like any other.

    A removal without an index would be taken for one of every group.
    """
    for group_idx, block in ((GROUP_1, 4), (GROUP_0, 2), (GROUP_1, 1), (GROUP_0, 3)):
        log.add_removed(group_idx, HASHES[block])
    events = log.take()
    assert events == [
        BlockRemoved([HASHES[2], HASHES[3]], GPU, 0),
        BlockRemoved([HASHES[4], HASHES[1]], GPU, 1),
    ]
    assert all(isinstance(event, BlockRemoved) and event.group_idx is not None for event in events)
    assert events[0] != BlockRemoved([HASHES[2], HASHES[3]], GPU, None)


def test_a_block_stored_and_removed_in_one_step_is_not_reported(log: EventLog) -> None:
    """Reported in the wrong order, it would leave a router with a block that is gone."""
    store(log, 0, [True] * 3)
    log.add_removed(GROUP_0, HASHES[1])
    assert reported(log.take()) == [("stored", 0, 0), ("stored", 0, 2)]
    assert log.take() == []


def test_a_block_removed_and_stored_again_in_one_step_is_not_reported(log: EventLog) -> None:
    """The router has it already, and is right."""
    log.add_removed(GROUP_0, HASHES[1])
    store(log, 0, [True] * 3)
    assert reported(log.take()) == [("stored", 0, 0), ("stored", 0, 2)]


@pytest.mark.parametrize(
    ("changes", "events"),
    [
        ("+-", []),
        ("+-+", [("stored", 0, 0)]),
        ("+-+-", []),
        ("-", [("removed", 0, 0)]),
        ("-+", []),
        ("-+-", [("removed", 0, 0)]),
        ("-+-+", []),
    ],
)
def test_only_the_difference_between_two_steps_is_reported(
    log: EventLog, changes: str, events: list[tuple[object, ...]]
) -> None:
    """A block may change hands many times in one step."""
    for change in changes:
        if change == "+":
            store(log, 0, [True])
        else:
            log.add_removed(GROUP_0, HASHES[0])
    assert reported(log.take()) == events


def test_a_hash_stored_again_is_reported_once_by_the_run_that_holds_it(log: EventLog) -> None:
    """The first run's block is gone; two stores of one hash would be counted twice."""
    store(log, 0, [True] * 3)
    log.add_removed(GROUP_0, HASHES[1])
    store(log, 1, [True])
    assert reported(log.take()) == [("stored", 0, 0), ("stored", 0, 2), ("stored", 0, 1)]


def test_groups_are_independent_of_each_other(log: EventLog) -> None:
    """The same hash goes from the window's group while full attention keeps it."""
    store(log, 0, [True] * 2, GROUP_0)
    log.add_removed(GROUP_1, HASHES[0])
    assert reported(log.take()) == [("removed", 1, 0), ("stored", 0, 0, 1)]


def test_a_step_does_not_undo_the_one_before(log: EventLog) -> None:
    """What was reported stays reported: its removal is a new event."""
    store(log, 0, [True])
    log.take()
    log.add_removed(GROUP_0, HASHES[0])
    assert reported(log.take()) == [("removed", 0, 0)]
    store(log, 0, [True])
    assert reported(log.take()) == [("stored", 0, 0)]


def test_clearing_comes_first_and_cancels_what_was_before_it(log: EventLog) -> None:
    """A store reported before it would be cleared with the rest; one after it stays."""
    log.add_removed(GROUP_1, HASHES[5])
    store(log, 0, [True] * 2)
    log.add_cleared()
    store(log, 0, [True], GROUP_1)
    log.add_cleared()
    store(log, 1, [True] * 3)
    log.add_removed(GROUP_0, HASHES[3])
    events = log.take()
    assert events[0] == AllBlocksCleared()
    assert reported(events) == [("cleared",), ("stored", 0, 1, 2)]
    assert log.take() == []


def test_tokens_appended_after_the_store_are_not_part_of_it(log: EventLog) -> None:
    """The request runs on while its events wait for the end of the step."""
    growing = request("b", range(6))
    log.start_run(GROUP_0, 0, growing)
    log.add_stored(growing.block_hashes[0], True)
    growing.append(range(6, 30))
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    assert event.token_ids == [0, 1, 2, 3]


def stored_whole(prompt: CacheRequest, group: KVCacheGroup) -> BlockStored:
    log, size = EventLog([group]), group.block_size
    log.start_run(GROUP_0, 0, prompt)
    for end in range(size, prompt.num_tokens + 1, size):
        log.add_stored(prompt.hash_at(end), True)
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    return event


def test_an_event_carries_what_besides_tokens_decides_each_block() -> None:
    """A router hashes blocks itself: it cannot tell apart what is not reported."""
    keys: list[ExtraKeys] = [None, (("image", 1),)]
    event = stored_whole(
        request("b", range(12), lora_name="sql", cache_salt="pepper", extra_keys=keys), full()
    )
    assert event.lora_name == "sql"
    assert event.extra_keys == [("sql", "pepper"), ("sql", ("image", 1)), ("sql",)]


def test_an_event_of_larger_blocks_has_one_entry_per_block_shifted_to_its_start() -> None:
    """With fewer entries than hashes, a reader would put a picture into the wrong block."""
    keys: list[ExtraKeys] = [None, (("image", 1),), None, (("image", -3),)]
    event = stored_whole(request("b", range(16), extra_keys=keys), mamba(8))
    assert event.extra_keys == [(("image", 5),), (("image", 1),)]


@pytest.mark.parametrize("keys", [(), [None, None]])
def test_an_event_without_extra_keys_leaves_the_list_out(keys: Sequence[ExtraKeys]) -> None:
    """An empty entry for every block would be most of the stream."""
    event = stored_whole(request("b", range(12), extra_keys=keys), full())
    assert (event.extra_keys, event.lora_name) == (None, None)


def test_a_run_of_a_salted_prompt_that_starts_later_needs_no_extra_keys() -> None:
    """The salt is in the first block's hash, and so in all that follow."""
    salted = request("b", range(12), cache_salt="pepper")
    log = EventLog([full()])
    log.start_run(GROUP_0, 1, salted)
    log.add_stored(salted.block_hashes[1], True)
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    assert (event.extra_keys, event.parent_block_hash) == (None, salted.block_hashes[0])
