"""The present state of one cache, kept from its events and written as a snapshot. No I/O.

A snapshot announces every block that is present, as often as it has copies: the GPU tier first,
within it the groups of full attention first, parents before children, contiguous blocks in one
event. A consumer that applies it to nothing holds the same as one that followed the stream from its
start. It lacks two things: the tokens of blocks whose own events never showed them (they are
announced without), and those of evicted ancestors of present blocks (the parent is then a hash that
the snapshot does not announce).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    TierBlocksCleared,
    pack_tokens,
    unpack_tokens,
)
from kvevents.layout import GroupKind, kind_from_wire

BATCH_WEIGHT = 4096
"""Bound of one event, in tokens plus `BLOCK_WEIGHT` per block; a batch stays below twice of it."""
BLOCK_WEIGHT = 8
REMEMBERED_CONTENTS = 8192
"""Evicted blocks of a group whose content is remembered: an offload tier announces a block after
the GPU has evicted it."""


class _Content(msgspec.Struct, frozen=True, gc=False):
    """Holds a block's content by its event. Packed, since there is one per block."""

    parent: BlockHash | None
    packed_tokens: bytes
    lora_name: str | None
    lora_id: int | None
    shows_extra_keys: bool
    extra_keys: Any
    lookahead: tuple[int, ...] | None
    cache_salt: str | None

    @property
    def run_key(self) -> tuple[int, str | None, int | None, str | None, bool, bool]:
        """The key of neighbours that can share one event."""
        return (
            len(self.packed_tokens),
            self.lora_name,
            self.lora_id,
            self.cache_salt,
            self.shows_extra_keys,
            self.lookahead is None,
        )


class _Place(NamedTuple):
    """A tier, and its place and owner by events."""

    tier: str
    locality: str | None = None
    ownership: str | None = None


_Copies: TypeAlias = dict[BlockHash, int]
_Contents: TypeAlias = dict[BlockHash, _Content]


class _GroupLabel(NamedTuple):
    """Holds the fields that every event of a group repeats."""

    group_idx: int | None = None
    kind: str | None = None
    sliding_window: int | None = None


class _Tier(NamedTuple):
    """One group's blocks in one tier, copied when the snapshot was taken."""

    place: _Place
    label: _GroupLabel
    copies: _Copies
    contents: _Contents


class _Group:
    """Blocks of one group by tier. Copies are counted, so that an engine may store a block
    twice."""

    def __init__(self) -> None:
        self.label = _GroupLabel()
        self.copies: dict[_Place, _Copies] = {}
        self.contents: _Contents = {}
        self._remembered: OrderedDict[BlockHash, _Content] = OrderedDict()

    def store(self, event: BlockStored) -> int:
        """Add a copy of each block; return how many blocks are new in the tier."""
        self._update_label(event)
        copies = self.copies.setdefault(_place_of(event), {})
        before = len(copies)
        for block_hash in event.block_hashes:
            copies[block_hash] = copies.get(block_hash, 0) + 1
        self._learn_contents(event)
        return len(copies) - before

    def remove(self, event: BlockRemoved) -> int:
        """Take a copy of each block away; return how many blocks left the tier."""
        copies = self.copies.get(_place_of(event), {})
        before, left = len(copies), event.remaining_copy_counts
        for index, block_hash in enumerate(event.block_hashes):
            count = copies.get(block_hash, 0)
            remaining = count - 1 if left is None else left[index]
            if count and remaining > 0:
                copies[block_hash] = remaining
            elif count:
                del copies[block_hash]
                self._release_content(block_hash)
        return before - len(copies)

    def clear(self, tier: str) -> int:
        """Empty one tier; return how many blocks it had."""
        places = [place for place in self.copies if place.tier == tier]
        gone = [self.copies.pop(place) for place in places]
        for copies in gone:
            for block_hash in copies:
                self._release_content(block_hash)
        return sum(map(len, gone))

    def tiers(self) -> list[_Tier]:
        """Copies that later events do not change."""
        contents = dict(self.contents)
        return [
            _Tier(place, self.label, dict(copies), contents)
            for place, copies in self.copies.items()
        ]

    def _update_label(self, event: BlockStored) -> None:
        if event.kv_cache_spec_kind is not None or self.label.kind is None:
            self.label = _GroupLabel(
                event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            )

    def _learn_contents(self, event: BlockStored) -> None:
        block_size = event.tokens_per_block
        learned = _contents(event, block_size) if block_size else self._recalled(event.block_hashes)
        for block_hash, content in learned:
            self.contents.setdefault(block_hash, content)

    def _recalled(self, hashes: Iterable[BlockHash]) -> Iterator[tuple[BlockHash, _Content]]:
        for block_hash in hashes:
            content = self._remembered.pop(block_hash, None)
            if content is not None:
                yield block_hash, content

    def _release_content(self, block_hash: BlockHash) -> None:
        """Move a block's content to the remembered ones if no tier has the block any more."""
        if any(block_hash in copies for copies in self.copies.values()):
            return
        content = self.contents.pop(block_hash, None)
        if content is not None:
            self._remembered[block_hash] = content
            if len(self._remembered) > REMEMBERED_CONTENTS:
                self._remembered.popitem(last=False)


