"""What the mirror says of a cache, against the cache itself: offload's own engine, simulated."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.simulation.layouts import TIME_MODEL
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.timeline import Timeline
from kvevents.events import BlockHash, BlockRemoved, BlockStored, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from kvroute_engine.core.build import EngineConfig
from kvroute_engine.core.requests import EngineRequest, SamplingParams, StepOutput
from router._core import Visit
from router.index.base import NO_HIT, SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints, StoreHint
from router.index.mirror import Mirror
from router.index.mirror_types import STEP, Prefilling
from router.index.prompt import HashedPrompt
from tests.oracle.mirror.mirror import ReferenceMirror
from tests.support.blocks import FULL
from tests.support.index import (
    Coming,
    in_prefill,
    load_prices,
    match_source,
    outlook,
    token_columns,
)

R0, R1 = SourceId("r0"), SourceId("r1")


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Mirrored:
    """A mirror with an index that hears no events."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.index: PrefixIndex = PrefixIndex()
        self.mirror = Mirror(clock=self.clock)

    def prompt(self, ids: list[int]) -> HashedPrompt:
        return self.index.prepare(array("I", ids), extra_steps=(STEP,))

    def begin(
        self,
        ids: list[int],
        source: SourceId = R0,
        uncached: int | None = None,
        keep: Sequence[int] = (),
    ) -> Visit:
        count = len(ids) if uncached is None else uncached
        prompts = [self.prompt(ids)]
        return self.mirror.begin("m", self.index, source, prompts, len(ids), count, keep=keep)

    def in_prefill(self, ids: list[int]) -> dict[SourceId, int]:
        found = in_prefill(self.mirror, self.prompt(ids))
        return {source: coming.tokens for source, coming in found.items()}


@pytest.fixture
def mirrored() -> Mirrored:
    return Mirrored()


IDS = list(range(1000))


def test_what_is_in_prefill_counts_where_it_is(mirrored: Mirrored) -> None:
    """A burst of equal prompts stays together, and only the common part counts."""
    mirrored.begin(IDS)
    assert mirrored.in_prefill(IDS) == {R0: 960}
    assert mirrored.in_prefill([*IDS[:200], *range(5000, 5800)]) == {R0: 192}
    assert mirrored.in_prefill(list(range(5000, 6000))) == {}


def test_an_equal_prompt_counts_up_to_its_last_token(mirrored: Mirrored) -> None:
    """No whole number of keys: the rest would look like work, and a burst of them like a queue."""
    mirrored.begin(IDS)
    prompt = mirrored.prompt(IDS)
    assert in_prefill(mirrored.mirror, prompt, len(IDS)) == {R0: Coming(999, 999)}
    assert in_prefill(mirrored.mirror, prompt, len(IDS) + 1) == {R0: Coming(960, 960)}
    assert in_prefill(mirrored.mirror, mirrored.prompt(IDS[:960]), 960) == {R0: Coming(959, 959)}


def test_what_was_in_prefill_counts_until_its_events_have_come(mirrored: Mirrored) -> None:
    """Afterwards the index knows better: it may have been evicted again."""
    visit = mirrored.begin(IDS)
    mirrored.clock.now = 1.0
    visit.first_token()
    assert mirrored.in_prefill(IDS) == {R0: 960}
    mirrored.clock.now = 1.0 + ReferenceMirror.EVENTS_S
    assert mirrored.in_prefill(IDS) == {}


def test_others_are_told_of_long_prompts_and_of_those_that_wait(mirrored: Mirrored) -> None:
    """Of a short one that is computed at once its events tell as soon."""

    def told() -> list[tuple[int, int]]:
        return [(each.tokens, each.queued_tokens) for each in mirrored.mirror.prefilling()]

    long, short, quick = mirrored.begin(IDS), mirrored.begin(NEW[:200]), mirrored.begin(NEW[:100])
    assert told() == [(1000, 1000)]
    quick.first_token()
    mirrored.clock.now += ReferenceMirror.SOON_S
    assert told() == [(1000, 1000), (200, 200)]
    short.first_token()
    long.first_token()
    assert told() == [(1000, 0), (200, 0)], "until their events have come for sure"
    mirrored.clock.now += ReferenceMirror.EVENTS_S
    assert told() == []


