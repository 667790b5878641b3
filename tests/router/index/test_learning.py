"""What is known of a source's layout and hash function, from whom, and what is only assumed."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.events import CPU, BlockHash, BlockStored, CacheLayout, GroupSpec
from kvevents.hashing import DEFAULT_SEED, HashChain, hash_algorithms, to_wire_int
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index import LayoutHints
from router.index.reference.learning import HashFinder, LayoutLearner, engine_hashes
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
    assert learner.layout == KVCacheLayout((mamba(32), chunks), 16, 32, eagle=False)
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


def test_eagle_drops_nothing_where_hashes_cover_the_next_tokens() -> None:
    """vLLM 0.33 reuses the last block then: what the draft head needs to see is in its hash."""
    event = replace(PROMPT.stored(0, FULL), lookahead_token_ids=[[7, 8]] * 10)
    learner = learned(event, hints=LayoutHints(eagle=True))
    assert learner.layout is not None
    assert not learner.layout.eagle
    assert learner.lookahead == 2


# --- block sizes ----------------------------------------------------------------------------------


def test_events_of_other_tiers_and_without_tokens_say_nothing_of_the_layout() -> None:
    """An offload tier may mix blocks of different sizes in one event."""
    offloaded = replace(PROMPT.stored(0, KVCacheGroup(GroupKind.FULL, 32)), medium=CPU)
    without_tokens = replace(PROMPT.stored(0, KVCacheGroup(GroupKind.FULL, 32)), token_ids=[])
    assert learned(offloaded, without_tokens).layout is None
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


# --- hash functions -------------------------------------------------------------------------------


def finder(*seeds: str) -> HashFinder:
    return HashFinder(LayoutHints(hash_seeds=seeds or LayoutHints().hash_seeds))


def first_event(
    algorithm: str, seed: str, as_int: bool, kept: list[int] | None = None, lookahead: int = 0
) -> BlockStored:
    """The start of a prompt, as an engine with that hash function announces it; *kept* blocks, or
    all."""
    token_ids, size = tokens(64), 16
    chain = HashChain.from_seed(algorithm, seed)
    digests = list(chain.block_hashes([*token_ids, *range(lookahead)], size, lookahead=lookahead))
    names: list[BlockHash] = (
        [to_wire_int(digest) for digest in digests] if as_int else list(digests)
    )
    chosen = names if kept is None else [names[end // size - 1] for end in kept]
    behind = [
        [*token_ids, *range(lookahead)][end : end + lookahead]
        for end in (kept or range(16, 65, 16))
    ]
    return BlockStored(
        chosen,
        None,
        token_ids,
        "GPU",
        0,
        block_size=size,
        lookahead_token_ids=behind if lookahead else None,
    )


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("kept", [None, [64], [32, 48]], ids=["dense", "last", "holes"])
@pytest.mark.parametrize("as_int", [True, False], ids=["int", "bytes"])
@pytest.mark.parametrize("algorithm", hash_algorithms())
def test_every_known_function_is_found_from_an_event(
    algorithm: str, as_int: bool, kept: list[int] | None, lookahead: int
) -> None:
    """One event that starts a prompt is enough, dense or with holes, in either form."""
    found = finder()
    found.try_event(first_event(algorithm, "42", as_int, kept, lookahead), 16)
    if lookahead and kept == [32, 48]:
        assert found.chain in (None, HashChain.from_seed(algorithm, "42"))
    else:
        assert found.chain == HashChain.from_seed(algorithm, "42")
        assert not found.may_find


def test_a_function_is_found_from_a_prompt() -> None:
    """Blocks of a model without a dense group tell nothing by themselves; the prompt that made them
    comes again."""
    found, prompt = finder(), Prefix(tokens(160), seed=DEFAULT_SEED)
    found.try_prompt(prompt.tokens, [[]], 16, 0, {prompt.hash_at(112)})
    assert found.chain == HashChain.from_seed()


def test_what_an_announcement_says_needs_no_search() -> None:
    """Ours names its function and the root of its chain."""
    found = finder()
    found.see_announcement(
        CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16, "sha256_cbor", b"root")
    )
    assert found.chain == HashChain("sha256_cbor", b"root")
    unknown = finder()
    unknown.see_announcement(
        CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16, "md5", b"root")
    )
    assert unknown.chain is None
    assert unknown.may_find


def test_a_seed_that_was_not_configured_is_not_found() -> None:
    """It is one of those given, or none."""
    event = first_event("sha256", "a secret", as_int=True)
    found = finder("0", "1")
    found.try_event(event, 16)
    assert found.chain is None
    known = finder("0", "a secret")
    known.try_event(event, 16)
    assert known.chain == HashChain.from_seed("sha256", "a secret")


@pytest.mark.parametrize(
    "change",
    [
        {"parent_block_hash": 5},
        {"lora_name": "sql"},
        {"extra_keys": [["tenant-a"], None, None, None]},
        {"block_hashes": []},
    ],
    ids=["behind a parent", "an adapter", "a salt", "no hashes"],
)
def test_an_event_whose_hashes_cover_more_than_is_shown_is_not_tried(
    change: dict[str, object],
) -> None:
    """It costs effort and proves nothing."""
    found = finder()
    found.try_event(replace(first_event("sha256", "0", as_int=True), **change), 16)
    assert (found.chain, found._effort) == (None, 0)


def test_one_right_hash_among_wrong_ones_proves_nothing() -> None:
    """In an event with holes every hash must be in the chain."""
    event = first_event("sha256", "0", as_int=True, kept=[32, 48])
    found = finder()
    found.try_event(replace(event, block_hashes=[event.block_hashes[0], 12345]), 16)
    assert found.chain is None


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_hashes_of_an_unknown_function_are_never_taken_for_a_known_ones(
    hashes: list[BlockHash], is_dense: bool
) -> None:
    """A wrong function finds nothing, or worse, other blocks."""
    size = 16 if is_dense else 4
    found = finder()
    found.try_event(
        BlockStored(hashes, None, tokens(len(hashes) * 16), "GPU", 0, block_size=size), 16
    )
    found.try_prompt(tokens(64), [[]], 16, 0, set(hashes))
    assert found.chain is None


def test_the_search_ends_when_it_has_proved_useless() -> None:
    """An engine with a random seed must not cost the router a second of every minute."""
    found, rng = finder(), random.Random(1)
    events = 0
    while found.may_find:
        found.try_event(
            BlockStored([rng.getrandbits(64)], None, tokens(16, events), "GPU", 0, block_size=16),
            16,
        )
        events += 1
        assert events < 20_000
    assert events > 100
    assert found.chain is None


def test_a_search_over_wide_blocks_ends_as_soon() -> None:
    """What costs is the tokens that are hashed, and a publisher chooses how many are in a block."""
    found, wide, started = finder(), list(range(65_536)), time.process_time()
    while found.may_find and time.process_time() - started < 4:
        found.try_event(BlockStored([1], None, wide, "GPU", 0, block_size=len(wide)), len(wide))
    assert not found.may_find


def test_a_search_with_a_wide_lookahead_ends_as_soon() -> None:
    """A publisher also chooses how many tokens behind a block its hash is said to cover."""
    found, started = finder(), time.process_time()
    found.try_prompt(list(range(16_000)), [[]], 16, 8_000, {1})
    assert time.process_time() - started < 3


def test_an_event_that_is_too_long_to_try_is_left() -> None:
    """One event must not take the whole budget."""
    found = finder()
    length = (found.BLOCKS_PER_TRY + 1) * 16
    found.try_event(BlockStored([1], None, tokens(length), "GPU", 0, block_size=16), 16)
    assert found._effort == 0


@pytest.mark.parametrize("as_int", [True, False])
def test_a_prompts_hashes_have_the_form_the_engine_sends(as_int: bool) -> None:
    """They are looked up among those it sent."""
    chain, prompt = HashChain.from_seed("sha256", "0"), Prefix(tokens(64), seed="0", as_int=as_int)
    assert engine_hashes(chain, prompt.tokens, 16, (), 0, as_int) == prompt.hashes


def test_only_chunked_groups_are_shown_with_a_chunk_size() -> None:
    """An operator who reads one at a group of full attention looks for a mistake that is none."""
    chunked = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=64)
    events = [PROMPT.stored(index, group) for index, group in enumerate((FULL, chunked))]
    layout = learned(*events, hints=LayoutHints(groups=(FULL, chunked))).layout
    assert layout is not None
    assert [group.attention_chunk_size for group in layout.groups] == [None, 64]
