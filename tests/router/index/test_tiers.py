"""Lower tiers: how many tokens each keeps together, and what that makes of a hit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from kvevents.codec import encode
from kvevents.events import (
    AllBlocksCleared,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
    TierBlocksCleared,
)
from kvevents.layout import KVCacheGroup
from router.index.base import SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, TierHint
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, SOURCE, Prefix, apply, mamba, tokens, window
from tests.support.index import dump, load, match_source, match_tier

PROMPT = Prefix(tokens(400))
OTHER = Prefix(tokens(400, first=9000))
W64 = window(64)


@pytest.fixture
def index(implementation: Implementation) -> PrefixIndex:
    """Of one source with full attention and nothing on its GPU; its hashes cannot be computed."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, FULL)
    return index


def fill(index: PrefixIndex, prompt: Prefix, *groups: KVCacheGroup) -> None:
    """Have the prompt's blocks announced and evicted, so that their places are known."""
    for number, group in enumerate(groups):
        ends = range(group.block_size, len(prompt.tokens) + 1, group.block_size)
        apply(index, prompt.stored(number, group), prompt.removed(number, ends))


def described(
    prompt: Prefix, start: int, end: int, group: int = 0, size: int = 16, medium: str = "CPU"
) -> BlockStored:
    """A self-describing event of one chunk, which names the blocks in it."""
    return prompt.stored(group, KVCacheGroup(FULL.kind, size), start, end, medium)


def hit(index: PrefixIndex, prompt: Sequence[int]) -> tuple[int, int]:
    return index.match(prompt)[SOURCE][:2]


def units(index: PrefixIndex) -> dict[tuple[int, str], int]:
    return index.statistics()[SOURCE].units


# --- a tier's unit is learned ---------------------------------------------------------------------


def test_chunks_of_several_blocks_that_name_their_last_hash_are_found(index: PrefixIndex) -> None:
    """vLLM's documentation has four blocks in a chunk: a rule that asks for each block finds
    nothing where the engine reuses 128 tokens."""
    apply(index, PROMPT.offloaded(0, [64, 128]))
    assert units(index) == {(0, "CPU"): 64}
    assert hit(index, PROMPT.tokens[:150]) == (0, 128)
    assert hit(index, PROMPT.tokens[:127]) == (0, 64)


def test_a_prompt_that_parts_inside_a_self_describing_chunk_reuses_none_of_it(
    index: PrefixIndex,
) -> None:
    """All blocks of the chunk are named, and none can be loaded without the others."""
    apply(index, described(PROMPT, 0, 64))
    assert units(index) == {(0, "CPU"): 64}
    assert hit(index, PROMPT.tokens[:48] + OTHER.tokens[:48]) == (0, 0)
    assert hit(index, PROMPT.tokens[:64] + OTHER.tokens[:48]) == (0, 64)


def test_the_blocks_in_a_self_describing_chunk_end_no_unit(implementation: Implementation) -> None:
    """Nobody knows the place of what another prompt left, so look-ups go on teaching: each block
    that the tier then names would be taken for a chunk of its own, for good."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, FULL, W64)
    apply(index, described(PROMPT, 0, 64), PROMPT.offloaded(1, [64]))
    apply(index, OTHER.offloaded(1, [128]))
    assert index.statistics()[SOURCE].unplaced == 1
    assert hit(index, PROMPT.tokens[:80]) == (0, 64)
    assert hit(index, PROMPT.tokens[:48] + OTHER.tokens[:48]) == (0, 0)
    assert units(index) == {(0, "CPU"): 64, (1, "CPU"): 64}


def test_a_chunk_described_before_the_layout_is_known_teaches_its_unit_alone(
    implementation: Implementation,
) -> None:
    """A router that joins late may hear of a chunk before it can tell how large a block is; its
    inner blocks are no ends then, either."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints((FULL, window(64, 24)), 16, hash_seeds=()))
    apply(index, described(PROMPT, 0, 64), OTHER.offloaded(0, [128]))
    assert index.statistics()[SOURCE].layout is None
    copy = implementation.create(None)
    load(b"".join(dump(index)), copy)
    for each in (index, copy):
        fill(each, PROMPT, FULL, window(64, 32))
        apply(each, PROMPT.offloaded(1, [64]))
        assert hit(each, PROMPT.tokens[:80]) == (0, 64)
        assert hit(each, PROMPT.tokens[:48] + OTHER.tokens[:48]) == (0, 0)
        assert units(each)[0, "CPU"] == 64


