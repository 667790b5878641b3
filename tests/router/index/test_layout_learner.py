"""What is known of a source's layout, from whom, and what is only assumed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvevents.events import CPU, BlockStored, CacheLayout, GroupSpec
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index.layout_learner import LayoutHints, LayoutLearner
from tests.support.blocks import FULL, Prefix, mamba, tokens, window

NOT_CACHED = KVCacheGroup(GroupKind.NOT_CACHED, 1)
CHUNKED = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=64)
PROMPT = Prefix(tokens(160))


def learn(learner: LayoutLearner, *events: BlockStored) -> LayoutLearner:
    """Feed a learner as a source does."""
    for event in events:
        learner.see_stored(event)
    return learner


def learned(*events: BlockStored, hints: LayoutHints | None = None) -> LayoutLearner:
    return learn(LayoutLearner(hints or LayoutHints()), *events)


def groups_of(learner: LayoutLearner) -> tuple[KVCacheGroup, ...]:
    """The groups, without sizes that mean nothing for their kind."""
    assert learner.layout is not None
    return tuple(map(_meant, learner.layout.groups))


def _meant(group: KVCacheGroup) -> KVCacheGroup:
    return KVCacheGroup(
        group.kind,
        group.block_size,
        group.sliding_window if group.kind is GroupKind.SLIDING_WINDOW else None,
        group.attention_chunk_size if group.kind is GroupKind.CHUNKED_LOCAL else None,
    )


def silent(event: BlockStored) -> BlockStored:
    """The event of an engine that names no kinds (vLLM < 0.22)."""
    return replace(event, kv_cache_spec_kind=None, kv_cache_spec_sliding_window=None)


# --- who is believed ------------------------------------------------------------------------------


def test_nothing_is_known_before_anything_was_said() -> None:
    """No layout, no hit: better than a wrong one."""
    learner = LayoutLearner()
    assert learner.layout is None
    assert learner.assumptions() == ()


def test_events_name_kinds_windows_and_block_sizes() -> None:
    """A current vLLM needs no configuration."""
    learner = learned(
        PROMPT.stored(0, window(64)), PROMPT.stored(1, KVCacheGroup(GroupKind.FULL, 32))
    )
    assert groups_of(learner) == (window(64), KVCacheGroup(GroupKind.FULL, 32))
    assert learner.layout is not None
    assert (learner.layout.hash_block_size, learner.layout.scheduler_block_size) == (16, 32)
    assert learner.assumptions() == ()


def test_events_are_believed_before_the_configuration() -> None:
    """Who runs the engine changed a flag and forgot the router's file."""
    hints = LayoutHints((window(128, 32), window(32)))
    assert groups_of(learned(PROMPT.stored(0, FULL), hints=hints)) == (FULL, window(32))


def test_the_configuration_fills_in_what_events_leave_out() -> None:
    """Up to vLLM 0.21 an event has a group and a block size, and no kind."""
    learner = learned(
        silent(PROMPT.stored(0, FULL)),
        silent(PROMPT.stored(1, FULL)),
        hints=LayoutHints((FULL, window(64))),
    )
    assert groups_of(learner) == (FULL, window(64))


def test_a_group_of_unknown_kind_is_taken_as_full_attention_and_this_is_said() -> None:
    """Full attention never promises too much: it needs every block."""
    learner = learned(
        silent(PROMPT.stored(0, FULL)),
        replace(PROMPT.stored(1, FULL), kv_cache_spec_kind="attention of 2031"),
    )
    assert groups_of(learner) == (FULL, FULL)
    assert len(learner.assumptions()) == 2
    assert all(
        f"group {index}: kind" in text and "full attention" in text
        for index, text in enumerate(learner.assumptions())
    )


def test_facts_from_the_configuration_are_not_changed_by_events() -> None:
    """A recording knows better than what can be seen of it."""
    hints = LayoutHints((window(64), FULL), 16, 32, authoritative=True)
    learner = learned(PROMPT.stored(0, FULL), PROMPT.stored(2, mamba()), hints=hints)
    assert learner.layout == KVCacheLayout((window(64), FULL), 16, 32)
    assert learner.assumptions() == ("groups: from the configuration",)


def test_an_announced_layout_is_believed_before_all_else() -> None:
    """It is the publisher's own word."""
    specs = [
        GroupSpec("mamba", 32),
        GroupSpec("chunked_local_attention", 16, attention_chunk_size=128),
    ]
    learner = LayoutLearner(LayoutHints((FULL,), eagle=True, authoritative=True))
    learn(learner, PROMPT.stored(0, window(64)))
    learner.see_announcement(CacheLayout("publisher-1", specs, 16, 32, eagle=False))
    learn(learner, PROMPT.stored(0, window(64)), PROMPT.stored(3, FULL))
    chunks = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=128)
    assert learner.layout == KVCacheLayout((mamba(32), chunks), 16, 32, eagle=frozenset())
    assert learner.assumptions() == ()


