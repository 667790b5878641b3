"""Which removals of a block's copies a source announces: found out from what follows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvevents.codec import decode
from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from router.cli.recordings import Query, RecordingReader
from router.index.base import SourceLimits
from tests.oracle.index.copy_counting import RUNS_FOR_LAST, CopyWatch, Counting
from tests.oracle.index.index import PromptKeys, hit_and_junction
from tests.oracle.index.keys import KeySpace
from tests.oracle.index.source import SourceCache
from tests.support.random_engine import CopyingEngine

STREAMS = Path(__file__).parents[2] / "conformance" / "streams"
WITH_COPIES = (
    "eagle_mixed_two",
    "eagle_two_windows_only",
    "holes_eagle_swa_mamba",
    "look1_full_swa",
    "look3_mm",
    "mamba_partial_swa_hash",
    "mixed_64_16_32",
    "mm_full_swa",
    "pressure_gptoss.1",
    "real_gemma3",
    "real_qwen3_next",
    "v0280_eagle_full_swa",
)
"""Recordings long enough to show the way, were only last removals announced in them."""
ASSUMPTION = "removals: announced only with the last copy of a block"


def source() -> SourceCache:
    return SourceCache(KeySpace(), limits=SourceLimits())


def apply(cache: SourceCache, *events: Event) -> bool:
    """Whether the batch left the picture in doubt."""
    return cache.apply(EventBatch(0.0, list(events))).is_incomplete


def held(cache: SourceCache) -> dict[BlockHash, int]:
    return cache.table.held.get((0, GPU), {})


def stored(*hashes: int, parent: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), parent, [1] * 16 * len(hashes), GPU, 0, block_size=16)


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), GPU, 0)


def lives(first: int, count: int) -> Iterator[list[Event]]:
    """Runs of two blocks, each stored twice, gone with one removal, and stored again."""
    for number in range(first, first + 10 * count, 10):
        run = stored(number, number + 1)
        yield [run, run, removed(number, number + 1), run]


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_announces_every_removal_is_counted_exactly_and_believed(seed: int) -> None:
    """Today's vLLM: to believe the other way would cost blocks that are there."""
    engine, cache = CopyingEngine(seed, "every"), source()
    for _ in range(300):
        assert not apply(cache, *engine.step())
        assert held(cache) == engine.copies
    assert cache.copies.counting is Counting.EVERY_COPY
    assert ASSUMPTION not in cache.statistics().assumptions


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_tells_how_many_are_left_is_counted_exactly(seed: int) -> None:
    """Also from the middle of its stream on: what it tells replaces what was counted."""
    engine, cache = CopyingEngine(seed, "count"), source()
    for _ in range(300):
        apply(cache, *engine.step())
        assert held(cache) == engine.copies
    assert cache.copies.counting is Counting.EVERY_COPY


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_announces_last_removals_only_is_found_out_and_followed(seed: int) -> None:
    """Until then ghosts stay; from then on the index holds what the engine holds."""
    engine, cache = CopyingEngine(seed, "last"), source()
    ghosts = followed = 0
    for _ in range(1000):
        apply(cache, *engine.step())
        if cache.copies.counting is Counting.LAST_COPY:
            followed += 1
            assert held(cache).keys() == engine.copies.keys()
        else:
            ghosts = max(ghosts, len(held(cache)) - len(engine.copies))
    assert ghosts > 0
    assert followed > 300
    assert ASSUMPTION in cache.statistics().assumptions


@pytest.mark.parametrize("name", WITH_COPIES)
def test_a_recording_with_last_removals_only_is_exact_once_the_way_is_known(name: str) -> None:
    """The same engine, had it announced its removals in the other way."""
    queries = 0
    truth: Counter[tuple[int, BlockHash]] = Counter()
    with RecordingReader(STREAMS / f"{name}.jsonl.gz") as reader:
        cache = SourceCache(KeySpace(), reader.header.hints(False))
        for record in reader:
            if not isinstance(record, Query):
                batch = decode(record)
                cache.apply(replace(batch, events=list(without_earlier_removals(truth, batch))))
                continue
            prompt = PromptKeys(
                cache._space, record.query, record.lora, record.salt, record.extra_keys
            )
            if cache.copies.counting is Counting.LAST_COPY:
                queries += 1
                assert hit_and_junction(cache, prompt)[0].cached_tokens == record.hit
    assert queries > 50


