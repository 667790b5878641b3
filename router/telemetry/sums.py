"""Describes the sums of requests that the compiled data plane served: of those that end in quick
succession only some are reported one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


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