def test_an_announced_layout_that_contradicts_itself_is_said_to() -> None:
    """Without a layout the source gets no hit at all: an operator must see why."""
    learner = learned(PROMPT.stored(0, FULL))
    learner.see_announcement(CacheLayout("publisher-1", [GroupSpec("full_attention", 24)], 16, 48))
    assert learner.layout is None
    assert (
        learner.error
        == "group 0 (full_attention): block_size 24 must be a multiple of hash_block_size 16"
    )
    assert learner.assumptions() == (learner.error,)


# --- groups that no event has named ---------------------------------------------------------------


def test_a_configured_group_that_no_event_has_named_exists_all_the_same() -> None:
    """Its blocks are missing, not its say: a hit needs them."""
    hints = LayoutHints((FULL, window(64)))
    assert groups_of(learned(PROMPT.stored(0, FULL), hints=hints)) == (FULL, window(64))
    assert groups_of(LayoutLearner(hints)) == (FULL, window(64))


def test_a_configured_group_that_no_event_has_named_is_an_assumption() -> None:
    """What had to be assumed is listed, so that an operator sees a wrong file."""
    learner = learned(PROMPT.stored(0, FULL), hints=LayoutHints((FULL, window(64))))
    assert any(text.startswith("group 1") for text in learner.assumptions())


def test_unseen_groups_can_be_left_out() -> None:
    """To learn a layout is to believe only what was seen."""
    hints = LayoutHints((FULL, window(64)), assume_unseen=False)
    assert LayoutLearner(hints).layout is None
    assert groups_of(learned(PROMPT.stored(0, FULL), hints=hints)) == (FULL,)


def test_a_group_between_others_that_was_never_seen_has_no_say() -> None:
    """Groups of cross attention announce nothing."""
    assert groups_of(learned(PROMPT.stored(2, FULL))) == (NOT_CACHED, NOT_CACHED, FULL)


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_group_that_was_never_seen_is_full_attention_where_no_other_is(medium: str) -> None:
    """Its blocks are larger than all prompts so far: nothing that windows accept is reused."""
    learner = learned(PROMPT.stored(1, window(50), medium=medium))
    assert groups_of(learner) == (FULL, window(50))
    assert "group 0: taken as full attention, no event has named it" in learner.assumptions()
    learner.see_stored(PROMPT.stored(1, window(50)))
    learner.see_stored(PROMPT.stored(0, KVCacheGroup(GroupKind.FULL, 64)))
    assert groups_of(learner) == (KVCacheGroup(GroupKind.FULL, 64), window(50))


def test_an_event_without_a_group_is_of_group_0() -> None:
    """Engines before vLLM 0.20 know no groups, and have one."""
    assert groups_of(learned(replace(PROMPT.stored(0, FULL), group_idx=None))) == (FULL,)


# --- what is missing for a kind -------------------------------------------------------------------


def test_chunk_sizes_come_from_the_configuration_of_the_group_or_of_another() -> None:
    """No engine puts them on the wire; a model has one chunk size."""
    event = PROMPT.stored(1, CHUNKED)
    learner = learned(PROMPT.stored(0, FULL), event, hints=LayoutHints((FULL, CHUNKED)))
    assert groups_of(learner) == (FULL, CHUNKED)
    assert learner.assumptions() == ("group 1: attention_chunk_size 64",)
    swapped = learned(PROMPT.stored(0, FULL), event, hints=LayoutHints((CHUNKED, FULL)))
    assert groups_of(swapped) == (FULL, CHUNKED)


def test_chunks_of_unknown_size_are_taken_as_full_attention_and_this_is_said() -> None:
    """Too low a hit, never one too high."""
    learner = learned(PROMPT.stored(0, CHUNKED))
    assert groups_of(learner) == (FULL,)
    assert learner.assumptions() == (
        "group 0: attention_chunk_size unknown, taken as full attention",
    )


def test_a_window_of_unknown_size_is_taken_as_full_attention_and_this_is_said() -> None:
    """The same for a window, and for one that only the configuration knows."""
    unsized = replace(PROMPT.stored(0, window(64)), kv_cache_spec_sliding_window=None)
    learner = learned(unsized)
    assert groups_of(learner) == (FULL,)
    assert any("sliding_window" in text for text in learner.assumptions())
    known = learned(unsized, hints=LayoutHints((window(64),)))
    assert groups_of(known) == (window(64),)
    assert any("sliding_window" in text for text in known.assumptions())


def test_eagle_is_known_only_from_the_configuration() -> None:
    """No vLLM says so; it is an assumption, and listed."""
    learner = learned(PROMPT.stored(0, FULL), hints=LayoutHints(eagle=True))
    assert learner.layout is not None
    assert learner.layout.eagle
    assert learner.assumptions() == ("eagle: from the configuration",)


