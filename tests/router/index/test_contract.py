"""What every index must do: what a batch does, what is bounded, and what is said when a bound was
hit."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from kvevents.codec import encode
from kvevents.events import (
    CPU,
    GPU,
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
from kvevents.hashing import DEFAULT_SEED, HashChain, to_wire_int
from router.index.base import (
    NO_HIT,
    ApplyResult,
    GroupHit,
    Hit,
    SourceId,
    SourceLimits,
    SourceStatistics,
    WaitingStatistics,
    pack_keys,
    unpack_keys,
)
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from router.index.prompt import HashedPrompt
from tests.router.index.implementations import Implementation
from tests.support.blocks import FULL, SOURCE, Prefix, gpu_hit, tokens, window
from tests.support.index import blocks_held, match_source, removals, token_columns

PROMPT = Prefix(tokens(160))


def index_with(implementation: Implementation, **limits: int) -> PrefixIndex:
    """An index of one source, whose hash function cannot be found: only events place blocks."""
    index = implementation.create(SourceLimits(**limits))
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    return index


def apply(index: PrefixIndex, *events: Event) -> ApplyResult:
    return index.apply(SOURCE, EventBatch(0.0, list(events)))


def statistics(index: PrefixIndex) -> SourceStatistics:
    return index.statistics()[SOURCE]


def orphan(number: int, blocks: int = 1) -> BlockStored:
    """A run whose parent has not been announced."""
    prompt = Prefix(tokens(16 * (blocks + 1), first=100_000 * (number + 1)))
    return prompt.stored(0, FULL, 16)


def parent_of(number: int, blocks: int = 1) -> BlockStored:
    prompt = Prefix(tokens(16 * (blocks + 1), first=100_000 * (number + 1)))
    return prompt.stored(0, FULL, 0, 16)


# --- what a batch does ----------------------------------------------------------------------------


def test_a_batch_tells_what_it_did(implementation: Implementation) -> None:
    """Metrics are made of these numbers."""
    index = index_with(implementation)
    assert apply(index, PROMPT.stored(0, FULL)) == ApplyResult(stored=10, layout_changed=True)
    assert apply(index, PROMPT.stored(0, FULL, 0, 32)) == ApplyResult(stored=2)
    assert apply(index, PROMPT.removed(0, [16, 160])) == ApplyResult(removed=2)
    assert apply(index, PROMPT.removed(0, [160]), PROMPT.removed(1, [16])) == ApplyResult(skipped=2)
    assert apply(index, orphan(0, blocks=3)) == ApplyResult(stored=3, waiting=3)
    assert apply(index, AllBlocksCleared()) == ApplyResult(removed=13, cleared=True)
    assert apply(index) == ApplyResult()


def test_events_of_unknown_type_are_counted_as_skipped(index: PrefixIndex) -> None:
    """The codec left them out; the count must not be lost."""
    assert index.apply(SOURCE, EventBatch(0.0, [], skipped=3)) == ApplyResult(skipped=3)


@pytest.mark.parametrize("clear", [AllBlocksCleared("cpu"), TierBlocksCleared("CPU")], ids=str)
def test_a_clear_empties_the_tier_it_names_and_no_other(
    implementation: Implementation, clear: Event
) -> None:
    """Taken for the GPU's, it would throw away all that the GPU still has; skipped, the tier would
    seem to hold what it lost."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16, 32]))
    assert apply(index, clear) == ApplyResult(removed=2)
    assert statistics(index).blocks == {(0, "GPU"): 10}
    apply(index, PROMPT.offloaded(0, [16, 32]))
    assert apply(index, TierBlocksCleared("GPU")).cleared
    assert statistics(index).blocks == {(0, "CPU"): 2}


def test_a_removal_leaves_as_many_copies_as_the_engine_tells(
    implementation: Implementation,
) -> None:
    """The engine knows, also where the index missed a store or counted one too many."""
    index = index_with(implementation)
    one = PROMPT.stored(0, FULL, 0, 16)

    def left(count: int) -> ApplyResult:
        return apply(index, replace(PROMPT.removed(0, [16]), remaining_copy_counts=[count]))

    apply(index, one, one, one)
    assert left(0) == ApplyResult(removed=1)
    assert gpu_hit(index, PROMPT.tokens) == 0
    apply(index, one)
    assert left(2) == ApplyResult(removed=1)
    assert apply(index, PROMPT.removed(0, [16])) == ApplyResult(removed=1)
    assert gpu_hit(index, PROMPT.tokens) == 16
    assert left(0) == ApplyResult(removed=1)
    assert left(1) == ApplyResult(skipped=1)
    assert statistics(index).blocks == {(0, "GPU"): 1}


# --- one source -----------------------------------------------------------------------------------


def test_the_blocks_held_are_distinct_and_on_the_gpu(implementation: Implementation) -> None:
    """Lower tiers say nothing of how full the GPU is, and a further copy is no further block."""
    index = index_with(implementation)
    assert blocks_held(index, SOURCE) == 0
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64), 0, 32))
    apply(index, PROMPT.stored(0, FULL, 0, 32), PROMPT.offloaded(0, [16, 32]))
    assert blocks_held(index, SOURCE) == 12
    apply(index, PROMPT.removed(0, [16]), PROMPT.removed(0, [160]))
    assert blocks_held(index, SOURCE) == 11
    apply(index, AllBlocksCleared())
    assert blocks_held(index, SOURCE) == 0


def test_removals_are_those_of_the_gpu_since_it_was_known_to_be_empty(
    implementation: Implementation,
) -> None:
    """A cache that has removed nothing yet has not been full."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16, 32]))
    apply(index, PROMPT.removed(0, [16], "CPU"), PROMPT.removed(1, [32]))
    assert removals(index, SOURCE) == 0
    apply(index, PROMPT.removed(0, [16, 160]))
    apply(index, replace(PROMPT.removed(0, [32]), remaining_copy_counts=[0]))
    assert removals(index, SOURCE) == 3
    apply(index, TierBlocksCleared("CPU"))
    assert removals(index, SOURCE) == 3
    apply(index, AllBlocksCleared())
    assert removals(index, SOURCE) == 0
    apply(index, PROMPT.stored(0, FULL), PROMPT.removed(0, [16]))
    index.clear(SOURCE)
    assert removals(index, SOURCE) == 0


def test_removals_are_counted_for_each_group_as_long_as_the_source_is_followed(
    implementation: Implementation,
) -> None:
    """How fast a group's blocks are evicted is the difference of two looks at this."""
    index = index_with(implementation)
    assert statistics(index).removed == {}
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64), 0, 32))
    apply(index, PROMPT.removed(1, [16, 160]), PROMPT.removed(0, [16, 32], "CPU"))
    assert statistics(index).removed == {1: 1}
    apply(index, PROMPT.removed(0, [16, 32]), AllBlocksCleared(), PROMPT.stored(0, FULL))
    apply(index, replace(PROMPT.removed(0, [16]), remaining_copy_counts=[0]))
    assert statistics(index).removed == {0: 3, 1: 1}
    index.restore(list(index.export()))
    assert statistics(index).removed == {0: 3, 1: 1}
    index.clear(SOURCE)
    assert statistics(index).removed == {}