def test_a_tier_of_blocks_is_told_from_one_of_chunks(index: PrefixIndex) -> None:
    """One end that is no multiple of the chunk decides."""
    apply(index, PROMPT.offloaded(0, [64, 128]))
    apply(index, PROMPT.offloaded(0, [16, 32, 48, 80]))
    assert units(index) == {(0, "CPU"): 16}
    assert hit(index, PROMPT.tokens[:150]) == (0, 80)


def test_each_tier_has_its_own_unit(index: PrefixIndex) -> None:
    """Blocks in memory, larger chunks elsewhere: an engine loads from the one that has more."""
    apply(
        index, PROMPT.offloaded(0, [16, 32, 48, 64, 80]), PROMPT.offloaded(0, [64, 128], "STORAGE")
    )
    assert units(index) == {(0, "CPU"): 16, (0, "STORAGE"): 64}
    assert hit(index, PROMPT.tokens[:90]) == (0, 80)
    assert hit(index, PROMPT.tokens[:150]) == (0, 128)


@pytest.mark.parametrize("group", [W64, mamba()], ids=["a window", "a state"])
def test_a_group_with_few_ends_has_the_chunks_of_full_attention(
    implementation: Implementation, group: KVCacheGroup
) -> None:
    """A window keeps one or two chunks of a prompt, a state one: their ends alone would say 192."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, FULL, group)
    apply(index, PROMPT.offloaded(1, [192]), PROMPT.offloaded(0, [64, 128, 192]))
    assert units(index) == {(0, "CPU"): 64, (1, "CPU"): 64}
    assert hit(index, PROMPT.tokens[:200]) == (0, 192)


def test_groups_of_other_block_sizes_have_as_many_blocks_in_a_chunk(
    implementation: Implementation,
) -> None:
    """vLLM chunks by blocks: of 32 and 16 tokens, two each."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, KVCacheGroup(FULL.kind, 32), window(32))
    apply(index, PROMPT.offloaded(0, [64, 128, 192]), PROMPT.offloaded(1, [192]))
    assert units(index) == {(0, "CPU"): 64, (1, "CPU"): 32}


def test_without_full_attention_windows_tell_each_other(implementation: Implementation) -> None:
    """Ends of several prompts: their common divisor is the chunk."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, W64, window(100))
    apply(index, PROMPT.offloaded(0, [192]), PROMPT.offloaded(1, [128, 192]))
    assert units(index) == {(0, "CPU"): 64, (1, "CPU"): 64}


def test_ends_that_were_placed_later_are_learned_from_prompts(
    implementation: Implementation,
) -> None:
    """A router that joins late knows a tier's hashes before their places."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(groups=(FULL,), hash_seeds=()))
    apply(index, PROMPT.offloaded(0, [64, 128]))
    assert hit(index, PROMPT.tokens[:150]) == (0, 0)
    fill(index, PROMPT, FULL)
    assert hit(index, PROMPT.tokens[:150]) == (0, 128)
    assert units(index) == {(0, "CPU"): 64}


def test_hashes_that_must_be_computed_teach_units_too(implementation: Implementation) -> None:
    """Windows alone, with holes in every event: no hash has a place."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(groups=(W64,), hash_seeds=("0",)))
    prompt = Prefix(tokens(400), seed="0")
    apply(index, prompt.kept(0, W64, [176, 192], 0, 200), prompt.removed(0, [176, 192]))
    apply(index, prompt.offloaded(0, [192]))
    apply(index, prompt.offloaded(0, [128]))
    assert hit(index, prompt.tokens[:200]) == (0, 192)
    assert units(index) == {(0, "CPU"): 64}
    apply(index, prompt.offloaded(0, [32]))
    assert hit(index, prompt.tokens[:200]) == (0, 32)
    assert units(index) == {(0, "CPU"): 32}


# --- or configured --------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", [TierHint(unit_blocks=4), TierHint(unit_size=64)])
def test_a_configured_unit_is_a_fact(implementation: Implementation, hint: TierHint) -> None:
    """One chunk at 192 looks like a chunk of 192, and the end of a prompt like a small one."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=(), tiers=(("CPU", hint),)))
    fill(index, PROMPT, FULL)
    apply(index, PROMPT.offloaded(0, [192]))
    assert units(index) == {(0, "CPU"): 64}
    assert hit(index, PROMPT.tokens[:200]) == (0, 0)
    apply(index, PROMPT.offloaded(0, [32, 64]), described(OTHER, 0, 32))
    assert units(index) == {(0, "CPU"): 64}
    assert hit(index, PROMPT.tokens[:200]) == (0, 64)
    assert hit(index, OTHER.tokens[:50]) == (0, 0)


