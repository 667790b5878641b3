"""`LoadTracker` where the compiled core keeps the books: decisions there read the same sums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from router._core import Books, Flight, TokenIdsRequest
from router.replicas.load import (
    Follower,
    InFlight,
    LoadStatistics,
    LoadTracker,
    ReplicaLoad,
)

_Place = str | tuple[str, int]


class CoreLoadTracker(LoadTracker):
    """The sums by replica and rank, in the core."""

    is_in_core = True

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        """What decisions read; the core's."""

    @override
    def started(
        self,
        replica_id: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> InFlight:
        flight = Flight(self.books, replica_id, uncached_tokens, prompt_tokens, dp_rank)
        return CoreInFlight(flight, replica_id, visit)

    @override
    def load_of(self, replica_id: str) -> ReplicaLoad:
        return ReplicaLoad(*self.books.load_of(replica_id))

    @override
    def look_at(self, replica_id: str) -> ReplicaLoad:
        return ReplicaLoad(*self.books.look_at(replica_id))

    @property
    @override
    def loads(self) -> Mapping[_Place, ReplicaLoad]:
        return _Loads(self)

    @override
    def loads_of_ranks(self, replica_id: str, dp_ranks: Sequence[int]) -> list[ReplicaLoad]:
        found = self.books.loads_of_ranks(replica_id, dp_ranks)
        return [ReplicaLoad(*load) for load in found]

    @override
    def places(self) -> Iterator[tuple[str, int | None, ReplicaLoad]]:
        return (
            (replica, dp_rank, ReplicaLoad(*load)) for replica, dp_rank, load in self.books.places()
        )

    @override
    def take_others(self, loads: Mapping[_Place, ReplicaLoad]) -> None:
        self.books.take_others(
            [
                (*((place, None) if isinstance(place, str) else place), _fields_of(load))
                for place, load in loads.items()
            ]
        )

    @override
    def others_at(self, replica_id: str) -> ReplicaLoad:
        return ReplicaLoad(*self.books.others_at(replica_id))

    @override
    def statistics(self) -> LoadStatistics:
        replicas = {place: load for place, dp_rank, load in self.places() if dp_rank is None}
        return LoadStatistics(replicas, *self.books.counts())

    @override
    @contextlib.contextmanager
    def tokenizing(self, replica_id: str) -> Iterator[None]:
        request = TokenIdsRequest(self.books, replica_id)
        try:
            yield
        finally:
            request.ended()


class CoreInFlight(InFlight):
    """One request's share of the sums."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight, replica_id: str, visit: Follower | None) -> None:
        self._flight = flight
        self.replica_id = replica_id
        self._visit = visit

    @override
    def first_token(self) -> None:
        if self._flight.first_token() and self._visit is not None:
            self._visit.first_token()

    @override
    def generated(self, tokens: int) -> None:
        self._flight.generated(tokens)

    @override
    def retried(
        self,
        replica_id: str,
        uncached_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> None:
        if not self._flight.retried(replica_id, uncached_tokens, dp_rank):
            return
        if self._visit is not None:
            self._visit.ended(was_served=False)
        self._visit = visit
        self.replica_id = replica_id

    @override
    def ended(self) -> None:
        if self._flight.ended() and self._visit is not None:
            self._visit.ended()


class _Loads(Mapping[_Place, ReplicaLoad]):
    """What `look_at` returns, by replica id alone."""

    def __init__(self, tracker: CoreLoadTracker) -> None:
        self._tracker = tracker

    @override
    def get(self, place: _Place, default: Any = None) -> Any:
        return self._tracker.look_at(place) if isinstance(place, str) else default

    def __getitem__(self, place: _Place) -> ReplicaLoad:
        found: ReplicaLoad | None = self.get(place)
        if found is None:
            raise KeyError(place)
        return found

    def __iter__(self) -> Iterator[_Place]:
        return (replica for replica, dp_rank, _ in self._tracker.places() if dp_rank is None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _fields_of(load: ReplicaLoad) -> tuple[int, int, int, int, int]:
    return (
        load.prefilling_requests,
        load.prefill_tokens,
        load.decoding_requests,
        load.context_tokens,
        load.tokenizing_requests,
    )