def test_one_source_is_matched_as_it_is_among_all(implementation: Implementation) -> None:
    """Whoever asks for one must not pay for all, nor get another answer."""
    index = index_with(implementation)
    other, empty = SourceId("replica-b"), SourceId("replica-c")
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64)))
    apply(index, PROMPT.removed(0, [128]), PROMPT.offloaded(0, [112, 128, 144]))
    index.apply(other, EventBatch(0.0, [PROMPT.stored(0, FULL, 0, 48)]))
    index.add(empty)
    prompt = index.prepare(tokens(161))
    alone = {source: match_source(index, prompt, source) for source in (SOURCE, other, empty)}
    assert alone == index.match_prompt(prompt)
    assert alone[other] == Hit(48, 48)


def test_the_hits_of_a_match_are_the_same_in_columns(implementation: Implementation) -> None:
    """A decision reads them without an object for each; unknown sources hold nothing."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL))
    index.add(SourceId("empty"))
    sources = [SourceId("unknown"), SOURCE, SourceId("empty")]
    hits = index.match(tokens(161))
    expected = [hits.get(source, NO_HIT) for source in sources]
    assert expected[1] != NO_HIT
    for found in (hits, dict(hits.items()), {}):
        gpu, cached, _ = token_columns(found, sources)
        assert gpu == [hit.gpu_cached_tokens if found else 0 for hit in expected]
        assert cached == [hit.cached_tokens if found else 0 for hit in expected]


def test_a_junction_is_what_full_attention_has_beyond_the_hit(
    implementation: Implementation,
) -> None:
    """There a prompt that is computed once more makes a hit for all later ones."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(128), 0, 64))
    assert token_columns(index.match(tokens(161)), [SOURCE]) == ([64], [64], [160 - 64])
    apply(index, PROMPT.removed(1, [16, 32, 48, 64]))
    assert token_columns(index.match(tokens(161)), [SOURCE]) == ([0], [0], [160])


def test_the_hits_of_a_match_stay_as_they_were_found(implementation: Implementation) -> None:
    """They are read while sources come and go: none may get the hit of another."""
    index = index_with(implementation)
    other, late = SourceId("replica-b"), SourceId("replica-c")
    apply(index, PROMPT.stored(0, FULL))
    index.apply(other, EventBatch(0.0, [PROMPT.stored(0, FULL, 0, 48)]))
    found = index.match(tokens(161))
    index.drop(SOURCE)
    index.add(late)
    index.apply(late, EventBatch(0.0, [PROMPT.stored(0, FULL, 0, 16)]))
    assert found == {SOURCE: Hit(160, 160), other: Hit(48, 48)}
    assert (found[SOURCE], found.get(late), found.get(late, NO_HIT)) == (
        Hit(160, 160),
        None,
        NO_HIT,
    )
    assert index.match(tokens(161)) == {other: Hit(48, 48), late: Hit(16, 16)}


def test_the_hits_of_a_match_are_a_mapping(implementation: Implementation) -> None:
    """Whoever reads one like a dict must not notice which index made it."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL))
    empty = SourceId("replica-b")
    index.add(empty)
    found, expected = index.match(tokens(161)), {SOURCE: Hit(160, 160), empty: NO_HIT}
    assert isinstance(found, Mapping)
    assert (dict(found), dict(found.items()), {**found}) == (expected, expected, expected)
    assert (set(found), set(found.keys()), len(found)) == (set(expected), set(expected), 2)
    assert sorted(found.values()) == [NO_HIT, Hit(160, 160)]
    assert found == index.match(tokens(161)) != index.match(tokens(99))
    assert found != {SOURCE: NO_HIT}
    assert found != 7
    assert SOURCE in found
    assert SourceId("nobody") not in found
    assert repr(found) == repr(expected)
    with pytest.raises(KeyError, match="nobody"):
        found[SourceId("nobody")]
    with pytest.raises(TypeError, match="unhashable"):
        found.get([])  # type: ignore[call-overload]


def test_a_source_that_is_not_known_holds_nothing(index: PrefixIndex) -> None:
    """It may have been dropped a moment ago."""
    assert blocks_held(index, SOURCE) == removals(index, SOURCE) == 0
    assert match_source(index, index.prepare(tokens(161)), SOURCE) == Hit(0, 0)


def test_of_a_large_source_that_was_dropped_nothing_is_left_for_others(
    implementation: Implementation,
) -> None:
    """Its blocks go in small steps, while the index serves: nobody may see what is still there."""
    index = index_with(implementation)
    other, late = SourceId("replica-b"), SourceId("replica-c")
    large = Prefix(tokens(16 * 6000))
    apply(index, large.stored(0, FULL))
    index.apply(other, EventBatch(0.0, [large.stored(0, FULL, 0, 160)]))
    index.drop(SOURCE)
    index.add(late)
    index.add(SOURCE)
    assert index.match(large.tokens) == {other: Hit(160, 160), late: NO_HIT, SOURCE: NO_HIT}
    index.apply(late, EventBatch(0.0, [large.stored(0, FULL, 0, 320)]))
    index.clear(late)
    apply(index, large.stored(0, FULL, 0, 48))
    assert index.match(large.tokens) == {other: Hit(160, 160), late: NO_HIT, SOURCE: Hit(48, 48)}
    implementation.expect_sound(index)
    for source in (SOURCE, other, late):
        index.drop(source)
    implementation.expect_empty(index)


# --- copies ---------------------------------------------------------------------------------------


def test_copies_that_an_engine_tells_of_are_bounded_as_others_are(
    implementation: Implementation,
) -> None:
    """A removal must not be a way to fill the index."""
    index = index_with(implementation, blocks=2)
    removed = replace(PROMPT.removed(0, [16, 32, 48]), remaining_copy_counts=[9, 9, 9])
    apply(index, removed)
    assert statistics(index).blocks == {(0, "GPU"): 2}


def test_a_batch_that_hides_removals_makes_the_source_incomplete(
    implementation: Implementation,
) -> None:
    """Until nothing is left of what was held then."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16]))
    batch = EventBatch(0.0, [], unreadable=1, hides_removals=True, problem="events[0]: why")
    result = index.apply(SOURCE, batch)
    assert (result.is_incomplete, result.unreadable, result.problem) == (True, 1, "events[0]: why")
    apply(index, AllBlocksCleared())
    assert statistics(index).is_incomplete
    apply(index, PROMPT.removed(0, [16], medium=CPU))
    apply(index, AllBlocksCleared())
    assert not statistics(index).is_incomplete


