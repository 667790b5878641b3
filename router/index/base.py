"""The values that go into an index and come out of it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from kvevents.field_docs import flag, gauge
from kvevents.layout import GroupKind, KVCacheLayout


class SourceId(NamedTuple):
    """One KV cache: a data-parallel rank of a replica."""

    replica: str
    dp_rank: int = 0


# --- input of an index ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Bounds on one source's memory, in the core's order."""

    blocks: int = 4_194_304
    """Distinct (group, hash) held in one tier: a full one takes nothing from the others."""
    tiers: int = 8
    waiting_runs: int = 4096
    """Events whose parent block is unknown."""
    waiting_tokens: int = 4_194_304
    """Tokens of those events."""
    waiting_batches: int = 10_000
    """Batches after which a run that still waits for its parent is given up."""
    forgotten: int = 8192
    """Prefixes remembered after the last copy of a block was removed, at most; of more, exactly the
    newest. An offload tier announces a block after the GPU has evicted it. As many again are
    remembered of clears: all that one took, or nothing if that is more, and what earlier ones took
    as long as it is not too much with that."""
    cleared_at_once: int = 4096
    """Blocks of one tier that are taken away within the call that clears them; what an index leaves
    behind of more than these, no prompt finds, and `PrefixIndex.tidy` takes it away."""


def pack_keys(keys: Sequence[int]) -> bytes:
    """Prefix keys as 8 bytes each. An index of an equal key space gives the same."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


# --- results of an index ----------------------------------------------------------------------


class ApplyResult(msgspec.Struct, gc=False):
    """Holds what one batch did to its source, in blocks unless stated otherwise."""

    stored: int = 0
    removed: int = 0
    waiting: int = 0
    """Stored blocks whose prefix is not known yet."""
    skipped: int = 0
    """Events of unknown type, removals of unknown blocks, and blocks over a limit."""
    overflow: int = 0
    """Part of *skipped*: blocks over a limit."""
    unreadable: int = 0
    """Events that break the format, left out of the batch."""
    problem: str | None = None
    """Place and rule of the first event left out that matters."""
    given_up: int = 0
    """Runs that waited too long, or were too many, to still learn their prefix, and of which blocks
    are held."""
    cleared: bool = False
    """The GPU was emptied as a whole."""
    layout_changed: bool = False
    has_lower_tiers: bool = False
    """The source now holds blocks below the GPU."""
    is_incomplete: bool = False
    """From this batch on the picture is wrong: blocks were refused, or given up and out of reach
    of every look-up, or an event that took blocks away could not be read. Only a rebuild of the
    source mends it."""


class Hit(NamedTuple):
    """Holds the tokens of a prompt that a source would reuse."""

    gpu_cached_tokens: int
    cached_tokens: int
    """With the blocks that lower tiers would bring back."""
    by_tier: tuple[tuple[str, int], ...] = ()
    """Tokens that each lower tier or shared store adds, the fastest first; the sum is the
    difference between the two. Empty: not separated."""


NO_HIT = Hit(0, 0)


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The longest prefix that one group by itself accepts on the GPU."""

    group: int
    kind: str
    """A `GroupKind`."""
    tokens: int


def group_hits(layout: KVCacheLayout, accepted: Sequence[int]) -> tuple[GroupHit, ...]:
    """The tokens that each group accepts, as hits; groups that are not cached have none."""
    return tuple(
        GroupHit(index, group.kind.value, tokens)
        for index, (group, tokens) in enumerate(zip(layout.groups, accepted, strict=True))
        if group.kind is not GroupKind.NOT_CACHED
    )


@dataclass(frozen=True, slots=True)
class HashesFound:
    """A source's hit for a prompt that is known by block hashes alone."""

    hit: Hit
    groups: tuple[GroupHit, ...]
    held: int
    """How many of the hashes the source, or a store that it shares, holds."""
    problem: str | None
    """Why the source may reuse more than the hit; None: it is exact."""


@dataclass(frozen=True, slots=True)
class WaitingStatistics:
    """Runs of blocks that wait until their parent's prefix is known."""

    runs: Annotated[int, gauge("kvroute_index_waiting_runs")]
    """Events that wait for their parent block."""
    tokens: int
    given_up: int
    """Such runs given up since the source was last known to hold nothing."""


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """The state of one source in numbers."""

    blocks: Annotated[dict[tuple[int, str], int], gauge("kvroute_index_blocks", "group", "tier")]
    """Distinct blocks held."""
    units: dict[tuple[int, str], int]
    """(group, lower tier) -> tokens that the tier keeps together."""
    unplaced: Annotated[int, gauge("kvroute_index_unplaced_blocks")]
    """Blocks held whose prefix is not known."""
    ambiguous: int
    """Times two live hashes claimed one prefix: the hash covers something that events do not
    show."""
    waiting: WaitingStatistics
    layout: KVCacheLayout | None
    """None while too little is known: the source then gets no hits."""
    hash_algorithm: str | None
    """The engine's hash function, where it is known."""
    assumptions: tuple[str, ...]
    """Facts that are assumed rather than known, one sentence each, for an operator."""
    is_incomplete: Annotated[
        bool, flag("kvroute_index_incomplete", "1 where blocks were refused or given up.")
    ]
    """Since it was added or cleared, blocks or removals were lost (see `ApplyResult`)."""
    stores: Mapping[str, Mapping[tuple[int, str], int]] = field(default_factory=dict)
    """Distinct blocks by store, then (group, tier); by any writer."""
    removed: Mapping[int, int] = field(default_factory=dict)
    """Group -> blocks removed from the GPU since the source was added or cleared; those of an event
    that clears the cache do not count."""
    key_problem: Annotated[
        str | None,
        flag(
            "kvroute_index_foreign_key",
            "1 where blocks are announced under a hash key that the router does not have: "
            "nothing is found there.",
        ),
    ] = None
    """The fault of its block hashes' key."""
