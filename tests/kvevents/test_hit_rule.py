"""The hit rule against its definition, written a second time in the words of the design."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pytest

from kvevents.hit_rule import (
    equal_groups,
    longest_accepted,
    longest_extended_hit,
    longest_hit,
)
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from tests.support.engine_model import (
    defined_hit,
    defined_own,
    defined_tier_hit,
    lengths,
)

FULL = KVCacheGroup(GroupKind.FULL, 16)
NOT_CACHED = KVCacheGroup(GroupKind.NOT_CACHED, 1)
Eagle: TypeAlias = bool | Sequence[int]
OF_EVERY_KIND = [
    GroupKind.FULL,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.MAMBA,
    GroupKind.NOT_CACHED,
]


# --- random caches --------------------------------------------------------------------------------


@dataclass
class Cache:
    """Which blocks are present, and which were asked for."""

    ends: set[tuple[int, int]]
    asked: set[int]

    def has(self, group: int, end: int) -> bool:
        return (group, end) in self.ends

    def present(self, group: int, end: int) -> bool:
        self.asked.add(end)
        return self.has(group, end)


@dataclass
class Case:
    layout: KVCacheLayout
    cache: Cache
    limit: int
    prompt_tokens: int


def random_group(
    rng: random.Random, unit: int, kinds: list[GroupKind], sizes: list[int]
) -> KVCacheGroup:
    size = unit * rng.choice(sizes)
    # A chunk ends where the blocks of all groups end; other chunks have a test of their own below.
    chunk = unit * math.lcm(*sizes) * rng.randint(1, 4)
    return KVCacheGroup(
        rng.choice(kinds), size, sliding_window=rng.randint(1, 40), attention_chunk_size=chunk
    )


def random_eagle(rng: random.Random, groups: int) -> bool | list[int]:
    """A drafter in no group, in all, or in some."""
    if rng.random() < 0.6:
        return False
    return rng.random() < 0.4 or [index for index in range(groups) if rng.random() < 0.4]


def random_layout(rng: random.Random) -> KVCacheLayout:
    """Any mix of kinds and block sizes; a quarter of them with hits inside blocks."""
    if rng.random() < 0.25:
        return random_layout_with_hits_inside_blocks(rng)
    unit, sizes = rng.choice([1, 2, 4]), rng.choice([[1], [1, 2], [2, 4], [2, 3]])
    groups = [
        random_group(rng, unit, OF_EVERY_KIND, sizes) for _ in range(rng.choice([1, 1, 2, 2, 3, 5]))
    ]
    if all(group.kind is GroupKind.NOT_CACHED for group in groups):
        groups.append(KVCacheGroup(GroupKind.FULL, unit))
    return KVCacheLayout.build(
        groups, unit, None, random_eagle(rng, len(groups)), rng.random() < 0.8
    )


def random_layout_with_hits_inside_blocks(rng: random.Random) -> KVCacheLayout:
    """States, one group of full attention, and perhaps a window, as in the models that use it."""
    unit, sizes = rng.choice([1, 2, 4]), rng.choice([[1, 2], [2, 4], [2, 3], [4]])
    groups = [random_group(rng, unit, [GroupKind.MAMBA], sizes) for _ in range(rng.randint(1, 3))]
    groups.insert(rng.randint(0, 1), random_group(rng, unit, [GroupKind.FULL], sizes))
    if rng.random() < 0.4:
        groups.append(random_group(rng, unit, [GroupKind.SLIDING_WINDOW], sizes))
    return KVCacheLayout.build(
        groups, unit, unit, random_eagle(rng, len(groups)), rng.random() < 0.8
    )


def random_ends(
    rng: random.Random, layout: KVCacheLayout, index: int, prompt_tokens: int
) -> set[tuple[int, int]]:
    """Blocks of one group: nearly all, half of them, or few; entries inside blocks only where hits
    may end there."""
    group = layout.groups[index]
    step = min(group.block_size, layout.scheduler_block_size)
    share = rng.choice([1.0, 0.97, 0.9, 0.5])
    if group.kind is GroupKind.SLIDING_WINDOW:
        step = group.block_size
    return {(index, end) for end in range(step, prompt_tokens + 1, step) if rng.random() < share}


def random_case(rng: random.Random) -> Case:
    layout = random_layout(rng)
    prompt_tokens = rng.randint(1, 120)
    ends = set[tuple[int, int]]().union(
        *(random_ends(rng, layout, index, prompt_tokens) for index in range(len(layout.groups)))
    )
    return Case(layout, Cache(ends, set()), prompt_tokens - rng.choice([0, 1, 1]), prompt_tokens)


def random_cases(count: int, seed: int = 1) -> Iterator[Case]:
    rng = random.Random(seed)
    return (random_case(rng) for _ in range(count))


def smallest(wrong: list[Case]) -> list[Case]:
    """The simplest case to look at."""
    return sorted(wrong, key=lambda case: (len(case.layout.groups), case.prompt_tokens))[:1]


@pytest.mark.parametrize("seed", range(4))
def test_the_hit_is_the_longest_prefix_that_every_group_accepts(seed: int) -> None:
    """Walking from block to block must find what trying every length finds."""
    wrong = [
        case
        for case in random_cases(2500, seed)
        if longest_hit(case.layout, case.cache.present, case.limit, case.prompt_tokens)
        != defined_hit(case.layout, case.cache.has, case.limit, case.prompt_tokens)
    ]
    assert smallest(wrong) == []


def test_only_ends_of_the_prompts_own_blocks_are_asked_for() -> None:
    """The index finds blocks by position: an end outside the prompt has no hash."""
    for case in random_cases(1000):
        longest_hit(case.layout, case.cache.present, case.limit, case.prompt_tokens)
        assert all(
            0 < end <= case.prompt_tokens and end % case.layout.hash_block_size == 0
            for end in case.cache.asked
        )


def test_a_groups_own_longest_prefix_is_the_longest_it_accepts() -> None:
    """What an operator sees of each group follows the same rule."""
    wrong = [
        case for case in random_cases(2500) if _own_prefixes(case) != _defined_own_prefixes(case)
    ]
    assert smallest(wrong) == []


def _own_prefixes(case: Case) -> list[int]:
    groups = range(len(case.layout.groups))
    return [
        longest_accepted(case.layout, index, case.cache.present, case.limit, case.prompt_tokens)
        for index in groups
    ]


def _defined_own_prefixes(case: Case) -> list[int]:
    groups = range(len(case.layout.groups))
    return [
        defined_own(case.layout, index, case.cache.has, case.limit, case.prompt_tokens)
        for index in groups
    ]


def test_the_random_caches_give_hits_of_every_size() -> None:
    """If all hits were 0 or the whole prompt, the comparisons above would show little."""
    cases = list(random_cases(2000))
    hits = [
        defined_hit(case.layout, case.cache.has, case.limit, case.prompt_tokens) for case in cases
    ]
    longest = [lengths(case.layout, case.limit)[0] for case in cases]
    between = sum(0 < hit < most for hit, most in zip(hits, longest, strict=True))
    assert between > 400
    assert sum(hit == most > 0 for hit, most in zip(hits, longest, strict=True)) > 100
    assert hits.count(0) > 100


# --- single cases ---------------------------------------------------------------------------------


def window(size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=size)


def chunked(size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.CHUNKED_LOCAL, block_size, attention_chunk_size=size)


def mamba(block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.MAMBA, block_size)


def hit(
    *groups: KVCacheGroup, gone: dict[int, set[int]], prompt_tokens: int = 161, eagle: Eagle = False
) -> int:
    """The hit with all blocks present but those in *gone*, by group."""
    layout = KVCacheLayout.build(groups, eagle=eagle)
    return longest_hit(
        layout, lambda group, end: end not in gone.get(group, ()), prompt_tokens - 1, prompt_tokens
    )


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (1, 1),
        (2, 1),
        (16, 1),
        (17, 1),
        (18, 2),
        (33, 2),
        (34, 3),
        (64, 4),
        (65, 4),
        (66, 5),
        (1000, 63),
    ],
)
def test_a_window_needs_the_blocks_its_other_tokens_lie_in_and_at_least_one(
    size: int, blocks: int
) -> None:
    """A window of w sees w - 1 tokens before the next one; vLLM asks for a block even where it sees
    none."""
    assert window(size).window_blocks() == blocks
    reach = 160 if blocks > 10 else blocks * 16
    assert hit(window(size), gone={0: set(range(16, 161 - reach, 16))}) == 160
    assert hit(window(size), gone={0: {161 - 1 - reach + 16}}) < 160


def test_a_chunk_that_starts_at_the_hit_needs_nothing() -> None:
    """The next token reads only its own chunk, which is still empty."""
    assert hit(FULL, chunked(32), gone={1: set(range(16, 161, 16))}) == 160
    assert hit(FULL, chunked(64), gone={1: set(range(16, 129, 16))}) == 160
    assert hit(FULL, chunked(64), gone={1: {144}}) == 128


def test_a_chunk_need_not_end_where_blocks_of_other_groups_end() -> None:
    """Hits end at multiples of 96 here, chunks at multiples of 144: the chunk of the hit counts,
    not that of the limit."""
    layout = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 32), chunked(144, 48)])
    assert longest_hit(layout, lambda group, end: (group, end) != (1, 96), 150, 151) == 0


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole still has to produce a token."""
    assert hit(FULL, gone={}, prompt_tokens=160) == 144
    assert hit(FULL, gone={}, prompt_tokens=161) == 160


