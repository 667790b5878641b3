"""Counts this router's requests in flight at each replica, and at each of its data-parallel ranks:
prompt tokens until the first response token, then decoding requests. Other routers' are kept beside
them. The compiled core keeps the sums: decisions there read them.

Each request is accounted for by one `InFlight`. Its steps may be called in any order, repeatedly or
not at all; after `ended` everything it added has been taken back. So the sums return to exactly
zero whatever happens to a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec.structs import astuple

from kvevents.field_docs import gauge
from router._core import Books, Flight, TokenIdsRequest

Place = str | tuple[str, int]
"""A replica, or one of its ranks."""


class ReplicaLoad(msgspec.Struct):
    """Holds this router's load at one replica, or one rank of it. Readers get copies."""

    prefilling_requests: int = 0
    prefill_tokens: Annotated[int, gauge("kvroute_in_flight_prefill_tokens")] = 0
    """Uncached prompt tokens of a router's requests at a replica, until the first byte."""
    decoding_requests: Annotated[int, gauge("kvroute_in_flight_decodes")] = 0
    """A router's requests at a replica whose responses have begun."""
    context_tokens: int = 0
    """Prompt and response tokens of the decoding requests."""
    tokenizing_requests: Annotated[int, gauge("kvroute_in_flight_tokenizations")] = 0
    """The router's own requests at a replica for token ids, where `models[].tokenizer` is
    `replica`; not among `kvroute_in_flight_requests`."""

    @property
    def requests(self) -> int:
        """Requests in either phase."""
        return self.prefilling_requests + self.decoding_requests


def sum_of(one: ReplicaLoad, other: ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(*map(sum, zip(astuple(one), astuple(other), strict=True)))


class Follower(Protocol):
    """Follows a request at one replica."""

    def first_token(self) -> None:
        """The first byte of its response has arrived."""

    def ended(self, was_served: bool = True) -> None:
        """The request is over there.

        Args:
            was_served: True if the replica may have computed it; if not, it failed.
        """


class LoadTracker:
    """The sums by replica and rank. Memory is bounded by what is in flight: a replica without
    requests has no entry, nor has such a rank."""

    def __init__(self, books: Books | None = None) -> None:
        """
        Args:
            books: A mirror's, where one follows the caches.
        """
        self.books = books or Books()
        """The core's books, which decisions read."""

    def started(
        self,
        replica_id: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> InFlight:
        """A request is about to be sent; call `InFlight.ended` when it is over.

        Args:
            dp_rank: The rank that gets it; None if the engine chooses.
            visit: Records its first token and its end there.
        """
        flight = Flight(self.books, replica_id, uncached_tokens, prompt_tokens, dp_rank)
        return InFlight(flight, replica_id, visit)

    def load_of(self, replica_id: str) -> ReplicaLoad:
        """Return this router's load at a replica; zeros for an unknown one."""
        return ReplicaLoad(*self.books.load_of(replica_id))

    def look_at(self, replica_id: str) -> ReplicaLoad:
        """Return the load there, other routers' included."""
        return ReplicaLoad(*self.books.look_at(replica_id))

    def loads_of_ranks(self, replica_id: str, dp_ranks: Sequence[int]) -> list[ReplicaLoad]:
        """Return the load at each rank of a replica, as far as known. Requests whose rank the
        engine chose are shared out equally, rounded up."""
        found = self.books.loads_of_ranks(replica_id, dp_ranks)
        return [ReplicaLoad(*load) for load in found]

    def requests_by_rank(self, replica_id: str, dp_ranks: Sequence[int]) -> dict[int, int]:
        loads = self.loads_of_ranks(replica_id, dp_ranks)
        return {rank: load.requests for rank, load in zip(dp_ranks, loads, strict=True)}

    # What other routers have in flight.

    def places(self) -> Iterator[tuple[str, int | None, ReplicaLoad]]:
        """Yield this router's loads, by replica and rank; None stands for a whole replica."""
        return (
            (replica, dp_rank, ReplicaLoad(*load)) for replica, dp_rank, load in self.books.places()
        )

    def take_others(self, loads: Mapping[Place, ReplicaLoad]) -> None:
        """Replace the loads of other routers, by replica or rank."""
        self.books.take_others(
            [
                (*((place, None) if isinstance(place, str) else place), astuple(load))
                for place, load in loads.items()
            ]
        )

    def others_at(self, replica_id: str) -> ReplicaLoad:
        """Return other routers' load at a replica."""
        return ReplicaLoad(*self.books.others_at(replica_id))

    @contextlib.contextmanager
    def tokenizing(self, replica_id: str) -> Iterator[None]:
        """Count a request for token ids while the block runs."""
        request = TokenIdsRequest(self.books, replica_id)
        try:
            yield
        finally:
            request.ended()


@dataclass(slots=True, eq=False)
class InFlight:
    """One request's share of the sums. Every step may be repeated; after `ended` none has an
    effect."""

    _flight: Flight
    replica_id: str
    _visit: Follower | None
    """Records its first token and its end there."""

    def first_token(self) -> None:
        """The first byte of the response has arrived: its prefill is done."""
        if self._flight.first_token() and self._visit is not None:
            self._visit.first_token()

    def generated(self, tokens: int) -> None:
        """The response grew by about *tokens*, and so did its context."""
        self._flight.generated(tokens)

    def retried(
        self,
        replica_id: str,
        uncached_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> None:
        """The replica failed; the request is sent to another one, from the start.

        Args:
            dp_rank: The rank that gets it there, if that is known.
        """
        if not self._flight.retried(replica_id, uncached_tokens, dp_rank):
            return
        if self._visit is not None:
            self._visit.ended(was_served=False)
        self._visit = visit
        self.replica_id = replica_id

    def ended(self, was_served: bool = True) -> None:
        """The request is over, whether it succeeded or not.

        Args:
            was_served: See `Follower.ended`.
        """
        if self._flight.ended() and self._visit is not None:
            self._visit.ended(was_served)