def test_an_event_without_hashes_and_tokens_does_nothing(index: PrefixIndex) -> None:
    """An empty run of an engine whose hash function is known."""
    layout = CacheLayout(
        "p", [GroupSpec("full_attention", 16)], 16, 16, "sha256", HashChain.from_seed().none_hash
    )
    apply(index, layout)
    assert apply(index, BlockStored([], None, [], "GPU", 0, block_size=16)) == ApplyResult()
    assert statistics(index).blocks == {}


@pytest.mark.parametrize("medium", ["GPU", "gpu", "Gpu", None, ""])
def test_the_gpu_goes_by_several_names(implementation: Implementation, medium: str | None) -> None:
    """Engines before vLLM 0.10.2 name no medium at all: layout and blocks must come out the
    same."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL, medium=medium))
    assert statistics(index).blocks == {(0, "GPU"): 10}
    assert gpu_hit(index, PROMPT.tokens) == 160
    apply(index, PROMPT.removed(0, [160], medium="gpu"))
    assert gpu_hit(index, PROMPT.tokens) == 144


def test_an_event_without_a_group_is_of_group_0(implementation: Implementation) -> None:
    """A removal may name the group that the store did not."""
    index = index_with(implementation)
    apply(index, replace(PROMPT.stored(0, FULL), group_idx=None), PROMPT.removed(0, [160]))
    assert gpu_hit(index, PROMPT.tokens) == 144


def test_a_removal_from_one_tier_or_group_leaves_the_others(implementation: Implementation) -> None:
    """The same hash is in all of them."""
    index = index_with(implementation)
    apply(
        index,
        PROMPT.stored(0, FULL),
        PROMPT.stored(1, FULL),
        PROMPT.offloaded(0, range(16, 161, 16)),
    )
    apply(
        index,
        PROMPT.removed(1, [16], medium=CPU),
        PROMPT.removed(0, [16], medium=CPU),
        PROMPT.removed(1, [32]),
    )
    assert statistics(index).blocks == {(0, GPU): 10, (1, GPU): 9, (0, CPU): 9}


def test_a_hash_with_copies_left_anywhere_keeps_its_place(implementation: Implementation) -> None:
    """Only the last copy of all groups and tiers takes it along."""
    index = index_with(implementation)
    apply(
        index,
        PROMPT.stored(0, FULL),
        PROMPT.offloaded(0, [16]),
        PROMPT.removed(0, range(16, 161, 16)),
    )
    assert statistics(index).blocks == {(0, CPU): 1}
    implementation.expect_sound(index)
    hit = index.match(PROMPT.tokens)[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (0, 16)


def test_two_live_hashes_of_one_prefix_are_counted_as_ambiguous(
    implementation: Implementation,
) -> None:
    """Something the events do not show goes into the hash: salts before vLLM 0.17."""
    index = index_with(implementation)
    apply(index, PROMPT.stored(0, FULL))
    assert statistics(index).ambiguous == 0
    apply(index, Prefix(PROMPT.tokens, seed="and a hidden salt").stored(0, FULL))
    assert statistics(index).ambiguous == 10


def test_a_hidden_salt_shows_in_the_batch_that_completes_the_layout(
    implementation: Implementation,
) -> None:
    """The hash function is known and the layout was not: the salted blocks must not be taken for
    those of the same tokens."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_block_size=16, hash_seeds=("0",)))
    apply(index, Prefix(PROMPT.tokens, seed="0").kept(0, FULL, [64, 80], 0, 96))
    assert statistics(index).hash_algorithm == "sha256"
    other = Prefix(tokens(480, first=5000))
    apply(index, other.stored(1, window(64, 32)), other.stored(2, window(64, 24)))
    assert statistics(index).layout is None
    salted = replace(Prefix(PROMPT.tokens, seed="a hidden salt").stored(0, FULL), extra_keys=None)
    batch = EventBatch(0.0, [salted, other.stored(2, window(64, 48))])
    result = index.apply(SOURCE, encode(batch))
    assert statistics(index).layout is not None
    assert result.waiting == 10


def test_a_parent_named_by_several_digests_is_the_block_that_its_last_one_names(
    implementation: Implementation,
) -> None:
    """vLLM up to 0.23 names a block of several hash blocks so, as a parent too."""
    token_ids = tokens(128)
    digests = list(HashChain.from_seed("sha256", "unknown").block_hashes(token_ids, 16))
    names = [digests[at] + digests[at + 1] for at in range(0, 8, 2)]
    stored = Prefix(token_ids[:64], hash_block_size=32).stored(
        0, dataclasses.replace(FULL, block_size=32)
    )
    index = index_with(implementation)
    apply(index, replace(stored, block_hashes=names[:2]))
    behind = replace(stored, block_hashes=names[2:], parent_block_hash=names[1])
    apply(index, replace(behind, token_ids=token_ids[64:]))
    assert gpu_hit(index, token_ids) == 128


def test_a_hash_that_covers_the_next_tokens_is_found_only_with_them(
    implementation: Implementation,
) -> None:
    """vLLM 0.33 with speculative decoding: the block's content is the same, its use is not."""
    token_ids, size, lookahead = tokens(66), 16, 2
    digests = HashChain.from_seed("sha256", "unknown to the router").block_hashes(
        token_ids, size, lookahead=lookahead
    )
    hashes: list[BlockHash] = [to_wire_int(digest) for digest in digests]
    behind = [token_ids[end : end + lookahead] for end in range(16, 65, 16)]
    stored = BlockStored(
        hashes, None, token_ids[:64], "GPU", 0, None, [None] * 4, "full_attention", None, 16
    )
    index = index_with(implementation)
    apply(
        index,
        replace(
            stored,
            block_hashes=hashes[:2],
            token_ids=token_ids[:32],
            lookahead_token_ids=behind[:2],
        ),
    )
    apply(
        index,
        replace(
            stored,
            block_hashes=hashes[2:],
            parent_block_hash=hashes[1],
            token_ids=token_ids[32:64],
            lookahead_token_ids=behind[2:],
        ),
    )
    assert index.match([*token_ids, 7])[SOURCE].gpu_cached_tokens == 64
    assert index.match([*token_ids[:64], 1, 2, 3])[SOURCE].gpu_cached_tokens == 48
    assert index.match(token_ids[:64])[SOURCE].gpu_cached_tokens == 48
    assert index.match([*token_ids[:32], 1, 2, 3])[SOURCE].gpu_cached_tokens == 16