def test_a_cut_by_one_group_is_offered_to_the_others_again() -> None:
    """Each shortens what the other accepted: window, then state, then window again."""
    states = {1: set(range(16, 161, 16)) - {48, 112}}
    assert hit(window(33), mamba(), gone=states) == 112
    assert hit(window(33), mamba(), gone=states | {0: {96}}) == 48
    assert hit(window(33), mamba(), gone=states | {0: {96, 32}}) == 0


def test_eagle_must_see_one_block_more_than_is_reused() -> None:
    """A window needs it on top of its own; a state is the state before the dropped block."""
    assert hit(FULL, gone={}, eagle=True) == 144
    assert hit(window(17), gone={}, eagle=True) == 144
    assert hit(window(17), gone={0: {160}}, eagle=True) == 128
    assert hit(window(17), gone={0: {144}}, eagle=True) == 112
    assert hit(FULL, mamba(), gone={}, eagle=True) == 144


def test_only_the_groups_with_the_drafters_layers_give_eagles_block() -> None:
    """vLLM flags them: a window without a drafter beside full attention with one reuses what full
    attention does, and no block less."""
    groups = (FULL, window(17))
    assert hit(*groups, gone={}, eagle=[0]) == 144
    assert hit(*groups, gone={1: {160}}, eagle=[0]) == 144
    assert hit(*groups, gone={1: {160}}, eagle=True) == 128
    # The window's extra block may lie behind what full attention holds.
    assert hit(*groups, gone={0: {144}}, eagle=[1]) == 128
    assert hit(*groups, gone={0: {144}}, eagle=[0]) == 112
    assert hit(*groups, gone={0: {144}}, eagle=[0, 1]) == 112
    assert hit(*groups, gone={0: {144}}, eagle=[]) == 128


