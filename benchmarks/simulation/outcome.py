"""The outcome of the requests of one simulation, and its figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """The course of one request; times are in seconds of virtual time."""

    request_id: str
    replica_id: str
    arrived_s: float
    prompt_tokens: int
    predicted_tokens: int
    """The prompt tokens that the router predicted to be cached there when it decided."""
    expected_tokens: int = 0
    """The prompt tokens that the router expected then to be cached when the engine would admit
    it."""
    turn: int = 0
    """The number of requests of its session before it."""
    alone_s: float = 0.0
    """The time to its first token on an idle replica that has whatever any replica ever computed
    of it."""
    floor_s: float = 0.0
    """The time to its first token where all replicas share one cache; see `floor`."""
    cached_tokens: int = 0
    """The prompt tokens that were cached when the engine admitted it."""
    answer: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """The gaps between the tokens of the response."""
    is_finished: bool = False

    @property
    def ttft_s(self) -> float:
        """Return the time from its arrival to its first token."""
        return self.first_s - self.arrived_s

    @property
    def avoidable_s(self) -> float:
        """Return what waiting, and computing again what some replica had computed, added to it."""
        return max(0.0, self.ttft_s - self.alone_s)


@dataclass(slots=True)
class Outcome:
    """The result of one simulation."""

    records: list[RequestRecord]
    busy_s: dict[str, float]
    preemptions: int
    arrivals_end_s: float
    """The time when the last request arrived, or the last conversation began: then the load
    falls."""

    def figures(self, warm_up: float = 0.0) -> dict[str, float | int]:
        """Compute all figures from the requests that arrived between *warm_up*, a share of the
        time, and the end of the arrivals."""
        start_s = warm_up * self.arrivals_end_s
        counted = [
            record for record in self.records if start_s <= record.arrived_s <= self.arrivals_end_s
        ]
        later = [record.ttft_s for record in counted if record.turn]
        return {
            "requests": len(counted),
            **_reuse(counted),
            **_times("ttft", [record.ttft_s for record in counted], (50, 90, 99)),
            **_times("later_ttft", later, (99,)),
            **_times("avoidable", [record.avoidable_s for record in counted], (99,)),
            "floor_mean_ms": round(statistics.fmean(each.floor_s for each in counted) * 1000, 2),
            **_percentiles(
                "inter_token", [gap for record in counted for gap in record.gaps_s], (50, 99)
            ),
            **_throughput(counted),
            "load_imbalance": round(variation(list(self.busy_s.values())), 4),
            "preemptions": self.preemptions,
        }


def _reuse(counted: Sequence[RequestRecord]) -> dict[str, float | int]:
    prompts = sum(record.prompt_tokens for record in counted)
    reused = sum(record.cached_tokens for record in counted)
    errors = [record.predicted_tokens - record.cached_tokens for record in counted]
    return {
        "prompt_tokens": prompts,
        "reused_tokens": reused,
        "hit_rate": round(reused / prompts, 4),
        "mispredicted": round(sum(error != 0 for error in errors) / len(errors), 4),
        "promised_too_much": round(sum(error > 0 for error in errors) / len(errors), 4),
        "promised_too_little": round(sum(error < 0 for error in errors) / len(errors), 4),
        "mean_error_tokens": round(statistics.fmean(map(abs, errors)), 1),
        "misexpected": round(
            sum(record.expected_tokens != record.cached_tokens for record in counted)
            / len(counted),
            4,
        ),
    }


def _throughput(counted: Sequence[RequestRecord]) -> dict[str, float]:
    span_s = max(record.last_s for record in counted) - min(record.arrived_s for record in counted)
    answers = sum(len(record.answer) for record in counted)
    return {
        "requests_per_s": round(len(counted) / span_s, 3),
        "answer_tokens_per_s": round(answers / span_s, 1),
    }


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: 0 if all are equal."""
    mean = statistics.fmean(values)
    return statistics.pstdev(values) / mean if mean else 0.0


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of the ascending values that *percent* of them do not exceed; 0 if there
    are none."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def _times(name: str, values: Sequence[float], percents: Sequence[int]) -> dict[str, float]:
    mean = statistics.fmean(values) if values else 0.0
    return {f"{name}_mean_ms": round(mean * 1000, 2), **_percentiles(name, values, percents)}


def _percentiles(name: str, values: Sequence[float], percents: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"{name}_p{percent}_ms": round(percentile(ordered, percent) * 1000, 2)
        for percent in percents
    }
