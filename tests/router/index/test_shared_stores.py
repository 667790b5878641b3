"""One file system or bucket behind several replicas: what one wrote, all of them can load."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvevents.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupSpec,
    TierBlocksCleared,
)
from router.index.base import ApplyResult, Hit, SourceId, SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, StoreHint
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, Prefix, apply, mamba, tokens, window
from tests.support.index import dump, load

A, B, ALONE = SourceId("a"), SourceId("b"), SourceId("alone")
PROMPT = Prefix(tokens(160))
OTHER = Prefix(tokens(160, first=9000))
BUCKET = StoreHint("bucket", ("STORAGE",))


def sharing(*stores: StoreHint) -> LayoutHints:
    return LayoutHints(hash_seeds=(), stores=stores)


@pytest.fixture
def index(implementation: Implementation) -> PrefixIndex:
    """Two sources that share a bucket, and one that does not. All know their layout."""
    return filled(implementation)


def filled(implementation: Implementation, limits: SourceLimits | None = None) -> PrefixIndex:
    index = implementation.create(limits)
    for source, hints in ((A, sharing(BUCKET)), (B, sharing(BUCKET)), (ALONE, sharing())):
        index.add(source, hints)
        apply(index, OTHER.stored(0, FULL, 0, 16), source=source)
    return index


def wrote(index: PrefixIndex, *events: Event, prompt: Prefix = PROMPT) -> None:
    """*A* computed the prompt, evicted it, and announced *events*."""
    ends = range(16, len(prompt.tokens) + 1, 16)
    apply(index, prompt.stored(0, FULL), *events, prompt.removed(0, ends), source=A)


def test_what_one_replica_wrote_counts_for_all_that_share_the_store(index: PrefixIndex) -> None:
    """With the engines' own event, which has no tokens: the writer's GPU tells where each belongs.
    A replica that has never seen the prompt loads it all the same."""
    wrote(index, PROMPT.offloaded(0, [16, 32, 48, 64], "STORAGE"))
    stored = Hit(0, 64, (("bucket", 64),))
    assert index.match(PROMPT.tokens) == {A: stored, B: stored, ALONE: Hit(0, 0)}


def test_blocks_in_a_store_are_no_replicas_own(index: PrefixIndex) -> None:
    """Of the writer's own tiers there is none, so its loss or restart takes nothing away."""
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    found = index.statistics()
    assert found[A].blocks == {(0, "GPU"): 1}
    assert found[A].stores == found[B].stores == {"bucket": {(0, "STORAGE"): 2}}
    assert found[ALONE].stores == {}
    index.clear(A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32
    index.drop(A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32
    index.drop(B)
    index.add(B, sharing(BUCKET))
    assert index.match(PROMPT.tokens)[B].cached_tokens == 0, "nobody was left to say what is there"


def test_a_hit_goes_on_from_the_readers_gpu_and_own_tiers_into_the_store(
    index: PrefixIndex,
) -> None:
    """Each block from wherever it is: the GPU, then the reader's CPU, then the store."""
    wrote(index, PROMPT.offloaded(0, [80, 96, 112], "STORAGE"))
    apply(index, PROMPT.stored(0, FULL, 0, 32), source=B)
    assert index.match(PROMPT.tokens)[B] == Hit(32, 32), "a hole before what the store has"
    apply(index, PROMPT.stored(0, FULL, 32, 80), PROMPT.removed(0, [48, 64, 80]), source=B)
    apply(index, PROMPT.offloaded(0, [48, 64, 80]), source=B)
    assert index.match(PROMPT.tokens)[B] == Hit(32, 112, (("CPU", 48), ("bucket", 32)))


def test_a_window_leans_on_the_readers_gpu_and_on_the_store(implementation: Implementation) -> None:
    """Each group by its own rule, wherever its blocks are."""
    index, groups = implementation.create(None), (FULL, window(48))
    for source in (A, B):
        index.add(source, sharing(BUCKET))
        for group, spec in enumerate(groups):
            apply(index, OTHER.stored(group, spec, 0, 16), source=source)
    for group, spec in enumerate(groups):
        apply(index, PROMPT.stored(group, spec), source=A)
    apply(index, PROMPT.offloaded(0, range(16, 161, 16), "STORAGE"), source=A)
    apply(index, PROMPT.offloaded(1, [128, 144, 160], "STORAGE"), source=A)
    prompt = [*PROMPT.tokens, 1]
    assert index.match(prompt)[B] == Hit(0, 160, (("bucket", 160),))
    apply(index, PROMPT.removed(1, [144], "STORAGE"), source=A)
    assert index.match(prompt)[B] == Hit(0, 0), "no window is whole"
    for group, spec in enumerate(groups):
        apply(index, PROMPT.stored(group, spec, 0, 144), source=B)
    assert index.match(prompt)[B] == Hit(144, 160, (("bucket", 16),))


def test_a_block_that_two_replicas_wrote_is_there_once(index: PrefixIndex) -> None:
    """It is one file: removed by one of them, it is gone for both."""
    for source in (A, B):
        apply(index, PROMPT.stored(0, FULL), source=source)
        apply(index, PROMPT.offloaded(0, [16, 32], "STORAGE"), source=source)
    ends = range(16, 161, 16)
    for source in (A, B):
        apply(index, PROMPT.removed(0, ends), source=source)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32
    apply(index, PROMPT.removed(0, [32], "STORAGE"), source=A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 16


def test_several_writers_fill_one_store(index: PrefixIndex) -> None:
    """A conversation that moved between replicas is in the store in parts."""
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    ends = range(16, 161, 16)
    apply(index, PROMPT.stored(0, FULL), PROMPT.removed(0, ends), source=B)
    apply(index, PROMPT.offloaded(0, [48, 64], "STORAGE"), source=B)
    assert index.match(PROMPT.tokens)[A] == Hit(0, 64, (("bucket", 64),))


@pytest.mark.parametrize("before", [True, False], ids=["events first", "places first"])
def test_a_block_is_placed_when_any_sharing_source_tells_where_it_belongs(
    index: PrefixIndex, before: bool
) -> None:
    """The writer may have announced it before its parent was known, or another replica's GPU may be
    the first to tell."""
    if before:
        apply(index, PROMPT.offloaded(0, [16, 32], "STORAGE"), source=A)
        assert index.match(PROMPT.tokens)[B].cached_tokens == 0
    ends = range(16, 161, 16)
    apply(index, PROMPT.stored(0, FULL), PROMPT.removed(0, ends), source=B)
    if not before:
        apply(index, PROMPT.offloaded(0, [16, 32], "STORAGE"), source=B)
    assert index.match(PROMPT.tokens)[A].cached_tokens == 32


def test_self_describing_events_need_no_gpu(index: PrefixIndex) -> None:
    """Also behind a parent that only the store has, and one that comes later."""
    apply(index, PROMPT.stored(0, FULL, 0, 32, "STORAGE"), source=A)
    apply(index, PROMPT.stored(0, FULL, 32, 64, "STORAGE"), source=B)
    apply(index, PROMPT.stored(0, FULL, 96, 128, "STORAGE"), source=A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 64
    apply(index, PROMPT.stored(0, FULL, 64, 96, "STORAGE"), source=A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 128


def test_units_of_a_store_are_learned_from_all_that_write_to_it(index: PrefixIndex) -> None:
    """A reader that never wrote loads whole chunks too."""
    wrote(index, PROMPT.offloaded(0, [64, 128], "STORAGE"))
    assert index.match(PROMPT.tokens)[B].cached_tokens == 128
    assert index.match(PROMPT.tokens[:127])[B].cached_tokens == 64


def test_a_replica_that_has_just_started_reads_what_others_wrote(
    implementation: Implementation,
) -> None:
    """Its own events have said nothing yet, not even its layout: it is taken to be like the others,
    and an operator is told."""
    index = implementation.create(None)
    index.add(A, sharing(BUCKET))
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    index.add(B, sharing(BUCKET))
    assert index.match(PROMPT.tokens)[B] == Hit(0, 32, (("bucket", 32),))
    assert "layout: as that of others that share its store" in index.statistics()[B].assumptions
    apply(index, OTHER.stored(0, FULL, 0, 16), source=B)
    assert index.statistics()[B].assumptions == ()


LAYOUTS = {
    "full": [FULL],
    "full and a window": [FULL, window(40)],
    "full and states": [FULL, mamba()],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_store_is_worth_what_a_copy_of_it_at_every_replica_would_be(
    implementation: Implementation, name: str
) -> None:
    """That is what sharing means, and it needs no notion of a store: in the second index every
    replica hears of every block that any of them stores, as if it were its own."""
    rng, groups, sources = random.Random(name), LAYOUTS[name], (A, B, ALONE)
    sharing_one, copying = implementation.create(None), implementation.create(None)
    start = tokens(64)
    prompts = [
        Prefix([*start[: 16 * rng.randrange(5)], *tokens(96, first=1000 * number)])
        for number in range(2, 8)
    ]
    for index, hints in ((sharing_one, sharing(BUCKET)), (copying, sharing())):
        for source in sources:
            index.add(source, hints)
            for group, spec in enumerate(groups):
                for prompt in prompts:
                    ends = range(16, len(prompt.tokens) + 1, 16)
                    known = prompt.stored(group, spec), prompt.removed(group, ends)
                    apply(index, *known, source=source)
    stored: set[tuple[int, BlockHash]] = set()
    longer = 0
    for _ in range(300):
        prompt, source, group = rng.choice(prompts), rng.choice(sources), rng.randrange(len(groups))
        ends = rng.sample(range(16, len(prompt.tokens) + 1, 16), rng.randrange(1, 5))
        medium = rng.choice(["GPU", "CPU", "STORAGE", "STORAGE"])
        if rng.random() < 0.3:
            event: BlockStored | BlockRemoved = prompt.removed(group, ends, medium)
        else:
            event = prompt.offloaded(group, ends, medium)
        apply(sharing_one, event, source=source)
        # A file is there once, whoever wrote it; a source counts copies.
        if medium == "STORAGE":
            is_new = isinstance(event, BlockStored)
            hashes = [each for each in event.block_hashes if ((group, each) in stored) != is_new]
            event = replace(event, block_hashes=hashes)
            stored ^= {(group, each) for each in hashes}
        for other in sources if medium == "STORAGE" else [source]:
            apply(copying, event, source=other)
        for prompt in prompts:
            hits = sharing_one.match(prompt.tokens)
            expected = copying.match(prompt.tokens)
            assert {each: hits[each][:2] for each in hits} == {
                each: expected[each][:2] for each in expected
            }
            longer += any("bucket" in dict(hit.by_tier) for hit in hits.values())
    assert longer > 100


# --- what is in a store ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("locality", "is_shared"), [(None, True), ("REMOTE", True), ("LOCAL", False), ("local", False)]
)
def test_a_block_announced_as_local_is_the_replicas_own(
    index: PrefixIndex, locality: str | None, is_shared: bool
) -> None:
    """A disk of its own may have the same name on the wire."""
    wrote(index, replace(PROMPT.offloaded(0, [16, 32], "STORAGE"), locality=locality))
    found = index.match(PROMPT.tokens)
    assert found[A].cached_tokens == 32
    assert found[B].cached_tokens == (32 if is_shared else 0)


def test_a_store_without_tiers_is_all_that_is_announced_as_remote(
    implementation: Implementation,
) -> None:
    """Where the engines say what is remote, nobody has to know their tiers' names."""
    index = implementation.create(None)
    for source in (A, B):
        index.add(source, sharing(StoreHint("bucket")))
        apply(index, OTHER.stored(0, FULL, 0, 16), source=source)
    stored = PROMPT.offloaded(0, [16, 32], "POOL")
    wrote(index, replace(stored, locality="REMOTE"), PROMPT.offloaded(0, [48]))
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32
    assert index.match(PROMPT.tokens)[A].cached_tokens == 48


def test_stores_are_told_apart_by_who_owns_the_tier(implementation: Implementation) -> None:
    """Two secondary tiers of an engine have one name on the wire, and may be two places."""
    index = implementation.create(None)
    fast, slow = StoreHint("fast", ("STORAGE",), "nvme"), StoreHint("slow", ("STORAGE",), "s3")
    for source, hints in ((A, sharing(fast, slow)), (B, sharing(slow))):
        index.add(source, hints)
        apply(index, OTHER.stored(0, FULL, 0, 16), source=source)
    stored = PROMPT.offloaded(0, [16, 32], "STORAGE")
    wrote(index, replace(stored, ownership="nvme"))
    assert index.match(PROMPT.tokens)[B].cached_tokens == 0
    apply(index, replace(PROMPT.offloaded(0, [16], "STORAGE"), ownership="s3"), source=A)
    assert index.match(PROMPT.tokens)[B] == Hit(0, 16, (("slow", 16),))
    assert index.match(PROMPT.tokens)[A] == Hit(0, 32, (("fast", 32),)), "the first that has it"
    assert set(index.statistics()[A].stores) == {"fast", "slow"}


def test_remote_blocks_that_no_store_is_configured_for_count_for_their_replica(
    index: PrefixIndex,
) -> None:
    """Who else reads them is not on the wire; an operator is told that nobody said so."""
    remote = replace(PROMPT.offloaded(0, [16, 32], "STORAGE"), locality="REMOTE")
    ends = range(16, 161, 16)
    apply(index, PROMPT.stored(0, FULL), remote, PROMPT.removed(0, ends), source=ALONE)
    found = index.match(PROMPT.tokens)
    assert (found[ALONE].cached_tokens, found[A].cached_tokens) == (32, 0)
    assert any("configure stores" in each for each in index.statistics()[ALONE].assumptions)
    assert index.statistics()[A].assumptions == ()


def test_the_gpu_is_never_shared(index: PrefixIndex) -> None:
    """Whatever an engine says of it."""
    remote = replace(PROMPT.stored(0, FULL), locality="REMOTE")
    apply(index, remote, source=A)
    assert index.match([*PROMPT.tokens, 1])[B] == Hit(0, 0)
    assert index.match([*PROMPT.tokens, 1])[A] == Hit(160, 160)


# --- clears and bounds ----------------------------------------------------------------------------


def test_a_clear_of_the_gpu_leaves_the_store_alone(index: PrefixIndex) -> None:
    """Also one that names another tier."""
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    apply(index, AllBlocksCleared(), TierBlocksCleared("CPU"), source=A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32


def test_an_engine_that_empties_the_tier_empties_the_store(index: PrefixIndex) -> None:
    """It says so of all that is behind it."""
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    apply(index, TierBlocksCleared("STORAGE"), source=ALONE)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 32
    assert apply_counted(index, TierBlocksCleared("STORAGE")).removed == 2
    assert index.match(PROMPT.tokens)[B].cached_tokens == 0


def test_of_a_full_store_the_oldest_blocks_go_first(implementation: Implementation) -> None:
    """Engines announce no removal from a file system: what is still there of what was written first
    nobody knows. No source is incomplete for that."""
    index = filled(implementation, SourceLimits(blocks=12))
    wrote(index, OTHER.stored(0, FULL, 0, 64, "STORAGE"), prompt=OTHER)
    for source in (A, B):
        apply(index, PROMPT.stored(0, FULL, 0, 160, "STORAGE"), source=source)
    statistics = index.statistics()[A]
    assert statistics.stores == {"bucket": {(0, "STORAGE"): 12}}
    assert not statistics.is_incomplete
    assert index.match(OTHER.tokens)[B] == Hit(16, 16), "on its GPU; the next block went"
    assert index.match(PROMPT.tokens)[B].cached_tokens == 160


def test_a_removal_does_not_stop_a_full_store_from_taking_more(
    implementation: Implementation,
) -> None:
    """A tier that announces its removals is believed; of a store, others may remove in silence."""
    index = filled(implementation, SourceLimits(blocks=4))
    apply(index, PROMPT.stored(0, FULL, 0, 64, "STORAGE"), source=A)
    apply(index, PROMPT.removed(0, [64], "STORAGE"), source=A)
    found = apply_counted(index, OTHER.stored(0, FULL, 0, 48, "STORAGE"))
    assert (found.overflow, found.is_incomplete) == (0, False)
    assert index.match(OTHER.tokens)[B].cached_tokens == 48


def apply_counted(index: PrefixIndex, *events: Event) -> ApplyResult:
    return index.apply(A, EventBatch(0.0, list(events)))


def test_batches_are_counted_as_for_a_tier_of_the_source(index: PrefixIndex) -> None:
    """Metrics count what came, wherever it went; a source that writes to a store has lower
    tiers."""
    apply(index, PROMPT.stored(0, FULL), source=A)
    found = apply_counted(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    assert (found.stored, found.has_lower_tiers, found.waiting) == (2, True, 0)
    found = apply_counted(index, PROMPT.removed(0, [16, 48], "STORAGE"))
    assert (found.removed, found.skipped) == (1, 1)
    found = apply_counted(index, Prefix(tokens(32, first=70)).offloaded(0, [16], "STORAGE"))
    assert (found.stored, found.waiting) == (1, 1)


# --- keeping --------------------------------------------------------------------------------------


def test_a_store_survives_a_dump(implementation: Implementation, index: PrefixIndex) -> None:
    """With its units, its places and those who share it."""
    wrote(index, PROMPT.offloaded(0, [64, 128], "STORAGE"))
    copy = implementation.create(None)
    load(b"".join(dump(index)), copy)
    assert copy.match(PROMPT.tokens) == index.match(PROMPT.tokens)
    assert copy.statistics() == index.statistics()
    apply(copy, PROMPT.removed(0, [128], "STORAGE"), source=B)
    assert copy.match(PROMPT.tokens)[A].cached_tokens == 64


def test_one_source_is_exported_with_what_it_shares(
    implementation: Implementation, index: PrefixIndex
) -> None:
    """A recording of it would miss hits."""
    wrote(index, PROMPT.offloaded(0, [16, 32], "STORAGE"))
    copy = implementation.create(None)
    copy.restore(index.export(B))
    assert copy.match(PROMPT.tokens) == {B: Hit(0, 32, (("bucket", 32),))}
    copy.restore(index.export(ALONE))
    assert copy.statistics()[ALONE].stores == {}


def test_our_own_engines_layout_holds_for_their_store(implementation: Implementation) -> None:
    """They name every block that they can load."""
    index = implementation.create(None)
    layout = CacheLayout("one", [GroupSpec("full_attention", 16)], 16, 16)
    for source in (A, B):
        index.add(source, sharing(BUCKET))
        apply(index, layout, source=source)
    stored: BlockStored = PROMPT.stored(0, FULL, 0, 48, "STORAGE")
    apply(index, stored, source=A)
    assert index.match(PROMPT.tokens)[B].cached_tokens == 48
