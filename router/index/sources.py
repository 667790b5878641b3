"""Holds the state outside the core of a source, and of the stores that sources share; and the state
of an index as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from kvevents.errors import UNREADABLE
from kvevents.events import GPU, BlockStored, CacheLayout, Event
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheLayout
from router._core import Core, StateError
from router.errors import RouterError
from router.index.base import SourceId, SourceStatistics, WaitingStatistics
from router.index.hash_finder import HashFinder, HashForm, engine_hashes
from router.index.layout_learner import LayoutHints, LayoutLearner, SeenGroup, TierHint

_KINDS = {
    GroupKind.FULL: 0,
    GroupKind.SLIDING_WINDOW: 1,
    GroupKind.CHUNKED_LOCAL: 2,
    GroupKind.MAMBA: 3,
    GroupKind.NOT_CACHED: 4,
}
"""The numbers of `GroupKind` in core/index/layout.hpp."""
_DIGEST_BYTES = 32


@dataclass(slots=True)
class SharedStore:
    """A store that several sources write to and read from: one file system or bucket behind many
    replicas.

    It is no source's own: it outlives each of them, and a block is there once, however many
    announced it. Readers trust each other's prefix of a hash, so all have to hash alike.
    """

    name: str
    slot: int
    tiers: tuple[tuple[str, TierHint], ...]
    """The configured units."""
    layout: KVCacheLayout | None = None
    """The layout of the last writer: readers lay out their blocks alike."""
    lookahead: int = 0
    """The lookahead of the same writer."""


@dataclass(slots=True)
class KnownSource:
    """Holds the state outside the core of one source."""

    slot: int
    learner: LayoutLearner
    finder: HashFinder
    stores: tuple[SharedStore, ...] = ()
    """The stores that it shares, each once."""
    unplaced: int = 0
    published: object = None
    """The layout as the core knows it."""

    @property
    def layout(self) -> KVCacheLayout | None:
        """None while too little is known. One without events so far that shares a store is taken to
        be like the others."""
        lender = self.lender
        return self.learner.layout if lender is None else lender.layout

    @property
    def lender(self) -> SharedStore | None:
        """The store whose layout stands in for its own."""
        if self.learner.layout is not None or self.learner.error is not None:
            return None
        return next((store for store in self.stores if store.layout is not None), None)

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its hash covers too, where prompts look it up."""
        lender = self.lender
        return self.learner.lookahead if lender is None else lender.lookahead

    def is_opaque(self, event: Event) -> bool:
        """Return whether its hashes cover something that the event does not show, such as a salt
        before vLLM 0.17. Only a known hash function can tell: the first hash then differs from what
        the event's tokens hash to. A lower tier may have hashes of its own, so theirs show
        nothing."""
        chain, layout = self.finder.chain, self.layout
        if chain is None or layout is None or not isinstance(event, BlockStored):
            return False
        if event.tier != GPU:
            return False
        if event.parent_block_hash is not None or event.extra_keys is not None:
            return False
        if event.adapter is not None or event.cache_salt or event.lookahead_token_ids:
            return False
        size, wanted = event.tokens_per_block, event.block_hashes[0] if event.block_hashes else None
        if not size or wanted is None:
            return False
        tokens, as_int = event.token_ids[:size], isinstance(wanted, int)
        form = HashForm(chain, layout.hash_block_size, as_int=as_int)
        first = engine_hashes(form, tokens)
        wanted = wanted if isinstance(wanted, int) else wanted[-_DIGEST_BYTES:]
        return bool(first) and first[-1] != wanted

    def publish_layout(self, core: Core) -> None:
        """Give the core the learned layout, if it differs from the core's."""
        learner, layout = self.learner, self.layout
        is_announced = learner.announced is not None
        is_lent = self.lender is not None
        news = (layout, is_announced, learner.lookahead, is_lent, self.lookahead)
        if news == self.published:
            return
        self.published = news
        if is_lent or layout is None:
            core.unset_layout(self.slot, is_announced, learner.lookahead)
        if is_lent:
            assert layout is not None
            core.borrow_layout(self.slot, layout_fields(layout), self.lookahead)
        elif layout is not None:
            fields = layout_fields(layout)
            core.set_layout(self.slot, fields, is_announced, learner.lookahead)


def layout_fields(layout: KVCacheLayout) -> tuple[Any, ...]:
    groups = [
        (
            _KINDS[group.kind],
            group.block_size,
            _size_or_none(group.sliding_window),
            _size_or_none(group.attention_chunk_size),
            index in layout.eagle,
        )
        for index, group in enumerate(layout.groups)
    ]
    return (
        groups,
        layout.hash_block_size,
        layout.scheduler_block_size,
        layout.eagle_sees_last_token,
        layout.prefix_replay_tokens,
    )


