"""The state of a cache: a snapshot must replace everything that was published before it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.cache_state import BATCH_WEIGHT, BLOCK_WEIGHT, REMEMBERED_CONTENTS, CacheState
from kvevents.codec import decode, encode
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    TierBlocksCleared,
)
from kvevents.hashing import DEFAULT_SEED, HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from router.cli.recordings import Query, RecordingReader
from router.index.base import SourceId
from router.index.layout_learner import LayoutHints
from tests.oracle.index.index import ReferenceIndex
from tests.support.blocks import Prefix, copies_held, mamba, tokens, window

STREAMS = sorted((Path(__file__).parents[1] / "conformance" / "streams").glob("*.jsonl.gz"))
IN_CHUNKS = re.compile(r"offload_\w+_chunk[2-9]")
"""Recorded with tiers that keep several blocks as one and name the last. How many shows in the
lengths and ends of their events, which a snapshot does not keep: it begins with a `CacheLayout`,
and a publisher with one announces every block that a tier can bring back."""
FOLLOWED = SourceId("followed from the start")

FULL = KVCacheGroup(GroupKind.FULL, 4)
LAYOUTS = {
    "full": [FULL],
    "full and window": [FULL, window(7, 4)],
    "window first": [window(7, 4), FULL],
    "full and Mamba": [mamba(4), FULL],
    "two block sizes": [KVCacheGroup(GroupKind.FULL, 8), window(9, 4)],
}
PROMPTS = [
    Prefix(tokens(24), 4),
    Prefix(tokens(12) + tokens(12, 2000), 4),
    Prefix(tokens(24, 3000), 4, as_int=False),
    Prefix(tokens(24), 4, salt="pepper"),
    Prefix(tokens(24), 4, lora="sql"),
]


def state_of(groups: Sequence[KVCacheGroup], chain: HashChain | None = None) -> CacheState:
    return CacheState(announce(KVCacheLayout.build(groups), chain))


def announced(state: CacheState) -> list[Event]:
    """Every event of a snapshot, as it is read from the wire."""
    batches = [decode(encode(EventBatch(0.0, batch, 0))) for batch in state.snapshot().batches()]
    return [event for batch in batches for event in batch.events]


def apply(index: ReferenceIndex, source: SourceId, events: Sequence[Event]) -> None:
    index.apply(source, encode(EventBatch(0.0, list(events), 0)))


def stored(state: CacheState) -> list[BlockStored]:
    return [event for event in announced(state) if isinstance(event, BlockStored)]


# --- the whole state ------------------------------------------------------------------------------


class Engine:
    """What an engine might do: blocks are stored twice, parents removed first, and the CPU stores
    blocks that the GPU has or had."""

    def __init__(self, seed: int, groups: Sequence[KVCacheGroup]) -> None:
        self._random = Random(seed)
        self._groups = groups
        self._seen: dict[tuple[int, int], set[int]] = {}

    def history(self) -> list[Event]:
        return [self._event() for _ in range(self._random.randint(1, 40))]

    def _event(self) -> Event:
        which, index = (
            self._random.randrange(len(PROMPTS)),
            self._random.randrange(len(self._groups)),
        )
        prompt, group, choice = PROMPTS[which], self._groups[index], self._random.random()
        seen = self._seen.setdefault((which, index), set())
        if choice < 0.45 or not seen:
            start = self._random.choice([0, 0, 8, 16])
            end = self._random.choice(range(start + 8, 25, 8))
            seen |= set(range(start + group.block_size, end + 1, group.block_size))
            return prompt.stored(index, group, start, end)
        ends = self._random.sample(sorted(seen), self._random.randint(1, min(3, len(seen))))
        if choice < 0.7:
            return prompt.removed(index, ends)
        if choice < 0.97:
            return (
                prompt.offloaded(index, ends)
                if choice < 0.85
                else prompt.removed(index, ends, "CPU")
            )
        return AllBlocksCleared()


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_late_joiner_holds_what_a_follower_does_and_finds_no_less_of_it(
    name: str, seed: int
) -> None:
    """This is what a snapshot is for; one missing copy is a wrong hit later.

    It may find more: a follower drops the tokens of a run that waits for its parent when the run's
    blocks are removed.
    """
    events = Engine(seed, LAYOUTS[name]).history()
    state, index = state_of(LAYOUTS[name]), ReferenceIndex()
    apply(index, FOLLOWED, [state.layout, *events])
    state.apply(events)
    late = _join(index, state, "late")
    held = copies_held(index, FOLLOWED)
    assert copies_held(index, late) == held
    assert state.blocks == sum(len(hashes) for hashes in held.values())
    for prompt in PROMPTS:
        hits = index.match([*prompt.tokens, 1], prompt.lora, prompt.salt)
        assert hits[late].gpu_cached_tokens >= hits[FOLLOWED].gpu_cached_tokens
        assert hits[late].cached_tokens >= hits[FOLLOWED].cached_tokens


def test_the_histories_reach_what_is_interesting() -> None:
    """Random events that never lead to a hit in any tier would prove nothing."""
    index, totals = ReferenceIndex(), {"gpu": 0, "lower": 0, "copies": 0}
    for seed in range(100):
        source = SourceId(str(seed))
        state = state_of([FULL])
        apply(index, source, [state.layout, *Engine(seed, [FULL]).history()])
        totals["copies"] += (
            max(max(held.values()) for held in copies_held(index, source).values() or [{0: 0}]) > 1
        )
    for prompt in PROMPTS:
        for hit in index.match([*prompt.tokens, 1], prompt.lora, prompt.salt).values():
            totals["gpu"] += hit.gpu_cached_tokens > 0
            totals["lower"] += hit.cached_tokens > hit.gpu_cached_tokens
    assert min(totals.values()) > 20, totals


def test_a_snapshot_says_where_a_tier_is_and_whose() -> None:
    """Two tiers may have one name. Without the words a shared block would seem to be the
    replica's own, or the other way round."""
    state, prompt = state_of([FULL]), PROMPTS[0]
    shared = {"locality": "REMOTE", "ownership": "bucket"}
    ends, one = range(4, 25, 4), prompt.offloaded(0, [4, 8], "STORAGE")
    state.apply(
        [
            prompt.stored(0, FULL),
            replace(one, locality="LOCAL"),
            replace(one, **shared),
            replace(prompt.removed(0, [8], "STORAGE"), **shared),
            prompt.removed(0, ends),
        ]
    )
    found = {(event.locality, event.ownership): event.block_hashes for event in stored(state)}
    assert found == {
        ("LOCAL", None): [prompt.hash_at(4), prompt.hash_at(8)],
        ("REMOTE", "bucket"): [prompt.hash_at(4)],
    }
    assert state.blocks == 3
    state.apply([TierBlocksCleared("STORAGE")])
    assert (state.blocks, stored(state)) == (0, [])