def test_a_publisher_that_announces_its_layout_names_every_block(
    implementation: Implementation,
) -> None:
    """Our own tiers give each block a name, however many they keep together."""
    index = implementation.create(None)
    layout = CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16)
    apply(index, layout, PROMPT.stored(0, FULL, 0, 96), PROMPT.removed(0, range(16, 97, 16)))
    apply(index, PROMPT.offloaded(0, [32, 64]))
    assert units(index) == {(0, "CPU"): 16}
    assert hit(index, PROMPT.tokens[:100]) == (0, 0)


def test_units_survive_a_dump(implementation: Implementation, index: PrefixIndex) -> None:
    """A restored index that has to learn them again predicts 192 here."""
    apply(index, PROMPT.offloaded(0, [64, 128, 192]))
    apply(index, removed_from_cpu(PROMPT, [64, 128]))
    assert hit(index, PROMPT.tokens[:200]) == (0, 0)
    copy = implementation.create(None)
    load(b"".join(dump(index)), copy)
    assert units(copy) == units(index) == {(0, "CPU"): 64}
    assert hit(copy, PROMPT.tokens[:200]) == (0, 0)


def removed_from_cpu(prompt: Prefix, ends: Sequence[int]) -> Event:
    return prompt.removed(0, ends, "CPU")


# --- a tier with hashes of its own ----------------------------------------------------------------


LMCACHE = Prefix(PROMPT.tokens, seed="LMCache's own")


def test_a_tier_with_hashes_and_blocks_of_its_own_is_found_by_its_tokens(
    index: PrefixIndex,
) -> None:
    """LMCache hashes by itself, in chunks of 256 tokens; nothing of the GPU's has these hashes."""
    apply(index, described(LMCACHE, 0, 256, size=128))
    assert units(index) == {(0, "CPU"): 128}
    assert hit(index, PROMPT.tokens[:200]) == (0, 128)
    assert hit(index, PROMPT.tokens[:300]) == (0, 256)


@pytest.mark.parametrize("hint", [(), (("CPU", TierHint(unit_size=256)),)], ids=["learned", "told"])
@pytest.mark.parametrize("tail", [200, 208, 16, 8])
@pytest.mark.parametrize("tail_first", [True, False])
def test_a_chunk_that_its_prompt_does_not_fill_changes_no_unit(
    implementation: Implementation,
    hint: tuple[tuple[str, TierHint], ...],
    tail: int,
    tail_first: bool,
) -> None:
    """LMCache stores such chunks with `save_unfull_chunk`, and loads the whole ones before them."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=(), tiers=hint))
    prompt = Prefix(tokens(480))
    fill(index, prompt, FULL)
    chunks = [lmcache_chunk(prompt, 0, 256), lmcache_chunk(prompt, 256, 256 + tail)]
    apply(index, *(reversed(chunks) if tail_first else chunks))
    copy = implementation.create(None)
    load(b"".join(dump(index)), copy)
    for each in (index, copy):
        assert units(each) == {(0, "CPU"): 256}
        assert hit(each, prompt.tokens[:300] + OTHER.tokens[:40]) == (0, 256)


def lmcache_chunk(prompt: Prefix, start: int, end: int) -> BlockStored:
    """One chunk in an event, as LMCache has them; the hashes name nothing of an engine's."""
    parent = hash(("chunk", start)) % 2**63 if start else None
    own = hash(("chunk", end)) % 2**63
    return BlockStored([own], parent, prompt.tokens[start:end], "cpu", 0, block_size=end - start)


def test_a_store_that_leaves_chunks_out_still_names_their_size(
    implementation: Implementation,
) -> None:
    """LMCache's server tells of three chunks, and the engine has announced the first before: what
    is left has no place, and must not be taken for a chunk of its own."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(groups=(FULL,), hash_seeds=()))
    whole = described(LMCACHE, 0, 384, size=128)
    apply(index, replace(whole, block_hashes=whole.block_hashes[1:]), described(OTHER, 0, 16))
    assert units(index) == {(0, "CPU"): 128}


def test_a_tiers_own_hashes_are_no_hidden_salt(implementation: Implementation) -> None:
    """They are not what the engine's function makes of the same tokens; only the GPU's show
    something when they differ."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=("0",)))
    prompt = Prefix(tokens(300), seed="0")
    apply(index, prompt.kept(0, FULL, [240, 256], 0, 288))
    apply(index, prompt.removed(0, [240, 256]))
    assert index.statistics()[SOURCE].hash_algorithm == "sha256"
    apply(index, BlockStored([7], None, prompt.tokens[:256], "CPU", 0, block_size=256))
    assert index.statistics()[SOURCE].unplaced == 0
    assert hit(index, prompt.tokens) == (0, 256)