def without_earlier_removals(
    truth: Counter[tuple[int, BlockHash]], batch: EventBatch
) -> Iterator[Event]:
    """The events without removals that leave copies on the GPU."""
    for event in batch.events:
        group = getattr(event, "group_idx", None) or 0
        if isinstance(event, AllBlocksCleared):
            truth.clear()
        if isinstance(event, BlockStored) and event.tier == GPU:
            truth.update((group, each) for each in event.block_hashes)
        elif isinstance(event, BlockRemoved) and event.tier == GPU:
            last = []
            for each in event.block_hashes:
                truth[group, each] -= 1
                if truth[group, each] <= 0:
                    last.append(each)
            if last:
                yield replace(event, block_hashes=last)
            continue
        yield event


def test_it_takes_several_runs_to_believe_that_only_the_last_removal_is_announced() -> None:
    """One may be a request that was not allowed to read the cache."""
    cache = source()
    for number, batch in enumerate(lives(100, RUNS_FOR_LAST), start=1):
        apply(cache, *batch)
        expected = Counting.LAST_COPY if number == RUNS_FOR_LAST else Counting.UNKNOWN
        assert cache.copies.counting is expected
    assert not apply(cache, removed(100, 101))
    assert 100 not in held(cache)


def test_ghosts_go_when_the_way_is_known() -> None:
    """Those whose prompts nobody asks again would stay for ever."""
    cache = source()
    apply(cache, stored(1), stored(1), removed(1))
    assert 1 in held(cache)
    for batch in lives(100, RUNS_FOR_LAST):
        apply(cache, *batch)
    assert 1 not in held(cache)


def test_single_blocks_that_are_stored_again_say_nothing() -> None:
    """The last block of a prompt that is asked again and again."""
    cache = source()
    for number in range(100, 200):
        apply(cache, stored(number), stored(number), removed(number), stored(number))
    assert cache.copies.counting is Counting.UNKNOWN


@pytest.mark.parametrize(
    "proof",
    [[removed(1), removed(1)], [removed(1, 1)], [removed(1), stored(9, parent=1)]],
    ids=["in two events", "in one event", "a block behind it"],
)
def test_a_sign_that_every_removal_is_announced_ends_the_question(proof: list[Event]) -> None:
    """A last removal cannot be announced twice, and a request holds what it continues."""
    cache = source()
    apply(cache, stored(1), stored(1), stored(1))
    apply(cache, *proof)
    for batch in lives(100, 3 * RUNS_FOR_LAST):
        apply(cache, *batch)
    assert cache.copies.counting is Counting.EVERY_COPY
    assert held(cache)[100] == 2


def test_a_source_that_was_taken_for_the_wrong_kind_says_so() -> None:
    """Copies were taken for gone that are there: only a rebuild brings them back."""
    cache = source()
    for batch in lives(100, RUNS_FOR_LAST):
        apply(cache, *batch)
    assert not apply(cache, removed(100))
    assert apply(cache, removed(100))
    assert cache.copies.counting is Counting.EVERY_COPY
    assert cache.statistics().is_incomplete


def test_a_clear_leaves_nothing_over() -> None:
    """A block that is stored after a clear was not there."""
    cache = source()
    for batch in lives(100, RUNS_FOR_LAST - 1):
        apply(cache, *batch)
    apply(cache, stored(1, 2), stored(1, 2), removed(1, 2), AllBlocksCleared(), stored(1, 2))
    assert cache.copies.counting is Counting.UNKNOWN


def test_what_is_remembered_of_removals_is_bounded() -> None:
    """An engine with many copies must not fill the memory."""
    watch = CopyWatch(remembered=10)
    for number in range(100):
        watch.removed(0, number, 2)
    assert list(watch.leftovers) == [(0, number) for number in range(90, 100)]
