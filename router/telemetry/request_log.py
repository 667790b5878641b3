"""The requests routed last, each with its prediction and its end; and their totals over the last
minute.

Bounded, and the only thing it keeps of a prompt is its length: readers of the log see where
requests went, not their text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from operator import attrgetter
from typing import Literal, TypeAlias

import msgspec

from router.errors import RequestError
from router.index.mirror_types import STEP
from router.policies.types import Candidate, Ranked
from router.telemetry.settled import Comparisons, RequestSum

MAX_REQUESTS = 512
MAX_REASON_CHARS = 500
SECONDS = 60
Verdict: TypeAlias = Literal["exact", "near", "over", "under"]
_NO_CANDIDATE = Candidate(replica_id="")
_FAILED_ENDS = frozenset(("replica_died", "no_replica", "overloaded", "abandoned"))


def outcome(predicted: int, actual: int, is_approximate: bool = False) -> Verdict:
    """Compare a prediction with the truth.

    Args:
        is_approximate: An estimate is never exact, and near within its resolution.
    """
    if is_approximate and abs(predicted - actual) < STEP:
        return "near"
    if predicted == actual and not is_approximate:
        return "exact"
    return "over" if predicted > actual else "under"


class RequestFacts(msgspec.Struct, kw_only=True, eq=False):
    """The facts of a request, for us and for readers of the log."""

    number: int = 0
    """The larger, the later."""
    change: int = 0
    """The number of the last change in the log that touched this request."""
    arrived_at: float = 0.0
    """Unix time, to the millisecond."""
    request_id: str
    trace_id: str | None = None
    """The distributed trace that it belongs to (W3C Trace Context); null where the client names
    none."""
    path: str
    model: str
    policy: str
    stream: bool
    prompt_tokens: int
    unknown: str | None
    """Why the prompt is not known in full: one of the reasons of
    `kvroute_untokenized_prompts_total`."""
    replica: str | None = None
    """The replica it was sent to last."""
    dp_rank: int | None = None
    prefiller: str | None = None
    """The replica that computes its prompt, where that is another one."""
    prefiller_cached_tokens: int | None = None
    """Prompt tokens predicted to be cached there; null where the router does not hand over."""
    prefiller_actual_tokens: int | None = None
    """Cached tokens as that one reported them; null where it did not."""
    attempts: int = 0
    last_failure: str | None = None
    """How the last failed attempt failed; another attempt may have followed."""
    status: int | None = None
    end: str | None = None
    """How it ended; null while it runs."""


class RoutedRequest(RequestFacts, kw_only=True, eq=False):
    """One request, as far as it is known by now. Tokens are prompt tokens."""

    candidate: Candidate = _NO_CANDIDATE
    """The replica that it was sent to last, with its predicted hit."""
    expected_tokens: int | None = None
    """Tokens predicted to be cached there at its admission; None where unknown."""
    why: str | Callable[[], str] = ""
    """The reason, from `Ranked.why`."""
    actual_tokens: int | None = None
    """Tokens that the engine reported as cached; None where it reported nothing comparable."""
    first_byte_s: float | None = None
    seconds: float | None = None

    def sent_to(self, ranked: Ranked) -> None:
        """Record one more attempt, and the prediction for this replica."""
        candidate = self.candidate = ranked.candidate
        self.attempts += 1
        self.replica, self.dp_rank = candidate.replica_id, candidate.dp_rank
        self.expected_tokens = None
        self.why = ranked.why

    @property
    def cached_tokens(self) -> int:
        """Tokens predicted to be cached there in any tier."""
        return self.candidate.cached_tokens

    @property
    def reason(self) -> str:
        """Why it went there, as a sentence."""
        why = self.why if isinstance(self.why, str) else self.why()
        return why[:MAX_REASON_CHARS]

    @property
    def verdict(self) -> Verdict | None:
        """How the prediction compares with what was cached; None where that is not known."""
        if self.actual_tokens is None:
            return None
        return outcome(self.cached_tokens, self.actual_tokens, self.candidate.is_approximate)

    @property
    def was_refused(self) -> bool:
        """Return whether it ended with a 4xx: nothing was computed for it."""
        return 400 <= (self.status or 0) < 500

    @property
    def has_failed(self) -> bool:
        """Return whether it failed for a reason other than its client."""
        return (self.status or 0) >= 500 or self.end in _FAILED_ENDS


class Totals(msgspec.Struct):
    """Counts over a period. Tokens are prompt tokens."""

    requests: int = 0
    """Requests routed, with any end."""
    failed: int = 0
    """Requests that ended with a 5xx or were broken off, the router's own refusals included."""
    routed_tokens: int = 0
    """Prompt tokens of all routed requests but those with a 4xx, which compute nothing; as far as
    known."""
    promised_tokens: int = 0
    """Part of *routed_tokens* that was predicted to be cached."""
    compared: int = 0
    """Requests whose responses reported their cached tokens."""
    estimated: int = 0
    """Compared requests whose prediction was an estimate: it counts as neither over nor under."""
    compared_tokens: int = 0
    predicted_tokens: int = 0
    """Part of *compared_tokens* that was predicted to be cached."""
    actual_tokens: int = 0
    """Part of *compared_tokens* that was cached."""
    over: int = 0
    """Predictions above the truth."""
    under: int = 0

    def add(self, other: Totals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_request(self, request: RoutedRequest) -> None:
        self.failed += request.has_failed
        if not request.was_refused:
            self.routed_tokens += request.prompt_tokens
            self.promised_tokens += request.cached_tokens
        if request.actual_tokens is not None:
            self.compared += 1
            self.compared_tokens += request.prompt_tokens
            self.predicted_tokens += request.cached_tokens
            self.actual_tokens += request.actual_tokens
            if request.candidate.is_approximate:
                self.estimated += 1
            else:
                self.over += request.verdict == "over"
                self.under += request.verdict == "under"

    def add_sum(self, summed: RequestSum, compared: Iterable[Comparisons]) -> None:
        """Count requests that were served whole.

        Args:
            compared: Those whose responses reported their cached tokens.
        """
        self.requests += summed.requests
        self.routed_tokens += summed.prompt_tokens
        self.promised_tokens += summed.promised_tokens
        for each in compared:
            self.compared += each.requests
            self.compared_tokens += each.prompt_tokens
            self.predicted_tokens += each.at_decision.predicted_tokens
            self.actual_tokens += each.actual_tokens
            self.over += each.at_decision.over
            self.under += each.at_decision.under


class RollingTotals:
    """The totals of the last 60 seconds, kept second by second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._by_second = [Totals() for _ in range(SECONDS)]
        self._second = int(self._started)

    def now(self) -> Totals:
        """The present second, to be counted into."""
        second = int(self._clock())
        if second != self._second:
            self._forget_old(second)
        return self._by_second[self._second % SECONDS]

    @property
    def seconds(self) -> float:
        """The length of the period that `total` sums over: a minute, less after the start."""
        self.now()
        since = max(self._started, self._second - SECONDS + 1)
        return max(self._clock() - since, 1.0)

    def total(self) -> Totals:
        self.now()
        total = Totals()
        for each in self._by_second:
            total.add(each)
        return total

    def _forget_old(self, second: int) -> None:
        """Reset the seconds that have passed until *second*."""
        for passed in range(max(self._second + 1, second - SECONDS + 1), second + 1):
            self._by_second[passed % SECONDS] = Totals()
        self._second = max(second, self._second)


class RequestLog:
    """Holds the requests that changed last. Belongs to one event loop.

    Args:
        max_requests: Bound on requests shown; the longest unchanged is dropped first, even while
            it runs.
        clock: Returns Unix time.
        totals: Counts along; by default on the system's monotonic clock.
    """

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        clock: Callable[[], float] = time.time,
        totals: RollingTotals | None = None,
    ) -> None:
        self.totals = totals or RollingTotals()
        self.started_at = clock()
        self.last_change = 0
        """The number of the last change."""
        self._last_number = 0
        self._max_requests = max_requests
        self._clock = clock
        self._held: dict[int, RoutedRequest] = {}
        self._logged_anew: dict[str, RoutedRequest] = {}
        """Requests that are to be logged anew, by their ids: readers have seen their numbers."""

    def add(self, request: RoutedRequest) -> None:
        """Log a request that has been decided on."""
        before = self._logged_anew.pop(request.request_id, None)
        if before is None:
            self._last_number += 1
        request.number = self._last_number if before is None else before.number
        request.arrived_at = round(self._clock(), 3)
        self.totals.now().requests += 1
        self.update(request)

    def add_refused(self, request: RoutedRequest, error: RequestError) -> None:
        """Log a request that no replica could take.

        Args:
            request: Decided as far as possible.
        """
        request.status, request.end = error.status, error.code
        self.add(request)

    def update(self, request: RoutedRequest) -> None:
        """Record a change of a request; one that was dropped is held again."""
        self.last_change += 1
        request.change = self.last_change
        if request.number not in self._held:
            self._held[request.number] = request
            if len(self._held) > 2 * self._max_requests:
                # Seldom, rather than one in and one out each time.
                kept = self._latest()
                self._held = {request.number: request for request in kept}

    def forget(self, request: RoutedRequest) -> None:
        """Remove a request that is logged anew, under the same number."""
        self.totals.now().requests -= 1
        self._held.pop(request.number, None)
        self._logged_anew[request.request_id] = request
        if len(self._logged_anew) > self._max_requests:
            del self._logged_anew[next(iter(self._logged_anew))]

    def end_forgotten(self, request_id: str, end: str, status: int | None) -> None:
        """Note that a request has ended before it was logged anew, if it was to be."""
        request = self._logged_anew.pop(request_id, None)
        if request is not None:
            request.end, request.status = end, status
            self.totals.now().requests += 1
            self.finish(request)

    def finish(self, request: RoutedRequest) -> None:
        """Note that a request has ended, and count it."""
        self.update(request)
        self.totals.now().add_request(request)

    def add_sum(self, summed: RequestSum, compared: Iterable[Comparisons]) -> None:
        """Count requests that are not shown: others ended in the same moment.

        Args:
            summed: It holds all of them; each was served whole.
        """
        self.totals.now().add_sum(summed, compared)

    def count_failure(self) -> None:
        """Count a request that the router itself ended with a 5xx."""
        self.totals.now().failed += 1

    def since(self, change: int, limit: int = MAX_REQUESTS) -> list[RoutedRequest]:
        """Return the requests that changed after a given change, the latest first.

        Args:
            change: The number of a change; 0 for everything.
        """
        return list(
            islice(takewhile(lambda request: request.change > change, self._latest()), limit)
        )

    def _latest(self) -> list[RoutedRequest]:
        """Return the requests that changed last, the latest first."""
        latest = sorted(self._held.values(), key=attrgetter("change"), reverse=True)
        return latest[: self._max_requests]