@pytest.mark.parametrize("gpu_first", [True, False])
def test_a_tiers_own_hashes_do_not_hide_the_gpus(
    implementation: Implementation, gpu_first: bool
) -> None:
    """Both stand for the same prefix."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(groups=(FULL,), hash_seeds=()))
    events = [PROMPT.stored(0, FULL, 0, 160), described(LMCACHE, 0, 256, size=128)]
    apply(index, *(events if gpu_first else reversed(events)))
    assert index.statistics()[SOURCE].ambiguous == 0
    assert hit(index, PROMPT.tokens[:161]) == (160, 160)
    assert hit(index, PROMPT.tokens[:300]) == (160, 160)
    apply(index, PROMPT.removed(0, [112, 128, 144, 160]))
    assert hit(index, PROMPT.tokens[:300]) == (96, 256)
    copy = implementation.create(None)
    load(b"".join(dump(index)), copy)
    assert hit(copy, PROMPT.tokens[:300]) == (96, 256)
    apply(index, LMCACHE.removed(0, [128, 256], "CPU"))
    assert hit(index, PROMPT.tokens[:300]) == (96, 96)
    apply(index, PROMPT.removed(0, range(16, 97, 16)))
    implementation.expect_empty(index)


# --- what tiers say of the layout -----------------------------------------------------------------


def test_a_source_known_only_from_its_cpu_tier_is_credited(implementation: Implementation) -> None:
    """Tokens, size and kind are on the wire."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, described(PROMPT, 0, 64), described(PROMPT, 64, 128))
    assert hit(index, PROMPT.tokens[:150]) == (0, 128)
    assert index.statistics()[SOURCE].assumptions == (
        "group 0: from a lower tier, no event of the GPU has named it",
    )


def test_a_window_that_only_a_tier_has_named_is_a_window(implementation: Implementation) -> None:
    """vLLM's placeholders carry kind and window, and neither size nor tokens."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, described(PROMPT, 0, 64), described(PROMPT, 64, 128), described(PROMPT, 128, 192))
    placeholder = BlockStored(
        [PROMPT.hash_at(192)],
        None,
        [],
        "CPU",
        group_idx=1,
        block_size=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=64,
    )
    apply(index, placeholder)
    layout = index.statistics()[SOURCE].layout
    assert layout is not None
    assert layout.groups == (FULL, W64)
    assert hit(index, PROMPT.tokens[:200]) == (0, 192)
    assert hit(index, PROMPT.tokens[:190]) == (0, 0)


def test_a_tiers_chunk_is_not_the_gpus_block(implementation: Implementation) -> None:
    """What the GPU says is right as soon as it says it."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, described(LMCACHE, 0, 256, size=128))
    apply(index, PROMPT.stored(0, FULL, 0, 96))
    layout = index.statistics()[SOURCE].layout
    assert layout is not None
    assert (layout.groups, layout.hash_block_size) == ((FULL,), 16)
    assert hit(index, PROMPT.tokens[:300]) == (96, 256)
    apply(index, described(LMCACHE, 256, 384, size=128))
    assert index.statistics()[SOURCE].layout == layout


# --- tiers that are full --------------------------------------------------------------------------


def bounded(implementation: Implementation, blocks: int) -> PrefixIndex:
    index = implementation.create(SourceLimits(blocks=blocks))
    index.add(SOURCE, LayoutHints(groups=(FULL,), hash_seeds=()))
    apply(index, PROMPT.stored(0, FULL, 0, 160), PROMPT.removed(0, range(16, 161, 16)))
    return index