def test_a_prompt_is_not_taken_for_one_of_a_process_that_was_there_before() -> None:
    """A worker that was started again tells under the same name as the one that died."""
    numbers = set()
    for _ in range(20):
        mirrored = Mirrored()
        mirrored.begin(IDS)
        mirrored.begin(NEW)
        numbers |= {each.number for each in mirrored.mirror.prefilling()}
    assert len(numbers) == 40


def test_what_a_failed_replica_was_computing_counts_no_more(mirrored: Mirrored) -> None:
    """It will never be a hit there."""
    mirrored.begin(IDS)
    mirrored.mirror.forget("r0")
    assert mirrored.in_prefill(IDS) == {}


def test_the_first_prompt_in_prefill_progresses(mirrored: Mirrored) -> None:
    """At the speed that was learned, and never to its end: it may be slower."""
    for start in range(100):
        mirrored.clock.now = float(start)
        visit = mirrored.begin(list(range(start * 5000, start * 5000 + 4000)))
        mirrored.clock.now += 0.5
        visit.first_token()
        visit.ended()
    mirrored.begin(list(range(4000)))
    mirrored.begin(list(range(9000, 13000)))
    mirrored.clock.now += 0.25
    found = outlook(mirrored.mirror, "m", R0)
    assert found.progress_tokens == pytest.approx(2000, rel=0.05)
    mirrored.clock.now += 5
    assert outlook(mirrored.mirror, "m", R0).progress_tokens == 4000 * ReferenceMirror.MAX_PROGRESS


def test_what_ends_twice_or_out_of_order_is_accounted_for_once(mirrored: Mirrored) -> None:
    """Streams break off at any point."""
    first, second = mirrored.begin(IDS), mirrored.begin(IDS[:500])
    second.ended()
    second.first_token()
    first.first_token()
    first.first_token()
    first.ended()
    first.ended()
    assert mirrored.mirror.statistics().keys == 15
    mirrored.clock.now = 10.0
    assert mirrored.in_prefill(IDS) == {}


def test_a_request_that_a_replica_failed_leaves_nothing_there(mirrored: Mirrored) -> None:
    """What was not computed cannot be evicted, and no event will report it."""
    mirrored.begin(IDS).ended(was_served=False)
    assert mirrored.mirror.statistics().keys == 0
    assert mirrored.in_prefill(IDS) == {}
    assert mirrored.mirror.prefilling() == []


@pytest.mark.parametrize(
    ("shared", "own", "most"),
    [(0, 1000, 53), (0, 70, 204), (960, 64, 51)],
    ids=["long", "short", "a long prefix and an ending of its own"],
)
def test_the_mirror_holds_to_its_bound(shared: int, own: int, most: int) -> None:
    """Of a cache without events nothing is known to be evicted. A request keeps its whole prompt,
    whatever it owns of it, and takes memory however short that is."""
    index, mirror = PrefixIndex(), Mirror(max_keys=1020)
    for start in range(400):
        ids = array("I", [*range(shared), *range((start + 1) * 2000, (start + 1) * 2000 + own)])
        mirror.begin("m", index, R0, [index.prepare(ids)], len(ids), own).ended()
    assert mirror.statistics().requests == most


