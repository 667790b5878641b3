"""One source's bookkeeping: what a batch does, what is bounded, and what is said when a bound was
hit."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
from msgspec.structs import replace

from kvevents.codec import decode, encode
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
)
from kvevents.hashing import DEFAULT_SEED, HashChain, to_wire_int
from router.index import ApplyResult, LayoutHints, SourceLimits, SourceStatistics, WaitingStatistics
from router.index.reference.index import ReferenceIndex
from router.index.reference.keys import KeySpace
from router.index.reference.source import Source
from tests.support.blocks import FULL, SOURCE, Prefix, gpu_hit, tokens, window

PROMPT = Prefix(tokens(160))


def source_with(**limits: int) -> Source:
    """A source with a hash function nobody can find, so that only its events place blocks."""
    return Source(KeySpace(), LayoutHints(hash_seeds=()), SourceLimits(**limits))


def index_with(**limits: int) -> ReferenceIndex:
    index = ReferenceIndex(limits=SourceLimits(**limits))
    index.add(SOURCE, LayoutHints(hash_seeds=()))
    return index


def apply(target: Source | ReferenceIndex, *events: Event) -> ApplyResult:
    batch = EventBatch(0.0, list(events))
    return target.apply(batch) if isinstance(target, Source) else target.apply(SOURCE, batch)


def statistics(index: ReferenceIndex) -> SourceStatistics:
    return index.statistics()[SOURCE]


def orphan(number: int, blocks: int = 1) -> BlockStored:
    """A run whose parent nobody has announced."""
    prompt = Prefix(tokens(16 * (blocks + 1), first=100_000 * (number + 1)))
    return prompt.stored(0, FULL, 16)


def parent_of(number: int, blocks: int = 1) -> BlockStored:
    prompt = Prefix(tokens(16 * (blocks + 1), first=100_000 * (number + 1)))
    return prompt.stored(0, FULL, 0, 16)


# --- what a batch does ----------------------------------------------------------------------------


def test_a_batch_tells_what_it_did() -> None:
    """Metrics are made of these numbers."""
    source = source_with()
    assert apply(source, PROMPT.stored(0, FULL)) == ApplyResult(stored=10, layout_changed=True)
    assert apply(source, PROMPT.stored(0, FULL, 0, 32)) == ApplyResult(stored=2)
    assert apply(source, PROMPT.removed(0, [16, 160])) == ApplyResult(removed=2)
    assert apply(source, PROMPT.removed(0, [160]), PROMPT.removed(1, [16])) == ApplyResult(
        skipped=2
    )
    assert apply(source, orphan(0, blocks=3)) == ApplyResult(stored=3, waiting=3)
    assert apply(source, AllBlocksCleared()) == ApplyResult(removed=13, cleared=True)
    assert apply(source) == ApplyResult()


def test_events_of_unknown_type_are_counted_as_skipped() -> None:
    """The codec left them out; the count must not be lost."""
    assert source_with().apply(EventBatch(0.0, [], skipped=3)) == ApplyResult(skipped=3)


def test_an_event_without_hashes_and_tokens_does_nothing() -> None:
    """An empty run of an engine whose hash function is known."""
    index = ReferenceIndex()
    layout = CacheLayout(
        "p", [GroupSpec("full_attention", 16)], 16, 16, "sha256", HashChain.from_seed().none_hash
    )
    apply(index, layout)
    assert apply(index, BlockStored([], None, [], "GPU", 0, block_size=16)) == ApplyResult()
    assert statistics(index).blocks == {}


@pytest.mark.parametrize("medium", ["GPU", "gpu", "Gpu", None, ""])
def test_the_gpu_goes_by_several_names(medium: str | None) -> None:
    """Engines before vLLM 0.10.2 name no medium at all: layout and blocks must come out the
    same."""
    index = index_with()
    apply(index, PROMPT.stored(0, FULL, medium=medium))
    assert statistics(index).blocks == {(0, "GPU"): 10}
    assert gpu_hit(index, PROMPT.tokens) == 160
    apply(index, PROMPT.removed(0, [160], medium="gpu"))
    assert gpu_hit(index, PROMPT.tokens) == 144


def test_an_event_without_a_group_is_of_group_0() -> None:
    """A removal may name the group that the store did not."""
    index = index_with()
    apply(index, replace(PROMPT.stored(0, FULL), group_idx=None), PROMPT.removed(0, [160]))
    assert gpu_hit(index, PROMPT.tokens) == 144


def test_a_removal_from_one_tier_or_group_leaves_the_others() -> None:
    """The same hash is in all of them."""
    index = index_with()
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


def test_a_hash_with_copies_left_anywhere_keeps_its_place() -> None:
    """Only the last copy of all groups and tiers takes the name with it."""
    index = index_with()
    apply(
        index,
        PROMPT.stored(0, FULL),
        PROMPT.offloaded(0, [16]),
        PROMPT.removed(0, range(16, 161, 16)),
    )
    assert len(index.sources[SOURCE].hash_at) == 1
    hit = index.match(PROMPT.tokens)[SOURCE]
    assert (hit.gpu_cached_tokens, hit.cached_tokens) == (0, 16)


def test_two_live_hashes_of_one_prefix_are_counted_as_ambiguous() -> None:
    """Something the events do not show goes into the hash: salts before vLLM 0.17."""
    index = index_with()
    apply(index, PROMPT.stored(0, FULL))
    assert statistics(index).ambiguous == 0
    apply(index, Prefix(PROMPT.tokens, seed="and a hidden salt").stored(0, FULL))
    assert statistics(index).ambiguous == 10


def test_a_hash_that_covers_the_next_tokens_is_found_only_with_them() -> None:
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
    index = index_with()
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


def test_no_more_runs_wait_than_allowed_and_the_oldest_is_given_up() -> None:
    """The youngest is the likeliest to be placed."""
    index = index_with(waiting_runs=3)
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


def test_no_more_tokens_wait_than_allowed() -> None:
    """One run may carry a whole prompt."""
    index = index_with(waiting_tokens=100)
    apply(index, orphan(0, blocks=4))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (64, 0)
    apply(index, orphan(1, blocks=3))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (48, 1)
    apply(index, orphan(2, blocks=10))
    assert (statistics(index).waiting.tokens, statistics(index).waiting.given_up) == (0, 3)


def test_no_run_waits_longer_than_allowed() -> None:
    """A parent that did not come in ten thousand batches will not come; heartbeats count as time,
    too."""
    index = index_with(waiting_batches=5)
    apply(index, orphan(0))
    for _ in range(5):
        apply(index)
    assert (statistics(index).waiting.runs, statistics(index).is_incomplete) == (1, False)
    apply(index)
    assert (statistics(index).waiting.runs, statistics(index).waiting.given_up) == (0, 1)
    assert statistics(index).is_incomplete
    assert statistics(index).unplaced == 1


def test_a_run_that_was_given_up_is_still_held_and_found_once_it_is_announced_again() -> None:
    """Given up is its place, not its presence."""
    index = index_with(waiting_runs=0)
    apply(index, orphan(0))
    apply(index, parent_of(0))
    assert gpu_hit(index, tokens(32, first=100_000)) == 16
    apply(index, orphan(0))
    assert gpu_hit(index, tokens(32, first=100_000)) == 32


def test_a_known_hash_function_needs_no_waiting() -> None:
    """Every look-up hashes the prompt: nothing is lost by giving up, and nothing waits."""
    index = ReferenceIndex(limits=SourceLimits(waiting_runs=0))
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


def test_a_child_of_its_own_block_waits_and_ends() -> None:
    """No engine sends it; nobody may hang the router with it either."""
    index = index_with(waiting_runs=10)
    apply(index, BlockStored([1], 1, tokens(16), GPU, 0, block_size=16))
    apply(
        index,
        BlockStored([2], 3, tokens(16), GPU, 0, block_size=16),
        BlockStored([3], 2, tokens(16), GPU, 0, block_size=16),
    )
    assert statistics(index).waiting.runs == 3
    apply(index, BlockStored([1, 3], None, tokens(32), GPU, 0, block_size=16))
    assert statistics(index).waiting.runs == 0


def test_a_chain_of_a_thousand_orphans_is_placed_at_once() -> None:
    """Without recursion: one parent may set free a whole conversation."""
    index, prompt = index_with(), Prefix(tokens(16 * 2000))
    for start in range(16 * 1999, 0, -16):
        apply(index, prompt.stored(0, FULL, start, start + 16))
    assert statistics(index).waiting.runs == 1999
    apply(index, prompt.stored(0, FULL, 0, 16))
    assert statistics(index).waiting.runs == 0
    assert gpu_hit(index, prompt.tokens) == 32_000


# --- other bounds ---------------------------------------------------------------------------------


def test_no_more_blocks_are_held_than_allowed_and_the_source_is_incomplete_from_there_on() -> None:
    """A source over its bound answers too low; the feed must know that it does."""
    index = index_with(blocks=6)
    result = apply(index, PROMPT.stored(0, FULL))
    assert (result.stored, result.overflow, result.skipped) == (6, 4, 4)
    assert statistics(index).blocks == {(0, GPU): 6}
    assert gpu_hit(index, PROMPT.tokens) == 96
    assert statistics(index).is_incomplete
    apply(index, AllBlocksCleared())
    assert statistics(index).is_incomplete
    index.clear(SOURCE)
    assert not statistics(index).is_incomplete


def test_blocks_are_bounded_over_all_groups_and_tiers() -> None:
    """The bound is on memory, not on a table."""
    index = index_with(blocks=15)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, range(16, 161, 16)))
    assert statistics(index).blocks == {(0, GPU): 10, (0, CPU): 5}
    apply(index, PROMPT.removed(0, [160, 144]), PROMPT.offloaded(1, [16, 32, 48]))
    assert statistics(index).blocks == {(0, GPU): 8, (0, CPU): 5, (1, CPU): 2}


def test_no_more_tiers_are_held_than_allowed() -> None:
    """Their names come from the wire; groups of a known tier are still welcome."""
    index = index_with(tiers=2)
    apply(index, PROMPT.stored(0, FULL), PROMPT.offloaded(0, [16]), PROMPT.stored(1, FULL))
    result = apply(index, PROMPT.offloaded(0, [16], medium="DISK"))
    assert (result.stored, result.overflow) == (0, 1)
    assert statistics(index).is_incomplete
    assert set(statistics(index).blocks) == {(0, GPU), (0, CPU), (1, GPU)}


def test_as_many_places_are_remembered_as_allowed() -> None:
    """An offload tier announces blocks after the GPU has evicted them; what comes too late is held,
    and said to be unplaced."""
    index = index_with(forgotten=4)
    apply(index, PROMPT.stored(0, FULL), PROMPT.removed(0, range(16, 161, 16)))
    apply(index, PROMPT.offloaded(0, range(16, 161, 16)))
    assert statistics(index).unplaced == 6
    assert any("6 blocks cannot be placed" in text for text in statistics(index).assumptions)
    source = index.sources[SOURCE]
    assert len(source._forgotten) == 0
    apply(index, PROMPT.removed(0, range(16, 161, 16), medium=CPU))
    assert len(source._forgotten) == 4
    assert (source._blocks, source.hash_at, source.unplaced) == ({}, {}, 0)


def nonsense(name: str, number: int) -> BlockStored:
    """A run that waits for a parent, small in tokens and large in something else."""
    run = BlockStored([number], 7, tokens(16), GPU, 0, block_size=16)
    if name == "more extra keys than blocks":
        return replace(run, extra_keys=[[f"key {key}"] for key in range(1000)])
    if name == "many extra keys in one block":
        return replace(run, extra_keys=[[f"key {key}" for key in range(1000)]])
    return replace(run, block_hashes=[number] * 1000, token_ids=[5] * 1000, block_size=1)


@pytest.mark.parametrize(
    "name",
    [
        "more extra keys than blocks",
        "many extra keys in one block",
        "runs shorter than what their hashes cover",
    ],
)
def test_what_waits_is_bounded_in_memory_and_not_only_in_tokens(name: str) -> None:
    """A publisher that sends nonsense must not fill the router with it: 100 tokens may wait here,
    not megabytes."""
    source = source_with(waiting_tokens=100)
    wide = [[5] * 2000] if name.startswith("runs") else None
    apply(
        source, BlockStored([0], None, tokens(16), GPU, 0, block_size=16, lookahead_token_ids=wide)
    )
    payloads = [
        encode(EventBatch(0.0, [nonsense(name, 2000 + number), BlockRemoved([], GPU)]))
        for number in range(40)
    ]
    tracemalloc.start()
    try:
        for payload in payloads:
            source.apply(decode(payload))
        waiting, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert waiting < 150_000


@pytest.mark.parametrize(
    "first", [b"\xff", b"\xff" * 20_000], ids=["the first one short", "all of them long"]
)
def test_the_names_of_blocks_are_bounded_in_memory(first: bytes) -> None:
    """A count of blocks bounds nothing if one name may be as long as a message."""
    source = source_with()
    hashes: list[BlockHash] = [first, *(bytes([number]) * 20_000 for number in range(200))]
    stored = BlockStored(hashes, b"p" * 20_000 if len(first) > 1 else 5, [], GPU, 0)
    payload = encode(EventBatch(0.0, [stored]))
    tracemalloc.start()
    try:
        source.apply(decode(payload))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(names) for names in source.held.values()) == 201
    assert held < 200_000


# --- memory ---------------------------------------------------------------------------------------


def test_blocks_that_came_and_went_leave_nothing_but_the_bounded_memory_of_places() -> None:
    """Memory follows what a replica holds, not what it ever held."""
    source = source_with(forgotten=100)
    for number in range(300):
        hashes: list[BlockHash] = list(range(number * 500, number * 500 + 500))
        apply(
            source,
            BlockStored(hashes, None, tokens(500, number), GPU, 0, block_size=1),
            BlockRemoved(hashes, GPU, 0),
        )
    assert (source.held, source.hash_at, source._blocks, source.unplaced) == ({}, {}, {}, 0)
    assert len(source._forgotten) == 100
    assert source.statistics().waiting == WaitingStatistics(0, 0, 0)


def test_clearing_the_gpu_takes_every_copy() -> None:
    """Counts do not survive a reset."""
    index = index_with()
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


@pytest.mark.parametrize("seed", range(40))
def test_no_well_formed_batch_makes_the_index_fail(seed: int) -> None:
    """The codec cannot refuse what only makes no sense: applying it must not fail half-way, nor may
    a look-up behind it."""
    nonsense, index = (
        Nonsense(seed),
        ReferenceIndex(limits=SourceLimits(blocks=20, waiting_runs=5, tiers=2)),
    )
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
        _expect_sound(index.sources[SOURCE])


def _expect_sound(source: Source) -> None:
    """What is written down twice says the same twice."""
    copies = Counter[BlockHash]()
    for hashes in source.held.values():
        assert all(count > 0 for count in hashes.values())
        copies.update(hashes)
    assert copies == {block_hash: block.copies for block_hash, block in source._blocks.items()}
    assert source._held_total == sum(map(len, source.held.values())) <= source.limits.blocks
    assert source.unplaced == sum(block.key is None for block in source._blocks.values())
    assert all(source._blocks[block_hash].key == key for key, block_hash in source.hash_at.items())
    assert (
        source.statistics().waiting.runs
        == sum(map(len, source._waiting.by_parent.values()))
        <= source.limits.waiting_runs
    )
