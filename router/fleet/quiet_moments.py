"""Finds the requests that had a replica to themselves: their effect on its cache is known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import msgspec

from router._core import Placing


@dataclass(slots=True)
class _Requests:
    """The requests at one replica."""

    under_way: int = 0
    begun: int = 0
    others: int = 0
    """Requests of other routers, as far as they are known."""
    ended_at: float = -math.inf


class QuietSample(msgspec.Struct, frozen=True):
    """A request at a replica."""

    replica_id: str
    number: int | None
    """Its number among the requests there; None if it was not quiet when this one began."""


class QuietMoments:
    """Finds the requests that had a replica to themselves. The caller passes the time, in seconds
    on a monotonic clock.

    Args:
        quiet_s: Between the end of one request and the beginning of the next.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._company: Placing | None = None
        self._replicas: dict[str, _Requests] = {}

    def count_also(self, company: Placing) -> None:
        """Count the requests that the data plane sends by itself as well."""
        self._company = company

    def _met(self, replica_id: str) -> tuple[int, int, float]:
        return (0, 0, -math.inf) if self._company is None else self._company.company(replica_id)

    def began(self, replica_id: str, now: float) -> QuietSample:
        """A request is about to be sent; call `ended` when it is over."""
        requests = self._replicas.get(replica_id)
        if requests is None:
            requests = self._replicas[replica_id] = _Requests()
        met, met_in_all, met_until = self._met(replica_id)
        ended_at = max(requests.ended_at, met_until)
        is_alone = requests.under_way + met == 0 and now - ended_at >= self._quiet_s
        begun = requests.begun + 1
        number = begun + requests.others + met_in_all
        sample = QuietSample(replica_id, number if is_alone else None)
        requests.begun = begun
        requests.under_way += 1  # last: without a sample nothing would count it down
        return sample

    def ended(self, moment: QuietSample, now: float) -> bool:
        """A request is over; returns whether it was alone from its beginning to its end."""
        requests = self._replicas.get(moment.replica_id)
        if requests is None:
            return False  # the replica was removed meanwhile
        requests.under_way = max(requests.under_way - 1, 0)
        requests.ended_at = now
        return moment.number == requests.begun + requests.others + self._met(moment.replica_id)[1]

    def was_quiet(self, replica_id: str, began_at: float) -> bool:
        """Return whether nothing from here was at a replica since a while before *began_at*.

        Args:
            began_at: When a request of the company began.
        """
        requests = self._replicas.get(replica_id)
        return requests is None or (
            requests.under_way == 0 and began_at - requests.ended_at >= self._quiet_s
        )

    def begun(self) -> dict[str, int]:
        """Requests that began at each replica."""
        found = Counter({name: requests.begun for name, requests in self._replicas.items()})
        found.update({} if self._company is None else self._company.begun())
        return {name: count for name, count in found.items() if count}

    def disturbed(self, replica_id: str, now: float) -> None:
        """Another router has a request there, or had one a moment ago."""
        requests = self._replicas.setdefault(replica_id, _Requests())
        requests.others += 1
        requests.ended_at = now

    def forget(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)
        if self._company is not None:
            self._company.forget(replica_id)