# --- runs that wait for their parent --------------------------------------------------------------


def test_no_more_runs_wait_than_allowed_and_the_oldest_is_given_up(
    implementation: Implementation,
) -> None:
    """The youngest is the likeliest to be placed."""
    index = index_with(implementation, waiting_runs=3)
    for number in range(5):
        apply(index, orphan(number))
    assert (
        statistics(index).waiting.runs,
        statistics(index).waiting.tokens,
        statistics(index).waiting.given_up,
    ) == (3, 48, 2)
    assert statistics(index).is_incomplete
    apply(index, parent_of(0), parent_of(4))
    assert gpu_hit(index, tokens(32, first=100_000)) == 16
    assert gpu_hit(index, tokens(32, first=500_000)) == 32


def test_no_more_tokens_wait_than_allowed(implementation: Implementation) -> None:
    """One run may carry a whole prompt."""
    index = index_with(implementation, waiting_tokens=100)
    apply(index, orphan(0, blocks=4))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (64, 0)
    apply(index, orphan(1, blocks=3))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (48, 1)
    apply(index, orphan(2, blocks=10))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (0, 3)


def test_no_run_waits_longer_than_allowed(implementation: Implementation) -> None:
    """A parent that did not come in ten thousand batches will not come; heartbeats count as time,
    too."""
    index = index_with(implementation, waiting_batches=5)
    apply(index, orphan(0))
    for _ in range(5):
        apply(index)
    assert (statistics(index).waiting.runs, statistics(index).is_incomplete) == (1, False)
    apply(index)
    assert (statistics(index).waiting.runs, statistics(index).waiting.given_up) == (0, 1)
    assert statistics(index).is_incomplete
    assert statistics(index).unplaced == 1


def test_a_run_that_was_given_up_is_still_held_and_found_once_it_is_announced_again(
    implementation: Implementation,
) -> None:
    """Given up is its place, not its presence."""
    index = index_with(implementation, waiting_runs=0)
    apply(index, orphan(0))
    apply(index, parent_of(0))
    assert gpu_hit(index, tokens(32, first=100_000)) == 16
    apply(index, orphan(0))
    assert gpu_hit(index, tokens(32, first=100_000)) == 32


def test_a_run_whose_blocks_are_gone_is_not_missed(implementation: Implementation) -> None:
    """Nothing is held that no prompt can find: the source must not count as incomplete, long after
    the cache was cleared."""
    index = index_with(implementation, waiting_batches=2)
    apply(index, orphan(0), orphan(1), orphan(2))
    apply(index, BlockRemoved(orphan(0).block_hashes, GPU, 0))
    for _ in range(3):
        apply(index)
    assert (statistics(index).waiting.runs, statistics(index).waiting.given_up) == (0, 2)
    apply(index, orphan(3), orphan(4))
    apply(index, AllBlocksCleared())
    for _ in range(3):
        assert not apply(index).is_incomplete
    assert (statistics(index).waiting.runs, statistics(index).waiting.given_up) == (0, 0)


def test_a_source_that_was_cleared_as_a_whole_is_not_incomplete(
    implementation: Implementation,
) -> None:
    """What was refused, or given up, is gone with all the rest."""
    index = index_with(implementation, blocks=6, waiting_runs=0)
    apply(index, PROMPT.stored(0, FULL))
    apply(index, AllBlocksCleared(), orphan(0))
    assert statistics(index).is_incomplete
    apply(index, AllBlocksCleared())
    assert not statistics(index).is_incomplete
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16]))
    apply(index, AllBlocksCleared())
    assert statistics(index).is_incomplete


def test_no_choice_of_hashes_makes_waiting_slow(implementation: Implementation) -> None:
    """An engine chooses its hashes. Multiples of the sizes that the tables of C++'s library grow to
    have one place in them: with those, each run would walk over all others."""

    def seconds(step: int) -> float:
        index = index_with(implementation)
        orphans = [
            BlockStored([1 + number], (2 + number) * step, [number], GPU, block_size=1)
            for number in range(30_000)
        ]
        payload = encode(EventBatch(0.0, orphans))
        start = time.process_time()
        assert index.apply(SOURCE, payload).waiting == 30_000
        return time.process_time() - start

    usual = max(seconds(2**48 - 59), seconds(2**48 - 65))
    assert seconds(10_273 * 20_753 * 42_043) < 8 * usual


def test_a_known_hash_function_needs_no_waiting(implementation: Implementation) -> None:
    """Every look-up hashes the prompt: nothing is lost by giving up, and nothing waits."""
    index = implementation.create(SourceLimits(waiting_runs=0))
    prompt, other = (
        Prefix(tokens(160), seed=DEFAULT_SEED),
        Prefix(tokens(32, first=9000), seed=DEFAULT_SEED),
    )
    apply(index, prompt.stored(0, FULL, 16))
    apply(index, replace(other.kept(1, window(32), [32]), group_idx=0))
    assert statistics(index).hash_algorithm == "sha256"
    assert not statistics(index).is_incomplete
    apply(index, prompt.stored(0, FULL, 0, 16))
    assert (statistics(index).waiting.runs, statistics(index).is_incomplete) == (0, False)


def test_a_child_of_its_own_block_waits_and_ends(implementation: Implementation) -> None:
    """No engine sends it, and it must not hang the router."""
    index = index_with(implementation, waiting_runs=10)
    apply(index, BlockStored([1], 1, tokens(16), GPU, 0, block_size=16))
    apply(
        index,
        BlockStored([2], 3, tokens(16), GPU, 0, block_size=16),
        BlockStored([3], 2, tokens(16), GPU, 0, block_size=16),
    )
    assert statistics(index).waiting.runs == 3
    apply(index, BlockStored([1, 3], None, tokens(32), GPU, 0, block_size=16))
    assert statistics(index).waiting.runs == 0


