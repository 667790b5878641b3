"""The state of the reference index as records: one that says whose they are, then one per source.

The effort spent on finding a hash function is left out: a restored source may search again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, TypeVar

import msgspec

from kvevents.events import BlockHash, CacheLayout
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from router.index.base import SourceId, SourceLimits
from router.index.layout_learner import LayoutHints, LayoutLearner, SeenGroup, TierHint
from router.index.sources import DumpError
from tests.oracle.index.block_table import BlockTable, GroupTier
from tests.oracle.index.copy_counting import Counting
from tests.oracle.index.keys import KeySpace, joined, split
from tests.oracle.index.placing import BlockRun
from tests.oracle.index.shared_store import SharedStore
from tests.oracle.index.source import SourceCache

_Record = TypeVar("_Record")


_Key: TypeAlias = tuple[int, int]
"""A key in two parts, since msgpack's integers have 64 bits."""


class _HeldBlocks(msgspec.Struct, array_like=True):
    group: int
    tier: str
    hashes: list[BlockHash]
    copies: list[int]


class _TableRecord(msgspec.Struct):
    """The blocks of a source or a store."""

    held: list[_HeldBlocks]
    placed: list[tuple[BlockHash, _Key, bool]]
    """Hash, key, and whether the key leads to this hash."""
    forgotten: list[tuple[BlockHash, _Key]]
    cleared: list[tuple[BlockHash, _Key]]
    tier_hashes: list[tuple[BlockHash, _Key]]
    removing_tiers: list[str]
    uses_int_hashes: bool
    ambiguous: int


class _StoreRecord(msgspec.Struct):
    name: str
    tiers: tuple[tuple[str, TierHint], ...]
    layout: KVCacheLayout | None
    lookahead: int
    units: list[tuple[GroupTier, int]]
    unit_sizes: list[tuple[GroupTier, int]]
    table: _TableRecord


class _IndexRecord(msgspec.Struct):
    """The first record."""

    implementation: Literal["reference"]
    modulus: int
    """Of the key space: keys mean nothing under another one."""
    stores: list[_StoreRecord]


class _WaitingRun(msgspec.Struct, array_like=True):
    parent: BlockHash
    age: int
    """Batches applied since it was received."""
    run: BlockRun


class _SourceRecord(msgspec.Struct):
    source: SourceId
    hints: LayoutHints
    announced: CacheLayout | None
    seen: dict[int, SeenGroup]
    smallest_step: int
    lookahead: int
    chain: HashChain | None
    shows_extra_keys: bool
    has_overflowed: bool
    has_lost_removals: bool
    has_shared: bool
    announces_unshared: bool
    counting: Counting
    removals: int
    removed: dict[int, int]
    given_up: int
    units: list[tuple[GroupTier, int]]
    unit_sizes: list[tuple[GroupTier, int]]
    tiers_seen: dict[int, SeenGroup]
    table: _TableRecord
    waiting: list[_WaitingRun]


def records_of(space: KeySpace, sources: dict[SourceId, SourceCache]) -> Iterator[bytes]:
    """Write the records.

    Args:
        space: The index's.
        sources: Each is written as it is at its turn; one dropped by then is left out. What they
            share is written first.
    """
    stores = {store.name: store for source in sources.values() for store in source.stores}
    shared = [_store_record(store) for store in stores.values()]
    yield msgspec.msgpack.encode(_IndexRecord("reference", space.modulus, shared))
    for source_id in list(sources):
        if source_id in sources:
            yield msgspec.msgpack.encode(_record_of(source_id, sources[source_id]))


def sources_of(
    records: Iterable[bytes | memoryview], limits: SourceLimits
) -> tuple[KeySpace, dict[SourceId, SourceCache], dict[str, SharedStore]]:
    """Read the records.

    Args:
        records: As from `records_of`.
        limits: Of each source.
    Raises:
        DumpError: They are not records of this implementation.
    """
    remaining = iter(records)
    first = next(remaining, b"")
    head = decoded(first, _IndexRecord)
    space = KeySpace(head.modulus)
    stores = {}
    for store in head.stores:
        with _refusing(f"store {store.name!r}"):
            stores[store.name] = _store_of(store, limits)
    sources = {}
    for record in remaining:
        found = decoded(record, _SourceRecord)
        with _refusing(str(found.source)):
            sources[found.source] = _source_of(found, space, limits, stores)
    return space, sources, stores


@contextmanager
def _refusing(whose: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError) as error:
        raise DumpError(
            f"index dump: the record of {whose} contradicts itself: {error!r}"
        ) from None