class Engine:
    """One simulated engine under a mirror; requests come one after another or overlap."""

    def __init__(
        self,
        preset: str,
        event_delay_s: float = 0.0,
        cpu_blocks: int = 0,
        num_blocks: int = 400,
        retention_interval: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.timeline = Timeline()
        self.index = PrefixIndex()
        self.mirror = Mirror(clock=self.timeline.now)
        self.visits: dict[str, Visit] = {}
        self.hits: dict[str, int] = {}
        self.predictions: list[tuple[int, int, int]] = []
        """Of each request: what was cached when it was sent, what was expected, what was found."""
        self.then: Callable[[], None] = lambda: None
        """Called when a request has ended."""
        config = EngineConfig(
            preset=preset,
            simulate=True,
            num_blocks=num_blocks,
            cpu_blocks=cpu_blocks,
            block_size=16,
            max_num_seqs=4,
            retention_interval=retention_interval,
            time_model=TIME_MODEL,
        )
        self.replica = SimulatedReplica(
            "r0", config, self.timeline, event_delay_s, self._events, self._outputs
        )

    def send(self, name: str, ids: list[int], answer: int) -> None:
        prompt = self.index.prepare(array("I", ids), extra_steps=(STEP,))
        found = self.index.match_prompt(prompt)
        _, hit, loads = found.get(R0, NO_HIT)
        (_,), _, (junction,) = token_columns(found, [R0])
        self.hits[name] = hit
        outlook(self.mirror, "m", R0, self.num_blocks)
        self.visits[name] = self.mirror.begin(
            "m",
            self.index,
            R0,
            [prompt],
            len(ids),
            len(ids) - hit,
            hit,
            loads=loads,
            junction_tokens=junction,
        )
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.replica.add(EngineRequest(name, ids, sampling))

    def oldest_end(
        self, ends: dict[str, float], prompts: dict[str, list[int]], margin: int
    ) -> float:
        """The end of the last use of what the engine keeps and used longest ago, from the whole
        history: a prompt's own part is what no later one shares. *margin* is how many tokens of
        that must be left."""
        names, found = list(ends), []
        for number, name in enumerate(names):
            ids = prompts[name]
            shared = (_common(ids, prompts[other]) for other in names[number + 1 :])
            own_from = max(shared, default=0) // STEP * STEP
            hit = match_source(self.index, self.index.prepare(array("I", ids)), R0)
            if own_from < len(ids) // STEP * STEP and hit.gpu_cached_tokens > own_from + margin:
                found.append(ends[name])
        return min(found, default=self.timeline.now_s)

    def _events(self, replica_id: str, batch: EventBatch) -> None:
        self.index.apply(SourceId(replica_id), batch)

    def _outputs(self, outputs: Sequence[StepOutput], _step_s: float) -> None:
        for output in outputs:
            name = output.request_id
            visit = self.visits[name]
            if name in self.hits:
                found = output.num_cached_tokens
                self.predictions.append((self.hits.pop(name), visit.expected_tokens, found))
                visit.first_token()
            if output.finish_reason:
                visit.ended()
                self.then()


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize(("preset", "window"), [("full", 0), ("gptoss", 128), ("llama4", 0)])
def test_the_oldest_content_is_what_the_engine_will_evict(preset: str, window: int) -> None:
    """Requests of one conversation, of several and of shared beginnings, in a cache that holds a
    few of them. After each, the mirror's age is that from the whole history; where a prompt's own
    part begins is known to a step, and a later prompt may restore the window before it."""
    engine, random = Engine(preset), Random(7)
    prompts: dict[str, list[int]] = {}
    ends: dict[str, float] = {}
    evicting = 0
    for number in range(60):
        name = f"request-{number}"
        start = random.choice(list(prompts.values())) if prompts and number % 3 else []
        new = [random.randrange(50_000) for _ in range(random.randint(100, 400))]
        prompts[name] = [*start[: random.randint(0, 700)], *new]
        engine.send(name, prompts[name], answer=4)
        engine.timeline.run()
        ends[name] = now = engine.timeline.now_s
        age = outlook(engine.mirror, "m", R0).eviction_age_s
        if age is not None:
            evicting += 1
            oldest = now - engine.oldest_end(ends, prompts, 0)
            surely = now - engine.oldest_end(ends, prompts, window + STEP)
            assert surely - 1e-9 <= age <= oldest + 1e-9
    assert evicting > 20, "the cache must have been full most of the time"


@pytest.mark.parametrize(("prompts", "under_pressure"), [(6, False), (12, True)])
def test_a_cache_that_evicts_what_comes_back_is_under_pressure(
    prompts: int, under_pressure: bool
) -> None:
    """It holds 6,400 tokens and is asked in turn for prompts of 800: an autoscaler must tell a
    cache that is too small from one that is merely full of what nobody wants."""
    engine = Engine("full")
    for number in range(60):
        first = number % prompts * 1000
        engine.send(f"request-{number}", [*range(first, first + 800)], answer=4)
        engine.timeline.run()
    pressure = outlook(engine.mirror, "m", R0).reuse_probability
    assert pressure > 0.9 if under_pressure else pressure == 0
    for number in range(60, 160):
        engine.send(f"request-{number}", [*range(number * 1000, number * 1000 + 800)], answer=4)
        engine.timeline.run()
    assert outlook(engine.mirror, "m", R0).reuse_probability < 0.6


@pytest.mark.parametrize(("cpu_blocks", "dearest"), [(2000, 0.2), (0, 1.0)])
def test_what_a_tier_below_holds_is_brought_back_for_the_price_of_its_load(
    cpu_blocks: int, dearest: float
) -> None:
    """The GPU holds 6,400 tokens and is asked in turn for 12,000. With a tier below nothing that it
    evicts is lost, without one all of it is."""
    engine = Engine("full", cpu_blocks=cpu_blocks)
    for number in range(60):
        first = number % 10 * 10_000
        engine.send(f"request-{number}", [*range(first, first + 1200)], answer=4)
        engine.timeline.run()
    found = outlook(engine.mirror, "m", R0)
    assert found.reuse_probability > 0.9
    assert found.refill == 1.0 if dearest == 1.0 else 0.0 < found.refill < dearest


def test_what_loading_takes_is_measured_where_a_prompt_is_alone() -> None:
    """A model that computes 8,000 tokens a second behind a link that brings 200,000: half of a
    load's time is that of the step that computes the last token."""
    engine = Engine("full", cpu_blocks=2000)
    for number in range(120):
        first = number % 10 * 10_000
        engine.send(f"request-{number}", [*range(first, first + 1200)], answer=4)
        engine.timeline.run()
    prices = load_prices(engine.mirror, R0)
    assert prices is not None
    assert prices.of("CPU") != 0.1, "it was measured"
    # The load is a moment, and the step that computes the last token 12.5 ms.
    computing = engine.mirror.prefill_tokens_per_s("m")
    assert prices.of("CPU") == pytest.approx(0.0126 * computing / 1200, rel=0.2)


def test_what_a_cache_was_given_lately_is_known_by_cache(mirrored: Mirrored) -> None:
    """A replica that holds what everybody asks for is busier than the others."""
    for second in range(120):
        mirrored.clock.now = float(second)
        mirrored.begin(IDS, R0, uncached=100).ended()
        if second % 10 == 0:
            mirrored.begin(IDS, R1, uncached=500).ended()
    busy, idle = outlook(mirrored.mirror, "m", R0), outlook(mirrored.mirror, "m", R1)
    assert busy.arrivals_per_s == pytest.approx(1.0, rel=0.1)
    assert busy.uncached_tokens_per_s == pytest.approx(100, rel=0.1)
    assert idle.arrivals_per_s == pytest.approx(0.1, rel=0.3)


def test_a_prompt_behind_one_that_shares_its_beginning_will_find_it_cached(
    mirrored: Mirrored,
) -> None:
    """It is admitted later: what is missing now is there then."""
    prompt = mirrored.prompt([*IDS[:500], *range(7000, 7100)])
    assert mirrored.mirror.expected(R0, prompt, 600, 16) == 16
    mirrored.begin(IDS)
    assert mirrored.mirror.expected(R0, prompt, 600, 16) == 448
    assert mirrored.mirror.expected(R0, mirrored.prompt(IDS[:64]), 64, 0) == 63


def test_before_a_followed_cache_tells_its_layout_nothing_more_is_expected(
    mirrored: Mirrored,
) -> None:
    """Where hits end there, and whether windows are kept, its first event will say."""
    prompt = mirrored.prompt([*IDS[:500], *range(7000, 7100)])
    mirrored.index.add(R0)
    mirrored.begin(IDS)
    assert mirrored.mirror.expected(R0, prompt, 600, 16) == 16
    layout = announce(KVCacheLayout.build([FULL]), HashChain.from_seed())
    mirrored.index.apply(R0, EventBatch(0.0, (layout,)))
    assert mirrored.mirror.expected(R0, prompt, 600, 16) == 496


def test_a_cache_whose_events_say_nothing_evicts_nothing_that_could_be_predicted(
    mirrored: Mirrored,
) -> None:
    """A replica without events, or one that is just being rebuilt: requests end there and others
    are in prefill, and its index is empty."""
    layout = announce(KVCacheLayout.build([FULL]), HashChain.from_seed())
    mirrored.index.apply(R0, EventBatch(0.0, (layout,)))
    mirrored.begin([*range(9000, 9500)]).ended()
    mirrored.begin(IDS)
    prompt = mirrored.prompt([*range(9000, 9600)])
    assert mirrored.mirror.expected(R0, prompt, 600, 16) == 16


def overlapping(engine: Engine, in_flight: int) -> None:
    """Send 300 requests of shared beginnings, so many at a time."""
    random = Random(11)
    roots = [[random.randrange(50_000) for _ in range(random.randint(200, 500))] for _ in range(12)]
    sent = 0

    def send() -> None:
        nonlocal sent
        if sent < 300:
            new = [random.randrange(50_000) for _ in range(random.randint(20, 300))]
            engine.send(f"request-{sent}", [*random.choice(roots), *new], answer=8)
            sent += 1

    engine.then = send
    engine.timeline.run()  # its layout is announced
    for _ in range(in_flight):
        send()
    engine.timeline.run()
    assert len(engine.predictions) == 300


@pytest.mark.parametrize("preset", ["full", "gptoss", "gemma", "mamba-hybrid"])
def test_the_prediction_for_admission_is_right_more_often(preset: str) -> None:
    """Eight requests at a time, in a cache that holds a few and keeps windows densely: those ahead
    store their prompts, and evict what the present says is cached."""
    engine = Engine(preset)
    overlapping(engine, 8)
    now = sum(hit == actual for hit, _, actual in engine.predictions)
    later = sum(expected == actual for _, expected, actual in engine.predictions)
    assert later > now


@pytest.mark.parametrize(
    ("preset", "num_blocks"),
    [
        ("full", 480),
        ("full", 4000),
        ("gptoss", 800),
        ("gptoss", 8000),
        ("gemma", 2400),
        ("gemma", 24_000),
        ("mamba-hybrid", 800),
        ("mamba-hybrid", 8000),
    ],
)
def test_the_prediction_for_admission_is_nearly_always_right(preset: str, num_blocks: int) -> None:
    """Where engines keep sparsely, as they do by default; in caches that evict all the time, and in
    those that hold everything."""
    engine = Engine(preset, num_blocks=num_blocks, retention_interval=0)
    overlapping(engine, 8)
    now = sum(hit == actual for hit, _, actual in engine.predictions)
    later = sum(expected == actual for _, expected, actual in engine.predictions)

    assert later >= max(now, 285)


# --- what those ahead will evict ------------------------------------------------------------------

WINDOW = KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=64)