def _size_or_none(size: int | None) -> int | None:
    """Return None for a negative size, which a group of another kind has."""
    return None if size is None or size < 0 else size


def block_counts(found: dict[str, Any]) -> dict[tuple[int, str], int]:
    """Distinct blocks by group and tier, from the statistics of the core."""
    return {(group, tier): count for group, tier, count in sorted(found["blocks"])}


def statistics_of(core: Core, known: KnownSource) -> SourceStatistics:
    found, chain = core.statistics(known.slot), known.finder.chain
    lost = found["has_overflowed"] or found["has_lost_removals"]
    return SourceStatistics(
        blocks=block_counts(found),
        units={(group, tier): unit for group, tier, unit in sorted(found["units"])},
        unplaced=found["unplaced"],
        ambiguous=found["ambiguous"],
        waiting=WaitingStatistics(
            found["waiting_runs"], found["waiting_tokens"], found["given_up"]
        ),
        layout=known.layout,
        hash_algorithm=chain.algorithm if chain else None,
        assumptions=assumptions_of(known, found),
        stores={store.name: block_counts(core.statistics(store.slot)) for store in known.stores},
        removed=dict(found["removed"]),
        key_problem=known.finder.key_problem,
        is_incomplete=lost or (found["given_up"] > 0 and chain is None),
    )


def assumptions_of(known: KnownSource, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the assumptions as sentences for an operator."""
    assumed = known.learner.assumptions()
    if found["removes_last_only"]:
        assumed = (*assumed, "removals: announced only with the last copy of a block")
    if known.lender is not None:
        assumed = (*assumed, "layout: as that of others that share its store")
    if found["announces_remote"]:
        assumed = (
            *assumed,
            "blocks announced as remote count for this replica alone: "
            "configure stores if others read them too",
        )
    if not found["unplaced"] or known.finder.known:
        return assumed
    unknown = (
        f"{found['unplaced']} blocks cannot be placed: the engine's hash function is not known; "
        "configure hash_seeds"
    )
    return (*assumed, unknown)


# --- as records -----------------------------------------------------------------------------------

_Record = TypeVar("_Record")


class DumpError(RouterError):
    """Bytes that are not the state of an index, or not of this kind of index."""


def decoded_record(record: bytes | memoryview, kind: type[_Record]) -> _Record:
    """Read a record; raises `DumpError`."""
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except UNREADABLE as error:
        raise DumpError(
            f"index dump: a record of {len(record)} bytes is not of this implementation: {error}"
        ) from None


class StoreRecord(msgspec.Struct):
    """A store that sources share."""

    name: str
    tiers: tuple[tuple[str, TierHint], ...]
    layout: KVCacheLayout | None
    lookahead: int
    state: bytes
    """The core's state."""


class IndexRecord(msgspec.Struct):
    """The first record."""

    implementation: Literal["native"]
    secrets: tuple[int, int]
    """The secrets of the key space: keys mean nothing under others."""
    stores: list[StoreRecord]


class SourceRecord(msgspec.Struct):
    """A source."""

    source: SourceId
    hints: LayoutHints
    announced: CacheLayout | None
    seen: dict[int, SeenGroup]
    tiers_seen: dict[int, SeenGroup]
    smallest_step: int
    lookahead: int
    chain: HashChain | None
    state: bytes
    """The core's state."""


def tier_units(tiers: Iterable[tuple[str, TierHint]]) -> list[tuple[str, int, int]]:
    """The tiers' names with the blocks and the tokens of a unit, 0 where that is not configured."""
    return [(tier, hint.unit_blocks or 0, hint.unit_size or 0) for tier, hint in tiers]


def store_record(core: Core, store: SharedStore) -> StoreRecord:
    state = core.export_source(store.slot)
    return StoreRecord(store.name, store.tiers, store.layout, store.lookahead, state)


def source_record(core: Core, source: SourceId, known: KnownSource) -> SourceRecord:
    learner = known.learner
    return SourceRecord(
        source=source,
        hints=learner.hints,
        announced=learner.announced,
        seen=learner.seen,
        tiers_seen=learner.tiers_seen,
        smallest_step=learner.smallest_step,
        lookahead=learner.lookahead,
        chain=known.finder.known,
        state=core.export_source(known.slot),
    )


def restore_state(core: Core, slot: int, state: bytes, whose: str) -> None:
    """Fill a slot of the core with an exported state; raises `DumpError`, naming *whose* it is."""
    try:
        core.restore_source(slot, state)
    except StateError as error:
        raise DumpError(f"index dump: the record of {whose} contradicts itself: {error}") from None