def test_storage_that_is_never_emptied_does_not_stop_the_gpu(
    implementation: Implementation,
) -> None:
    """vLLM's file and object tiers announce no removals: a GPU that shares their bound would be
    refused once they have filled it."""
    index = bounded(implementation, 12)
    for first in range(1000, 9000, 1000):
        other = Prefix(tokens(160, first=100 * first))
        assert not index.apply(
            SOURCE, EventBatch(0.0, [other.offloaded(0, range(16, 161, 16), "STORAGE")])
        ).is_incomplete
    apply(index, PROMPT.stored(0, FULL, 0, 160))
    assert index.statistics()[SOURCE].blocks == {(0, "GPU"): 10, (0, "STORAGE"): 12}
    assert not index.statistics()[SOURCE].is_incomplete
    assert hit(index, PROMPT.tokens[:161]) == (160, 160)
    implementation.expect_sound(index)


def test_of_a_tier_that_never_removes_the_oldest_goes_first(implementation: Implementation) -> None:
    """What was announced last is there most likely."""
    index = bounded(implementation, 10)
    apply(index, PROMPT.offloaded(0, range(16, 161, 16), "STORAGE"))
    apply(index, OTHER.stored(0, FULL, 0, 32), OTHER.removed(0, [16, 32]))
    apply(index, OTHER.offloaded(0, [16, 32], "STORAGE"))
    assert hit(index, OTHER.tokens[:40]) == (0, 32)
    assert hit(index, PROMPT.tokens[:161]) == (0, 0)
    assert index.statistics()[SOURCE].blocks == {(0, "STORAGE"): 10}
    implementation.expect_sound(index)


def test_a_tier_that_removes_is_believed_to_hold_what_it_announced(
    implementation: Implementation,
) -> None:
    """To drop blocks of which the engine tells would be wrong without a word: others are refused,
    and the source says so."""
    index = bounded(implementation, 10)
    apply(index, PROMPT.offloaded(0, range(16, 161, 16)), PROMPT.removed(0, [160], "CPU"))
    copy = implementation.create(SourceLimits(blocks=10))
    load(b"".join(dump(index)), copy)
    for each in (index, copy):
        result = each.apply(SOURCE, EventBatch(0.0, [OTHER.offloaded(0, [16, 32])]))
        assert (result.stored, result.overflow, result.is_incomplete) == (1, 1, True)
        result = each.apply(SOURCE, EventBatch(0.0, [OTHER.offloaded(0, [48])]))
        assert (result.stored, result.overflow) == (0, 1)
        assert hit(each, PROMPT.tokens[:161]) == (0, 144)
        implementation.expect_sound(each)