@pytest.mark.parametrize(
    "path",
    [path for path in STREAMS if not IN_CHUNKS.match(path.name)],
    ids=lambda path: path.name.removesuffix(".jsonl.gz"),
)
def test_whoever_joins_a_recorded_engine_late_predicts_every_later_query(path: Path) -> None:
    """Real engines leave holes, store twice and evict in their own order; a snapshot must carry all
    of it."""
    with RecordingReader(path) as recording:
        hints = recording.header.hints(learn_layout=False)
        records = list(recording)
    layout = KVCacheLayout.build(
        hints.groups, hints.hash_block_size, hints.scheduler_block_size, hints.eagle
    )
    state, index, late = CacheState(announce(layout)), ReferenceIndex(), []
    for number, record in enumerate(records):
        if number % (len(records) // 3) == 0:
            late.append(_join(index, state, f"joined at {number}", hints))
        if isinstance(record, Query):
            hits = index.match(record.query, record.lora, record.salt, record.extra_keys)
            assert {source: hits[source].cached_tokens for source in late} == dict.fromkeys(
                late, record.hit
            )
        else:
            state.apply(decode(record).events)
            for source in late:
                index.apply(source, record)
    assert len(late) >= 3


@pytest.mark.parametrize(
    "path",
    [path for path in STREAMS if IN_CHUNKS.match(path.name)],
    ids=lambda path: path.name.removesuffix(".jsonl.gz"),
)
def test_whoever_joins_an_engine_with_chunks_late_predicts_what_others_do(path: Path) -> None:
    """With the layout, which says that every block stands for itself, the events are as good as the
    snapshot: not what the recorded engine meant, but the same for all who follow it."""
    with RecordingReader(path) as recording:
        hints = recording.header.hints(learn_layout=False)
        records = list(recording)
    layout = announce(
        KVCacheLayout.build(
            hints.groups, hints.hash_block_size, hints.scheduler_block_size, hints.eagle
        )
    )
    state, index, sources = CacheState(layout), ReferenceIndex(), [FOLLOWED]
    apply(index, FOLLOWED, [layout])
    hits: Counter[int] = Counter()
    for number, record in enumerate(records):
        if number % (len(records) // 3) == 0:
            sources.append(_join(index, state, f"joined at {number}"))
        if isinstance(record, Query):
            found = index.match(record.query, record.lora, record.salt, record.extra_keys)
            assert {found[source] for source in sources} == {found[FOLLOWED]}
            hits[found[FOLLOWED].cached_tokens] += 1
        else:
            state.apply(decode(record).events)
            for source in sources:
                index.apply(source, record)
    assert len(sources) >= 4
    assert len(hits) > 3, "prompts with hits of several lengths"


def _join(
    index: ReferenceIndex, state: CacheState, name: str, hints: LayoutHints | None = None
) -> SourceId:
    """A new source made from a snapshot; with *hints* without its layout, as the recorded engines
    announced none."""
    source = SourceId(name)
    index.add(source, hints)
    for batch in islice(state.snapshot().batches(), 0 if hints is None else 1, None):
        apply(index, source, batch)
    return source


def test_a_window_alone_is_found_through_the_announced_hash_function() -> None:
    """Ancestors that slid out are removed: only the engine's own hashes place the other blocks."""
    group = window(7, 4)
    prompt = Prefix(tokens(24), 4, as_int=False, seed=DEFAULT_SEED)
    state, index = state_of([group], HashChain.from_seed("sha256")), ReferenceIndex()
    state.apply([prompt.stored(0, group), prompt.removed(0, [4, 8, 12, 16])])
    late = _join(index, state, "late")
    assert index.match([*prompt.tokens, 1])[late].gpu_cached_tokens == 24


# --- how it is told -------------------------------------------------------------------------------


def test_the_layout_is_the_first_event_of_a_batch_of_its_own() -> None:
    """A consumer must know the groups before it reads their blocks."""
    state = state_of([FULL])
    state.apply([PROMPTS[0].stored(0, FULL)])
    first = next(state.snapshot().batches())
    assert first == [state.layout]


def test_contiguous_blocks_of_several_events_become_one_run() -> None:
    """A snapshot of a large cache should be no larger than necessary."""
    state = state_of([FULL])
    state.apply([PROMPTS[0].stored(0, FULL, start, start + 4) for start in range(0, 24, 4)])
    (event,) = stored(state)
    assert event.block_hashes == PROMPTS[0].hashes
    assert event.token_ids == PROMPTS[0].tokens
    assert event.parent_block_hash is None
    assert event.block_size is None


def test_a_parent_stored_after_its_children_is_announced_before_them() -> None:
    """Consumers place a block by its parent: the other way round they have to wait for it."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply(
        [
            prompt.stored(0, FULL, 12, 24),
            prompt.stored(0, FULL, 4, 12),
            prompt.stored(0, FULL, 0, 4),
        ]
    )
    assert [
        block_hash for event in stored(state) for block_hash in event.block_hashes
    ] == prompt.hashes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_parents_come_before_children(seed: int) -> None:
    """Within one group and tier no run may follow a block whose tokens are announced later."""
    state = state_of([FULL])
    state.apply(Engine(seed, [FULL]).history())
    seen: set[tuple[str | None, object]] = set()
    runs = [event for event in stored(state) if event.token_ids]
    all_told = {(event.medium, block_hash) for event in runs for block_hash in event.block_hashes}
    for event in runs:
        parent = (event.medium, event.parent_block_hash)
        assert event.parent_block_hash is None or parent in seen or parent not in all_told
        seen |= {(event.medium, block_hash) for block_hash in event.block_hashes}


def test_full_attention_and_the_gpu_come_first() -> None:
    """Other groups' and tiers' hashes are resolved through them."""
    prompt, group = PROMPTS[0], window(7, 4)
    state = state_of([group, FULL])
    state.apply([prompt.offloaded(1, [4]), prompt.stored(0, group), prompt.stored(1, FULL)])
    assert [(event.medium, event.group_idx) for event in stored(state)] == [
        ("GPU", 1),
        ("GPU", 0),
        ("CPU", 1),
    ]


def test_a_run_whose_parent_is_gone_is_cut_where_another_group_knows_it() -> None:
    """A window of small blocks slid on, inside a larger block of full attention: the blocks after
    it must still be placed."""
    full, small = KVCacheGroup(GroupKind.FULL, 8), window(9, 4)
    prompt, state, index = PROMPTS[0], state_of([full, small]), ReferenceIndex()
    state.apply([prompt.stored(0, full), prompt.stored(1, small), prompt.removed(1, [4])])
    late = _join(index, state, "late")
    assert [event.block_hashes for event in stored(state)[1:]] == [
        prompt.hashes[1:2],
        prompt.hashes[2:],
    ]
    assert index.match([*prompt.tokens, 1])[late].gpu_cached_tokens == 24


def test_batches_and_events_are_bounded() -> None:
    """A snapshot of any size is sent in pieces that delay nothing else."""
    count = 20_000
    prompt, state = Prefix(list(range(4 * count)), 4), state_of([FULL])
    state.apply([prompt.stored(0, FULL), prompt.offloaded(0, range(4, 4 * count + 1, 4))])
    state.apply([BlockStored([-number for number in range(1, count)], None, [], "STORAGE", 0)])
    batches = list(state.snapshot().batches())
    for batch in batches:
        assert (
            sum(_weight(event) for event in batch if isinstance(event, BlockStored))
            < 2 * BATCH_WEIGHT
        )
    assert sum(len(event.block_hashes) for event in stored(state)) == 3 * count - 1
    assert all(_weight(event) <= BATCH_WEIGHT for event in stored(state))


def _weight(event: BlockStored) -> int:
    return len(event.token_ids) + BLOCK_WEIGHT * len(event.block_hashes)


def test_everything_a_hash_covers_is_announced_again() -> None:
    """Adapter, salt, multimodal items and lookahead decide the content of a block as much as its
    tokens."""
    event = BlockStored(
        [1, 2],
        None,
        tokens(8),
        "GPU",
        0,
        lora_name="sql",
        extra_keys=[["salt", ["image", 2]], None],
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=7,
        lookahead_token_ids=[[1004, 1005], [7, 8]],
    )
    state = state_of([window(7, 4)])
    state.apply([event])
    assert stored(state) == [event]


def test_extra_keys_that_are_all_empty_are_announced_as_such() -> None:
    """An engine that reports "no salt" differs from one that reports nothing about salts."""
    state = state_of([FULL])
    state.apply([BlockStored([1], None, tokens(4), "GPU", 0, extra_keys=[None])])
    assert stored(state)[0].extra_keys == [None]
    state.apply([BlockRemoved([1], "GPU", 0), BlockStored([2], None, tokens(4), "GPU", 0)])
    assert stored(state)[0].extra_keys is None


def test_runs_of_different_adapters_are_not_joined() -> None:
    """One event has one adapter."""
    state = state_of([FULL])
    state.apply(
        [
            BlockStored([1], None, tokens(4), "GPU", 0),
            BlockStored([2], 1, tokens(4), "GPU", 0, lora_name="sql"),
            BlockStored([3], 2, tokens(4), "GPU", 0, lora_id=7),
        ]
    )
    assert [(event.block_hashes, event.adapter) for event in stored(state)] == [
        ([1], None),
        ([2], "sql"),
        ([3], 7),
    ]


def test_a_block_with_three_copies_is_announced_three_times() -> None:
    """Each copy gets its own removal, and only the last of them removes the block."""
    state = state_of([FULL])
    state.apply(
        [
            PROMPTS[0].stored(0, FULL, 0, 8),
            PROMPTS[0].stored(0, FULL),
            PROMPTS[0].stored(0, FULL, 0, 4),
        ]
    )
    announced_hashes = [block_hash for event in stored(state) for block_hash in event.block_hashes]
    assert [announced_hashes.count(block_hash) for block_hash in PROMPTS[0].hashes] == [
        3,
        2,
        1,
        1,
        1,
        1,
    ]


# --- what it follows ------------------------------------------------------------------------------


def test_a_clear_empties_the_gpu_and_leaves_the_lower_tiers() -> None:
    """`AllBlocksCleared` means the GPU pool; offloaded blocks are kept, and so are their tokens."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([prompt.stored(0, FULL), prompt.offloaded(0, [4, 8]), AllBlocksCleared()])
    (event,) = stored(state)
    assert (event.medium, event.block_hashes, event.token_ids) == (
        "CPU",
        prompt.hashes[:2],
        prompt.tokens[:8],
    )
    assert state.blocks == 2


@pytest.mark.parametrize("clear", [AllBlocksCleared("CPU"), TierBlocksCleared("cpu")], ids=str)
def test_a_clear_of_a_lower_tier_leaves_the_gpu(clear: Event) -> None:
    """A snapshot that still had the tier would bring it back to every late joiner."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([prompt.stored(0, FULL), prompt.offloaded(0, [4, 8]), clear])
    assert {event.medium for event in stored(state)} == {"GPU"}


def test_a_removal_leaves_as_many_copies_as_it_tells() -> None:
    """A late joiner must count what a follower counts."""
    prompt, state = PROMPTS[0], state_of([FULL])
    one = prompt.stored(0, FULL, 0, 4)
    for left, announced_copies in (2, 2), (0, 0):
        state.apply([one, one, one, one])
        state.apply([replace(prompt.removed(0, [4]), remaining_copy_counts=[left])])
        assert len(stored(state)) == announced_copies


def test_the_salt_of_an_engine_that_names_it_is_announced_again() -> None:
    """Without it a late joiner would predict a tenant's blocks for everybody."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([replace(prompt.stored(0, FULL), cache_salt="tenant")])
    assert {event.cache_salt for event in stored(state)} == {"tenant"}


def test_an_offloaded_block_is_announced_with_the_tokens_of_its_gpu_event() -> None:
    """Also when the transfer is announced after the GPU has evicted it, which is the usual order
    under pressure."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([prompt.stored(0, FULL, 0, 4), prompt.removed(0, [4]), prompt.offloaded(0, [4])])
    (event,) = stored(state)
    assert (event.medium, event.token_ids) == ("CPU", prompt.tokens[:4])


def test_an_offloaded_block_that_no_event_showed_is_announced_without_tokens() -> None:
    """They may become known later; until then only the hash is."""
    state = state_of([FULL])
    state.apply([PROMPTS[0].offloaded(0, [4])])
    assert stored(state) == [BlockStored([PROMPTS[0].hash_at(4)], None, [], "CPU", 0)]


def test_a_removal_of_what_is_not_there_changes_nothing() -> None:
    """Counts below zero would hide the next store."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([prompt.removed(0, [4]), prompt.removed(3, [4]), prompt.stored(0, FULL, 0, 4)])
    assert state.blocks == 1
    assert len(stored(state)) == 1


def test_a_parent_loop_ends() -> None:
    """No engine sends one, but it must not hang the publisher."""
    state = state_of([FULL])
    state.apply(
        [BlockStored([1], 2, tokens(4), "GPU", 0), BlockStored([2], 1, tokens(4), "GPU", 0)]
    )
    state.apply([BlockStored([3], 3, tokens(4), "GPU", 0)])
    assert sorted(block_hash for event in stored(state) for block_hash in event.block_hashes) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_tokens_that_no_consumer_accepts_are_left_out(bad: int) -> None:
    """A consumer refuses the whole batch for one of them."""
    state = state_of([FULL])
    state.apply([BlockStored([1], None, [1, 2, 3, bad], "GPU", 0)])
    assert [event.token_ids for event in stored(state)] == [[]]


def test_what_is_remembered_of_evicted_blocks_is_bounded() -> None:
    """Otherwise an engine's publisher would keep every prompt it ever saw."""
    state = state_of([FULL])
    for number in range(REMEMBERED_CONTENTS + 2):
        state.apply(
            [BlockStored([number], None, tokens(4), "GPU", 0), BlockRemoved([number], "GPU", 0)]
        )
    state.apply([BlockStored([0, 1, 2], None, [], "CPU", 0)])
    known = {
        block_hash: bool(event.token_ids)
        for event in stored(state)
        for block_hash in event.block_hashes
    }
    assert known == {0: False, 1: False, 2: True}


def test_a_snapshot_stays_as_it_was() -> None:
    """It is sent in parts, while the engine goes on."""
    prompt, state = PROMPTS[0], state_of([FULL])
    state.apply([prompt.stored(0, FULL)])
    batches: Iterator[list[Event]] = state.snapshot().batches()
    next(batches)
    state.apply([AllBlocksCleared(), PROMPTS[2].stored(0, FULL)])
    ((event,),) = list(batches)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == prompt.hashes


def test_a_reset_replaces_everything() -> None:
    """After a loss only the whole state is of use."""
    state = state_of([FULL])
    state.apply([PROMPTS[0].stored(0, FULL)])
    state.is_complete = False
    assert not state.is_complete
    state.reset([PROMPTS[2].stored(0, FULL)])
    assert state.is_complete
    assert state.blocks == 6
    assert stored(state)[0].block_hashes == PROMPTS[2].hashes