def test_a_full_group_of_the_drafters_own_is_looked_up_by_itself() -> None:
    """What the model's own group lacks costs no block more."""
    assert hit(FULL, window(17), FULL, gone={0: {112}}, eagle=[2]) == 96
    assert hit(FULL, window(17), FULL, gone={0: {112}}, eagle=[0, 2]) == 80


def test_a_window_without_a_drafter_that_cuts_the_hit_makes_the_others_give_again() -> None:
    """The hit then ends at other blocks, and a drafter has to see the one behind those."""
    # The first gives up 96 for 80; the second cuts to 48; then the first gives up 48 for 32.
    assert hit_of_windows({16, 32, 48, 80, 96}, {16, 32, 48}, eagle=[0]) == 32
    assert hit_of_windows({16, 32, 48, 80, 96}, {16, 32, 48}) == 48


def test_eagles_block_of_a_window_is_whole_also_where_hits_may_end_inside_blocks() -> None:
    """Only full attention has entries inside a block to test; a window's next entry is at its
    block's end."""
    layout = KVCacheLayout.build(
        [KVCacheGroup(GroupKind.FULL, 32), mamba(32), window(33, 32)], 16, 16, eagle=True
    )
    assert longest_hit(layout, lambda group, end: True, 99, 100) == 64
    assert longest_hit(layout, lambda group, end: (group, end) != (2, 96), 99, 100) == 32


def test_groups_that_are_not_cached_have_no_say() -> None:
    """The encoder's blocks of an encoder-decoder model are never shared."""
    layout = KVCacheLayout.build([NOT_CACHED, FULL], eagle=False)
    assert layout.scheduler_block_size == layout.hash_block_size == 16
    assert longest_hit(layout, lambda group, end: group == 1, 160, 161) == 160
    assert longest_accepted(layout, 0, lambda group, end: False, 160, 161) == 160


def test_a_prompt_shorter_than_a_block_hits_nothing() -> None:
    """There is no block to ask for."""
    assert [hit(FULL, gone={}, prompt_tokens=length) for length in range(1, 17)] == [0] * 16