def test_a_chain_of_a_thousand_orphans_is_placed_at_once(implementation: Implementation) -> None:
    """Without recursion: one parent may set free a whole conversation."""
    index, prompt = index_with(implementation), Prefix(tokens(16 * 2000))
    for start in range(16 * 1999, 0, -16):
        apply(index, prompt.stored(0, FULL, start, start + 16))
    assert statistics(index).waiting.runs == 1999
    apply(index, prompt.stored(0, FULL, 0, 16))
    assert statistics(index).waiting.runs == 0
    assert gpu_hit(index, prompt.tokens) == 32_000


# --- other bounds ---------------------------------------------------------------------------------


def test_no_more_blocks_are_held_than_allowed_and_the_source_is_incomplete_from_there_on(
    implementation: Implementation,
) -> None:
    """A source over its bound answers too low; the feed must know that it does."""
    index = index_with(implementation, blocks=6)
    result = apply(index, PROMPT.stored(0, FULL))
    assert (result.stored, result.overflow, result.skipped) == (6, 4, 4)
    assert statistics(index).blocks == {(0, GPU): 6}
    assert gpu_hit(index, PROMPT.tokens) == 96
    assert statistics(index).is_incomplete
    index.clear(SOURCE)
    assert not statistics(index).is_incomplete


def test_blocks_of_a_tier_are_bounded_over_all_groups(implementation: Implementation) -> None:
    """Each tier by itself: what fills one must not keep the others out."""
    index = index_with(implementation, blocks=15)
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64)))
    assert statistics(index).blocks == {(0, GPU): 10, (1, GPU): 5}
    apply(index, PROMPT.offloaded(0, range(16, 161, 16)))
    assert statistics(index).blocks == {(0, GPU): 10, (1, GPU): 5, (0, CPU): 10}
    result = apply(index, PROMPT.removed(0, [160, 144]), PROMPT.stored(2, FULL))
    assert (result.stored, result.overflow, result.is_incomplete) == (2, 8, True)


def test_no_more_tiers_are_held_than_allowed(implementation: Implementation) -> None:
    """Their names come from the wire; groups of a known tier are still welcome."""
    index = index_with(implementation, tiers=2)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16]), PROMPT.stored(1, FULL))
    result = apply(index, PROMPT.offloaded(0, [16], medium="DISK"))
    assert (result.stored, result.overflow) == (0, 1)
    assert statistics(index).is_incomplete
    assert set(statistics(index).blocks) == {(0, GPU), (0, CPU), (1, GPU)}


def test_as_many_places_are_remembered_as_allowed(implementation: Implementation) -> None:
    """An offload tier announces blocks after the GPU has evicted them; what comes too late is held,
    and said to be unplaced."""
    index = index_with(implementation, forgotten=4)
    apply(index, PROMPT.stored(0, FULL), PROMPT.removed(0, range(16, 161, 16)))
    apply(index, PROMPT.offloaded(0, range(16, 161, 16)))
    assert statistics(index).unplaced == 6
    assert any("6 blocks cannot be placed" in text for text in statistics(index).assumptions)
    apply(index, PROMPT.removed(0, range(16, 161, 16), medium=CPU))
    assert statistics(index).unplaced == 0
    implementation.expect_empty(index)
    implementation.expect_sound(index)


# --- memory ---------------------------------------------------------------------------------------


def test_clearing_the_gpu_takes_every_copy(implementation: Implementation) -> None:
    """Counts do not survive a reset."""
    index = index_with(implementation)
    apply(index, *[PROMPT.stored(0, FULL)] * 3, AllBlocksCleared(), PROMPT.stored(0, FULL, 0, 32))
    assert statistics(index).blocks == {(0, GPU): 2}
    apply(index, PROMPT.removed(0, [16, 32]))
    assert statistics(index).blocks == {}


# --- well-formed nonsense -------------------------------------------------------------------------


LOOKAHEADS: list[list[list[int]] | None] = [None, None, None, [], [[]], [[1]], [[1, 2], []]]


