"""Sums up what a load tracker counts."""

from __future__ import annotations

from collections.abc import Mapping
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