class Full(Mirrored):
    """A cache of a known size that holds a prompt; its index hears what it stores.

    Args:
        layout: Of the cache.
        capacity: In blocks, of all groups together; None: it does not say.
        stores: That it can read, and others as well.
    """

    def __init__(
        self, layout: KVCacheLayout, capacity: int | None, stores: tuple[StoreHint, ...] = ()
    ) -> None:
        super().__init__()
        self.groups = layout.groups
        self.index.add(R0, LayoutHints(stores=stores))
        announcement = announce(layout)
        self.index.apply(R0, EventBatch(0.0, (announcement,)))
        self.begin([0]).ended()
        outlook(self.mirror, "m", R0, capacity)

    @staticmethod
    def hashes(ids: list[int]) -> list[BlockHash]:
        ends = range(16, len(ids) + 1, 16)
        return [hash(tuple(ids[:end])) & (1 << 63) - 1 for end in ends]

    def store(self, ids: list[int]) -> None:
        """All whole blocks of a prompt, in every group."""
        hashes = self.hashes(ids)
        events = [
            BlockStored(
                hashes,
                None,
                ids[: len(hashes) * 16],
                "GPU",
                group,
                kv_cache_spec_kind=spec.kind.value,
                kv_cache_spec_sliding_window=spec.sliding_window,
            )
            for group, spec in enumerate(self.groups)
        ]
        self.index.apply(R0, EventBatch(0.0, events))

    def serve(self, ids: list[int]) -> None:
        """Compute a prompt, to the end of its response."""
        visit = self.begin(ids)
        self.store(ids)
        visit.first_token()
        visit.ended()

    def coming(self, ids: list[int]) -> Coming:
        """Of a prompt, there."""
        return in_prefill(self.mirror, self.prompt(ids), len(ids)).get(R0, Coming(0, 0))

    def expected(self, ids: list[int]) -> int:
        prompt = self.prompt(ids)
        hit = match_source(self.index, prompt, R0).gpu_cached_tokens
        return self.mirror.expected(R0, prompt, len(ids), hit)