class Nonsense:
    """Batches that every rule of the wire allows and no engine would send."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def batch(self) -> EventBatch:
        kinds = (
            [self._stored] * 6
            + [self._removed] * 2
            + [AllBlocksCleared]
            + [self._layout] * (self.rng.random() < 0.05)
        )
        return EventBatch(0.0, [self.rng.choice(kinds)() for _ in range(self.rng.randint(1, 4))])

    def _stored(self) -> BlockStored:
        any_of = self.rng.choice
        return BlockStored(
            block_hashes=self._hashes(),
            parent_block_hash=any_of([None, *self._hashes()]),
            token_ids=self.rng.choices(range(3), k=any_of([0, 1, 2, 4, 8])),
            medium=any_of([None, "GPU", "gpu", "CPU", "DISK", ""]),
            group_idx=any_of([None, 0, 1, 2]),
            lora_name=any_of([None, None, "", "sql"]),
            extra_keys=any_of(
                [
                    None,
                    [],
                    [None],
                    [["sql", "salt"]],
                    [[["image", any_of([-3, 0, 1, 5])]], None],
                    [7],
                    [[]],
                    ["x"],
                ]
            ),
            kv_cache_spec_kind=any_of(
                [None, "full_attention", "mamba", "sliding_window", "chunked_local_attention", "x"]
            ),
            kv_cache_spec_sliding_window=any_of([None, 0, 1, 3, 9]),
            block_size=any_of([None, 0, 1, 2, 2, 4]),
            lookahead_token_ids=any_of(LOOKAHEADS),
        )

    def _hashes(self) -> list[BlockHash]:
        return self.rng.choices([1, 2, 3, 4, 5, b"six", -7], k=self.rng.choice([0, 1, 1, 2, 4]))

    def _removed(self) -> BlockRemoved:
        return BlockRemoved(
            self._hashes(), self.rng.choice([None, "GPU", "CPU"]), self.rng.choice([None, 0, 1])
        )

    def _layout(self) -> CacheLayout:
        any_of = self.rng.choice
        kinds = [
            "full_attention",
            "mamba",
            "sliding_window",
            "chunked_local_attention",
            "cross_attention",
            "x",
        ]
        groups = [
            GroupSpec(any_of(kinds), any_of([1, 2, 4]), any_of([None, 3]), any_of([None, 4]))
            for _ in range(any_of([0, 1, 3]))
        ]
        root = any_of([None, b"", HashChain.from_seed().none_hash])
        return CacheLayout(
            "p",
            groups,
            any_of([0, 1, 2]),
            any_of([0, 2, 4]),
            any_of([None, "sha256"]),
            root,
            any_of([True, False]),
        )


def test_a_size_that_a_group_of_its_kind_has_not_is_ignored(
    implementation: Implementation,
) -> None:
    """Publishers fill what they do not use with what they like."""
    index = index_with(implementation)
    groups = [GroupSpec("full_attention", 16, sliding_window=-1, attention_chunk_size=-(2**63))]
    apply(index, CacheLayout("p", groups, 16, 16), PROMPT.stored(0, FULL))
    assert gpu_hit(index, PROMPT.tokens) == 160


def test_a_tier_that_holds_little_is_cleared_in_no_time_whatever_others_hold(
    implementation: Implementation,
) -> None:
    """A source that stores and clears in turn must not make the router walk over all blocks each
    time."""
    cleared = [BlockStored([7], None, [], CPU), AllBlocksCleared(CPU)] * 2000

    def seconds(blocks: int) -> float:
        index = index_with(implementation)
        other = BlockStored(list(range(1, 1 + blocks)), None, [], GPU)
        index.apply(SourceId("other"), EventBatch(0.0, [other]))
        apply(index, BlockStored(list(range(1, 5001)), None, [], GPU))
        payload = encode(EventBatch(0.0, cleared))
        start = time.process_time()
        assert index.apply(SOURCE, payload).removed == 2000
        return time.process_time() - start

    usual = max(seconds(1), seconds(2))
    assert seconds(200_000) < 8 * usual


def test_a_large_cache_that_is_cleared_begins_anew(implementation: Implementation) -> None:
    """At every update of an engine's weights, say. What it held may be taken away later, but nobody
    finds it any more: neither in the same batch, nor after many clears, nor what it had copies of.
    Other sources keep theirs."""
    long, short, other = Prefix(tokens(16 * 5000)), Prefix(tokens(160, first=1)), SourceId("other")
    index = index_with(implementation)
    index.add(other, LayoutHints(hash_seeds=()))
    held = [long.stored(0, FULL), long.stored(1, window(64)), long.stored(0, FULL, 0, 1600)]
    few = [short.stored(0, FULL), short.stored(1, window(64))]
    index.apply(other, EventBatch(0.0, list(held)))
    for _ in range(12):
        assert apply(index, *held).stored == 10_100
        assert gpu_hit(index, long.tokens) == 80_000
        result = apply(index, AllBlocksCleared(), *few)
        assert result == ApplyResult(stored=20, removed=10_100, cleared=True)
        assert (gpu_hit(index, long.tokens), gpu_hit(index, short.tokens)) == (0, 160)
        assert gpu_hit(index, long.tokens, other) == 80_000
        assert statistics(index).blocks == {(0, "GPU"): 10, (1, "GPU"): 10}
        assert removals(index, SOURCE) == 0
        assert apply(index, AllBlocksCleared()) == ApplyResult(removed=20, cleared=True)
    apply(index, *held)
    index.tidy()
    assert apply(index, AllBlocksCleared()).removed == 10_100
    while index.tidy():
        assert gpu_hit(index, long.tokens) == 0
    implementation.expect_sound(index)
    index.drop(other)
    implementation.expect_empty(index)


def test_a_large_tier_is_cleared_beside_another(implementation: Implementation) -> None:
    """Blocks that both of them hold stay in the other."""
    long, index = Prefix(tokens(16 * 5000)), index_with(implementation)
    apply(index, long.stored(0, FULL), long.offloaded(0, range(16, 160 + 1, 16)))
    assert apply(index, AllBlocksCleared()) == ApplyResult(
        removed=5000, cleared=True, has_lower_tiers=True
    )
    assert statistics(index).blocks == {(0, "CPU"): 10}
    assert index.match([*long.tokens, 1])[SOURCE] == Hit(0, 160, by_tier=(("CPU", 160),))
    implementation.expect_sound(index)


def test_a_large_lower_tier_that_is_cleared_alone(implementation: Implementation) -> None:
    """With nothing on the GPU beside it; in the middle of a run of batches, too."""
    long, few = Prefix(tokens(16 * 5000)), Prefix(tokens(160, first=1))
    for clear in (TierBlocksCleared("CPU"), AllBlocksCleared("CPU")):
        index = index_with(implementation)
        apply(index, long.stored(0, FULL), long.offloaded(0, range(16, 80_000 + 1, 16)))
        apply(index, AllBlocksCleared())
        assert apply(index, clear, few.stored(0, FULL)) == ApplyResult(stored=10, removed=5000)
        assert statistics(index).blocks == {(0, "GPU"): 10}
        assert gpu_hit(index, few.tokens) == 160
        implementation.expect_sound(index)
        index.drop(SOURCE)
        implementation.expect_empty(index)


@pytest.mark.parametrize("is_tidied", [False, True])
def test_an_offload_that_ends_after_a_large_clear_is_found(
    implementation: Implementation, is_tidied: bool
) -> None:
    """It names hashes alone: the key of each is remembered of what the GPU held."""
    long, index = Prefix(tokens(16 * 5000)), index_with(implementation)
    apply(index, long.stored(0, FULL))
    apply(index, AllBlocksCleared())
    while is_tidied and index.tidy():
        continue
    assert apply(index, long.offloaded(0, range(16, 1600 + 1, 16))).waiting == 0
    while index.tidy():
        continue
    assert statistics(index).unplaced == 0
    assert index.match([*long.tokens, 1])[SOURCE] == Hit(0, 1600, by_tier=(("CPU", 1600),))
    implementation.expect_sound(index)


def test_a_whole_fleet_is_cleared_and_leaves(implementation: Implementation) -> None:
    """Weights are updated everywhere at once, and again before the last time is worked off."""
    long, index = Prefix(tokens(16 * 4200)), implementation.create(None)
    sources = [SourceId(f"replica-{number}") for number in range(12)]
    for source in sources:
        index.add(source, LayoutHints(hash_seeds=()))
    for _ in range(3):
        for source in sources:
            index.apply(source, EventBatch(0.0, [long.stored(0, FULL)]))
        assert {gpu_hit(index, long.tokens, source) for source in sources} == {67_200}
        for source in sources:
            index.apply(source, EventBatch(0.0, [AllBlocksCleared()]))
        assert {gpu_hit(index, long.tokens, source) for source in sources} == {0}
        index.tidy()
    for source in sources[::2]:
        index.apply(source, EventBatch(0.0, [long.stored(0, FULL)]))
    for source in sources[1::2]:
        index.drop(source)
    assert {gpu_hit(index, long.tokens, source) for source in sources[::2]} == {67_200}
    implementation.expect_sound(index)
    for source in sources[::2]:
        index.drop(source)
    implementation.expect_empty(index)


@pytest.mark.parametrize("seed", range(40))
def test_no_well_formed_batch_makes_the_index_fail(
    implementation: Implementation, seed: int
) -> None:
    """The codec cannot refuse what only makes no sense: applying it must not fail half-way, nor may
    a look-up behind it."""
    nonsense = Nonsense(seed)
    index = implementation.create(SourceLimits(blocks=20, waiting_runs=5, tiers=2))
    if seed % 2:
        groups = [GroupSpec("full_attention", 2), GroupSpec("sliding_window", 2, 3)]
        apply(index, CacheLayout("p", groups, 2, 2, "sha256", HashChain.from_seed().none_hash))
    for _ in range(60):
        index.apply(SOURCE, encode(nonsense.batch()))
        prompt = nonsense.rng.choices(range(3), k=9)
        hit = index.match(
            prompt, nonsense.rng.choice([None, "sql"]), nonsense.rng.choice([None, "salt"])
        )[SOURCE]
        assert 0 <= hit.gpu_cached_tokens <= 8
        assert hit.gpu_cached_tokens <= hit.cached_tokens <= 9
        index.explain(index.prepare(prompt), SOURCE)
        implementation.expect_sound(index)


# --- sources --------------------------------------------------------------------------------------


def test_a_source_is_held_from_its_first_batch_until_it_is_dropped(index: PrefixIndex) -> None:
    """Also while it holds no block: what is not held is not asked about."""
    assert not index.holds(SOURCE)
    apply(index)
    assert index.holds(SOURCE)
    assert index.match(PROMPT.tokens) == {SOURCE: Hit(0, 0)}
    index.clear(SOURCE)
    assert index.holds(SOURCE)
    index.drop(SOURCE)
    assert not index.holds(SOURCE)
    assert (index.match(PROMPT.tokens), index.statistics()) == ({}, {})


def test_copies_that_seemed_left_when_the_cache_was_cleared_teach_nothing_afterwards(
    implementation: Implementation,
) -> None:
    """A block that is stored again after a clear was gone: it does not show that the engine leaves
    removals out."""
    index = index_with(implementation)
    for _ in range(10):
        apply(index, PROMPT.stored(0, FULL), PROMPT.stored(0, FULL))
        apply(index, PROMPT.removed(0, range(16, 161, 16)), AllBlocksCleared())
        apply(index, PROMPT.stored(0, FULL), AllBlocksCleared())
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(0, FULL), PROMPT.removed(0, [160]))
    assert gpu_hit(index, PROMPT.tokens) == 160


def test_clearing_or_dropping_an_unknown_source_does_nothing(index: PrefixIndex) -> None:
    """A replica may go before its first event."""
    index.clear(SOURCE)
    index.drop(SOURCE)
    assert not index.holds(SOURCE)


def test_a_source_that_is_added_again_starts_from_nothing(index: PrefixIndex) -> None:
    """Its replica was configured again, perhaps with another layout."""
    index.add(SOURCE, LayoutHints(eagle=True))
    apply(index, PROMPT.stored(0, FULL))
    index.add(SOURCE)
    assert statistics(index).blocks == {}
    apply(index, PROMPT.stored(0, FULL))
    assert gpu_hit(index, PROMPT.tokens) == 160


def test_an_empty_source_says_that_it_is_empty(implementation: Implementation) -> None:
    """Nothing is known, assumed, or missing."""
    index = index_with(implementation)
    assert statistics(index) == SourceStatistics(
        blocks={},
        units={},
        unplaced=0,
        ambiguous=0,
        waiting=WaitingStatistics(0, 0, 0),
        layout=None,
        hash_algorithm=None,
        assumptions=(),
        is_incomplete=False,
    )


# --- hashes that claim one prefix, and runs without a parent --------------------------------------


def test_of_two_live_hashes_of_one_prefix_the_newer_is_found_when_the_older_goes(
    implementation: Implementation,
) -> None:
    """Before vLLM 0.17 salts are not on the wire, and two tenants' blocks claim the same place."""
    index = index_with(implementation)
    older, newer = PROMPT, Prefix(PROMPT.tokens, seed="another tenant's")
    apply(index, older.stored(0, FULL), newer.stored(0, FULL))
    assert statistics(index).ambiguous == 10
    apply(index, older.removed(0, range(16, 161, 16)))
    assert gpu_hit(index, PROMPT.tokens) == 160
    apply(index, newer.removed(0, [160]))
    assert gpu_hit(index, PROMPT.tokens) == 144


