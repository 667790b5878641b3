"""The state of an index as records."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from kvevents.errors import UNREADABLE
from kvevents.events import CacheLayout
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from router._core import Core, StateError
from router.errors import RouterError
from router.index.base import LayoutHints, SourceId, TierHint
from router.index.layout_learner import SeenGroup
from router.index.sources import KnownSource, SharedStore

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


def store_record(core: Core, store: SharedStore) -> StoreRecord:
    """The present state of a store."""
    state = core.export_source(store.slot)
    return StoreRecord(store.name, store.tiers, store.layout, store.lookahead, state)


def source_record(core: Core, source: SourceId, known: KnownSource) -> SourceRecord:
    """The present state of a source."""
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