def test_what_a_tier_announces_uses_up_no_search_for_the_gpus_hash_function(
    implementation: Implementation,
) -> None:
    """A tier may hash by itself, as LMCache does: nothing of its events can be explained, and the
    effort of a search is bounded."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints())
    prompt = Prefix(tokens(160), seed="vllm-none-hash")
    apply(index, prompt.stored(0, W64, 16, 160))  # without its beginning it has no place
    chunk = tokens(4096)
    apply(index, *(BlockStored([number], None, chunk, "CPU", 0) for number in range(200)))
    assert index.statistics()[SOURCE].hash_algorithm is None
    apply(index, Prefix(tokens(32, first=700), seed="vllm-none-hash").stored(0, W64, 0, 32))
    assert index.statistics()[SOURCE].hash_algorithm == "sha256"
    assert hit(index, [*prompt.tokens, 1]) == (160, 160)


# --- what is remembered of blocks that went -------------------------------------------------------


def test_a_flush_of_sglang_empties_its_host_memory_too(implementation: Implementation) -> None:
    """It frees both and sends one event, which names neither. What it stores there again would
    otherwise have two copies, of which one goes."""
    index = implementation.create(None)
    below = [PROMPT.stored(0, FULL, medium=tier) for tier in ("CPU_PINNED", "DISK")]
    flush = EventBatch(0.0, [AllBlocksCleared()], 0)
    for payload in (encode(flush), msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]], 0]), flush):
        apply(index, PROMPT.stored(0, FULL), *below)
        assert index.apply(SOURCE, payload).removed == 50
        assert index.statistics()[SOURCE].blocks == {(0, "DISK"): 25}
        apply(index, PROMPT.removed(0, range(16, 401, 16), "DISK"))
    apply(index, PROMPT.stored(0, FULL), *below, TierBlocksCleared("GPU"))
    assert index.statistics()[SOURCE].blocks == {(0, "CPU_PINNED"): 25, (0, "DISK"): 25}


def test_a_clear_of_an_engine_that_announces_its_layout_empties_what_it_names_alone(
    implementation: Implementation,
) -> None:
    """Such an engine clears each tier by its name, whatever it calls them."""
    index = implementation.create(None)
    layout = CacheLayout("p", [GroupSpec("full_attention", 16)], 16, 16)
    apply(index, layout, PROMPT.stored(0, FULL), PROMPT.stored(0, FULL, medium="CPU_PINNED"))
    apply(index, AllBlocksCleared())
    assert index.statistics()[SOURCE].blocks == {(0, "CPU_PINNED"): 25}


@pytest.mark.parametrize("at_once", [2, 4096])
@pytest.mark.parametrize("remembered", [0, 8, 9, 8192])
def test_what_a_clear_took_is_remembered_together_or_not_at_all(
    implementation: Implementation, remembered: int, at_once: int
) -> None:
    """An offload may end after it. However large it was, and before and after it is tidied up."""
    limits = SourceLimits(forgotten=remembered, cleared_at_once=at_once)
    index = implementation.create(limits)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, PROMPT.stored(0, FULL, 0, 144), AllBlocksCleared())
    copy = implementation.create(limits)
    load(b"".join(dump(index)), copy)
    for each, end in ((index, 144), (copy, 144), (index, 16)):
        result = each.apply(SOURCE, EventBatch(0.0, [PROMPT.offloaded(0, [end])]))
        assert result.waiting == (remembered < 9)
        while each.tidy():
            continue
    implementation.expect_sound(index)
    # The next one takes the place of that where both are too many.
    apply(index, OTHER.stored(0, FULL, 0, 16), AllBlocksCleared())
    result = index.apply(SOURCE, EventBatch(0.0, [PROMPT.offloaded(0, [32])]))
    assert result.waiting == (remembered < 10)


@pytest.mark.parametrize("remembered", [0, 3, 8192])
def test_of_what_was_removed_the_newest_is_remembered(
    implementation: Implementation, remembered: int
) -> None:
    """A tier announces a block after the GPU has evicted it."""
    index = implementation.create(SourceLimits(forgotten=remembered))
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    apply(index, PROMPT.stored(0, FULL, 0, 144), PROMPT.removed(0, range(144, 15, -16)))
    result = index.apply(SOURCE, EventBatch(0.0, [PROMPT.offloaded(0, range(16, 145, 16))]))
    assert result.waiting == max(0, 9 - remembered)


def test_a_hash_that_is_remembered_for_what_another_claims_is_still_found(
    implementation: Implementation,
) -> None:
    """No engine sends it; both indexes decide alike which of two hashes stands for a prefix."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    first = PROMPT.stored(0, FULL, 0, 16)
    apply(index, first, PROMPT.removed(0, [16]))
    claims = BlockStored([77, *first.block_hashes], None, PROMPT.tokens[:32], "CPU", 0)
    apply(index, claims, first)
    found = index.explain(index.prepare(PROMPT.tokens[:20]), SOURCE)
    assert [group.tokens for group in found] == [16]


# --- one tier by itself ---------------------------------------------------------------------------


def test_what_one_tier_would_give_by_itself_leaves_out_all_else(index: PrefixIndex) -> None:
    """Another engine can pull from this one's memory, and not from its GPU or disk."""
    on_disk = described(PROMPT, 128, 192, medium="STORAGE")
    apply(index, PROMPT.offloaded(0, [64, 128]), on_disk, PROMPT.stored(0, FULL, 0, 16))
    prompt = index.prepare(PROMPT.tokens)
    assert match_source(index, prompt, SOURCE).cached_tokens >= 192
    assert match_tier(index, prompt, SOURCE, "CPU") == 128
    assert match_tier(index, prompt, SOURCE, "STORAGE") == 0, "its beginning is elsewhere"
    assert match_tier(index, prompt, SOURCE, "GPU") == 0, "no lower tier"
    assert match_tier(index, prompt, SOURCE._replace(replica="unknown"), "CPU") == 0
    assert match_tier(index, index.prepare([7] * 200), SOURCE, "CPU") == 0


def test_a_window_that_is_gone_from_a_tier_shortens_what_it_would_give(
    implementation: Implementation,
) -> None:
    """What is pulled has to be a hit at every group."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    fill(index, PROMPT, FULL, W64)
    apply(index, described(PROMPT, 0, 320), described(PROMPT, 128, 192, group=1))
    prompt = index.prepare(PROMPT.tokens)
    assert match_tier(index, prompt, SOURCE, "CPU") == 192, "and not 320"