def test_an_adapters_run_waits_for_its_parent_although_the_hash_function_is_known(
    implementation: Implementation,
) -> None:
    """vLLM hashes the adapter's path too, which no event shows: only the parent tells its place."""
    index = implementation.create(None)
    index.add(SOURCE, LayoutHints(hash_seeds=("0",)))
    apply(index, Prefix(tokens(160), seed="0").kept(0, FULL, [16, 160]))
    index.match([*tokens(160), 1])
    assert statistics(index).hash_algorithm == "sha256"
    adapted = Prefix(tokens(160, first=50_000), lora="an adapter")
    apply(index, adapted.stored(0, FULL, 80))
    assert statistics(index).waiting.runs == 1
    apply(index, adapted.stored(0, FULL, 0, 80))
    assert gpu_hit(index, adapted.tokens, lora_name="an adapter") == 160


# --- what the feed acts on ------------------------------------------------------------------------


def test_a_batch_says_whether_anything_is_below_the_gpu(implementation: Implementation) -> None:
    """A cleared GPU makes a source known again only where nothing else is held."""
    index = index_with(implementation)
    assert not apply(index, PROMPT.stored(0, FULL)).has_lower_tiers
    assert apply(index, PROMPT.offloaded(0, [16])).has_lower_tiers
    assert apply(index).has_lower_tiers
    assert not apply(index, PROMPT.removed(0, [16], medium=CPU)).has_lower_tiers


