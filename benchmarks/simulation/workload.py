"""What is asked of the replicas: requests with a time, a session and a prompt."""

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
    """What the workload finds its prompt by."""


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """What a workload asks for in all."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    distinct_tokens: int
    """Prompt tokens of all requests, those of a shared prefix once."""
    longest_tokens: int
    """Of a prompt with its answer."""


class Workload(Protocol):
    """Requests, some of which wait for the answers of earlier ones. Used once."""

    size: WorkloadSize

    def arrivals(self) -> Sequence[Arrival]:
        """Those whose times are known from the start."""
        ...

    def prompt(self, arrival: Arrival) -> list[int]:
        """Its tokens; asked for when it arrives."""
        ...

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> Arrival | None:
        """The request that follows on this one's answer, if one does."""
        ...
