"""The cases every router for hybrid models must get right, one by one."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
)
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, TierHint
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, SOURCE, Prefix, apply, gpu_hit, mamba, tokens, window
from tests.support.index import match_source

W64 = window(64)
"""Needs the last four blocks of 16."""


@pytest.fixture
def prompt() -> Prefix:
    return Prefix(tokens(160))


# --- sliding windows ------------------------------------------------------------------------------


def test_a_window_whose_head_is_gone_still_gives_the_full_hit(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """The point of the project: what slid out of the window costs nothing."""
    apply(
        index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(1, range(16, 97, 16))
    )
    assert gpu_hit(index, prompt.tokens) == 160


def test_a_window_whose_tail_is_gone_shortens_the_hit(index: PrefixIndex, prompt: Prefix) -> None:
    """The hit ends where the window is whole again."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(1, [160]))
    assert gpu_hit(index, prompt.tokens) == 144


def test_a_hole_inside_the_window_that_matters_shortens_the_hit_to_before_it(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Every length whose window holds the hole is refused."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(1, [128]))
    assert gpu_hit(index, prompt.tokens) == 112


def test_a_window_that_is_all_gone_leaves_no_hit(index: PrefixIndex, prompt: Prefix) -> None:
    """Full attention by itself cannot serve the prompt; a group-blind router says 160 here."""
    apply(
        index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(1, range(16, 161, 16))
    )
    assert gpu_hit(index, prompt.tokens) == 0


def test_a_prefix_shorter_than_the_window_needs_all_its_blocks(index: PrefixIndex) -> None:
    """There are fewer blocks than the window has."""
    short = Prefix(tokens(32))
    apply(index, short.stored(0, FULL), short.stored(1, W64))
    assert gpu_hit(index, short.tokens) == 32
    apply(index, short.removed(1, [16]))
    assert gpu_hit(index, short.tokens) == 0


def test_a_model_with_only_a_sliding_window_group(index: PrefixIndex, prompt: Prefix) -> None:
    """Nothing but the window has a say."""
    apply(index, prompt.stored(0, W64), prompt.removed(0, range(16, 97, 16)))
    assert gpu_hit(index, prompt.tokens) == 160
    apply(index, prompt.removed(0, [112]))
    assert gpu_hit(index, prompt.tokens) == 0


def test_the_sliding_window_group_may_come_first(index: PrefixIndex, prompt: Prefix) -> None:
    """Fact 1: full attention need not be group 0."""
    apply(
        index, prompt.stored(0, W64), prompt.stored(1, FULL), prompt.removed(0, range(16, 97, 16))
    )
    assert gpu_hit(index, prompt.tokens) == 160
    apply(index, prompt.removed(1, [160]))
    assert gpu_hit(index, prompt.tokens) == 0


# --- other kinds ----------------------------------------------------------------------------------


def test_two_full_attention_groups_of_which_one_lacks_blocks(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """The shorter one decides."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, FULL, 0, 96))
    assert gpu_hit(index, prompt.tokens) == 96


def test_a_mamba_state_in_mid_prompt_ends_the_hit_there(index: PrefixIndex, prompt: Prefix) -> None:
    """A recurrent state serves exactly the prefix it stands for."""
    apply(index, prompt.stored(0, FULL), prompt.kept(1, mamba(), [64, 112]))
    assert gpu_hit(index, prompt.tokens) == 112
    apply(index, prompt.removed(1, [112]))
    assert gpu_hit(index, prompt.tokens) == 64


def test_chunked_local_attention_needs_only_its_chunk(index: PrefixIndex, prompt: Prefix) -> None:
    """What lies before the chunk is never read again."""
    chunked = KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=64)
    index.add(SOURCE, LayoutHints((FULL, chunked)))
    apply(
        index,
        prompt.stored(0, FULL),
        prompt.stored(1, chunked),
        prompt.removed(1, range(16, 129, 16)),
    )
    assert gpu_hit(index, prompt.tokens) == 160
    apply(index, prompt.removed(1, [144]))
    assert gpu_hit(index, prompt.tokens) == 128


def test_groups_with_different_block_sizes_share_the_hashes_of_common_ends(
    index: PrefixIndex,
) -> None:
    """A hit is a multiple of both sizes."""
    prompt, wide = Prefix(tokens(160)), KVCacheGroup(GroupKind.FULL, 32)
    apply(index, prompt.stored(0, wide), prompt.stored(1, window(48)))
    assert gpu_hit(index, prompt.tokens) == 160
    apply(index, prompt.removed(1, [160]))
    assert gpu_hit(index, prompt.tokens) == 128
    apply(index, prompt.removed(0, [96]))
    assert gpu_hit(index, prompt.tokens) == 64


def test_eagle_gives_the_last_matched_block_back(index: PrefixIndex, prompt: Prefix) -> None:
    """The draft head must see the last block computed; no engine says so on the wire."""
    index.add(SOURCE, LayoutHints(eagle=True))
    apply(index, prompt.stored(0, FULL))
    assert gpu_hit(index, prompt.tokens) == 144


@pytest.mark.parametrize(("eagle", "hit"), [((0,), 128), ((1,), 144), ((0, 1), 128), ((), 144)])
def test_only_the_groups_with_the_drafters_layers_give_the_last_block_back(
    index: PrefixIndex, prompt: Prefix, eagle: tuple[int, ...], hit: int
) -> None:
    """vLLM flags them; the others reuse all they have."""
    index.add(SOURCE, LayoutHints(eagle=eagle))
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(0, [160]))
    assert gpu_hit(index, prompt.tokens) == hit


def test_a_drafters_own_full_attention_is_looked_up_beside_the_models(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Equal in kind and sizes, they are two for vLLM: what the model's lacks costs no block
    more."""
    index.add(SOURCE, LayoutHints(eagle=(1,)))
    apply(index, prompt.stored(0, FULL), prompt.stored(1, FULL), prompt.removed(0, [160]))
    assert gpu_hit(index, prompt.tokens) == 144
    apply(index, prompt.removed(1, [160]))
    assert gpu_hit(index, prompt.tokens) == 128


def test_a_window_without_a_drafter_that_cuts_the_hit_makes_the_drafters_give_again(
    index: PrefixIndex,
) -> None:
    """The first window gives up 96 for 80, the second cuts to 48, and then the first gives up 48
    for 32."""
    prompt = Prefix(tokens(96))
    index.add(SOURCE, LayoutHints(eagle=(0,)))
    apply(index, prompt.stored(0, window(10)), prompt.stored(1, window(12)))
    apply(index, prompt.removed(0, [64]), prompt.removed(1, [64, 80, 96]))
    assert gpu_hit(index, prompt.tokens) == 32


@pytest.mark.parametrize(("replay", "hit"), [(0, 64), (63, 64), (64, 0), (128, 0)])
def test_a_hit_no_longer_than_what_is_replayed_is_worth_nothing(
    index: PrefixIndex, prompt: Prefix, replay: int, hit: int
) -> None:
    """vLLM computes the end of a hit again where a window is rebuilt and not cached (DeepSeek
    V4.1), and takes no hit that would be computed whole."""
    index.add(SOURCE, LayoutHints(prefix_replay_tokens=replay))
    apply(index, prompt.stored(0, FULL))
    assert gpu_hit(index, prompt.tokens) == 160
    assert gpu_hit(index, prompt.tokens[:64]) == hit


def test_what_a_tier_adds_counts_against_what_is_replayed(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """The engine looks at the whole hit, wherever its blocks come from."""
    of_a_block = (("CPU", TierHint(unit_blocks=1)),)
    index.add(SOURCE, LayoutHints(prefix_replay_tokens=64, tiers=of_a_block))
    on_cpu = replace(prompt.stored(0, FULL), medium="CPU")
    apply(index, prompt.stored(0, FULL), on_cpu, prompt.removed(0, range(80, 161, 16)))
    assert index.match([*prompt.tokens[:80], 7])[SOURCE].cached_tokens == 80
    assert gpu_hit(index, prompt.tokens[:80]) == 64
    assert index.match([*prompt.tokens[:64], 7])[SOURCE].cached_tokens == 0
    assert match_source(index, index.prepare([*prompt.tokens[:64], 7]), SOURCE).cached_tokens == 0


# --- copies and order -----------------------------------------------------------------------------


def test_a_block_stored_twice_and_removed_once_is_there(index: PrefixIndex, prompt: Prefix) -> None:
    """Fact 4: engines keep duplicates, and every copy gets its own removal."""
    apply(index, prompt.stored(0, FULL), prompt.stored(0, FULL, 144), prompt.removed(0, [160]))
    assert gpu_hit(index, prompt.tokens) == 160
    apply(index, prompt.removed(0, [160]))
    assert gpu_hit(index, prompt.tokens) == 144


def test_a_block_in_the_middle_evicted_and_stored_again_makes_the_tail_count_again(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """A tree that cuts its subtree off at an eviction loses the tail for good."""
    apply(index, prompt.stored(0, FULL))
    apply(index, prompt.removed(0, [80]))
    assert gpu_hit(index, prompt.tokens) == 64
    apply(index, prompt.stored(0, FULL, 64, 80))
    assert gpu_hit(index, prompt.tokens) == 160


def test_a_suffix_that_arrives_before_its_parent_is_placed_when_the_parent_comes(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Late joins and losses must not lose a subtree for good."""
    apply(index, prompt.stored(0, FULL, 96))
    apply(index, prompt.stored(0, FULL, 48, 96))
    assert gpu_hit(index, prompt.tokens) == 0
    assert index.statistics()[SOURCE].waiting.runs == 2
    apply(index, prompt.stored(0, FULL, 0, 48))
    assert gpu_hit(index, prompt.tokens) == 160
    assert index.statistics()[SOURCE].waiting.runs == 0


def test_a_parent_that_is_announced_after_its_child_was_removed_leaves_nothing_behind(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """A waiting run counts no more than what is held."""
    apply(index, prompt.stored(0, FULL, 96))
    apply(index, prompt.removed(0, range(112, 161, 16)))
    apply(index, prompt.stored(0, FULL, 0, 96))
    assert gpu_hit(index, prompt.tokens) == 96
    assert index.statistics()[SOURCE].blocks == {(0, "GPU"): 6}


def test_a_removal_of_an_unknown_block_is_counted_and_changes_nothing(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """It is what a lost store leaves behind."""
    apply(index, prompt.stored(0, FULL))
    result = index.apply(SOURCE, _batch(BlockRemoved([999], "GPU", 0)))
    assert result.skipped == 1
    assert gpu_hit(index, prompt.tokens) == 160


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_int", [True, False], ids=["int64", "32 bytes"])
def test_hashes_are_integers_or_bytes(index: PrefixIndex, as_int: bool) -> None:
    """vLLM sends either, by a switch of its own."""
    prompt = Prefix(tokens(160), as_int=as_int)
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64), prompt.removed(1, [160]))
    assert gpu_hit(index, prompt.tokens) == 144


def test_two_replicas_with_different_seeds_share_one_index(index: PrefixIndex) -> None:
    """Up to vLLM 0.28 every process has a hash seed of its own."""
    other = SourceId("replica-b")
    apply(index, Prefix(tokens(160), seed="one").stored(0, FULL, 0, 96))
    apply(index, Prefix(tokens(160), seed="two").stored(0, FULL, 0, 128), source=other)
    assert [hit.gpu_cached_tokens for hit in index.match(tokens(161)).values()] == [96, 128]


def test_two_dp_ranks_are_two_caches(index: PrefixIndex, prompt: Prefix) -> None:
    """A rank reuses only what it holds itself."""
    first, second = SourceId("replica-a", 0), SourceId("replica-a", 1)
    apply(index, prompt.stored(0, FULL), source=first)
    apply(index, prompt.stored(0, FULL, 0, 64), source=second)
    apply(index, AllBlocksCleared(), source=first)
    assert {source: hit.gpu_cached_tokens for source, hit in index.match(tokens(161)).items()} == {
        first: 0,
        second: 64,
    }


def test_salts_are_kept_apart(index: PrefixIndex) -> None:
    """Tenants must not share blocks, and the router must not think they do."""
    apply(index, Prefix(tokens(160), salt="tenant-a").stored(0, FULL))
    assert gpu_hit(index, tokens(160), cache_salt="tenant-a") == 160
    assert gpu_hit(index, tokens(160), cache_salt="tenant-b") == 0
    assert gpu_hit(index, tokens(160)) == 0


def test_lora_adapters_are_kept_apart(index: PrefixIndex) -> None:
    """An adapter changes every key and value."""
    apply(index, Prefix(tokens(160), lora="sql").stored(0, FULL))
    assert gpu_hit(index, tokens(160), lora_name="sql") == 160
    assert gpu_hit(index, tokens(160), lora_name="chat") == 0
    assert gpu_hit(index, tokens(160)) == 0


def test_an_adapter_with_a_name_is_known_by_it(index: PrefixIndex) -> None:
    """vLLM from 0.14 on sends both; the number is the engine's own affair."""
    apply(index, replace(Prefix(tokens(160), lora="sql").stored(0, FULL), lora_id=7))
    assert gpu_hit(index, tokens(160), lora_name="sql") == 160
    assert gpu_hit(index, tokens(160)) == 0


def test_an_adapter_that_has_only_a_number_is_not_taken_for_the_base_model(
    index: PrefixIndex,
) -> None:
    """vLLM up to 0.13 names an adapter's blocks by the engine's own number for it alone. Which name
    has it is unknown; but the blocks are of no use to the base model, whose hash is another."""
    adapted, plain = Prefix(tokens(160), lora="sql"), Prefix(tokens(160))

    def numbered(start: int, end: int, number: int) -> BlockStored:
        stored = adapted.stored(0, FULL, start, end)
        return replace(stored, lora_name=None, lora_id=number, extra_keys=None)

    apply(index, numbered(0, 80, 7), numbered(80, 160, 7))
    assert gpu_hit(index, tokens(160)) == 0
    assert gpu_hit(index, tokens(160), lora_name="sql") == 0
    apply(index, replace(plain.stored(0, FULL, 0, 64), lora_id=0, extra_keys=None))
    assert gpu_hit(index, tokens(160)) == 64


def test_conversations_that_part_at_a_blocks_end_are_told_apart_by_the_token_behind_it(
    index: PrefixIndex,
) -> None:
    """SGLang with EAGLE hashes `(token, next token)` pairs: two conversations with one system
    prompt have two blocks for its last tokens. One is evicted, and the other is still whole."""
    one, other = [*tokens(64), *tokens(33, 5000)], [*tokens(64), *tokens(33, 7000)]

    def stored(prompt: list[int], hashes: list[int], parent: int | None, start: int) -> bytes:
        size = 16 * len(hashes)
        pairs = [prompt[at : at + 2] for at in range(start, start + size)]
        event = ["BlockStored", hashes, parent, pairs, 16, None, "GPU"]
        return msgspec.msgpack.encode([0.0, [event], 0])

    index.apply(SOURCE, stored(one, [1, 2, 3, 14, 15, 16], None, 0))
    index.apply(SOURCE, stored(other, [24, 25, 26], 3, 48))
    assert (gpu_hit(index, one), gpu_hit(index, other)) == (96, 96)
    assert gpu_hit(index, [*tokens(64), 9]) == 48
    apply(index, BlockRemoved([26, 25, 24], "GPU"))
    assert (gpu_hit(index, one), gpu_hit(index, other)) == (96, 48)
    assert index.statistics()[SOURCE].ambiguous == 0


def sglang(prompt: Prefix, salt: str | None, start: int = 0) -> BlockStored:
    """A run as SGLang tells of it: no group, and the salt by its own name in every run."""
    stored = prompt.stored(0, FULL, start, medium="GPU")
    return replace(
        stored, group_idx=None, extra_keys=None, kv_cache_spec_kind=None, cache_salt=salt
    )


def test_a_salted_tenants_blocks_are_predicted_for_him_and_for_nobody_else(
    index: PrefixIndex,
) -> None:
    """SGLang writes the salt into a field of its own; its hashes depend on it."""
    salted, plain = Prefix(tokens(160), salt="tenant-a"), Prefix(tokens(160))
    apply(index, sglang(plain, None), replace(plain.removed(0, range(80, 161, 16)), group_idx=None))
    head = replace(sglang(salted, "tenant-a"), block_hashes=salted.hashes[:4])
    apply(index, replace(head, token_ids=head.token_ids[:64]))
    apply(index, sglang(salted, "tenant-a", 64))
    assert gpu_hit(index, tokens(160), cache_salt="tenant-a") == 160
    assert gpu_hit(index, tokens(160), cache_salt="tenant-b") == 0
    assert gpu_hit(index, tokens(160)) == 64
    assert index.statistics()[SOURCE].ambiguous == 0


def test_a_salted_run_that_came_before_its_parent_is_placed_with_it(index: PrefixIndex) -> None:
    """A late start: the run waits, and its salt is its parent's."""
    salted = Prefix(tokens(160), salt="tenant-a")
    head = sglang(salted, "tenant-a")
    apply(index, sglang(salted, "tenant-a", 64))
    apply(index, replace(head, block_hashes=head.block_hashes[:4], token_ids=head.token_ids[:64]))
    assert gpu_hit(index, tokens(160), cache_salt="tenant-a") == 160
    assert gpu_hit(index, tokens(160)) == 0


def test_a_salt_that_equals_an_adapters_name_is_not_taken_for_it(index: PrefixIndex) -> None:
    """Extra keys are positional, not a set of strings."""
    apply(index, Prefix(tokens(160), salt="sql").stored(0, FULL))
    assert gpu_hit(index, tokens(160), lora_name="sql") == 0
    assert gpu_hit(index, tokens(160), cache_salt="sql") == 160


# --- tiers ----------------------------------------------------------------------------------------


def test_cpu_blocks_without_tokens_extend_the_hit(index: PrefixIndex, prompt: Prefix) -> None:
    """The hit is the GPU run, then the CPU run."""
    apply(
        index,
        prompt.stored(0, FULL),
        prompt.offloaded(0, range(16, 145, 16)),
        prompt.removed(0, range(64, 161, 16)),
    )
    hit = index.match(prompt.tokens)[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (48, 144)


def test_cpu_blocks_announced_before_the_gpu_event_are_placed_by_it(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Nothing says which prefix they are until a dense event does."""
    apply(index, prompt.offloaded(0, range(16, 161, 16)))
    assert index.statistics()[SOURCE].unplaced == 10
    apply(index, prompt.stored(0, FULL))
    apply(index, prompt.removed(0, range(32, 161, 16)))
    hit = index.match([*prompt.tokens, 1])[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (16, 160)


@pytest.mark.parametrize("first", [(), (W64,)], ids=["alone", "behind a group with holes"])
def test_what_the_gpu_says_of_a_block_holds_and_not_what_a_lower_tier_said_before(
    index: PrefixIndex, first: tuple[KVCacheGroup, ...]
) -> None:
    """vLLM's self-describing events leave out salts. A block that a tier brings back from storage
    is announced so first, and by the GPU when it is loaded."""
    salted = Prefix(tokens(160), salt="s")
    hidden = replace(salted.stored(len(first), FULL), medium="CPU", extra_keys=None)
    holes = [salted.kept(0, group, [112, 128, 144, 160]) for group in first]
    apply(index, Prefix(tokens(32, 9000)).stored(len(first), FULL), hidden)
    apply(index, *holes, salted.stored(len(first), FULL))
    assert gpu_hit(index, salted.tokens) == 0
    assert gpu_hit(index, salted.tokens, cache_salt="s") == 160
    apply(index, salted.removed(len(first), range(16, 161, 16)))
    assert index.match([*salted.tokens, 1])[SOURCE].cached_tokens == 0
    found = index.match([*salted.tokens, 1], cache_salt="s")[SOURCE]
    assert first or found.cached_tokens == 160
    assert not index.statistics()[SOURCE].ambiguous


def test_cpu_blocks_announced_after_the_gpu_evicted_them_are_still_placed(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """A store to the CPU completes when it completes."""
    apply(
        index,
        prompt.stored(0, FULL),
        prompt.removed(0, range(32, 161, 16)),
        prompt.offloaded(0, range(32, 161, 16)),
    )
    hit = index.match([*prompt.tokens, 1])[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (16, 160)


def test_the_offloaded_part_may_reach_the_whole_prompt(index: PrefixIndex, prompt: Prefix) -> None:
    """On the GPU the last token is always computed; a load leaves nothing to compute."""
    apply(index, prompt.stored(0, FULL), prompt.offloaded(0, [16, 160]))
    hit = index.match(prompt.tokens)[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (144, 160)


def test_a_gpu_block_behind_the_first_gap_does_not_extend_an_offloaded_run(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Beyond the GPU hit only what a lower tier holds counts."""
    apply(index, prompt.stored(0, FULL), prompt.offloaded(0, [16, 64]), prompt.removed(0, [64]))
    hit = index.match([*prompt.tokens, 1])[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (48, 64)


def test_a_window_may_lean_on_gpu_blocks_before_the_gpu_hit(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Each group extends by its own rule."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64))
    apply(index, prompt.offloaded(0, [128, 144]), prompt.offloaded(1, [128, 144]))
    apply(index, prompt.removed(0, [128, 144, 160]), prompt.removed(1, [128, 144, 160, 16, 32]))
    hit = index.match([*prompt.tokens, 1])[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (112, 144)


def test_all_blocks_cleared_empties_the_gpu_tier_and_leaves_the_others(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Fact 5: it names no medium, and the CPU tier survives."""
    apply(
        index,
        prompt.stored(0, FULL),
        prompt.stored(1, W64),
        prompt.offloaded(0, range(16, 161, 16)),
    )
    apply(index, prompt.offloaded(1, range(16, 161, 16)), AllBlocksCleared())
    hit = index.match([*prompt.tokens, 1])[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (0, 160)
    assert {tier for _, tier in index.statistics()[SOURCE].blocks} == {"CPU"}


# --- what a real vLLM does (numbered facts) -------------------------------------------------------


def test_fact_2_a_window_that_kept_only_the_prompts_tail_serves_no_shorter_prefix(
    index: PrefixIndex,
) -> None:
    """Since 0.29 windows keep what a replay of the same prompt needs: a prompt that shares 200 of
    300 tokens hits nothing."""
    first = Prefix(tokens(304))
    apply(index, first.kept(0, W64, [256, 272, 288, 304]), first.stored(1, FULL))
    assert gpu_hit(index, first.tokens[:200]) == 0
    assert gpu_hit(index, first.tokens) == 304


def test_fact_3_an_event_with_holes_may_name_no_block_at_all(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Its tokens and parent describe the range; its hashes must never be zipped with them."""
    apply(
        index,
        prompt.kept(0, W64, [], 0, 96),
        prompt.kept(0, W64, [112, 128, 144, 160], 96),
        prompt.stored(1, FULL),
    )
    assert gpu_hit(index, prompt.tokens) == 160


def test_fact_3_holes_before_the_dense_group_are_placed_by_it(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Groups announce in their own order within a step."""
    apply(index, prompt.kept(0, W64, [112, 128, 144, 160]))
    apply(index, prompt.stored(1, FULL))
    assert gpu_hit(index, prompt.tokens) == 160


def test_fact_7_a_window_that_slid_on_sends_nothing_until_the_page_is_reused(
    index: PrefixIndex, prompt: Prefix
) -> None:
    """Until then the blocks are there and count."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64))
    assert gpu_hit(index, prompt.tokens[:64]) == 64


def test_fact_8_an_adapter_whose_hash_holds_a_hidden_path_is_learned_from_its_events(
    index: PrefixIndex,
) -> None:
    """From 0.31 no one outside can compute a LoRA hash; learning needs no hash function."""
    one, two = (
        Prefix(tokens(160), lora="sql", seed="path one"),
        Prefix(tokens(160), lora="chat", seed="path two"),
    )
    apply(index, one.stored(0, FULL), two.stored(0, FULL, 0, 64))
    assert gpu_hit(index, tokens(160), lora_name="sql") == 160
    assert gpu_hit(index, tokens(160), lora_name="chat") == 64


def test_fact_11_a_hit_may_end_inside_a_block_where_states_are_kept_there(
    index: PrefixIndex,
) -> None:
    """`--prefix-match-unit 16` with blocks of 32: partial entries are announced with a block size
    of 16."""
    prompt, wide = Prefix(tokens(80)), KVCacheGroup(GroupKind.FULL, 32)
    inside = KVCacheGroup(GroupKind.FULL, 16)
    apply(
        index,
        prompt.stored(0, wide, 0, 64),
        prompt.stored(1, mamba(32), 0, 64),
        prompt.stored(0, inside, 64, 80),
        prompt.stored(1, mamba(16), 64, 80),
    )
    assert gpu_hit(index, prompt.tokens) == 80
    apply(index, prompt.removed(1, [80]))
    assert gpu_hit(index, prompt.tokens) == 64


def test_blocks_of_a_model_without_a_dense_group_are_found_by_the_engines_own_hashes(
    index: PrefixIndex,
) -> None:
    """Where no event shows which blocks it names, only the hash function does; its default seed is
    known since 0.29."""
    prompt = Prefix(tokens(160), seed="vllm-none-hash")
    apply(index, prompt.kept(0, W64, [112, 128, 144, 160]))
    assert gpu_hit(index, prompt.tokens) == 160
    assert gpu_hit(index, prompt.tokens[:144]) == 0
    assert index.statistics()[SOURCE].hash_algorithm == "sha256"


def test_blocks_that_cannot_be_placed_are_reported(index: PrefixIndex, prompt: Prefix) -> None:
    """An unknown seed and no dense group: the index must say what it does not know."""
    apply(index, prompt.kept(0, W64, [112, 128, 144, 160]))
    assert gpu_hit(index, prompt.tokens) == 0
    assert index.statistics()[SOURCE].unplaced == 4
    assert any("cannot be placed" in text for text in index.statistics()[SOURCE].assumptions)


def test_salts_that_old_events_hide_are_told_apart_by_the_hash_function(
    index: PrefixIndex,
) -> None:
    """Before 0.17 an event says nothing of salts: learned from tokens alone, a tenant's blocks
    would look like everyone's."""
    salted = Prefix(tokens(160), salt="tenant-a", seed="0")
    plain = Prefix(tokens(64, first=9000), seed="0")
    apply(
        index,
        _without_extra_keys(plain.stored(0, FULL)),
        _without_extra_keys(salted.stored(0, FULL)),
    )
    assert gpu_hit(index, plain.tokens) == 64
    assert gpu_hit(index, salted.tokens) == 0
    assert gpu_hit(index, salted.tokens, cache_salt="tenant-a") == 160


def test_an_announced_layout_is_known_and_not_assumed(index: PrefixIndex, prompt: Prefix) -> None:
    """Our own publisher says everything, also the hash function."""
    chain = HashChain.from_seed("sha256_cbor", "secret")
    groups = [
        GroupSpec("full_attention", 16),
        GroupSpec("chunked_local_attention", 16, attention_chunk_size=64),
    ]
    layout = CacheLayout("publisher-1", groups, 16, 16, "sha256_cbor", chain.none_hash, eagle=True)
    apply(index, layout)
    statistics = index.statistics()[SOURCE]
    assert statistics.assumptions == ()
    assert statistics.hash_algorithm == "sha256_cbor"
    assert statistics.layout is not None
    assert statistics.layout.eagle


# --- memory ---------------------------------------------------------------------------------------


def test_a_block_without_holders_is_gone_at_once(
    implementation: Implementation, index: PrefixIndex, prompt: Prefix
) -> None:
    """Memory follows what replicas hold, without a sweep."""
    apply(index, prompt.stored(0, FULL), prompt.stored(1, W64))
    ends = range(16, 161, 16)
    apply(index, prompt.removed(0, ends), prompt.removed(1, ends))
    assert index.statistics()[SOURCE].blocks == {}
    assert index.statistics()[SOURCE].unplaced == 0
    implementation.expect_empty(index)


def test_dropping_a_source_leaves_nothing_of_it(index: PrefixIndex, prompt: Prefix) -> None:
    """A replica that disappears must not attract requests."""
    apply(index, prompt.stored(0, FULL))
    index.drop(SOURCE)
    assert index.match(prompt.tokens) == {}


def test_clearing_a_source_keeps_its_configured_hints(index: PrefixIndex, prompt: Prefix) -> None:
    """A restarted engine is configured as before."""
    index.add(SOURCE, LayoutHints(eagle=True))
    apply(index, prompt.stored(0, FULL))
    index.clear(SOURCE)
    assert gpu_hit(index, prompt.tokens) == 0
    apply(index, prompt.stored(0, FULL))
    assert gpu_hit(index, prompt.tokens) == 144


def _batch(*events: Event) -> EventBatch:
    return EventBatch(0.0, list(events))


def _without_extra_keys(event: BlockStored) -> BlockStored:
    return BlockStored(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.medium,
        block_size=event.block_size,
    )
