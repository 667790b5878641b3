"""Records of requests that the compiled data plane decided and served by itself: one by one, and
sums of those that end in quick succession."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from router.plane.attempts import Failure, failure_of
from router.plane.usage import UsageReader
from router.policies.types import Candidate

BY_CORE = "; decided by the data plane"
"""Ends the reason of a request that the core has decided."""


class CoreRequest(NamedTuple):
    """Holds the kind of such a request."""

    path: int
    """Its place among the paths that are prepared."""
    stream: bool
    is_comparable: bool
    """True if the engine's report counts what was predicted."""
    has_salt: bool
    has_adapter: bool
    tokenization_s: float | None


class Settled(NamedTuple):
    """A request that the compiled data plane decided and served by itself, when it is over."""

    model: str
    replica: str
    request_id: str
    client: tuple[str, int]
    dp_rank: int | None
    tokens: tuple[int, int, int, int]
    """The tokens of the prompt; predicted to be cached on the GPU, in all, and at admission."""
    suspect: bool
    approximate_trust: float | None
    """The share that counted of a hit that is an estimate; None: it is by events."""
    asked: CoreRequest
    was_alone: bool
    """True if it had the replica to itself, among those that the data plane decided."""
    began_at: float
    """Seconds, by the monotonic clock."""
    routing_s: float
    first_byte_s: float
    """0: no first byte."""
    end: str
    status: int
    seconds: float
    body_bytes: int
    failure: str | None
    """The failure in mid-body."""
    events: int
    is_json: bool
    usage: bytes
    first_usage: bytes
    trace_id: str | None = None
    is_traced: bool = False
    """True if that trace is recorded."""
    reason: str = ""
    """The reason of its placement, where known in full."""
    by_tier: tuple[tuple[str, int], ...] = ()
    """Tokens of the prompt in lower tiers, likewise."""

    @classmethod
    def of_core(cls, record: Sequence[Any]) -> Settled:
        """Name the parts of the core's record."""
        settled = cls(*record)
        return settled._replace(asked=CoreRequest(*settled.asked))

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that were to be computed."""
        prompt_tokens, _, cached_tokens, _ = self.tokens
        return prompt_tokens - cached_tokens

    @property
    def candidate(self) -> Candidate:
        """The replica, with the hit that was predicted there."""
        _, gpu_cached, cached, _ = self.tokens
        return Candidate(
            replica_id=self.replica,
            dp_rank=self.dp_rank,
            gpu_cached_tokens=gpu_cached,
            cached_tokens=cached,
            by_tier=self.by_tier,
            suspect=self.suspect,
            approximate_trust=self.approximate_trust,
        )

    def why(self) -> str:
        """Return the reason of its placement; where that is not known in full, the hit there."""
        if self.reason:
            return self.reason
        return "; ".join(self.candidate.hit_in_words(self.tokens[0])) + BY_CORE

    @property
    def last_failure(self) -> Failure | None:
        """The failure of the replica whose response the client got, if any."""
        if self.failure is not None:
            return failure_of(self.failure)
        return Failure.SERVER_ERROR if self.status >= 500 else None

    @property
    def exemplar(self) -> str | None:
        """The id of its trace, where that is recorded."""
        return self.trace_id if self.is_traced else None

    @property
    def usage_reader(self) -> UsageReader:
        reader = UsageReader()
        reader.take(self.is_json, self.usage, self.first_usage)
        return reader

    @property
    def response_tokens(self) -> int:
        """The same as `RequestObserver.response_tokens`; 0 without a response."""
        if not self.first_byte_s:
            return 0
        reported = self.usage_reader.usage().completion_tokens
        return self.events if reported is None else reported


# --- sums -----------------------------------------------------------------------------------------


class Distribution(NamedTuple):
    """Values in the buckets of a histogram."""

    counts: Sequence[int]
    """Counts by bucket, each without those below it; empty: no values."""
    total: float


class Verdicts(NamedTuple):
    """Counts of predictions by their outcome."""

    predicted_tokens: int
    exact: int
    over: int
    under: int


class Comparisons(NamedTuple):
    """Counts of predictions whose responses reported cached tokens."""

    requests: int
    prompt_tokens: int
    actual_tokens: int
    at_decision: Verdicts
    at_admission: Verdicts
    error_tokens: Distribution


class RequestSum(NamedTuple):
    """One replica's requests for one model, all served whole and with status 200."""

    model: str
    replica: str
    requests: int
    prompt_tokens: int
    promised_tokens: int
    """Prompt tokens predicted to be cached."""
    routing_s: Distribution
    first_byte_s: Distribution
    seconds: Distribution
    reported: Comparisons
    silent: Comparisons
    """Responses that count the prompt's tokens and no cached ones; vLLM leaves a zero out."""

    @classmethod
    def of_core(cls, record: Sequence[Any]) -> RequestSum:
        """Name the parts of the core's record."""
        *counts, routing, first_byte, seconds, reported, silent = record
        times = (Distribution(*each) for each in (routing, first_byte, seconds))
        return cls._make([*counts, *times, _comparisons(reported), _comparisons(silent)])


def _comparisons(record: Sequence[Any]) -> Comparisons:
    requests, prompt_tokens, actual_tokens, at_decision, at_admission, errors = record
    verdicts = Verdicts(*at_decision), Verdicts(*at_admission)
    return Comparisons(requests, prompt_tokens, actual_tokens, *verdicts, Distribution(*errors))
