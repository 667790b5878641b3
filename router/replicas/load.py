"""What this router has in flight at each replica: prompt tokens until the first answer token, then
decoding requests.

Each request is accounted for by one `InFlight`, whose steps may come in any order, repeat, or not
come at all; after `ended` everything it had added is gone. So the sums return to exactly zero
whatever way a request takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import msgspec


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What this router has in flight at one replica."""

    prefilling_requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of these, as predicted when they were sent."""
    decoding_requests: int = 0
    context_tokens: int = 0
    """Prompt and answer tokens of the decoding requests."""

    @property
    def requests(self) -> int:
        """Requests in either phase."""
        return self.prefilling_requests + self.decoding_requests


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """In flight by replica (only those with any), and requests since the start."""

    replicas: Mapping[str, ReplicaLoad]
    in_flight: int
    started: int
    retried: int


class LoadTracker:
    """The sums by replica. Memory is bounded by what is in flight: a replica without requests has
    no entry."""

    def __init__(self) -> None:
        self._loads: dict[str, _Sums] = {}
        self._in_flight = self._started = self._retried = 0

    def started(self, replica_id: str, uncached_tokens: int, prompt_tokens: int) -> InFlight:
        """A request is about to be sent; call `InFlight.ended` when it is over, or use the result
        in a `with` statement.

        Args:
            replica_id: Where it goes.
            uncached_tokens: Prompt tokens that have to be computed there, as predicted.
            prompt_tokens: The whole prompt.
        """
        self._started += 1
        self._in_flight += 1
        return InFlight(self, replica_id, max(uncached_tokens, 0), max(prompt_tokens, 0))

    def load_of(self, replica_id: str) -> ReplicaLoad:
        """What is in flight at a replica; zeros for one that is not known."""
        sums = self._loads.get(replica_id)
        return ReplicaLoad() if sums is None else sums.snapshot()

    def statistics(self) -> LoadStatistics:
        """Everything in flight."""
        replicas = {replica_id: sums.snapshot() for replica_id, sums in self._loads.items()}
        return LoadStatistics(replicas, self._in_flight, self._started, self._retried)

    # What an `InFlight` does to the sums.

    def add(self, replica_id: str, requests: int, prefill_tokens: int) -> None:
        """Count *requests* (1 or -1) in prefill."""
        sums = self._loads.setdefault(replica_id, _Sums())
        sums.prefilling_requests += requests
        sums.prefill_tokens += prefill_tokens
        self._drop_if_empty(replica_id, sums)

    def add_decoding(self, replica_id: str, requests: int, context_tokens: int) -> None:
        """Count *requests* (1, 0 or -1) in decode."""
        sums = self._loads.setdefault(replica_id, _Sums())
        sums.decoding_requests += requests
        sums.context_tokens += context_tokens
        self._drop_if_empty(replica_id, sums)

    def count_retried(self) -> None:
        """A request went to another replica."""
        self._retried += 1

    def count_ended(self) -> None:
        """A request is over."""
        self._in_flight -= 1

    def _drop_if_empty(self, replica_id: str, sums: _Sums) -> None:
        if not sums.prefilling_requests and not sums.decoding_requests:
            assert sums.prefill_tokens == sums.context_tokens == 0
            del self._loads[replica_id]


class _Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class InFlight:
    """One request's share of the sums. Every step may be repeated; after `ended` each does
    nothing."""

    __slots__ = (
        "_context_tokens",
        "_phase",
        "_prompt_tokens",
        "_tracker",
        "_uncached_tokens",
        "replica_id",
    )

    def __init__(
        self, tracker: LoadTracker, replica_id: str, uncached_tokens: int, prompt_tokens: int
    ) -> None:
        self.replica_id = replica_id
        self._tracker = tracker
        self._prompt_tokens = prompt_tokens
        self._phase: _Phase
        self._enter_prefill(uncached_tokens)

    def first_token(self) -> None:
        """The first byte of the answer is here: its prefill is done."""
        if self._phase is not _Phase.PREFILL:
            return
        self._leave()
        self._phase = _Phase.DECODE
        self._context_tokens = self._prompt_tokens
        self._tracker.add_decoding(self.replica_id, 1, self._context_tokens)

    def generated(self, tokens: int) -> None:
        """The answer grew by about *tokens*: its context is that much longer."""
        if self._phase is _Phase.DECODE and tokens > 0:
            self._context_tokens += tokens
            self._tracker.add_decoding(self.replica_id, 0, tokens)

    def retried(self, replica_id: str, uncached_tokens: int) -> None:
        """The replica failed and the request goes to another one, from the start."""
        if self._phase is _Phase.ENDED:
            return
        self._leave()
        self._tracker.count_retried()
        self.replica_id = replica_id
        self._enter_prefill(max(uncached_tokens, 0))

    def ended(self) -> None:
        """It is over, well or not."""
        if self._phase is not _Phase.ENDED:
            self._leave()
            self._phase = _Phase.ENDED
            self._tracker.count_ended()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended()

    def _enter_prefill(self, uncached_tokens: int) -> None:
        self._phase = _Phase.PREFILL
        self._uncached_tokens = uncached_tokens
        self._context_tokens = 0
        self._tracker.add(self.replica_id, 1, uncached_tokens)

    def _leave(self) -> None:
        """Take back what this request added to the sums."""
        if self._phase is _Phase.PREFILL:
            self._tracker.add(self.replica_id, -1, -self._uncached_tokens)
        elif self._phase is _Phase.DECODE:
            self._tracker.add_decoding(self.replica_id, -1, -self._context_tokens)


@dataclass(slots=True)
class _Sums:
    prefilling_requests: int = 0
    prefill_tokens: int = 0
    decoding_requests: int = 0
    context_tokens: int = 0

    def snapshot(self) -> ReplicaLoad:
        return ReplicaLoad(
            self.prefilling_requests,
            self.prefill_tokens,
            self.decoding_requests,
            self.context_tokens,
        )
