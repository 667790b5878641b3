"""Random caches with a lower tier: what both indexes predict is what the cache really has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.events import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvevents.hit_rule import longest_extended_hit
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index.layout_learner import LayoutHints, TierHint
from tests.router.index.implementations import Implementation
from tests.support.blocks import SOURCE, Prefix, apply
from tests.support.engine_model import defined_accept

TokenIds: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, TokenIds]
"""A group, and the prefix at whose end a block or unit ends."""

_STEP = 2
"""Tokens of a hash block."""
_LAYOUTS = (
    (KVCacheGroup(GroupKind.FULL, 2),),
    (KVCacheGroup(GroupKind.FULL, 4),),
    (KVCacheGroup(GroupKind.FULL, 2), KVCacheGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=5)),
    (
        KVCacheGroup(GroupKind.FULL, 8),
        KVCacheGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=7),
        KVCacheGroup(GroupKind.SLIDING_WINDOW, 4, sliding_window=9),
    ),
)


@dataclass
class Cache:
    """A cache with one lower tier, and the events that its engine would publish."""

    rng: random.Random
    groups: tuple[KVCacheGroup, ...]
    blocks_per_chunk: int
    is_described: bool
    """Events of full attention name all blocks in a chunk, and their tokens."""
    has_own_hashes: bool
    """The tier hashes by itself, and stores the end of a prompt too, as LMCache may."""
    seed: str
    """Of the engine's hashes."""
    hides_extra_keys: bool
    gpu: set[Place] = field(default_factory=set)
    tier: dict[Place, list[BlockHash]] = field(default_factory=dict)
    """With the hashes that were announced of it."""

    @property
    def layout(self) -> KVCacheLayout:
        return KVCacheLayout.build(self.groups, _STEP)

    def unit(self, group: int) -> int:
        return self.blocks_per_chunk * self.groups[group].block_size

    # --- what happens -----------------------------------------------------------------------------

    def serve(self, prompt: TokenIds) -> Iterator[Event]:
        """Compute a prompt, and copy what is whole of it to the tier."""
        prefix = Prefix([*prompt], _STEP, seed=self.seed)
        for index, group in enumerate(self.groups):
            yield from self._computed(index, group, prefix)
        for index in range(1 if self.has_own_hashes else len(self.groups)):
            yield from self._copied(index, prompt, prefix)

    def _computed(self, index: int, group: KVCacheGroup, prefix: Prefix) -> Iterator[Event]:
        tokens, size = tuple(prefix.tokens), group.block_size
        ends = range(size, len(tokens) + 1, size)
        missing = next((end for end in ends if (index, tokens[:end]) not in self.gpu), None)
        if missing is not None:
            stop = len(tokens) // size * size
            again = list(range(missing, stop + 1, size))
            held = [end for end in again if (index, tokens[:end]) in self.gpu]
            if held:
                yield prefix.removed(index, held)
            self.gpu |= {(index, tokens[:end]) for end in again}
            stored = prefix.stored(index, group, missing - size, stop)
            yield replace(stored, extra_keys=None) if self.hides_extra_keys else stored

    def _copied(self, index: int, prompt: TokenIds, prefix: Prefix) -> Iterator[Event]:
        unit, size = self.unit(index), self.groups[index].block_size
        ends = [*range(unit, len(prompt) + 1, unit)]
        if self.has_own_hashes and len(prompt) % unit:
            ends.append(len(prompt))
        for end in ends:
            start = (end - 1) // unit * unit
            if (index, prompt[:end]) in self.tier:
                continue
            if self.has_own_hashes:
                event = own_chunk(prompt, start, end)
            elif self.is_described and self.groups[index].kind is GroupKind.FULL:
                event = prefix.stored(index, self.groups[index], start, end, "CPU")
                event = replace(event, extra_keys=None)
            else:
                event = prefix.offloaded(index, [end])
            assert self.has_own_hashes or len(event.block_hashes) in (1, unit // size)
            self.tier[index, prompt[:end]] = event.block_hashes
            yield event

    def evict(self) -> Iterator[Event]:
        """Some of the blocks, or all of the GPU's, or some of the tier's."""
        roll = self.rng.random()
        if roll < 0.15:
            self.gpu.clear()
            yield AllBlocksCleared()
        elif roll < 0.6:
            for place in self.some_of(sorted(self.gpu)):
                self.gpu.remove(place)
                prefix = Prefix([*place[1]], _STEP, seed=self.seed)
                yield prefix.removed(place[0], [len(place[1])])
        else:
            for place in self.some_of(sorted(self.tier)):
                yield BlockRemoved(self.tier.pop(place), "CPU", place[0])

    def some_of(self, places: Sequence[Place]) -> list[Place]:
        share = self.rng.choice([0.1, 0.5, 1.0])
        return [place for place in places if self.rng.random() < share]

    # --- what a prompt finds ----------------------------------------------------------------------

    def on_gpu(self, group: int, prompt: TokenIds) -> Callable[[int], bool]:
        return lambda end: (group, prompt[:end]) in self.gpu

    def hit(self, prompt: TokenIds) -> int:
        layout, limit = self.layout, len(prompt) - 1
        step = layout.scheduler_block_size
        gpu = next(
            length
            for length in range(limit // step * step, -1, -step)
            if all(
                defined_accept(group, length, 0, self.on_gpu(index, prompt), len(prompt))
                for index, group in enumerate(self.groups)
            )
        )
        if len(self.groups) == 1:
            unit, end = self.unit(0), gpu // self.unit(0) * self.unit(0)
            while (0, prompt[: end + unit]) in self.tier and end + unit <= len(prompt):
                end += unit
            return end if end - gpu >= unit else gpu
        units = [self.unit(index) for index in range(len(self.groups))]

        def is_below(group: int, end: int) -> bool:
            return (group, prompt[:end]) in self.tier

        return longest_extended_hit(layout, is_below, gpu, len(prompt), units, as_vllm=True)


def own_chunk(prompt: TokenIds, start: int, end: int) -> BlockStored:
    """One chunk in an event, under a hash that is no engine's."""
    parent = own_hash(prompt[:start]) if start else None
    own, tokens = own_hash(prompt[:end]), [*prompt[start:end]]
    return BlockStored([own], parent, tokens, "CPU", block_size=end - start)


def own_hash(prefix: TokenIds) -> int:
    return random.Random(repr(prefix)).getrandbits(63)


def prompts(rng: random.Random) -> Iterator[TokenIds]:
    """Long ones, and beginnings of those before with another end."""
    known: list[TokenIds] = []
    while True:
        start: TokenIds = ()
        if known and rng.random() < 0.8:
            start = rng.choice(known)
            start = start[: rng.randint(0, len(start))]
        tail = tuple(rng.choices(range(100), k=rng.choice([1, 3, 16, 40])))
        known.append((start + tail)[:70])
        yield known[-1]


def check(implementation: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    has_own_hashes, is_learned = rng.random() < 0.3, rng.random() < 0.5
    groups = rng.choice(_LAYOUTS[:2] if has_own_hashes else _LAYOUTS)
    cache = Cache(
        rng,
        groups,
        rng.choice([1, 2, 3, 4]) + has_own_hashes,
        rng.random() < 0.6,
        has_own_hashes,
        rng.choice(["a seed nobody knows", "0"]),
        rng.random() < 0.3,
    )
    hint = TierHint(unit_size=cache.unit(0)) if has_own_hashes else None
    hint = hint or TierHint(unit_blocks=cache.blocks_per_chunk)
    hints = LayoutHints(
        () if is_learned else groups,
        None if is_learned else _STEP,
        authoritative=not is_learned,
        hash_seeds=("0",),
        tiers=(("CPU", hint),) if rng.random() < 0.4 else (),
    )
    index = implementation.create(None)
    index.add(SOURCE, hints)
    following = prompts(rng)
    # Two chunks and more show the unit, and every group.
    apply(index, *cache.serve(tuple(rng.choices(range(100), k=70))))
    if rng.random() < 0.5:
        # A prompt from before the router came: it hears of what is copied now, and of no place.
        before = [*cache.serve(tuple(range(1000, 1070)))]
        apply(index, *[event for event in before if event.tier != GPU][1:])
    history: list[TokenIds] = []
    for _ in range(25):
        history.append(next(following))
        apply(index, *cache.serve(history[-1]))
        if rng.random() < 0.4:
            apply(index, *cache.evict())
        asked = (*rng.choice(history), *rng.choices(range(100), k=rng.choice([1, 1, 9])))
        if rng.random() < 0.5:
            asked = (*asked[: rng.randint(2, len(asked))], 100)
        assert index.match(asked)[SOURCE].cached_tokens == cache.hit(asked), (hints, cache, asked)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_every_hit_of_a_random_cache_with_a_tier_is_predicted(
    implementation: Implementation, seed: int
) -> None:
    """Chunks that are described or only named, units that are told or learned, tiers with hashes
    of their own, evictions and clears: none may make a prediction differ from what is there."""
    check(implementation, seed)
