"""The index against a model of an engine's cache that knows the truth, whatever happens in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.codec import encode
from kvevents.events import CPU, GPU, BlockRemoved, CacheLayout, Event, EventBatch, GroupSpec
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index.base import SourceId
from router.index.layout_learner import LayoutHints, TierHint
from tests.router.index.implementations import CORE, Implementation
from tests.support.engine_model import Block, EngineModel, Prompt

SOURCE = SourceId("replica-a")
SEGMENT = 8
DEPTH = 5


def full(block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.FULL, block_size)


def window(size: int, block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


def chunked(size: int, block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.CHUNKED_LOCAL, block_size, attention_chunk_size=size)


def mamba(block_size: int = 4) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.MAMBA, block_size)


LAYOUTS: dict[str, KVCacheLayout] = {
    "full": KVCacheLayout.build([full()]),
    "full and a window": KVCacheLayout.build([full(), window(9)]),
    "two windows before full": KVCacheLayout.build([window(5), window(14), full()]),
    "two of full": KVCacheLayout.build([full(), full()]),
    "full and chunks": KVCacheLayout.build([full(), chunked(16)]),
    "states before full": KVCacheLayout.build([mamba(), full()]),
    "a window, states and full": KVCacheLayout.build([window(9), mamba(), full()]),
    "blocks of three sizes": KVCacheLayout.build([full(8), window(9), window(14, 2)]),
    "a group that is not cached": KVCacheLayout.build(
        [KVCacheGroup(GroupKind.NOT_CACHED, 1), full(), window(9)]
    ),
    "eagle": KVCacheLayout.build([full()], eagle=True),
    "eagle with a window and states": KVCacheLayout.build([full(), window(9), mamba()], eagle=True),
    "eagle in full attention": KVCacheLayout.build([full(), window(9)], eagle=[0]),
    "eagle in a window": KVCacheLayout.build([full(), window(9), mamba()], eagle=[1]),
    "eagle in a group of its own": KVCacheLayout.build([full(), full()], eagle=[1]),
}


def prompt_of(segments: Sequence[int], lora: str | None = None, salt: str | None = None) -> Prompt:
    """A path through a tree of prompts: paths with a common start share their blocks."""
    return Prompt(
        tuple(10 * segment + token for segment in segments for token in range(SEGMENT)), lora, salt
    )


prompts = st.builds(
    prompt_of,
    st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH),
    st.sampled_from([None, None, None, "sql"]),
    st.sampled_from([None, None, None, "tenant-a"]),
)


class Pair:
    """A model, and an index that sees it only through encoded batches."""

    def __init__(
        self,
        implementation: Implementation,
        layout: KVCacheLayout,
        as_int: bool = True,
        is_ours: bool = False,
    ) -> None:
        self.model = EngineModel(layout, as_int, names_block_size=not is_ours)
        self.index = CORE.create(None)
        self.is_ours = is_ours
        self.start()

    def start(self) -> None:
        """A fresh source: ours announces its layout, of others it is configured."""
        if self.is_ours:
            self.index.add(SOURCE)
            self.apply([announcement(self.model.layout)])
        else:
            self.index.add(SOURCE, hints_of(self.model.layout))

    def apply(self, events: Sequence[Event]) -> None:
        self.index.apply(SOURCE, encode(EventBatch(0.0, list(events), 0)))

    def check(self, asked: Sequence[Prompt]) -> None:
        """Every prompt's hit, and every count, is the model's own."""
        for prompt in asked:
            hit = self.index.match(prompt.tokens, prompt.lora, prompt.salt)[SOURCE]
            assert (hit.gpu_cached_tokens, hit.cached_tokens) == self.hit(prompt), prompt
            below = sum(tokens for _, tokens in hit.by_tier)
            assert below == hit.cached_tokens - hit.gpu_cached_tokens
        statistics = self.index.statistics()[SOURCE]
        assert statistics.blocks == self.model.counts()
        assert statistics.unplaced == self.unplaced()

    def hit(self, prompt: Prompt) -> tuple[int, int]:
        return self.model.hit(prompt, as_vllm=not self.is_ours)

    def unplaced(self) -> int:
        return len({block.prefix for block in self.model.copies} - self.model.described)

    def check_memory(self) -> None:
        """Remove what is left, copy by copy: nothing may stay."""
        self.apply([self.model.evict(block) for block in list(self.model.copies.elements())])
        statistics = self.index.statistics()[SOURCE]
        assert (statistics.blocks, statistics.unplaced) == ({}, 0)
        CORE.expect_empty(self.index)


def announcement(layout: KVCacheLayout) -> CacheLayout:
    groups = [
        GroupSpec(
            group.kind.value, group.block_size, group.sliding_window, group.attention_chunk_size
        )
        for group in layout.groups
    ]
    return CacheLayout(
        "publisher-1",
        groups,
        layout.hash_block_size,
        layout.scheduler_block_size,
        eagle=bool(layout.eagle),
        eagle_groups=sorted(layout.eagle),
    )


def hints_of(layout: KVCacheLayout) -> LayoutHints:
    sizes = (layout.hash_block_size, layout.scheduler_block_size)
    return LayoutHints(
        layout.groups,
        *sizes,
        eagle=tuple(layout.eagle),
        authoritative=True,
        hash_seeds=(),
        tiers=tuple((tier, TierHint(unit_blocks=1)) for tier in (CPU, "DISK")),
    )


# --- step by step, whatever the steps -------------------------------------------------------------


class IndexAgainstModel(RuleBasedStateMachine):
    """Any sequence of stores, evictions, offloads, resets and restarts, in batches of any size."""

    @initialize(
        layout=st.sampled_from(list(LAYOUTS.values())),
        as_int=st.booleans(),
        is_ours=st.booleans(),
    )
    def begin(self, layout: KVCacheLayout, as_int: bool, is_ours: bool) -> None:
        self.pair = Pair(CORE, layout, as_int, is_ours)
        self.model = self.pair.model
        self.waiting: list[Event] = []
        self.asked: list[Prompt] = [prompt_of([0] * DEPTH), prompt_of([1, 0])]

    @rule(
        prompt=prompts, group=st.integers(0, 9), start=st.integers(0, 20), count=st.integers(1, 12)
    )
    def store(self, prompt: Prompt, group: int, start: int, count: int) -> None:
        index = group % len(self.model.layout.groups)
        size = self.model.layout.groups[index].block_size
        first = start * size % len(prompt.tokens) // size * size
        if prompt.upto(first) not in self.model.described:
            first = 0  # children before their parents are the tests below
        last = min(first + count * size, len(prompt.tokens) // size * size)
        self._happened(prompt, self.model.store(index, prompt, first, last))

    @rule(prompt=prompts, group=st.integers(0, 9))
    def store_whole(self, prompt: Prompt, group: int) -> None:
        index = group % len(self.model.layout.groups)
        self._happened(prompt, self.model.store(index, prompt, 0, len(prompt.tokens)))

    @precondition(lambda self: not self.pair.is_ours)
    @rule(prompt=prompts, group=st.integers(0, 9), kept=st.sets(st.integers(0, 9), max_size=4))
    def keep(self, prompt: Prompt, group: int, kept: set[int]) -> None:
        index = group % len(self.model.layout.groups)
        size = self.model.layout.groups[index].block_size
        ends = range(size, len(prompt.tokens) + 1, size)
        chosen = sorted({ends[number % len(ends)] for number in kept})
        self._happened(prompt, self.model.keep(index, prompt, 0, ends[-1], chosen))

    @rule(
        prompt=prompts,
        group=st.integers(0, 9),
        ends=st.sets(st.integers(0, 9), min_size=1),
        tier=st.sampled_from([CPU, "DISK"]),
    )
    def offload(self, prompt: Prompt, group: int, ends: set[int], tier: str) -> None:
        index = group % len(self.model.layout.groups)
        size = self.model.layout.groups[index].block_size
        possible = range(size, len(prompt.tokens) + 1, size)
        chosen = sorted({possible[number % len(possible)] for number in ends})
        self._happened(prompt, self.model.offload(index, prompt, chosen, tier))

    @precondition(lambda self: self.model.copies)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.model.copies, key=repr)))
        self._happened(block.prefix, self.model.evict(block))

    @rule()
    def clear(self) -> None:
        self.waiting.append(self.model.clear())

    @rule()
    def restart(self) -> None:
        """Another process: other names for all blocks, and nothing in the cache."""
        self.waiting.clear()
        self.model = self.pair.model = EngineModel(
            self.model.layout, self.model.as_int, self.model.names_block_size, self.model.seed + "!"
        )
        self.pair.index.clear(SOURCE)
        self.pair.start()

    @rule()
    def deliver(self) -> None:
        self.pair.apply(self.waiting)
        self.waiting.clear()

    def _happened(self, prompt: Prompt, event: Event) -> None:
        self.waiting.append(event)
        self.asked = [*self.asked[-3:], prompt, prompt._replace(tokens=(*prompt.tokens, 7))]

    @invariant()
    def the_index_answers_as_the_model_would(self) -> None:
        if not self.waiting:
            self.pair.check(self.asked)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.deliver()
            self.pair.check(self.asked)
            self.pair.check_memory()


IndexAgainstModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIndexAgainstModel = IndexAgainstModel.TestCase


# --- long runs ------------------------------------------------------------------------------------


class RandomEngine:
    """An engine under a random workload; a parent is always announced before its children."""

    def __init__(self, model: EngineModel, seed: int) -> None:
        self.model = model
        self.rng = random.Random(seed)

    def prompt(self) -> Prompt:
        """Few enough prompts that they share blocks and come again."""
        segments = self.rng.choices((0, 1), k=self.rng.randint(1, DEPTH))
        return prompt_of(
            segments,
            self.rng.choice([None] * 7 + ["sql"]),
            self.rng.choice([None] * 7 + ["tenant-a"]),
        )

    def step(self) -> list[Event]:
        """What one engine step does to the cache."""
        if self.rng.random() < 0.01:
            return [self.model.clear()]
        ways = [self._serve, self._serve, self._evict, self._evict, self._offload]
        return self.rng.choice([*ways, self._keep] if self.model.names_block_size else ways)()

    def _serve(self) -> list[Event]:
        """A prompt's blocks in every group, from a block on that is known."""
        prompt = self.prompt()
        return [self._store(group, prompt) for group in range(len(self.model.layout.groups))]

    def _store(self, group: int, prompt: Prompt) -> Event:
        known = [
            end
            for end in self._ends(group, prompt)[:-1]
            if prompt.upto(end) in self.model.described
        ]
        return self.model.store(group, prompt, self.rng.choice([0, 0, *known]), len(prompt.tokens))

    def _evict(self) -> list[Event]:
        held = sorted(self.model.copies.elements(), key=repr)
        return [
            self.model.evict(block)
            for block in self.rng.sample(held, min(len(held), self.rng.randint(1, 8)))
        ]

    def _offload(self) -> list[Event]:
        group, prompt = self.rng.randrange(len(self.model.layout.groups)), self.prompt()
        return [self.model.offload(group, prompt, self._some(self._ends(group, prompt), 12), CPU)]

    def _keep(self) -> list[Event]:
        group, prompt = self.rng.randrange(len(self.model.layout.groups)), self.prompt()
        ends = self._ends(group, prompt)
        return [self.model.keep(group, prompt, 0, ends[-1], self._some(ends, 3))]

    def _ends(self, group: int, prompt: Prompt) -> range:
        size = self.model.layout.groups[group].block_size
        return range(size, len(prompt.tokens) + 1, size)

    def _some(self, ends: range, most: int) -> list[int]:
        return sorted(self.rng.sample(ends, self.rng.randint(0, min(most, len(ends)))))


