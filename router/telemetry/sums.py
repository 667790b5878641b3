"""Describes what is counted of requests that the compiled data plane decided, served and summed up:
of those that end in quick succession only some are reported one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Distribution(NamedTuple):
    """Values in the buckets of a histogram."""

    counts: Sequence[int]
    """By bucket, each without those below it; empty: there are no values."""
    total: float


class Verdicts(NamedTuple):
    """Predictions beside what was cached."""

    predicted_tokens: int
    exact: int
    over: int
    under: int


class Comparisons(NamedTuple):
    """Compares predictions of requests whose responses report what was cached."""

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
    """Those predicted to be cached."""
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