# --- groups with equal specs ----------------------------------------------------------------------


def test_groups_with_equal_specs_are_one_and_those_that_are_not_cached_none() -> None:
    """Gemma's many window groups are looked up once, whatever their indexes; one token of
    difference separates them."""
    layout = KVCacheLayout.build(
        [window(33), FULL, window(33), NOT_CACHED, window(34), FULL, mamba(), window(33, 32)]
    )
    assert equal_groups(layout) == ((0, 2), (1, 5), (4,), (6,), (7,))
    drafting = replace(layout, eagle=frozenset([2, 5]))
    assert equal_groups(drafting) == ((0,), (1,), (2,), (4,), (5,), (6,), (7,))


def test_equal_groups_give_eagles_block_together() -> None:
    """Asked one after the other, a group that gave its block would not be asked for it again when
    the other cut the hit."""
    gone = {0: {48}, 1: {64, 80}}
    # A hit needs the block at its end and EAGLE's after it, in both groups: only 16 and 32 are.
    assert hit(window(16), window(16), gone=gone, prompt_tokens=81, eagle=True) == 16
    # Another spec with the same needs: 64 suits the first, which gives its block; 32 the second;
    # and then 32 the first too.
    assert hit(window(16), window(17), gone=gone, prompt_tokens=81, eagle=True) == 32
    assert hit(window(17), window(16), gone=gone, prompt_tokens=81, eagle=True) == 32


def test_equal_groups_must_all_have_a_block() -> None:
    """Each has its own copies: the hit ends at the first hole in any of them."""
    assert hit(FULL, FULL, FULL, gone={2: {112}, 1: {144}}) == 96
    assert hit(mamba(), mamba(), gone={0: {160}, 1: {144}}) == 128
    assert hit(window(33), FULL, window(33), gone={0: {160}, 2: {128}}) == 112


@pytest.mark.parametrize("seed", range(2))
def test_a_group_asked_twice_changes_no_hit(seed: int) -> None:
    """A copy of a group with the same blocks has nothing to add, with EAGLE or without."""
    wrong = [
        case
        for case in random_cases(1500, 10 + seed)
        if sum(_caches(case)) > 1 and _hit_with_copy(case) != _hit_of(case)
    ]
    assert smallest(wrong) == []


def _caches(case: Case) -> list[bool]:
    return [group.kind is not GroupKind.NOT_CACHED for group in case.layout.groups]


def _hit_of(case: Case) -> int:
    return longest_hit(case.layout, case.cache.has, case.limit, case.prompt_tokens)


def _hit_with_copy(case: Case) -> int:
    count = len(case.layout.groups)
    eagle = {index + copy for index in case.layout.eagle for copy in (0, count)}
    doubled = replace(case.layout, groups=case.layout.groups * 2, eagle=frozenset(eagle))
    return longest_hit(
        doubled,
        lambda group, end: case.cache.has(group % count, end),
        case.limit,
        case.prompt_tokens,
    )


# --- with lower tiers -----------------------------------------------------------------------------


@dataclass
class TieredCase:
    gpu: Case
    below: Cache
    units: list[int]
    as_vllm: bool

    @property
    def gpu_hit(self) -> int:
        return longest_hit(
            self.gpu.layout, self.gpu.cache.has, self.gpu.prompt_tokens - 1, self.gpu.prompt_tokens
        )

    def found(self, below: Callable[[int, int], bool] | None = None) -> int:
        case = self.gpu
        return longest_extended_hit(
            case.layout,
            below or self.below.has,
            self.gpu_hit,
            case.prompt_tokens,
            self.units,
            self.as_vllm,
        )

    def defined(self) -> int:
        case = self.gpu
        return defined_tier_hit(
            case.layout,
            self.below.has,
            self.gpu_hit,
            case.prompt_tokens,
            self.units,
            self.as_vllm,
        )


def tiered_cases(count: int, seed: int) -> Iterator[TieredCase]:
    """Tiers of blocks, and of units of several blocks."""
    rng = random.Random(seed)
    for case in random_cases(count, seed):
        blocks = rng.choice((1, 1, 2, 3))
        units = [group.block_size * blocks for group in case.layout.groups]
        below = {
            (index, end)
            for index, unit in enumerate(units)
            for end in range(unit, case.prompt_tokens + 1, unit)
            if rng.random() < 0.8
        }
        yield TieredCase(case, Cache(below, set()), units, rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(2))
