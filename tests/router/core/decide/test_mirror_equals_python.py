"""The compiled mirror beside the one in Python, which defines what it says: whatever requests do,
engines tell and time passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.events import AllBlocksCleared, BlockStored, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from router.index.base import NO_HIT, SourceId
from router.index.index import PrefixIndex
from router.index.mirror_types import STEP, Prefilling
from router.index.prompt import HashedPrompt
from tests.router.core.decide.both import BothMirrors, BothVisits
from tests.support.blocks import FULL, Prefix, mamba, window
from tests.support.index import blocks_held, match_source, token_columns

LAYOUTS = {
    "full": KVCacheLayout.build([FULL]),
    "window": KVCacheLayout.build([FULL, window(64)]),
    "wide window": KVCacheLayout.build([FULL, window(512)]),
    "window first": KVCacheLayout.build([window(128), FULL]),
    "mamba": KVCacheLayout.build([FULL, mamba()]),
    "coarse": KVCacheLayout.build([FULL, window(96, 32)]),
    "eagle": KVCacheLayout.build([FULL, window(64)], eagle=True),
    "windows only": KVCacheLayout.build([window(64)]),
    "chunked": KVCacheLayout.build(
        [FULL, KVCacheGroup(GroupKind.CHUNKED_LOCAL, 16, attention_chunk_size=128)]
    ),
}
MODELS = "one", "other"
SOURCES = SourceId("r0"), SourceId("r0", 1), SourceId("r1")
STRANGER = SourceId("r2")
ROOTS = [list(range(first, first + 700)) for first in (1000, 3000)]
ENDINGS = [list(range(first, first + 400)) for first in (5000, 6000, 7000)]
LENGTHS = 1, 63, 64, 65, 128, 200, 320, 512, 640
"""Of what prompts have in common; their ends part them."""

prompts = st.tuples(
    st.sampled_from(ROOTS),
    st.sampled_from(LENGTHS),
    st.sampled_from(ENDINGS),
    st.sampled_from((0, 1, 30, 64, 100, 192, 330)),
).map(lambda drawn: [*drawn[0][: drawn[1]], *drawn[2][: drawn[3]]])
sources = st.sampled_from(SOURCES)
models = st.sampled_from(MODELS)
capacities = st.sampled_from((None, 0, 20, 60, 200))


class MirrorsSideBySide(RuleBasedStateMachine):
    """Two models with an index each, three caches of two replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.mirrors = BothMirrors(max_keys=120, clock=lambda: self.now)
        self.indexes = {model: PrefixIndex() for model in MODELS}
        self.layouts: dict[SourceId, KVCacheLayout] = {}
        self.visits: list[BothVisits] = []
        self.heard: list[Prefilling] = []
        self.capacity: int | None = None

    # --- engines ---

    @initialize(names=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * len(SOURCES)))
    def start(self, names: tuple[str, ...]) -> None:
        for source, name in zip(SOURCES, names, strict=True):
            self.layouts[source] = LAYOUTS[name]
            self.tell(source, announce(LAYOUTS[name]))

    @rule(source=sources, name=st.sampled_from(sorted(LAYOUTS)))
    def restart(self, source: SourceId, name: str) -> None:
        """Another process, with another layout."""
        self.layouts[source] = LAYOUTS[name]
        for index in self.indexes.values():
            index.clear(source)
        self.tell(source, announce(LAYOUTS[name]))

    @rule(source=sources)
    def drop(self, source: SourceId) -> None:
        """Its events are not followed any more; those that come add it again."""
        for index in self.indexes.values():
            index.drop(source)

    @rule(source=sources)
    def clear(self, source: SourceId) -> None:
        self.tell(source, AllBlocksCleared())

    @rule(source=sources, ids=prompts, dense=st.booleans())
    def store(self, source: SourceId, ids: list[int], dense: bool) -> None:
        """Full attention as a whole, the others so too or only their last block."""
        prefix = Prefix(ids)
        for number, group in enumerate(self.layouts[source].groups):
            end = len(ids) // group.block_size * group.block_size
            if not end:
                continue
            if dense or group.kind is GroupKind.FULL:
                self.tell(source, prefix.stored(number, group))
            else:
                first = max(end - 64, 0) // group.block_size * group.block_size
                ends = range(first + group.block_size, end + 1, group.block_size)
                self.tell(source, prefix.kept(number, group, list(ends)))

    @rule(source=sources, ids=prompts, keep=st.integers(0, 10))
    def evict(self, source: SourceId, ids: list[int], keep: int) -> None:
        """All but the first blocks of a prompt."""
        prefix = Prefix(ids)
        for number, group in enumerate(self.layouts[source].groups):
            ends = range(group.block_size, len(ids) + 1, group.block_size)
            if gone := list(ends)[keep:]:
                self.tell(source, prefix.removed(number, gone))

    @rule(source=sources, ids=prompts)
    def offload(self, source: SourceId, ids: list[int]) -> None:
        """To the memory below the GPU."""
        prefix = Prefix(ids)
        for number, group in enumerate(self.layouts[source].groups):
            if ends := list(range(group.block_size, len(ids) + 1, group.block_size)):
                self.tell(source, prefix.offloaded(number, ends))

    def tell(self, source: SourceId, event: object) -> None:
        for index in self.indexes.values():
            index.apply(source, EventBatch(0.0, [event]))  # type: ignore[list-item]

    # --- requests ---

    @rule(
        model=models,
        source=st.sampled_from((*SOURCES, STRANGER)),
        ids=prompts,
        keep=st.lists(st.integers(0, 600), max_size=2),
        is_honest=st.booleans(),
        speed=st.sampled_from((0.5, 1.0, 2.0)),
    )
    def begin(
        self,
        model: str,
        source: SourceId,
        ids: list[int],
        keep: list[int],
        is_honest: bool,
        speed: float,
    ) -> None:
        """What a planner counts on may be more or less than what is there."""
        index = self.indexes[model]
        prompt = self.prompt(index, ids)
        found = index.match_prompt(prompt)
        _, hit, loads = found.get(source, NO_HIT)
        (_,), _, (junction,) = token_columns(found, [source])
        if not is_honest:
            hit, junction, loads = min(160, len(ids) - 1) // 32 * 32, 32, ()
        self.visits.append(
            self.mirrors.begin(
                model,
                index,
                source,
                [prompt],
                len(ids),
                len(ids) - hit,
                hit,
                speed,
                loads,
                junction,
                keep,
            )
        )

    @rule(model=models, source=sources, all_ids=st.lists(prompts, min_size=0, max_size=3))
    def begin_batch(self, model: str, source: SourceId, all_ids: list[list[int]]) -> None:
        """Several prompts, or none that is known."""
        index, total = self.indexes[model], sum(map(len, all_ids)) or 100
        hashed = [self.prompt(index, ids) for ids in all_ids]
        self.visits.append(self.mirrors.begin(model, index, source, hashed, total, total))

    @precondition(lambda self: self.visits)
    @rule(data=st.data(), is_timed=st.booleans())
    def first_token(self, data: st.DataObject, is_timed: bool) -> None:
        data.draw(st.sampled_from(self.visits)).first_token(is_timed)

    @precondition(lambda self: self.visits)
    @rule(data=st.data(), was_served=st.booleans())
    def end(self, data: st.DataObject, was_served: bool) -> None:
        data.draw(st.sampled_from(self.visits)).ended(was_served)

    @rule(seconds=st.sampled_from((0.001, 0.02, 0.1, 0.3, 3.0, 100.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.sampled_from(("r0", "r1")))
    def forget(self, replica: str) -> None:
        self.mirrors.forget(replica)

    @rule(model=models)
    def forget_model(self, model: str) -> None:
        self.mirrors.forget_model(model)

    # --- others ---

    @rule(
        model=models,
        told=st.lists(st.tuples(st.sampled_from((*SOURCES, STRANGER)), prompts), max_size=2),
        kept=st.integers(0, 3),
    )
    def hear(self, model: str, told: list[tuple[SourceId, list[int]]], kept: int) -> None:
        """Some of what was heard before, and more."""
        news = [
            Prefilling(number, model, source, len(ids), len(ids), keys)
            for number, (source, ids) in enumerate(told)
            if (keys := self.prompt(self.indexes[model], ids).prefix_keys(STEP))
        ]
        self.heard = [*self.heard[:kept], *news]
        self.mirrors.hear(self.heard)

    # --- what they say ---

    @rule(model=models, ids=prompts, knows_length=st.booleans())
    def ask_of_a_prompt(self, model: str, ids: list[int], knows_length: bool) -> None:
        index = self.indexes[model]
        prompt = self.prompt(index, ids)
        self.mirrors.in_prefill(prompt, len(ids) if knows_length else 0)
        found = index.match_prompt(prompt)
        for source in (*SOURCES, STRANGER):
            (gpu,), _, (junction,) = token_columns(found, [source])
            self.mirrors.expected(source, prompt, len(ids), gpu, junction)

    @rule(model=models, capacity=capacities)
    def ask_of_caches(self, model: str, capacity: int | None) -> None:
        caches = [STRANGER, *SOURCES]
        self.mirrors.outlooks(model, caches, lambda number: number and capacity, self.now)

    @rule(model=models, idle_s=st.sampled_from((0.0, 0.005, 0.2, 5.0, 500.0, 1e6)))
    def ask_of_a_model(self, model: str, idle_s: float) -> None:
        self.mirrors.reuse_probability(model, idle_s)
        self.mirrors.prefill_tokens_per_s(model)

    @invariant()
    def agree(self) -> None:
        self.mirrors.statistics()
        self.mirrors.prefilling()
        for source in SOURCES:
            self.mirrors.ended(source)
            self.mirrors.load_prices(source)

    def prompt(self, index: PrefixIndex, ids: Sequence[int]) -> HashedPrompt:
        return index.prepare(array("I", ids), extra_steps=(STEP,))


MirrorsSideBySide.TestCase.settings = settings(max_examples=60, stateful_step_count=60)


class TestMirrorsSideBySide(MirrorsSideBySide.TestCase):  # type: ignore[misc]
    """The readable form says what the other must."""


def test_large_caches_are_followed_alike() -> None:
    """Tables grow and split, and shrink again when what was long ago makes room."""
    now = 0.0
    mirrors = BothMirrors(max_keys=20_000, clock=lambda: now)
    index, random = PrefixIndex(), Random(5)
    roots = [[random.randrange(50_000) for _ in range(12_000)] for _ in range(6)]
    running: list[BothVisits] = []
    for number in range(400):
        now += random.random()
        shared = random.choice(roots)[: random.randrange(12_000)]
        ids = [*shared, *(random.randrange(50_000) for _ in range(random.randrange(4000)))]
        prompt = index.prepare(array("I", ids), extra_steps=(STEP,))
        mirrors.in_prefill(prompt, len(ids))
        source = SOURCES[number % 3]
        running.append(mirrors.begin("m", index, source, [prompt], len(ids), len(ids)))
        if len(running) > 8:
            visit = running.pop(random.randrange(8))
            visit.first_token()
            visit.ended()
            mirrors.statistics()
    for source in SOURCES:
        mirrors.ended(source)
    mirrors.reuse_probability("m", 3.0)
    assert mirrors.statistics().kept > 10_000


def test_blocks_that_only_the_engines_hash_finds_are_found() -> None:
    """Windows of an engine that announces blocks without tokens have no key: the hashes of a prompt
    must come along, and whether they are whole decides what was evicted."""
    now = 0.0
    mirrors, index = BothMirrors(clock=lambda: now), PrefixIndex()
    source, prefix = SOURCES[0], Prefix(list(range(1, 700)), as_int=False, seed="0")
    chain = HashChain.from_seed("sha256", "0")
    index.apply(source, EventBatch(0.0, [announce(KVCacheLayout.build([FULL]), chain)]))
    ends = list(range(16, 640, 16))
    index.apply(source, EventBatch(0.0, [prefix.removed(0, [16])]))
    unplaced = prefix.stored(0, FULL, 16)
    index.apply(source, EventBatch(0.0, [unplaced]))
    index.apply(source, EventBatch(0.0, [prefix.stored(0, FULL, 0, 16)]))
    prompt = index.prepare(array("I", prefix.tokens), extra_steps=(STEP,))
    hit = match_source(index, prompt, source).gpu_cached_tokens
    visit = mirrors.begin("m", index, source, [prompt], len(prefix.tokens), 700 - hit, hit)
    visit.first_token()
    visit.ended()
    assert mirrors.statistics().requests == 1
    index.apply(source, EventBatch(0.0, [prefix.removed(0, ends[5:])]))
    other = index.prepare(array("I", range(9000, 9100)), extra_steps=(STEP,))
    mirrors.begin("m", index, source, [other], 100, 100).ended()
    mirrors.outlook("m", source, 40)
    mirrors.expected(source, prompt, len(prefix.tokens), hit)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_burst_of_equal_prompts_is_seen_alike(layout: str) -> None:
    """What is asked most: many in prefill that begin alike, and one more."""
    now = 0.0
    mirrors, index = BothMirrors(clock=lambda: now), PrefixIndex()
    source = SOURCES[0]
    index.apply(source, EventBatch(0.0, [announce(LAYOUTS[layout])]))
    for number in range(30):
        now += 0.01
        ids = [*ROOTS[0][: 640 - number], *ENDINGS[number % 3][:number]]
        prompt = index.prepare(array("I", ids), extra_steps=(STEP,))
        mirrors.in_prefill(prompt, len(ids))
        mirrors.expected(source, prompt, len(ids), 0)
        mirrors.begin("m", index, source, [prompt], len(ids), len(ids), keep=[number * 16])
        mirrors.outlooks("m", SOURCES, lambda _: 100, now)
        mirrors.prefilling()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["full", "window", "window first", "eagle", "mamba"])
def test_what_long_prompts_ahead_will_evict_is_foreseen_alike(layout: str, seed: int) -> None:
    """Prompts of several steps in caches that are nearly full, of content that was computed twice:
    what is left of each prompt that was served."""
    now, random, source = 0.0, Random(seed), SOURCES[0]
    mirrors, index = BothMirrors(clock=lambda: now), PrefixIndex()
    groups = LAYOUTS[layout].groups
    index.apply(source, EventBatch(0.0, [announce(LAYOUTS[layout])]))
    served: list[list[int]] = []
    for _ in range(8):
        now += 1.0
        ids = random.choice(ROOTS)[: random.randrange(700)] + random.choice(ENDINGS)[:300]
        visit = begin_at(mirrors, index, ids, random.random() < 0.5)
        events = [kept_of(Prefix(ids), number, group) for number, group in enumerate(groups)]
        index.apply(source, EventBatch(0.0, events))
        visit.first_token()
        visit.ended()
        served.append(ids)
    mirrors.outlook("m", source, blocks_held(index, source) + random.randrange(400))
    for number in range(6):
        ids = list(range(number * 9000, number * 9000 + 1000 * (number + 1)))
        begin_at(mirrors, index, served[number] if number % 2 else ids, True)
        for ids in served:
            prompt = index.prepare(array("I", [*ids, 1]), extra_steps=(STEP,))
            found = index.match_prompt(prompt)
            (gpu,), _, (junction,) = token_columns(found, [source])
            mirrors.expected(source, prompt, len(ids) + 1, gpu, junction)


def begin_at(
    mirrors: BothMirrors, index: PrefixIndex, ids: list[int], finds_it: bool
) -> BothVisits:
    """Begin with what is there of a prompt, or compute it again."""
    prompt = index.prepare(array("I", ids), extra_steps=(STEP,))
    (gpu,), _, (junction,) = token_columns(index.match_prompt(prompt), [SOURCES[0]])
    hit, junction = (gpu, junction) if finds_it else (0, 0)
    count = len(ids)
    return mirrors.begin(
        "m",
        index,
        SOURCES[0],
        [prompt],
        count,
        count - hit,
        hit,
        junction_tokens=junction,
    )


def kept_of(prefix: Prefix, number: int, group: KVCacheGroup) -> BlockStored:
    """Full attention as a whole, of the others what is before the end."""
    if group.kind is GroupKind.FULL:
        return prefix.stored(number, group)
    end = len(prefix.tokens) // group.block_size * group.block_size
    first = max(end - (group.sliding_window or 16), 0) // group.block_size * group.block_size
    return prefix.kept(number, group, list(range(first + group.block_size, end + 1, 16)))