@pytest.mark.parametrize("is_ours", [False, True], ids=["configured", "announced"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_index_is_exact_after_every_batch_of_a_long_run(
    implementation: Implementation, name: str, is_ours: bool
) -> None:
    """Many batches deep, with copies counted up and down, it must not have drifted by a block."""
    pair = Pair(implementation, LAYOUTS[name], is_ours=is_ours)
    engine = RandomEngine(pair.model, seed=7)
    hits: Counter[bool] = Counter()
    for _ in range(60):
        pair.apply([event for _ in range(engine.rng.randint(1, 3)) for event in engine.step()])
        asked = [engine.prompt() for _ in range(3)]
        pair.check(asked)
        hits.update(pair.hit(prompt)[1] > 0 for prompt in asked)
    assert hits[True] > 15
    assert hits[False] > 10
    pair.check_memory()


# --- events in another order ----------------------------------------------------------------------


def runs_of(
    rng: random.Random, model: EngineModel, prompts: Sequence[Prompt]
) -> list[tuple[int, Prompt, int, int]]:
    """Every group's blocks of every prompt, cut into runs as chunked prefill cuts them."""
    runs = []
    for prompt in prompts:
        for group, spec in enumerate(model.layout.groups):
            blocks = len(prompt.tokens) // spec.block_size
            cuts = sorted({0, blocks, *(rng.randint(0, blocks) for _ in range(3))})
            size = spec.block_size
            runs += [(group, prompt, one * size, other * size) for one, other in pairwise(cuts)]
    return runs


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "name", ["full", "full and a window", "blocks of three sizes", "a window, states and full"]
)
def test_stores_in_any_order_lead_to_the_same_hits(
    implementation: Implementation, name: str, seed: int
) -> None:
    """A late join sees children first and their parents with the snapshot: no subtree may be lost
    for good."""
    rng, pair = random.Random(seed), Pair(implementation, LAYOUTS[name])
    prompts = [
        prompt_of(rng.choices((0, 1), k=DEPTH), salt=rng.choice([None, "tenant-a"]))
        for _ in range(4)
    ]
    runs = runs_of(rng, pair.model, prompts)
    rng.shuffle(runs)
    for run in runs:
        pair.apply([pair.model.store(*run)])
        pair.check(prompts[:2])
    pair.check(prompts)
    assert pair.index.statistics()[SOURCE].waiting.runs == 0
    assert pair.index.statistics()[SOURCE].unplaced == 0
    assert pair.model.hit(prompts[0])[0] > 0
    pair.check_memory()


@pytest.mark.parametrize("seed", range(8))
def test_holes_and_offloaded_blocks_are_placed_whenever_the_dense_event_comes(
    implementation: Implementation, seed: int
) -> None:
    """Before it they count as held and not placed; behind it they are found."""
    rng, pair = random.Random(seed), Pair(implementation, LAYOUTS["full and a window"])
    prompts = [prompt_of(rng.choices((0, 1), k=DEPTH)) for _ in range(3)]
    events: list[tuple[str, Prompt]] = [
        (what, prompt) for prompt in prompts for what in ("dense", "keep", "offload")
    ]
    rng.shuffle(events)
    for what, prompt in events:
        ends = range(4, len(prompt.tokens) + 1, 4)
        if what == "dense":
            pair.apply([pair.model.store(0, prompt, 0, len(prompt.tokens))])
        elif what == "keep":
            pair.apply([pair.model.keep(1, prompt, 0, len(prompt.tokens), ends[-3:])])
        else:
            pair.apply([pair.model.offload(0, prompt, ends[3:7], CPU)])
        pair.check(prompts)
    assert pair.unplaced() == 0


def test_a_block_evicted_before_its_parent_was_known_is_found_when_a_lower_tier_announces_it(
    implementation: Implementation,
) -> None:
    """Its tokens were seen, and so was its parent in the end: the place is known, and the CPU's
    copy can be found."""
    pair, prompt = Pair(implementation, LAYOUTS["full"]), prompt_of([0, 1])
    late, early = pair.model.store(0, prompt, 8, 16), pair.model.store(0, prompt, 0, 8)
    pair.apply(
        [
            late,
            pair.model.evict(Block(0, GPU, prompt)),
            pair.model.evict(Block(0, GPU, prompt.upto(12))),
        ]
    )
    pair.apply([early, pair.model.offload(0, prompt, [12, 16], CPU)])
    pair.check([prompt, prompt._replace(tokens=(*prompt.tokens, 7))])


def test_events_delivered_twice_count_twice(implementation: Implementation) -> None:
    """The index cannot know a duplicate from a second copy: the feed must not hand on a batch
    twice."""
    pair, prompt = Pair(implementation, LAYOUTS["full"]), prompt_of([0])
    stored = pair.model.store(0, prompt, 0, 8)
    pair.apply([stored])
    pair.apply([stored])
    pair.apply([BlockRemoved(stored.block_hashes, GPU, 0)])
    assert pair.index.match((*prompt.tokens, 7))[SOURCE].gpu_cached_tokens == 8


# --- several sources ------------------------------------------------------------------------------


def test_sources_are_exact_side_by_side(implementation: Implementation) -> None:
    """Engines with other seeds, forms and layouts share one index, and none sees another's
    blocks."""
    index = CORE.create(None)
    engines = {}
    for number, layout in enumerate(LAYOUTS.values()):
        model = EngineModel(layout, as_int=number % 2 == 0, seed=f"engine {number}")
        engines[SourceId(f"replica-{number}", number)] = RandomEngine(model, number)
        index.add(SourceId(f"replica-{number}", number), hints_of(layout))
    for _ in range(40):
        for source, engine in engines.items():
            index.apply(source, encode(EventBatch(0.0, engine.step())))
        prompt = next(iter(engines.values())).prompt()
        answers = index.match(prompt.tokens, prompt.lora, prompt.salt)
        assert {source: hit[:2] for source, hit in answers.items()} == {
            source: engine.model.hit(prompt) for source, engine in engines.items()
        }


def test_the_explanation_holds_the_hit_and_each_groups_own(implementation: Implementation) -> None:
    """What an operator sees is what the router decided by."""
    pair, prompt = Pair(implementation, LAYOUTS["full and a window"]), prompt_of([0, 1, 0])
    pair.apply([pair.model.store(0, prompt, 0, 16), pair.model.store(1, prompt, 0, 24)])
    prepared = pair.index.prepare(prompt.tokens)
    hit = pair.index.match_prompt(prepared)[SOURCE]
    assert hit[:2] == pair.model.hit(prompt) == (16, 16)
    groups = pair.index.explain(prepared, SOURCE)
    assert [(group.group, group.kind, group.tokens) for group in groups] == [
        (0, "full_attention", 16),
        (1, "sliding_window", 20),
    ]