def test_a_tier_extends_a_hit_as_the_engine_does(seed: int) -> None:
    """Engine and router both ask this function; the definition tries every length."""
    cases = list(tiered_cases(4000, 20 + seed))
    wrong = [case for case in cases if case.found() != case.defined()]
    assert wrong == []
    assert sum(case.found() > case.gpu_hit for case in cases) > 300
    assert sum(case.found() == case.gpu_hit > 0 for case in cases) > 100
    assert sum(case.found() == case.gpu.prompt_tokens - 1 for case in cases) > 50


def test_an_empty_tier_changes_nothing() -> None:
    """And never makes a hit shorter."""
    wrong = [
        case.gpu
        for case in tiered_cases(500, 30)
        if case.found(lambda group, end: False) != case.gpu_hit
    ]
    assert smallest(wrong) == []


def extended(
    *groups: KVCacheGroup,
    gpu: dict[int, set[int]],
    below: dict[int, set[int]],
    prompt_tokens: int,
    eagle: Eagle = False,
    units: Sequence[int] | None = None,
) -> tuple[int, int]:
    """The GPU's hit and the hit with a tier, of blocks named by group and end."""
    layout = KVCacheLayout.build(groups, eagle=eagle)

    def on_gpu(group: int, end: int) -> bool:
        return end in gpu.get(group, ())

    gpu_hit = longest_hit(layout, on_gpu, prompt_tokens - 1, prompt_tokens)
    found = longest_extended_hit(
        layout, lambda group, end: end in below.get(group, ()), gpu_hit, prompt_tokens, units
    )
    return gpu_hit, found


EVERY = set(range(16, 161, 16))


def test_a_tiers_window_may_lean_on_the_gpus_blocks() -> None:
    """Its blocks before the GPU's hit need not be copied twice."""
    gpu = {0: {16, 32, 48, 64}, 1: {48, 64}}
    assert extended(
        FULL, window(49), gpu=gpu | {1: {32, 48, 64}}, below={0: {80}, 1: {80}}, prompt_tokens=161
    ) == (64, 80)
    assert extended(
        FULL,
        window(49),
        gpu=gpu | {1: {16, 32, 48, 64}},
        below={0: EVERY, 1: {96}},
        prompt_tokens=161,
    ) == (64, 64)
    # Before the GPU's hit a tier's blocks do not count: the engine has what it reads there already,
    # or has no hit there.
    assert extended(
        FULL,
        window(33),
        gpu={0: EVERY, 1: {80, 96}},
        below={0: EVERY, 1: EVERY - {112}},
        prompt_tokens=161,
    ) == (
        96,
        160,
    )


def test_beyond_the_gpus_hit_the_gpus_blocks_do_not_count() -> None:
    """A block after a hole is not part of the hit, and may be evicted before the load ends."""
    assert extended(FULL, gpu={0: EVERY - {48}}, below={0: {48}}, prompt_tokens=161) == (32, 48)
    assert extended(FULL, gpu={0: EVERY - {48}}, below={0: {64, 80}}, prompt_tokens=161) == (32, 32)


@pytest.mark.parametrize(
    ("groups", "hit_tokens"),
    [
        ((FULL,), 160),
        ((FULL, FULL), 160),
        ((FULL, NOT_CACHED), 160),
        ((window(33),), 159),
        ((FULL, window(33)), 159),
        ((FULL, chunked(32)), 159),
        ((FULL, mamba()), 144),
        ((FULL, window(33), mamba()), 144),
        ((mamba(),), 144),
    ],
)
def test_of_a_prompt_that_ends_with_a_block_a_tier_loads_all_that_its_kinds_allow(
    groups: tuple[KVCacheGroup, ...], hit_tokens: int
) -> None:
    """With full attention alone the last token is computed again, over the same blocks. A window
    leaves that token out, and its block is loaded all the same; a state exists only between
    blocks."""
    everything = dict.fromkeys(range(len(groups)), EVERY)
    assert extended(*groups, gpu={}, below=everything, prompt_tokens=160) == (0, hit_tokens)
    assert extended(*groups, gpu={}, below=everything, prompt_tokens=161) == (0, 160)
    assert extended(*groups, gpu={}, below=everything, prompt_tokens=159) == (0, 144)


