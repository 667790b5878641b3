"""The requests to the replicas, each with a time, a session and a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request before it is routed."""

    request_id: str
    at_s: float
    session: str
    answer_tokens: int
    place: int
    """The key under which the workload finds its prompt."""


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """The total size of a workload."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    distinct_tokens: int
    """Prompt tokens of all requests, with shared prefixes counted once."""
    longest_tokens: int
    """The longest prompt with its response."""


class Workload(Protocol):
    """Requests, some of which wait for the responses to earlier ones. Can be used once."""

    size: WorkloadSize

    def arrivals(self) -> Sequence[Arrival]:
        """The requests whose times are known from the start."""
        ...

    def prompt(self, arrival: Arrival) -> list[int]:
        """The tokens of a request; called when it arrives."""
        ...

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> Arrival | None:
        """The request that follows the response to this one, if any."""
        ...