def decoded(record: bytes | memoryview, kind: type[_Record]) -> _Record:
    """Read a record of a dump.

    Args:
        record: As exported.
        kind: Its type.
    Raises:
        DumpError: It is damaged, or another implementation's.
    """
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except msgspec.MsgspecError as error:
        raise DumpError(
            f"index dump: a record of {len(record)} bytes is not of this implementation: {error}"
        ) from None


def _record_of(source_id: SourceId, source: SourceCache) -> _SourceRecord:
    learner = source.learner
    return _SourceRecord(
        source=source_id,
        hints=learner.hints,
        announced=learner.announced,
        seen=learner.seen,
        smallest_step=learner.smallest_step,
        lookahead=learner.lookahead,
        chain=source.finder.known,
        shows_extra_keys=source.shows_extra_keys,
        has_overflowed=source.has_overflowed,
        has_lost_removals=source.has_lost_removals,
        has_shared=source.has_shared,
        announces_unshared=source.announces_unshared,
        counting=source.copies.counting,
        removals=source.removals,
        removed=source.removed,
        given_up=source.waiting.given_up,
        units=list(source.units.seen.items()),
        unit_sizes=list(source.units.sizes.items()),
        tiers_seen=learner.tiers_seen,
        table=_table_record(source.table),
        waiting=[
            _WaitingRun(parent, source.batches - run.batch, run)
            for parent, runs in source.waiting.by_parent.items()
            for run in runs
        ],
    )


def _store_record(store: SharedStore) -> _StoreRecord:
    return _StoreRecord(
        name=store.name,
        tiers=tuple(store.units.hints.items()),
        layout=store.layout,
        lookahead=store.lookahead,
        units=list(store.units.seen.items()),
        unit_sizes=list(store.units.sizes.items()),
        table=_table_record(store.table),
    )


def _table_record(table: BlockTable) -> _TableRecord:
    return _TableRecord(
        held=[
            _HeldBlocks(group, tier, list(held), list(held.values()))
            for (group, tier), held in table.held.items()
        ],
        placed=[(found, split(key), is_found) for found, key, is_found in table.placed()],
        forgotten=[(found, split(key)) for found, key in table.forgotten()],
        cleared=[(found, split(key)) for found, key in table.cleared.items()],
        tier_hashes=[(found, split(key)) for key, found in table.tier_hash_by_key.items()],
        removing_tiers=sorted(table.removing_tiers),
        uses_int_hashes=table.uses_int_hashes,
        ambiguous=table.ambiguous,
    )


def _fill_table(table: BlockTable, record: _TableRecord) -> None:
    held = {
        (blocks.group, blocks.tier): dict(zip(blocks.hashes, blocks.copies, strict=True))
        for blocks in record.held
    }
    table.restore(
        held,
        [(found, joined(*key), is_found) for found, key, is_found in record.placed],
        [(found, joined(*key)) for found, key in record.forgotten],
        [(found, joined(*key)) for found, key in record.tier_hashes],
        [(found, joined(*key)) for found, key in record.cleared],
    )
    table.removing_tiers.update(record.removing_tiers)
    table.ambiguous, table.uses_int_hashes = record.ambiguous, record.uses_int_hashes


def _store_of(record: _StoreRecord, limits: SourceLimits) -> SharedStore:
    store = SharedStore(record.name, limits, record.tiers)
    store.layout, store.lookahead = record.layout, record.lookahead
    store.units.seen.update(record.units)
    store.units.sizes.update(record.unit_sizes)
    _fill_table(store.table, record.table)
    return store


def _source_of(
    record: _SourceRecord,
    space: KeySpace,
    limits: SourceLimits,
    stores: Mapping[str, SharedStore],
) -> SourceCache:
    source = SourceCache(space, record.hints, limits, stores)
    source.learner = LayoutLearner(
        record.hints,
        lookahead=record.lookahead,
        announced=record.announced,
        seen=record.seen,
        tiers_seen=record.tiers_seen,
        smallest_step=record.smallest_step,
    )
    source.finder.take(record.chain)
    source.shows_extra_keys = record.shows_extra_keys
    source.has_overflowed = record.has_overflowed
    source.has_lost_removals = record.has_lost_removals
    source.has_shared = record.has_shared
    source.announces_unshared = record.announces_unshared
    source.copies.counting = record.counting
    source.removals, source.removed = record.removals, record.removed
    _fill_table(source.table, record.table)
    source.units.seen.update(record.units)
    source.units.sizes.update(record.unit_sizes)
    for waiting in record.waiting:
        waiting.run.batch = -waiting.age
        source.waiting.add(waiting.parent, waiting.run)
    source.waiting.given_up = record.given_up
    return source