def test_a_window_must_be_whole_at_the_end_of_the_last_unit() -> None:
    """The one block that a prompt of 192 tokens adds to one of 176 decides about all of them."""
    layout = (FULL, window(64))
    below = {0: set(range(16, 193, 16)), 1: {128, 144, 160, 176}}
    assert extended(*layout, gpu={}, below=below, prompt_tokens=192) == (0, 176)
    whole = below | {1: {144, 160, 176, 192}}
    assert extended(*layout, gpu={}, below=whole, prompt_tokens=192) == (0, 191)
    # With all but one token of the last unit, one unit more is needed than a window has.
    assert extended(FULL, window(66), gpu={}, below=whole, prompt_tokens=192, units=(32, 32)) == (
        0,
        0,
    )


def test_less_than_a_unit_beyond_the_gpus_hit_is_not_loaded() -> None:
    """15 tokens of a block of 16, or a block of a unit of two."""
    gpu = {0: EVERY - {160}, 1: EVERY - {160}}
    everything = {0: EVERY, 1: EVERY}
    assert extended(FULL, window(33), gpu=gpu, below=everything, prompt_tokens=160) == (144, 144)
    assert extended(FULL, gpu={0: {16}}, below={0: {32, 64}}, prompt_tokens=63, units=(32,)) == (
        16,
        16,
    )
    assert extended(FULL, gpu={0: {16}}, below={0: {32, 64}}, prompt_tokens=64, units=(32,)) == (
        16,
        64,
    )


def test_only_whole_units_of_a_tier_count() -> None:
    """A tier that keeps four blocks together brings back 64 tokens or none of them."""
    units = {"units": (64,), "gpu": dict[int, set[int]]()}
    assert extended(FULL, below={0: EVERY}, prompt_tokens=127, **units) == (0, 64)  # type: ignore[arg-type]
    assert extended(FULL, below={0: EVERY}, prompt_tokens=128, **units) == (0, 128)  # type: ignore[arg-type]
    assert extended(FULL, below={0: EVERY - {64}}, prompt_tokens=128, **units) == (0, 0)  # type: ignore[arg-type]


def test_eagle_gives_a_block_back_of_a_loaded_prompt_too() -> None:
    """The draft model needs its hidden states, wherever the rest came from."""
    assert extended(FULL, gpu={}, below={0: EVERY}, prompt_tokens=160, eagle=True) == (0, 144)
    assert extended(
        FULL, gpu={0: {16, 32, 48}}, below={0: EVERY}, prompt_tokens=161, eagle=True
    ) == (32, 144)


def test_a_loaded_prompt_gives_eagles_block_back_only_in_the_drafters_groups() -> None:
    """vLLM's connector asks for a unit more where a group is flagged, and nowhere else."""
    below = {0: EVERY - {160}, 1: EVERY}

    def loaded(*eagle: int) -> int:
        return extended(FULL, window(17), gpu={}, below=below, prompt_tokens=161, eagle=eagle)[1]

    assert (loaded(), loaded(0), loaded(1), loaded(0, 1)) == (144, 128, 144, 128)


def test_a_hit_is_never_shorter_with_a_tier() -> None:
    """EAGLE's block of a GPU hit may be on the GPU only, beyond the blocks that count there."""
    assert extended(
        FULL, window(17), gpu={0: EVERY, 1: EVERY}, below={}, prompt_tokens=161, eagle=True
    ) == (144, 144)


# --- the examples of the docstrings ---------------------------------------------------------------


def hit_of_windows(first: set[int], second: set[int], eagle: Eagle = False) -> int:
    """The hit of two windows of one block each, which hold the blocks with these ends."""
    layout = KVCacheLayout.build([window(10), window(12)], eagle=eagle)
    held = (first, second)
    return longest_hit(layout, lambda group, end: end in held[group], 96, 97)


def test_groups_cut_the_hit_in_turn_until_none_does() -> None:
    """Each may accept less the shorter the hit is."""
    assert hit_of_windows({48, 96}, {48, 64}) == 48


def test_a_cut_makes_every_group_give_eagles_block_again() -> None:
    """The hit then ends at other blocks, of which the draft model has to see one more."""
    assert hit_of_windows({16, 32, 48, 80, 96}, {16, 32, 64, 80}, eagle=True) == 16


def test_a_missing_block_of_a_window_is_skipped_with_all_lengths_that_need_it() -> None:
    """The walk looks at each block once."""
    layout, asked = KVCacheLayout.build([window(40)]), []

    def present(_group: int, end: int) -> bool:
        asked.append(end)
        return end != 64

    assert longest_hit(layout, present, 96, 97) == 48
    assert asked == [96, 80, 64, 48, 32, 16]
