"""What is in flight at each replica, in plain Python: the sums that the compiled core keeps are
tested to equal these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from router.fleet.load import (
    Follower,
    Place,
    ReplicaLoad,
    sum_of,
)
from tests.support.loads import LoadStatistics

NO_LOAD = ReplicaLoad()
_FIELDS = ReplicaLoad.__struct_fields__


class _BothLoads(Mapping[Place, ReplicaLoad]):
    """What this router and others have in flight."""

    def __init__(
        self, own: Mapping[Place, ReplicaLoad], others: Mapping[Place, ReplicaLoad]
    ) -> None:
        self._own = own
        self._others = others

    def __getitem__(self, place: Place) -> ReplicaLoad:
        found: ReplicaLoad | None = self.get(place)
        if found is None:
            raise KeyError(place)
        return found

    @override
    def get(self, place: Place, default: Any = None) -> Any:
        # Of every replica for every decision: Mapping's own takes three times as long.
        own, other = self._own.get(place), self._others.get(place)
        if own is None or other is None:
            return own or other or default
        return sum_of(own, other)

    def __iter__(self) -> Iterator[Place]:
        return iter({**self._own, **self._others})

    def __len__(self) -> int:
        return len(self._own.keys() | self._others.keys())


class ReferenceLoad:
    """The sums by replica and rank. Memory is bounded by what is in flight: a replica without
    requests has no entry, nor has such a rank."""

    def __init__(self) -> None:
        self._loads: dict[Place, ReplicaLoad] = {}
        self._others: Mapping[Place, ReplicaLoad] = {}
        self._in_flight = self._started = self._retried = 0

    def started(
        self,
        replica_id: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> InFlight:
        """A request is about to be sent; call `InFlight.ended` when it is over, or use the result
        in a `with` statement.

        Args:
            replica_id: Where it is sent.
            uncached_tokens: Prompt tokens that have to be computed there, as predicted.
            prompt_tokens: The whole prompt.
            dp_rank: Of the replica's ranks the one that gets it; None if the engine chooses.
            visit: Hears of its first token and of its end there.
        """
        self._started += 1
        self._in_flight += 1
        return InFlight(
            self, replica_id, max(uncached_tokens, 0), max(prompt_tokens, 0), dp_rank, visit
        )

    def load_of(self, replica_id: str) -> ReplicaLoad:
        """What this router has in flight at a replica; zeros for one that is unknown."""
        return replace(self._loads.get(replica_id) or NO_LOAD)

    def look_at(self, replica_id: str) -> ReplicaLoad:
        """What is known to be in flight there, that of others included. To be read at once and not
        kept."""
        return self.loads.get(replica_id) or NO_LOAD

    @property
    def loads(self) -> Mapping[Place, ReplicaLoad]:
        """What `look_at` returns, by replica id (and by rank): for whoever looks at many. Nothing
        is in flight where there is no entry."""
        return _BothLoads(self._loads, self._others) if self._others else self._loads

    def loads_of_ranks(self, replica_id: str, dp_ranks: Sequence[int]) -> list[ReplicaLoad]:
        """What is known to be in flight at each rank of a replica. Requests whose rank the engine
        chose are shared out equally, rounded up.

        Args:
            replica_id: The replica.
            dp_ranks: All its ranks.
        """
        loads = self.loads
        known = [loads.get((replica_id, rank)) or NO_LOAD for rank in dp_ranks]
        whole = loads.get(replica_id) or NO_LOAD
        shares = [
            -((sum(getattr(load, name) for load in known) - getattr(whole, name)) // len(known))
            for name in _FIELDS
        ]
        return [
            ReplicaLoad(
                *(getattr(load, name) + share for name, share in zip(_FIELDS, shares, strict=True))
            )
            for load in known
        ]

    # What other routers have in flight.

    def places(self) -> Iterator[tuple[str, int | None, ReplicaLoad]]:
        """What this router has in flight, by replica and rank; None stands for a whole replica."""
        return (
            (place, None, load) if isinstance(place, str) else (*place, load)
            for place, load in self._loads.items()
        )

    def take_others(self, loads: Mapping[Place, ReplicaLoad]) -> None:
        """Count what others have in flight, by replica or rank, in place of what they had."""
        self._others = loads

    def others_at(self, replica_id: str) -> ReplicaLoad:
        """What others have in flight at a replica."""
        return self._others.get(replica_id, NO_LOAD)

    def statistics(self) -> LoadStatistics:
        """Everything in flight."""
        replicas = {
            place: replace(load) for place, load in self._loads.items() if isinstance(place, str)
        }
        return LoadStatistics(replicas, self._in_flight, self._started, self._retried)

    @contextlib.contextmanager
    def tokenizing(self, replica_id: str) -> Iterator[None]:
        """Count a request for token ids while the block runs."""
        self._add_tokenizing(replica_id, 1)
        try:
            yield
        finally:
            self._add_tokenizing(replica_id, -1)

    def _add_tokenizing(self, replica_id: str, requests: int) -> None:
        load = self._load_at(replica_id)
        load.tokenizing_requests += requests
        self._drop_if_empty(replica_id, load)

    # What an `InFlight` does to the sums.

    def enter(
        self, replica_id: str, prefill_tokens: int, dp_rank: int | None = None
    ) -> dict[Place, ReplicaLoad]:
        """Add a request to what is in prefill. Returns the sums that it is in, by place; they stand
        until `leave`.

        Args:
            replica_id: Where.
            prefill_tokens: Its uncached prompt tokens.
            dp_rank: At which of its ranks, if that is known.
        """
        loads: dict[Place, ReplicaLoad] = {replica_id: self._load_at(replica_id)}
        if dp_rank is not None:
            loads[replica_id, dp_rank] = self._load_at((replica_id, dp_rank))
        for load in loads.values():
            load.prefilling_requests += 1
            load.prefill_tokens += prefill_tokens
        return loads

    def leave(self, loads: dict[Place, ReplicaLoad]) -> None:
        """A request has taken back what it added to the sums of `enter`."""
        for place, load in loads.items():
            self._drop_if_empty(place, load)

    def count_retried(self) -> None:
        """A request moved to another replica."""
        self._retried += 1

    def count_ended(self) -> None:
        """A request is over."""
        self._in_flight -= 1

    def _load_at(self, place: Place) -> ReplicaLoad:
        load = self._loads.get(place)
        if load is None:
            load = self._loads[place] = ReplicaLoad()
        return load

    def _drop_if_empty(self, place: Place, load: ReplicaLoad) -> None:
        if not (load.prefilling_requests or load.decoding_requests or load.tokenizing_requests):
            assert load.prefill_tokens == load.context_tokens == 0
            del self._loads[place]


class _Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class InFlight:
    """One request's share of the sums. Every step may be repeated; after `ended` none has an
    effect.

    Args:
        tracker: Holds the sums.
        replica_id: Where it is sent.
        uncached_tokens: Prompt tokens that have to be computed there; not negative.
        prompt_tokens: The whole prompt; not negative.
        dp_rank: The rank that gets it, if that is known.
        visit: Hears of its first token and of its end there.
    """

    __slots__ = (
        "_context_tokens",
        "_loads",
        "_phase",
        "_prompt_tokens",
        "_tracker",
        "_uncached_tokens",
        "_visit",
        "replica_id",
    )

    def __init__(
        self,
        tracker: ReferenceLoad,
        replica_id: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> None:
        self.replica_id = replica_id
        self._visit = visit
        self._tracker = tracker
        self._prompt_tokens = prompt_tokens
        self._uncached_tokens = uncached_tokens
        self._context_tokens = 0
        self._phase = _Phase.PREFILL
        self._loads = tracker.enter(replica_id, uncached_tokens, dp_rank)

    def first_token(self, is_timed: bool = True) -> None:
        """The first byte of the response has arrived: its prefill is done."""
        if self._phase is not _Phase.PREFILL:
            return
        self._phase = _Phase.DECODE
        self._context_tokens = self._prompt_tokens
        for load in self._loads.values():
            load.prefilling_requests -= 1
            load.prefill_tokens -= self._uncached_tokens
            load.decoding_requests += 1
            load.context_tokens += self._context_tokens
        if self._visit is not None:
            self._visit.first_token(is_timed)

    def generated(self, tokens: int) -> None:
        """The response grew by about *tokens*, and so did its context."""
        if self._phase is _Phase.DECODE and tokens > 0:
            self._context_tokens += tokens
            for load in self._loads.values():
                load.context_tokens += tokens

    def retried(
        self,
        replica_id: str,
        uncached_tokens: int,
        dp_rank: int | None = None,
        visit: Follower | None = None,
    ) -> None:
        """The replica failed; the request is sent to another one, from the start.

        Args:
            replica_id: Where it is sent now.
            uncached_tokens: Prompt tokens that have to be computed there, as predicted.
            dp_rank: The rank that gets it there, if that is known.
            visit: Hears of its first token and of its end there.
        """
        if self._phase is _Phase.ENDED:
            return
        self._leave()
        if self._visit is not None:
            self._visit.ended(was_served=False)
        self._visit = visit
        self._tracker.count_retried()
        self.replica_id = replica_id
        self._uncached_tokens = max(uncached_tokens, 0)
        self._context_tokens = 0
        self._phase = _Phase.PREFILL
        self._loads = self._tracker.enter(replica_id, self._uncached_tokens, dp_rank)

    def ended(self) -> None:
        """The request is over, whether it succeeded or not."""
        if self._phase is not _Phase.ENDED:
            self._leave()
            self._phase = _Phase.ENDED
            self._tracker.count_ended()
            if self._visit is not None:
                self._visit.ended()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended()

    def _leave(self) -> None:
        """Take back what this request added to the sums."""
        for load in self._loads.values():
            if self._phase is _Phase.PREFILL:
                load.prefilling_requests -= 1
                load.prefill_tokens -= self._uncached_tokens
            else:
                load.decoding_requests -= 1
                load.context_tokens -= self._context_tokens
        self._tracker.leave(self._loads)