def test_only_the_batch_that_lost_blocks_is_incomplete(implementation: Implementation) -> None:
    """The feed rebuilds a source once for each loss, not for every batch behind it."""
    index = index_with(implementation, blocks=6, waiting_batches=1)
    assert apply(index, PROMPT.stored(0, FULL)).is_incomplete
    assert not apply(index, AllBlocksCleared()).is_incomplete
    assert not apply(index, orphan(0)).is_incomplete
    assert not apply(index).is_incomplete
    result = apply(index)
    assert (result.given_up, result.is_incomplete) == (1, True)
    assert not apply(index).is_incomplete


def test_a_run_given_up_is_no_loss_where_the_hash_function_is_known(
    implementation: Implementation,
) -> None:
    """Every look-up hashes the prompt as the engine does, and finds the run's blocks."""
    index = implementation.create(SourceLimits(waiting_batches=1))
    prompt = Prefix(tokens(64), seed=DEFAULT_SEED)
    apply(index, prompt.stored(0, FULL, 32))
    apply(index, replace(prompt.kept(0, FULL, [16]), token_ids=prompt.tokens[:32]))
    result = apply(index)
    assert (result.given_up, result.is_incomplete) == (1, False)
    assert statistics(index).hash_algorithm == "sha256"
    assert not statistics(index).is_incomplete


# --- prompts --------------------------------------------------------------------------------------


def test_a_prepared_prompt_is_matched_like_its_tokens(index: PrefixIndex) -> None:
    """Prepared before or after the events that it meets."""
    early = index.prepare([*PROMPT.tokens, 1], extra_steps=(64,))
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16]))
    late = index.prepare([*PROMPT.tokens, 1])
    assert index.match_prompt(early) == index.match_prompt(late) == {SOURCE: Hit(160, 160)}
    apply(index, PROMPT.removed(0, [16, 160]))
    found = Hit(0, 16, (("CPU", 16),))
    assert index.match_prompt(early) == index.match_prompt(late) == {SOURCE: found}


@pytest.mark.parametrize("is_layout_known", [False, True])
def test_prefix_keys_are_equal_where_prefixes_are(
    index: PrefixIndex, is_layout_known: bool
) -> None:
    """The router remembers by them what it has just sent where, whatever it knows by then."""
    keys = index.prepare(tokens(200), extra_steps=(64,)).prefix_keys(64)
    if is_layout_known:
        apply(index, PROMPT.stored(0, FULL))
    assert len(set(keys)) == 3
    assert index.prepare(tokens(200), extra_steps=(64,)).prefix_keys(64) == keys
    assert index.prepare(tokens(192), extra_steps=(64,)).prefix_keys(64) == keys
    assert index.prepare([*tokens(190), 1, 2]).prefix_keys(64)[:2] == keys[:2]
    assert index.prepare([*tokens(190), 1, 2]).prefix_keys(64)[2] != keys[2]
    assert index.prepare(tokens(63)).prefix_keys(64) == []
    for other in ({"lora_name": "sql"}, {"cache_salt": "tenant-a"}, {"extra_keys": [["image"]]}):
        prepared = index.prepare(tokens(200), extra_steps=(64,), **other)  # type: ignore[arg-type]
        assert not set(prepared.prefix_keys(64)) & set(keys)


def test_prefix_keys_tell_media_apart_wherever_they_are_in_the_prompt(index: PrefixIndex) -> None:
    """An entry of extra keys is about one hash block, not about one step of the caller."""
    apply(index, PROMPT.stored(0, FULL))
    pictures = [[None] * 11 + [[[name, 0]]] for name in ("cat", "dog")]
    cat, dog = (
        index.prepare(tokens(200), extra_keys=picture, extra_steps=(64,)).prefix_keys(64)
        for picture in pictures
    )
    assert cat[:2] == dog[:2]
    assert cat[2] != dog[2]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after a microsecond, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_prompts_are_prepared_in_another_thread_while_sources_come_and_go(
    index: PrefixIndex,
) -> None:
    """Hashing a million tokens takes some 40 ms, too long for the event loop."""
    prompt = tokens(40)
    for number in range(200):
        index.add(SourceId(f"replica-{number}"))
    is_over = threading.Event()

    def prepare_until_it_is_over() -> HashedPrompt:
        while True:
            prepared = index.prepare(prompt)
            if is_over.is_set():
                return prepared

    with ThreadPoolExecutor(1) as threads:
        prepared = threads.submit(prepare_until_it_is_over)
        for number in range(2000):
            source = SourceId(f"replica-{number % 200}")
            index.drop(source)
            index.apply(source, EventBatch(0.0, [Prefix(prompt[:32]).stored(0, FULL)]))
        is_over.set()
        assert set(index.match_prompt(prepared.result()).values()) == {Hit(32, 32)}


def test_a_group_alone_may_allow_more_than_all_together(index: PrefixIndex) -> None:
    """The explanation shows an operator which group cut the hit."""
    apply(index, PROMPT.stored(0, FULL), PROMPT.stored(1, window(64)), PROMPT.removed(1, [128]))
    prompt = index.prepare([*PROMPT.tokens, 1])
    assert index.match_prompt(prompt) == {SOURCE: Hit(112, 112)}
    assert index.explain(prompt, SOURCE) == (
        GroupHit(0, "full_attention", 160),
        GroupHit(1, "sliding_window", 112),
    )


def test_the_shortest_prompt_that_can_have_a_hit_is_explained(index: PrefixIndex) -> None:
    """Two tokens, of which the last is always computed."""
    apply(index, PROMPT.stored(0, dataclasses.replace(FULL, block_size=1), 0, 4))
    prompt = index.prepare(PROMPT.tokens[:2])
    assert index.match_prompt(prompt) == {SOURCE: Hit(1, 1)}
    assert index.explain(prompt, SOURCE) == (GroupHit(0, "full_attention", 1),)


def test_there_is_nothing_to_explain_of_an_unknown_source_or_layout(index: PrefixIndex) -> None:
    """A replica may be asked about before its first event."""
    prompt = index.prepare(PROMPT.tokens)
    assert index.explain(prompt, SOURCE) == ()
    index.add(SOURCE)
    assert index.explain(prompt, SOURCE) == ()


# --- keys that processes share --------------------------------------------------------------------


def test_indexes_of_one_secret_have_the_same_keys_and_read_each_others() -> None:
    """Workers and routers tell each other what is being computed by these keys."""
    one, same, other = (PrefixIndex(secret=secret) for secret in (b"s", b"s", b"t"))
    keys = [list(index.prepare(range(1000)).prefix_keys(64)) for index in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert one.key_space == same.key_space != other.key_space
    assert unpack_keys(pack_keys(keys[0])) == keys[1]