NEW = list(range(50_000, 60_000))


def test_what_the_gpu_has_given_up_may_be_left_in_a_shared_store() -> None:
    """Then a part of it need not be computed again."""
    bucket = StoreHint("bucket", ("STORAGE",))
    cache = Full(KVCacheLayout.build([FULL]), capacity=64, stores=(bucket,))
    cache.serve(IDS)
    hashes = cache.hashes(IDS)
    assert outlook(cache.mirror, "m", R0, 64).refill == 1.0
    written = BlockStored(hashes, None, [], "STORAGE", 0)
    cache.index.apply(R0, EventBatch(0.0, [written, BlockRemoved(hashes, "GPU", 0)]))
    found = match_source(cache.index, cache.prompt([*IDS, 1]), R0)
    assert dict(found.by_tier) == {"bucket": 992}
    cache.serve(NEW[:320])
    assert outlook(cache.mirror, "m", R0, 64).refill < 1.0


def test_what_those_ahead_evict_is_the_end_of_what_was_used_longest_ago() -> None:
    """64 blocks hold a prompt of 62 blocks. 320 tokens ahead take 2 free blocks and 18 of the
    prompt's end: 44 blocks are left, to a step."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=64)
    cache.serve(IDS)
    assert cache.expected([*IDS, 1, 2, 3]) == 992
    cache.begin(NEW[:32])
    assert cache.expected([*IDS, 1, 2, 3]) == 992, "that fits into what is free"
    cache.begin(NEW[1000:1320])
    assert 11 * STEP - 3 * STEP <= cache.expected([*IDS, 1, 2, 3]) <= 11 * STEP
    cache.begin(NEW[2000:3000])
    assert cache.expected([*IDS, 1, 2, 3]) == 0


def test_what_is_computed_of_those_ahead_has_its_blocks_already() -> None:
    """They are among those that the cache holds now, as events tell: 20 blocks of them, then 10."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=72)
    cache.serve(IDS)
    cache.begin(NEW[:320])
    assert cache.expected([*IDS, 1]) == 992 - 10 * 16
    cache.store(NEW[:160])
    assert cache.expected([*IDS, 1]) == 992 - 10 * 16
    cache.begin(NEW[2000:2160])
    assert cache.expected([*IDS, 1]) == 992 - 20 * 16


