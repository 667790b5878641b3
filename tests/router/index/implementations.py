"""The implementations of `PrefixIndex`. Every test of this folder runs on each of them; those of
`reference/` look inside the one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvevents.events import BlockHash
from router.index import REFERENCE, PrefixIndex, SourceLimits, choose_index
from router.index.reference.index import ReferenceIndex
from router.index.reference.source import SourceCache


@dataclass(frozen=True)
class Implementation:
    """One of them, and how to look inside."""

    name: str
    create: Callable[[SourceLimits | None], PrefixIndex]
    expect_sound: Callable[[PrefixIndex], None]
    """Fails where two parts of its state contradict each other."""
    expect_empty: Callable[[PrefixIndex], None]
    """Fails where memory is left although no source holds a block."""


def _reference(limits: SourceLimits | None) -> PrefixIndex:
    return ReferenceIndex(limits=limits)


def _sources(index: PrefixIndex) -> list[SourceCache]:
    assert isinstance(index, ReferenceIndex)
    return list(index.sources.values())


def _expect_sound(index: PrefixIndex) -> None:
    for source in _sources(index):
        table, waiting = source.table, source.waiting
        copies = Counter[BlockHash]()
        for hashes in table.held.values():
            assert all(count > 0 for count in hashes.values())
            copies.update(hashes)
        entries = table._entries
        assert copies == {block_hash: entry.copies for block_hash, entry in entries.items()}
        totals = Counter[str]()
        for (_, tier), hashes in table.held.items():
            totals[tier] += len(hashes)
        assert totals == Counter(table._totals)
        assert all(total <= source.limits.blocks for total in totals.values())
        assert table.unplaced == sum(entry.key is None for entry in entries.values())
        assert all(entries[found].key == key for key, found in table.hash_by_key.items())
        assert len(table.forgotten()) <= source.limits.forgotten
        assert (
            waiting.statistics().runs
            == sum(map(len, waiting.by_parent.values()))
            <= source.limits.waiting_runs
        )


def _expect_empty(index: PrefixIndex) -> None:
    for source in _sources(index):
        table = source.table
        assert (table.held, table.hash_by_key, table._entries, table.unplaced) == ({}, {}, {}, 0)


def _native(limits: SourceLimits | None) -> PrefixIndex:
    if choose_index() is REFERENCE:
        pytest.skip("the compiled index is not built")
    return choose_index("native").create(limits=limits)


def _expect_native_sound(index: PrefixIndex) -> None:
    core = getattr(index, "core")  # noqa: B009 - its module is not there where it was not built
    assert core.contradictions() == []


def _expect_native_empty(index: PrefixIndex) -> None:
    core = getattr(index, "core")  # noqa: B009
    nodes, _ = core.sizes()
    assert nodes == 0


IMPLEMENTATIONS = (
    Implementation("reference", _reference, _expect_sound, _expect_empty),
    Implementation("native", _native, _expect_native_sound, _expect_native_empty),
)
