"""The requests routed last, each with what was predicted and what became of it.

Bounded, and without anything of a prompt but its length: who reads the journal may see where
requests went, not what they said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import msgspec

from router.observability.rolling_totals import Minute

MAX_REQUESTS = 512
MAX_REASON_CHARS = 500
_FAILED_ENDS = frozenset(("replica_died", "no_replica", "overloaded", "abandoned"))


class RoutedRequest(msgspec.Struct, kw_only=True, eq=False):
    """One request, as far as it is known by now. Tokens are prompt tokens."""

    request_id: str
    path: str
    model: str
    policy: str
    stream: bool
    prompt_tokens: int
    unknown: str | None
    """Why the prompt is not known in full: one of the reasons of
    `kvroute_untokenized_prompts_total`."""

    number: int = 0
    change: int = 0
    """Of all changes in the journal the one that touched this request last."""
    arrived_at: float = 0.0
    """Unix time."""
    replica: str | None = None
    """Where it was sent last."""
    dp_rank: int | None = None
    gpu_cached_tokens: int = 0
    """Predicted to be cached on that replica's GPU."""
    cached_tokens: int = 0
    """Predicted to be cached there in any tier."""
    suspect: bool = False
    why: str | Callable[[], str] = ""
    """The reason, or what makes it: most are never read."""
    attempts: int = 0
    last_failure: str | None = None
    """Of an attempt that was followed by another, or by the end."""
    actual_tokens: int | None = None
    """What the engine says was cached; None where it does not say, or not of the same thing."""
    first_byte_s: float | None = None
    status: int | None = None
    end: str | None = None
    """How it ended; None while it runs."""
    seconds: float | None = None

    @property
    def reason(self) -> str:
        """Why it went there, as a sentence."""
        return (self.why if isinstance(self.why, str) else self.why())[:MAX_REASON_CHARS]

    @property
    def verdict(self) -> Literal["exact", "over", "under"] | None:
        """The prediction held against the truth."""
        if self.actual_tokens is None:
            return None
        if self.actual_tokens == self.cached_tokens:
            return "exact"
        return "over" if self.cached_tokens > self.actual_tokens else "under"

    @property
    def has_failed(self) -> bool:
        """Not by its client's doing."""
        return (self.status or 0) >= 500 or self.end in _FAILED_ENDS


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """How much is held, and how much there was."""

    held: int
    requests: int
    changes: int


class Journal:
    """Holds the requests that changed last. Belongs to one event loop.

    Args:
        max_requests: More are forgotten, the longest unchanged first, also while they run.
        clock: Unix time.
        minute: Counts along.
    """

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        clock: Callable[[], float] = time.time,
        minute: Minute | None = None,
    ) -> None:
        self.minute = minute or Minute()
        self.started_at = clock()
        self._max_requests = max_requests
        self._clock = clock
        self._held: dict[int, RoutedRequest] = {}
        self._requests = self._changes = 0

    @property
    def changes(self) -> int:
        """The number of the last change."""
        return self._changes

    def opened(self, request: RoutedRequest) -> None:
        """A request has been decided on."""
        self._requests += 1
        request.number = self._requests
        request.arrived_at = self._clock()
        self.minute.now.requests += 1
        self.changed(request)

    def changed(self, request: RoutedRequest) -> None:
        """Something more is known of it."""
        self._changes += 1
        request.change = self._changes
        self._held.pop(request.number, None)
        self._held[request.number] = request
        if len(self._held) > self._max_requests:
            del self._held[next(iter(self._held))]

    def settled(self, request: RoutedRequest) -> None:
        """It is over."""
        self.changed(request)
        tally = self.minute.now
        tally.failed += request.has_failed
        tally.routed_tokens += request.prompt_tokens
        tally.promised_tokens += request.cached_tokens
        if request.actual_tokens is not None:
            tally.compared += 1
            tally.compared_tokens += request.prompt_tokens
            tally.predicted_tokens += request.cached_tokens
            tally.actual_tokens += request.actual_tokens
            tally.over += request.verdict == "over"
            tally.under += request.verdict == "under"

    def turned_away(self, request: RoutedRequest, status: int, code: str) -> None:
        """A request has been answered with an error, since nobody could take it."""
        request.status, request.end = status, code
        self.opened(request)

    def since(self, change: int, limit: int = MAX_REQUESTS) -> list[RoutedRequest]:
        """What changed after *change*, the latest first, at most *limit* of it."""
        return list(
            islice(takewhile(lambda request: request.change > change, self._latest()), limit)
        )

    def statistics(self) -> JournalStatistics:
        return JournalStatistics(len(self._held), self._requests, self._changes)

    def _latest(self) -> Iterator[RoutedRequest]:
        return reversed(self._held.values())