def test_what_is_used_last_stays_when_an_older_prompt_makes_room() -> None:
    """A hit outside of what goes is whole."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=64)
    cache.serve(NEW[5000:5500])
    cache.serve(IDS[:480])
    cache.begin(NEW[:320])
    assert cache.expected([*IDS[:480], 1]) == 480
    assert cache.expected([*NEW[5000:5500], 1]) < 496


def test_a_prompt_with_windows_that_loses_its_end_is_reusable_only_up_to_where_another_began() -> (
    None
):
    """Its windows were kept at its end only."""
    cache = Full(KVCacheLayout.build([FULL, WINDOW]), capacity=128)
    cache.serve(IDS)
    assert cache.expected([*IDS, 1]) == 992
    cache.begin(NEW[:320])
    assert cache.expected([*IDS, 1]) == 0


def test_a_window_within_a_prompt_ahead_is_counted_on_only_while_there_is_room() -> None:
    """Where windows are kept densely. What running requests hold leaves less room; when they end
    there is more again."""
    cache = Full(KVCacheLayout.build([FULL, WINDOW]), capacity=162)
    decoding = cache.begin(NEW[:960])
    cache.store(NEW[:960])
    decoding.first_token()
    cache.begin(IDS[:640])
    asked = [*IDS[:512], *NEW[9000:9100]]
    assert cache.expected(asked) == 512, "40 blocks of each group fit beside the 60 of the other"
    second = cache.begin(NEW[1000:1960])
    cache.store(NEW[1000:1960])
    second.first_token()
    assert cache.expected(asked) == 0, "40 blocks are left, and 80 are needed"
    second.ended()
    decoding.ended()
    assert cache.expected(asked) == 512


def test_a_share_of_less_than_a_step_is_none(mirrored: Mirrored) -> None:
    """Keys are compared, a step at a time; the first of them says whether there is anything."""
    mirrored.begin(IDS)
    assert mirrored.in_prefill([*IDS[:STEP], *NEW[:200]]) == {R0: STEP}
    assert mirrored.in_prefill([*IDS[: STEP - 1], *NEW[:200]]) == {}


def test_a_cache_that_was_emptied_in_part_evicts_nothing_before_it_is_full_again() -> None:
    """Of an engine that does not tell its size, the most blocks that it ever held say it."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=None)
    cache.serve(IDS)
    cache.serve(NEW[:500])
    assert outlook(cache.mirror, "m", R0).eviction_age_s is None, "it has removed nothing yet"
    gone = [hash(tuple(IDS[:end])) & (1 << 63) - 1 for end in range(16, 1001, 16)]
    cache.index.apply(R0, EventBatch(0.0, [BlockRemoved(gone, "GPU", 0)]))
    cache.serve(NEW[1000:1032])
    assert outlook(cache.mirror, "m", R0).eviction_age_s is None, "62 blocks have become free"
    cache.serve(NEW[2000:2976])
    assert outlook(cache.mirror, "m", R0).eviction_age_s is not None