def _place_of(event: BlockStored | BlockRemoved) -> _Place:
    return _Place(event.tier, event.locality, event.ownership)


def _contents(event: BlockStored, block_size: int) -> Iterator[tuple[BlockHash, _Content]]:
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
            _Content(
                parent=parent,
                packed_tokens=packed[index * step : (index + 1) * step],
                lora_name=event.lora_name,
                lora_id=event.lora_id,
                shows_extra_keys=event.extra_keys is not None,
                extra_keys=extra_keys[index] if index < len(extra_keys) else None,
                lookahead=tuple(lookaheads[index]) if index < len(lookaheads) else None,
                cache_salt=event.cache_salt,
            ),
        )
        parent = block_hash


class CacheState:
    """The present content of a publisher's cache. Not thread-safe."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.blocks = 0
        """Distinct (group, tier, hash)."""
        self.is_complete = True
        """False after a loss until `reset`: no snapshot may be taken of such a state."""
        self._groups: dict[int, _Group] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Follow one batch."""
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks += self._groups.setdefault(event.group_idx or 0, _Group()).store(event)
            elif isinstance(event, BlockRemoved):
                group = self._groups.get(event.group_idx or 0)
                self.blocks -= group.remove(event) if group else 0
            elif isinstance(event, (AllBlocksCleared, TierBlocksCleared)):
                self.blocks -= sum(group.clear(event.tier) for group in self._groups.values())
            elif isinstance(event, CacheLayout):
                self.layout = event
            else:
                raise TypeError(f"an event of type {type(event).__name__}")

    def reset(self, state: Iterable[Event]) -> None:
        """Start over from the whole state."""
        self._groups.clear()
        self.blocks = 0
        self.apply(state)
        self.is_complete = True

    def snapshot(self) -> Snapshot:
        """Copy the present state: the dictionaries, not the blocks."""
        groups = sorted(self._groups.items(), key=lambda item: self._rank(item[0]))
        tiers = [tier for _, group in groups for tier in group.tiers()]
        return Snapshot(
            self.layout, sorted(tiers, key=lambda tier: (tier.place.tier != GPU, tier.place.tier))
        )

    def _rank(self, group_idx: int) -> tuple[bool, int]:
        """Rank groups with full attention first: they know the most prefixes, and other groups'
        blocks may depend on them."""
        specs = self.layout.groups
        is_full = group_idx < len(specs) and kind_from_wire(specs[group_idx].kind) is GroupKind.FULL
        return not is_full, group_idx


@dataclass(eq=False, repr=False)
class Snapshot:
    """A state that no longer changes; several readers may share it."""

    layout: CacheLayout
    tiers: Sequence[_Tier]

    def batches(self) -> Iterator[list[Event]]:
        """The layout, then every block, in batches of bounded size."""
        yield [self.layout]
        batch: list[Event] = []
        weight = 0
        for index, tier in enumerate(self.tiers):
            for event in _stored_events(tier, self.tiers[:index]):
                batch.append(event)
                weight += len(event.token_ids) + BLOCK_WEIGHT * len(event.block_hashes)
                if weight >= BATCH_WEIGHT:
                    yield batch
                    batch, weight = [], 0
        if batch:
            yield batch


