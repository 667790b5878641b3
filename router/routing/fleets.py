"""Updates the compiled core with the replicas and their state.

A fleet stands for the replicas that serve one name, with the numbers of their sources in one index,
and is made anew when any of these changes. The state of a replica - its health, its gate, its
engine's load - is set when it changes, and all fleets see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from router._core import Books, Conditions, Fleet, SharedIndex
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.index.index import PrefixIndex

MAX_FLEETS = 256
"""The most fleets: of models, and of adapters that not all replicas of a model serve."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownFleet:
    """A fleet of the core, and what its numbers stand for."""

    replicas: list[Replica]
    index: PrefixIndex | None
    slots: Any
    """The slots of the index, when it was made."""
    shared: SharedIndex | None
    """The core's form of the index."""
    core: Fleet
    owners: dict[SourceId, Replica]
    """The replica of each cache."""

    def is_of(self, replicas: Sequence[Replica], index: PrefixIndex | None) -> bool:
        """Return whether it still stands for *replicas* and the sources that *index* has."""
        return (
            self.index is index
            and (index is None or self.slots is index.slots)
            and self.replicas == replicas
        )


class FleetKeeper:
    """The fleets of all models. Belongs to one event loop."""

    def __init__(
        self,
        books: Books,
        suspects: Collection[SourceId],
        lost_since: Callable[[SourceId], float | None] | None,
    ) -> None:
        """
        Args:
            suspects: The sources of which events were lost; it changes with them.
            lost_since: Returns since when a source's events have been incomplete; None: nothing is
                estimated in their place.
        """
        self._books = books
        self._suspects = suspects
        self._lost_since = lost_since
        self._known: WeakKeyDictionary[Replica, _KnownReplica] = WeakKeyDictionary()
        self._fleets: dict[tuple[str, int], KnownFleet] = {}
        self._versions = 0
        self._suspected: set[Replica] = set()

    def fleet_of(
        self, model: str, replicas: list[Replica], index: PrefixIndex | None
    ) -> KnownFleet:
        """The fleet of some replicas, with what is doubted of its caches now.

        Args:
            model: A key for their fleet; any text.
            replicas: In any state; not to be changed any more.
            index: Has the sources of their caches; None: no prompt is looked up.
        """
        key = (model if index is not None else f"{model} by load", len(replicas))
        fleet = self._fleets.get(key)
        if fleet is None or not fleet.is_of(replicas, index):
            if len(self._fleets) >= MAX_FLEETS:
                self._fleets.clear()
            fleet = self._fleets[key] = self._made(replicas, index)
        if self._suspects or self._suspected:
            self._suspect(fleet)
        return fleet

    def note_streams(self, replica: Replica) -> None:
        """Note that a replica publishes events, or none: then an estimate stands in for them."""
        known = self._known_of(replica)
        known.is_silent = not replica.sources and self._lost_since is not None
        known.set_lost(replica, known.suspects)

    def _suspect(self, fleet: KnownFleet) -> None:
        """Mark the caches of a fleet whose events were lost."""
        lost: dict[Replica, dict[int, float | None]] = {}
        for source in self._suspects:
            owner = fleet.owners.get(source)
            if owner is not None:
                since = None if self._lost_since is None else self._lost_since(source)
                lost.setdefault(owner, {})[source.dp_rank] = since
        for replica in self._suspected.intersection(fleet.replicas) | lost.keys():
            known, found = self._known_of(replica), lost.get(replica, {})
            if found != known.suspects:
                known.set_lost(replica, found)
        self._suspected.difference_update(fleet.replicas)
        self._suspected.update(lost)

    def _made(self, replicas: list[Replica], index: PrefixIndex | None) -> KnownFleet:
        caches = [_caches_of(replica) for replica in replicas]
        owners = {
            cache: owner for owner, each in zip(replicas, caches, strict=True) for cache in each
        }
        shared = None if index is None else index.core.shared()
        slots = None if index is None else index.slots
        self._versions += 1
        core = Fleet(
            self._books,
            self._versions,
            shared,
            [
                self._fields(replica, each, index)
                for replica, each in zip(replicas, caches, strict=True)
            ],
        )
        return KnownFleet(replicas, index, slots, shared, core, owners)

    def _fields(
        self, replica: Replica, caches: Sequence[SourceId], index: PrefixIndex | None
    ) -> Any:
        """Return a replica as the core takes it; see its `Fleet`."""
        return (
            replica.id,
            replica.config.speed,
            replica.config.max_concurrent_requests,
            replica.peer_address,
            replica.served.models,
            replica.served.adapters,
            [
                (source.dp_rank, self._books.cache_id(*source), _number_in(index, source))
                for source in caches
            ],
            self._known_of(replica).conditions,
        )

    def _known_of(self, replica: Replica) -> _KnownReplica:
        known = self._known.get(replica)
        if known is None:
            known = _KnownReplica(Conditions(self._books), _placement(replica))
            self._known[replica] = known
            replica.listeners.append(self._on_changed)
            _update(replica, known)
        return known

    def _on_changed(self, replica: Replica) -> None:
        known = self._known[replica]
        placement = _placement(replica)
        if placement != known.placement:
            known.placement = placement
            self._fleets.clear()
        _update(replica, known)


@dataclass(slots=True, eq=False)
class _KnownReplica:
    """The core's state of a replica."""

    conditions: Conditions
    placement: Any
    is_silent: bool = False
    """True if it publishes no events, and is estimated."""
    suspects: dict[int, float | None] = field(default_factory=dict)
    """Ranks of which events were lost, and since when; None: nothing is estimated."""

    def set_lost(self, replica: Replica, suspects: dict[int, float | None]) -> None:
        """Mark the ranks whose events were lost; an estimate may stand in for some."""
        self.suspects = suspects
        since = {rank: since for rank, since in suspects.items() if since is not None}
        if self.is_silent:
            since[replica.cache.dp_rank] = -math.inf
        self.conditions.set_lost(sorted(suspects), sorted(since.items()))


def _placement(replica: Replica) -> Any:
    """Return the part of a replica that a fleet is made from."""
    return replica.config, replica.sources


def _update(replica: Replica, known: _KnownReplica) -> None:
    conditions = known.conditions
    conditions.set(replica.is_healthy, replica.draining, False)
    conditions.set_gate(*replica.gate.facts)
    load = replica.engine_load
    if load is not None:
        foreign = replica.foreign_requests_by_rank
        ranks = [(each.dp_rank, foreign[each.dp_rank], each.waiting) for each in load.ranks]
        conditions.set_engine(
            *(replica.engine_load_at, replica.foreign_requests, load.waiting, ranks),
            *(load.cache_blocks, load.cache_tokens),
        )


def _caches_of(replica: Replica) -> list[SourceId]:
    """Return a replica's caches: at least one, also without events."""
    if not replica.has_ranks:
        return [replica.cache]
    return [SourceId(replica.id, source.dp_rank) for source in replica.sources]


def _number_in(index: PrefixIndex | None, source: SourceId) -> int | None:
    return None if index is None else index.number_of(source)
