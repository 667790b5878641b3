"""Puts requests into a load tracker, and sums up what it counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from router.fleet.load import LoadTracker, ReplicaLoad


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """Loads by replica (only those with any), and requests since the start."""

    replicas: Mapping[str, ReplicaLoad]
    in_flight: int
    started: int
    retried: int


def statistics_of(tracker: LoadTracker) -> LoadStatistics:
    replicas = {place: load for place, dp_rank, load in tracker.places() if dp_rank is None}
    return LoadStatistics(replicas, *tracker.books.counts())


@contextmanager
def in_flight(
    tracker: LoadTracker, replica_id: str, uncached_tokens: int, prompt_tokens: int
) -> Iterator[None]:
    """A request is in flight while the block runs."""
    flight = tracker.started(replica_id, uncached_tokens, prompt_tokens)
    try:
        yield
    finally:
        flight.ended()