def _stored_events(tier: _Tier, announced: Sequence[_Tier]) -> Iterator[BlockStored]:
    """Yield everything in a tier; a block with two copies appears twice."""
    pending = dict(tier.copies)
    while pending:
        further_copies: _Copies = {}
        yield from _events_of_one_copy(tier, announced, pending, further_copies)
        pending = further_copies


def _events_of_one_copy(
    tier: _Tier, announced: Sequence[_Tier], pending: _Copies, further_copies: _Copies
) -> Iterator[BlockStored]:
    bare: list[BlockHash] = []
    most_bare = BATCH_WEIGHT // BLOCK_WEIGHT
    while pending:
        run = _take_run(tier.contents, pending, further_copies)
        if run[0] not in tier.contents:
            bare.append(run.pop(0))
        if len(bare) == most_bare:
            yield _bare_event(tier, bare)
            bare = []
        for part in _anchored(tier, announced, run):
            yield from _dense_events(tier, part)
    if bare:
        yield _bare_event(tier, bare)


def _take_run(contents: _Contents, pending: _Copies, further_copies: _Copies) -> list[BlockHash]:
    """Take the youngest block and all its ancestors that are still pending, oldest first."""
    run: list[BlockHash] = []
    block_hash, copies = pending.popitem()
    while True:
        run.append(block_hash)
        if copies > 1:
            further_copies[block_hash] = copies - 1
        content = contents.get(block_hash)
        if content is None or content.parent is None or content.parent not in pending:
            break
        block_hash = content.parent
        copies = pending.pop(block_hash)
    run.reverse()
    return run


def _anchored(
    tier: _Tier, announced: Sequence[_Tier], run: list[BlockHash]
) -> list[list[BlockHash]]:
    """Cut a run that depends on an evicted block behind its first block that is announced already.

    A consumer cannot place such a run, since the parent is never announced to it; it can place
    blocks behind one that another group or tier has announced:

        run      b3  b4  b5  b6      the parent b2 is evicted everywhere
        before           b5          announced by the group of full attention
        events  [b3  b4  b5][b6]     the second one has the parent b5 and is placed
    """
    parent = tier.contents[run[0]].parent if run else None
    if parent is None or parent in tier.contents:
        return [run]
    for index, block_hash in enumerate(run[:-1], start=1):
        if any(block_hash in other.copies and block_hash in other.contents for other in announced):
            return [run[:index], run[index:]]
    return [run]


def _dense_events(tier: _Tier, run: list[BlockHash]) -> Iterator[BlockStored]:
    for (token_bytes, *_), alike in groupby(
        run, key=lambda block_hash: tier.contents[block_hash].run_key
    ):
        hashes = list(alike)
        size = max(1, BATCH_WEIGHT // (token_bytes // 4 + BLOCK_WEIGHT))
        for first in range(0, len(hashes), size):
            yield _dense_event(tier, hashes[first : first + size])


def _dense_event(tier: _Tier, hashes: list[BlockHash]) -> BlockStored:
    contents = [tier.contents[block_hash] for block_hash in hashes]
    first = contents[0]
    return replace(
        _bare_event(tier, hashes),
        parent_block_hash=first.parent,
        token_ids=unpack_tokens(b"".join(content.packed_tokens for content in contents)),
        lora_name=first.lora_name,
        lora_id=first.lora_id,
        extra_keys=[content.extra_keys for content in contents] if first.shows_extra_keys else None,
        lookahead_token_ids=None
        if first.lookahead is None
        else [list(content.lookahead or ()) for content in contents],
        cache_salt=first.cache_salt,
    )


def _bare_event(tier: _Tier, hashes: list[BlockHash]) -> BlockStored:
    """Return an event of blocks whose content is unknown."""
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        medium=tier.place.tier,
        locality=tier.place.locality,
        ownership=tier.place.ownership,
        group_idx=tier.label.group_idx,
        kv_cache_spec_kind=tier.label.kind,
        kv_cache_spec_sliding_window=tier.label.sliding_window,
    )
