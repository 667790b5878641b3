"""The present state of one cache, kept beside its events and told again as events. No I/O.

A snapshot announces every block that is there, as often as it has copies: the GPU tier first, in it
the groups of full attention first, parents before children, contiguous blocks in one event. A
consumer that applies it to nothing holds what one holds that followed the stream from its start.
What it cannot know: tokens of blocks whose own events never showed them (announced without), and of
evicted ancestors of live blocks (the parent is then a hash the snapshot does not announce).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    pack_tokens,
    unpack_tokens,
)
from kvevents.layout import GroupKind, kind_from_wire

BATCH_WEIGHT = 4096
"""Bound of one event, in tokens plus `BLOCK_WEIGHT` per block; a batch stays below twice of it."""
BLOCK_WEIGHT = 8
FORGOTTEN_PLACES = 8192
"""Evicted blocks of a group whose content is remembered: an offload tier announces a block after
the GPU has evicted it."""


class _Place(msgspec.Struct, frozen=True, gc=False):
    """What a block's event said about its content. Packed, since there is one per block."""

    parent: BlockHash | None
    packed_tokens: bytes
    lora_name: str | None
    shows_extra_keys: bool
    extra_keys: Any
    lookahead: tuple[int, ...] | None

    @property
    def run_key(self) -> tuple[int, str | None, bool, bool]:
        """Neighbours that agree in this can share one event."""
        return (
            len(self.packed_tokens),
            self.lora_name,
            self.shows_extra_keys,
            self.lookahead is None,
        )


_Held: TypeAlias = dict[BlockHash, int]
_Places: TypeAlias = dict[BlockHash, _Place]


class _GroupLabel(NamedTuple):
    """What every event of a group repeats."""

    group_idx: int | None = None
    kind: str | None = None
    sliding_window: int | None = None


class _Tier(NamedTuple):
    medium: str
    label: _GroupLabel
    held: _Held
    places: _Places


class _Group:
    """Blocks of one group by tier. Copies are counted, so that an engine may store a block
    twice."""

    def __init__(self) -> None:
        self.label = _GroupLabel()
        self.held: dict[str, _Held] = {}
        self.places: _Places = {}
        self._forgotten: OrderedDict[BlockHash, _Place] = OrderedDict()

    def store(self, event: BlockStored) -> int:
        """Add a copy of each block; return how many were not there."""
        self._see_label(event)
        held = self.held.setdefault(event.tier, {})
        before = len(held)
        for block_hash in event.block_hashes:
            held[block_hash] = held.get(block_hash, 0) + 1
        self._learn_places(event)
        return len(held) - before

    def remove(self, event: BlockRemoved) -> int:
        """Take a copy of each block away; return how many are gone."""
        held = self.held.get(event.tier, {})
        before = len(held)
        for block_hash in event.block_hashes:
            copies = held.get(block_hash, 0)
            if copies > 1:
                held[block_hash] = copies - 1
            elif copies:
                del held[block_hash]
                self._forget_place(block_hash)
        return before - len(held)

    def clear_gpu(self) -> int:
        """Empty the GPU tier; return how many blocks it had."""
        held = self.held.pop(GPU, {})
        for block_hash in held:
            self._forget_place(block_hash)
        return len(held)

    def tiers(self) -> list[_Tier]:
        """Copies that later events do not change."""
        places = dict(self.places)
        return [_Tier(medium, self.label, dict(held), places) for medium, held in self.held.items()]

    def _see_label(self, event: BlockStored) -> None:
        if event.kv_cache_spec_kind is not None or self.label.kind is None:
            self.label = _GroupLabel(
                event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            )

    def _learn_places(self, event: BlockStored) -> None:
        block_size = event.tokens_per_block
        places = _places(event, block_size) if block_size else self._remembered(event.block_hashes)
        for block_hash, place in places:
            self.places.setdefault(block_hash, place)

    def _remembered(self, hashes: Iterable[BlockHash]) -> Iterator[tuple[BlockHash, _Place]]:
        for block_hash in hashes:
            place = self._forgotten.pop(block_hash, None)
            if place is not None:
                yield block_hash, place

    def _forget_place(self, block_hash: BlockHash) -> None:
        if any(block_hash in held for held in self.held.values()):
            return
        place = self.places.pop(block_hash, None)
        if place is not None:
            self._forgotten[block_hash] = place
            if len(self._forgotten) > FORGOTTEN_PLACES:
                self._forgotten.popitem(last=False)


def _places(event: BlockStored, block_size: int) -> Iterator[tuple[BlockHash, _Place]]:
    """Each block of a dense event with its content."""
    try:
        packed = pack_tokens(event.token_ids)
    except OverflowError:  # no consumer accepts such a token id either
        return
    parent, step = event.parent_block_hash, block_size * 4
    extra_keys, lookaheads = event.extra_keys or (), event.lookahead_token_ids or ()
    for index, block_hash in enumerate(event.block_hashes):
        yield (
            block_hash,
            _Place(
                parent=parent,
                packed_tokens=packed[index * step : (index + 1) * step],
                lora_name=event.lora_name,
                shows_extra_keys=event.extra_keys is not None,
                extra_keys=extra_keys[index] if index < len(extra_keys) else None,
                lookahead=tuple(lookaheads[index]) if index < len(lookaheads) else None,
            ),
        )
        parent = block_hash