def test_a_drafters_group_that_no_event_has_named_is_not_in_the_layout_yet() -> None:
    """The list is of the whole cache, and the groups come one by one."""
    learner = learned(PROMPT.stored(0, FULL), hints=LayoutHints(eagle=(0, 1)))
    assert learner.layout is not None
    assert learner.layout.eagle == {0}
    learner.see_stored(PROMPT.stored(1, window(64)))
    assert learner.layout.eagle == {0, 1}


def test_eagle_drops_nothing_where_hashes_cover_the_next_tokens() -> None:
    """vLLM 0.33 reuses the last block then: what the draft head needs to see is in its hash."""
    event = replace(PROMPT.stored(0, FULL), lookahead_token_ids=[[7, 8]] * 10)
    learner = learned(event, hints=LayoutHints(eagle=True))
    assert learner.layout is not None
    assert not learner.layout.eagle
    assert learner.lookahead == 2


# --- block sizes ----------------------------------------------------------------------------------


def test_events_of_other_tiers_and_without_tokens_change_nothing_that_the_gpu_has_said() -> None:
    """A tier may keep several blocks as one."""
    offloaded = replace(PROMPT.stored(0, KVCacheGroup(GroupKind.FULL, 32)), medium=CPU)
    without_tokens = replace(PROMPT.stored(0, KVCacheGroup(GroupKind.FULL, 32)), token_ids=[])
    assert learned(without_tokens).layout is None
    for events in ([PROMPT.stored(0, FULL), offloaded], [offloaded, PROMPT.stored(0, FULL)]):
        layout = learned(*events).layout
        assert layout is not None
        assert layout.groups == (FULL,)
    assert groups_of(learned(offloaded, PROMPT.stored(0, FULL), without_tokens)) == (FULL,)


def test_hashes_are_as_far_apart_as_the_smallest_common_step_of_all_blocks() -> None:
    """48 and 32 share hashes every 16 tokens."""
    wide, other = KVCacheGroup(GroupKind.FULL, 48), window(64, 32)
    learner = learned(Prefix(tokens(96)).stored(0, wide), Prefix(tokens(96)).stored(1, other))
    assert learner.layout == KVCacheLayout((wide, other), 16, 96)


def test_smaller_entries_of_states_let_hits_end_inside_blocks() -> None:
    """vLLM's `--prefix-match-unit`: they are announced with a smaller block size than the group's
    own."""
    wide = KVCacheGroup(GroupKind.FULL, 32)
    whole = [PROMPT.stored(0, wide, 0, 64), PROMPT.stored(1, mamba(32), 0, 64)]
    inside = [PROMPT.stored(0, FULL, 64, 80), PROMPT.stored(1, mamba(16), 64, 80)]
    assert learned(*whole).layout == KVCacheLayout((wide, mamba(32)), 32, 32)
    assert learned(*whole, *inside).layout == KVCacheLayout((wide, mamba(32)), 16, 16)


def test_states_in_smaller_blocks_than_the_others_let_no_hit_end_inside_these() -> None:
    """Only an entry smaller than its own group's blocks shows a state inside one."""
    wide = KVCacheGroup(GroupKind.FULL, 32)
    learner = learned(PROMPT.stored(0, wide, 0, 64), PROMPT.stored(1, mamba(16), 0, 64))
    assert learner.layout == KVCacheLayout((wide, mamba(16)), 16, 32)


def test_smaller_entries_without_states_change_no_granularity() -> None:
    """Hits inside blocks exist only where states are kept there."""
    wide = KVCacheGroup(GroupKind.FULL, 32)
    learner = learned(
        PROMPT.stored(0, wide, 0, 64),
        PROMPT.stored(1, window(64, 32), 0, 64),
        PROMPT.stored(0, FULL, 64, 80),
    )
    assert learner.layout == KVCacheLayout((wide, window(64, 32)), 16, 32)


def test_sizes_that_contradict_each_other_leave_no_layout_and_a_reason() -> None:
    """The operator reads which group breaks which rule."""
    learner = learned(PROMPT.stored(0, FULL), hints=LayoutHints(hash_block_size=24))
    assert learner.layout is None
    assert learner.assumptions()[0].startswith(
        "layout: scheduler_block_size 16 must be a multiple of hash_block_size 24"
    )


def test_only_chunked_groups_are_shown_with_a_chunk_size() -> None:
    """A chunk size beside a full-attention group would look like a mistake to an operator."""
    chunked = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=64)
    events = [PROMPT.stored(index, group) for index, group in enumerate((FULL, chunked))]
    layout = learned(*events, hints=LayoutHints(groups=(FULL, chunked))).layout
    assert layout is not None
    assert [group.attention_chunk_size for group in layout.groups] == [None, 64]


# --- the wire and the configuration ---------------------------------------------------------------


def test_a_window_on_the_wire_beats_the_configured_one() -> None:
    """A configuration outlives the model it was written for."""
    hints = LayoutHints(groups=(FULL, window(512)))
    learner = LayoutLearner(hints)
    learner.see_stored(PROMPT.stored(0, FULL))
    learner.see_stored(PROMPT.stored(1, window(64)))
    assert groups_of(learner) == (FULL, window(64))
