"""Policies that do not look at the cache: in turn, at random, the least loaded."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from router.scoring.cost import busyness
from router.scoring.types import Candidate, Ranked, RouteRequest, Weights


class RoundRobinPolicy:
    """Each replica in its turn, per model.

    With one turn for all models, two whose requests alternate would each always meet the same
    replica.
    """

    MAX_MODELS = 1024

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Begin with the candidate whose turn it is, by id.

        Args:
            request: Only its model matters.
            candidates: In any order.
        """
        if not candidates:
            return []
        ordered = sorted(candidates, key=_by_id)
        start = self._next_turn(request.model) % len(ordered)
        turn = ordered[start:] + ordered[:start]
        return [
            Ranked(candidate, index, _turn_reason(index)) for index, candidate in enumerate(turn)
        ]

    def _next_turn(self, model: str) -> int:
        turn = self._turns.get(model, 0)
        if turn == 0 and len(self._turns) >= self.MAX_MODELS:
            self._turns.clear()
        self._turns[model] = turn + 1
        return turn


class RandomPolicy:
    """Any order, each as likely as the others."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:  # noqa: ARG002
        """Shuffle.

        Args:
            request: Not looked at.
            candidates: In any order.
        """
        ordered = list(candidates)
        self._random.shuffle(ordered)
        return [
            Ranked(candidate, index, "drawn at random") for index, candidate in enumerate(ordered)
        ]


class LeastLoadedPolicy:
    """The replica with the least to do first, whatever is cached there; ties at random."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:  # noqa: ARG002
        """Order by load.

        Args:
            request: Not looked at.
            candidates: With their loads.
        """
        loads = [
            (busyness(candidate.load, self._weights) / candidate.speed, candidate)
            for candidate in candidates
        ]
        loads.sort(key=lambda found: (found[0], found[1].load.requests, self._random.random()))
        return [
            Ranked(candidate, cost, _Wait(candidate.load.requests, cost))
            for cost, candidate in loads
        ]


class _Wait(NamedTuple):
    """Why a replica is the least loaded, written out only when it is read."""

    requests: int
    cost: float

    def __str__(self) -> str:
        return f"{self.requests:,} requests there, a wait of {self.cost:,.0f} prefill tokens"


def _by_id(candidate: Candidate) -> str:
    return candidate.replica_id


def _turn_reason(index: int) -> str:
    return "its turn" if index == 0 else f"{index} after the one whose turn it is"