class Mirror:
    """What a publisher's cache holds at this moment. Not thread-safe."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.blocks = 0
        """Distinct (group, tier, hash)."""
        self.is_complete = True
        """False from a loss on until the whole state is told anew: such a mirror must not be passed
        on."""
        self._groups: dict[int, _Group] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Follow one batch."""
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks += self._groups.setdefault(event.group_idx or 0, _Group()).store(event)
            elif isinstance(event, BlockRemoved):
                group = self._groups.get(event.group_idx or 0)
                self.blocks -= group.remove(event) if group else 0
            elif isinstance(event, AllBlocksCleared):
                self.blocks -= sum(group.clear_gpu() for group in self._groups.values())
            else:
                self.layout = event

    def lose(self) -> None:
        """Events passed by unseen."""
        self.is_complete = False

    def reset(self, state: Iterable[Event]) -> None:
        """Start over from the whole state."""
        self._groups.clear()
        self.blocks = 0
        self.apply(state)
        self.is_complete = True

    def capture(self) -> Capture:
        """The state as it is now; later events do not change it. Costs a copy of the dictionaries,
        not of the blocks."""
        groups = sorted(self._groups.items(), key=lambda item: self._rank(item[0]))
        tiers = [tier for _, group in groups for tier in group.tiers()]
        return Capture(
            self.layout, sorted(tiers, key=lambda tier: (tier.medium != GPU, tier.medium))
        )

    def _rank(self, group_idx: int) -> tuple[bool, int]:
        """Full attention first: it knows the most prefixes, and other groups' blocks may lean on
        them."""
        specs = self.layout.groups
        is_full = group_idx < len(specs) and kind_from_wire(specs[group_idx].kind) is GroupKind.FULL
        return not is_full, group_idx


class Capture:
    """A state that no longer changes; several readers may share it."""

    def __init__(self, layout: CacheLayout, tiers: Sequence[_Tier]) -> None:
        self._layout = layout
        self._tiers = tiers

    def batches(self) -> Iterator[list[Event]]:
        """The layout, then every block, in batches of bounded size."""
        yield [self._layout]
        batch: list[Event] = []
        weight = 0
        for index, tier in enumerate(self._tiers):
            for event in _stored_events(tier, self._tiers[:index]):
                batch.append(event)
                weight += len(event.token_ids) + BLOCK_WEIGHT * len(event.block_hashes)
                if weight >= BATCH_WEIGHT:
                    yield batch
                    batch, weight = [], 0
        if batch:
            yield batch


def _stored_events(tier: _Tier, told: Sequence[_Tier]) -> Iterator[BlockStored]:
    """Everything in a tier; a block with two copies comes twice."""
    pending = dict(tier.held)
    while pending:
        further_copies: _Held = {}
        yield from _events_of_one_copy(tier, told, pending, further_copies)
        pending = further_copies


def _events_of_one_copy(
    tier: _Tier, told: Sequence[_Tier], pending: _Held, further_copies: _Held
) -> Iterator[BlockStored]:
    loose: list[BlockHash] = []
    most_loose = BATCH_WEIGHT // BLOCK_WEIGHT
    while pending:
        run = _take_run(tier.places, pending, further_copies)
        if run[0] not in tier.places:
            loose.append(run.pop(0))
        if len(loose) == most_loose:
            yield _loose_event(tier, loose)
            loose = []
        for part in _anchored(tier, told, run):
            yield from _dense_events(tier, part)
    if loose:
        yield _loose_event(tier, loose)


def _anchored(tier: _Tier, told: Sequence[_Tier], run: list[BlockHash]) -> list[list[BlockHash]]:
    """Cut a run that leans on an evicted block behind its first block that another group or tier
    has told.

    Of such a run nothing can be placed, for want of its parent; what comes behind the cut can.
    """
    parent = tier.places[run[0]].parent if run else None
    if parent is None or parent in tier.places:
        return [run]
    for index, block_hash in enumerate(run[:-1], start=1):
        if any(block_hash in other.held and block_hash in other.places for other in told):
            return [run[:index], run[index:]]
    return [run]


def _take_run(places: _Places, pending: _Held, further_copies: _Held) -> list[BlockHash]:
    """Take the youngest block and all its ancestors that are still pending; the oldest ancestor
    comes first."""
    run: list[BlockHash] = []
    block_hash, copies = pending.popitem()
    while True:
        run.append(block_hash)
        if copies > 1:
            further_copies[block_hash] = copies - 1
        place = places.get(block_hash)
        if place is None or place.parent is None or place.parent not in pending:
            break
        block_hash = place.parent
        copies = pending.pop(block_hash)
    run.reverse()
    return run


def _dense_events(tier: _Tier, run: list[BlockHash]) -> Iterator[BlockStored]:
    for (token_bytes, *_), alike in groupby(
        run, key=lambda block_hash: tier.places[block_hash].run_key
    ):
        hashes = list(alike)
        size = max(1, BATCH_WEIGHT // (token_bytes // 4 + BLOCK_WEIGHT))
        for first in range(0, len(hashes), size):
            yield _dense_event(tier, hashes[first : first + size])


def _dense_event(tier: _Tier, hashes: list[BlockHash]) -> BlockStored:
    places = [tier.places[block_hash] for block_hash in hashes]
    tokens = unpack_tokens(b"".join(place.packed_tokens for place in places))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=places[0].parent,
        token_ids=tokens,
        medium=tier.medium,
        group_idx=tier.label.group_idx,
        lora_name=places[0].lora_name,
        extra_keys=[place.extra_keys for place in places] if places[0].shows_extra_keys else None,
        kv_cache_spec_kind=tier.label.kind,
        kv_cache_spec_sliding_window=tier.label.sliding_window,
        lookahead_token_ids=None
        if places[0].lookahead is None
        else [list(place.lookahead or ()) for place in places],
    )


def _loose_event(tier: _Tier, hashes: list[BlockHash]) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        medium=tier.medium,
        group_idx=tier.label.group_idx,
        kv_cache_spec_kind=tier.label.kind,
        kv_cache_spec_sliding_window=tier.label.sliding_window,
    )