def test_nothing_is_expected_of_a_prompt_ahead_that_shares_nothing(mirrored: Mirrored) -> None:
    """Also where a hit could be of a single token, for all that is known."""
    mirrored.begin(IDS)
    assert mirrored.mirror.expected(R0, mirrored.prompt(NEW[:500]), 500, 0) == 0


def test_a_cache_full_of_what_is_running_evicts_what_has_been_idle_for_no_time() -> None:
    """Nothing there has been used last some time ago."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=62)
    running = cache.begin(IDS)
    cache.store(IDS)
    running.first_token()
    assert outlook(cache.mirror, "m", R0, 62).eviction_age_s == 0.0


def test_a_state_is_counted_on_only_at_the_end_of_the_prompt_that_makes_it() -> None:
    """A Mamba state within it is not kept; the last token is computed again by an equal prompt."""
    cache = Full(KVCacheLayout.build([FULL, KVCacheGroup(GroupKind.MAMBA, 16)]), capacity=1000)
    cache.begin(NEW[:1030])
    assert cache.coming([*NEW[:1024], *IDS]) == Coming(1024, 1024)
    assert cache.coming([*NEW[:1000], *IDS]) == Coming(0, 992)
    assert cache.coming(NEW[:1024]) == Coming(0, 1008), "its last token is computed in any case"


def test_of_a_prompt_with_windows_only_the_end_is_counted_on() -> None:
    """Engines keep windows sparsely; full attention is whole, so the rest is a junction."""
    cache = Full(KVCacheLayout.build([FULL, WINDOW]), capacity=1000)
    cache.begin(NEW[:1000])
    assert cache.coming([*NEW[:992], *IDS]) == Coming(992, 992)
    assert cache.coming([*NEW[:991], *IDS]) == Coming(0, 976)
    assert cache.coming(NEW[:1000]) == Coming(992, 992), "an equal one"
    cache.begin(IDS[:60])
    assert cache.coming([*IDS[:40], *NEW]) == Coming(0, 0), "there is no whole key"


def test_where_a_window_reaches_the_start_a_hit_ends_at_any_block() -> None:
    """All that the engine keeps then is what a window needs."""
    wide = KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=512)
    cache = Full(KVCacheLayout.build([FULL, wide]), capacity=1000)
    cache.begin(NEW[:500])
    assert cache.coming([*NEW[:300], *IDS]) == Coming(288, 288)


def test_the_second_of_two_that_part_keeps_where_they_do() -> None:
    """It finds full attention beyond its hit: a junction, which is a hit for the third. What it was
    told to keep is one as well."""
    cache = Full(KVCacheLayout.build([FULL, WINDOW]), capacity=1000)
    document = NEW[:1000]
    cache.begin([*document, *IDS[:100]])
    assert cache.coming([*document, *IDS[100:200]]) == Coming(0, 992)
    cache.begin([*document, *IDS[100:200]])
    assert cache.coming([*document, *IDS[200:300]]) == Coming(992, 992)
    cache.begin([*IDS[:600], *NEW[5000:5050]], keep=[500])
    assert cache.coming([*IDS[:600], *NEW[6000:6050]]) == Coming(496, 592)


def test_an_equal_prompt_is_compared_to_its_last_token() -> None:
    """Two questions of one length about a document have the same keys up to the last."""
    cache = Full(KVCacheLayout.build([FULL]), capacity=1000)
    cache.begin([*NEW[:1000], 1, 2, 3, 4])
    assert cache.expected([*NEW[:1000], 5, 6, 7, 8]) == 992
    assert cache.expected([*NEW[:1000], 1, 2, 3, 4]) == 992


@given(
    sent=st.lists(
        st.tuples(
            st.sampled_from([(5, 9), (2, 7), (3,), (0,)]),
            st.integers(1, 640),
            st.sampled_from([R0, R1]),
            st.booleans(),
        )
    ),
    asked=st.tuples(st.sampled_from([(5, 9), (2, 7), (3,)]), st.integers(1, 640)),
)
@example([((5, 9), 64, R0, False)], ((5, 9), 64))
@example([((5, 9), 640, R0, True)], ((5, 9), 64))
def test_what_is_in_prefill_is_what_a_comparison_with_each_prompt_says(
    sent: list[tuple[tuple[int, ...], int, SourceId, bool]], asked: tuple[tuple[int, ...], int]
) -> None:
    """However many begin alike, and whoever sent them; an equal one shares all but the last token,
    and one that another router no longer tells of shares nothing."""

    def ids_of(parts: tuple[int, ...], length: int) -> list[int]:
        ids = list(range(1000))
        for part in parts:
            ids[part * STEP] = 5000 + part
        return ids[:length]

    mirrored, wanted = Mirrored(), ids_of(*asked)
    expected: dict[SourceId, int] = {}
    heard: list[Prefilling] = []
    for number, (parts, length, source, is_ours) in enumerate(sent):
        ids = ids_of(parts, length)
        if is_ours:
            mirrored.begin(ids, source)
        elif keys := mirrored.prompt(ids).prefix_keys(STEP):
            heard.append(Prefilling(number, "m", source, length, length, keys))
            gone = mirrored.prompt(wanted).prefix_keys(STEP)
            mirrored.mirror.take_others(
                [*heard, Prefilling(-1, "m", source, len(wanted), 1, gone)] if gone else heard
            )
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, wanted)))  # noqa: B905
        keyed = length // STEP * STEP
        is_equal = length == len(wanted) and keyed and same >= keyed  # as far as keys tell
        shared = min(length if is_equal else same // STEP * STEP, len(wanted) - 1)
        if shared:
            expected[source] = max(expected.get(source, 0), shared)
    mirrored.mirror.take_others(heard)
    found = in_prefill(mirrored.mirror, mirrored.prompt(wanted), len(wanted))
    assert {source: coming.tokens for source, coming in found.items()} == expected
