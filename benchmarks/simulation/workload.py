"""The requests to the replicas, each with a time, a session and a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
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
    turn: int = 0
    """The number of requests of its session before it."""


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """The sizes of its requests."""

    prompt_tokens: float
    """The mean over all requests."""
    longest_tokens: int
    """The longest prompt with its response."""


class Workload(Protocol):
    """Requests, some of which wait for the responses to earlier ones. Can be used once."""

    size: WorkloadSize
    ends_s: float
    """The time when the last request arrives: after that the load falls, and nothing is counted."""

    def arrivals(self) -> Sequence[Arrival]:
        """Return the requests whose times are known from the start."""
        ...

    def prompt(self, arrival: Arrival) -> list[int]:
        """Return the tokens of a request; called when it arrives."""
        ...

    def shared_ends(self, arrival: Arrival) -> Sequence[int]:
        """Return the lengths at which a message of the prompt ends that other sessions may share,
        as a chat template tells: those before the first response.

        Args:
            arrival: Of a request whose prompt was asked for.
        """
        ...

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> Arrival | None:
        """Return the request that follows the response to this one, if any."""
        ...


class Texts:
    """Texts that share no token with each other, so that none is ever found in another's place.

    They are runs of consecutive numbers: as good as any others for hashing, and quick to write out.
    """

    def __init__(self) -> None:
        self._next = 1000  # above all bytes, in which responses are written

    def text(self, tokens: int) -> range:
        """Return a new text of so many tokens."""
        start, self._next = self._next, self._next + tokens
        return range(start, self._next)


def arrival_times(random: Random, per_s: float, ends_s: float, variation: float) -> list[float]:
    """Return times up to *ends_s* whose gaps are gamma-distributed.

    Args:
        random: Where they are drawn from.
        per_s: Their mean rate.
        ends_s: Where they end, in seconds from 0.
        variation: The coefficient of variation of the gaps: 1 is a Poisson process; recorded
            services have 2 and more (BurstGPT, arXiv 2401.17644).
    """
    shape = 1 / variation**2
    scale = 1 / (per_s * shape)
    times = [random.gammavariate(shape, scale)]
    while times[-1] < ends_s:
        times.append(times[-1] + random.gammavariate(shape, scale))
    return times[:-1]
