"""The last batches of a stream, kept for replay."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import islice
from operator import itemgetter

from kvevents.messages import Batch


class ReplayRing:
    """Bounded in batches and in bytes; the oldest are removed first.

    Numbers ascend, with gaps where batches were dropped.
    """

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return self._bytes

    @property
    def oldest_seq(self) -> int | None:
        """Number of the oldest batch; None while the ring is empty."""
        return self._batches[0].seq if self._batches else None

    def append(self, batch: Batch) -> None:
        """Add the newest batch, and remove the oldest ones that are over a bound."""
        self._batches.append(batch)
        self._bytes += len(batch.payload)
        while len(self._batches) > self._max_steps or self._bytes > self._max_bytes:
            self._bytes -= len(self._batches.popleft().payload)

    def since(self, seq: int, limit: int) -> list[Batch]:
        """Return the oldest batches from a number on.

        Args:
            limit: Most batches to return.
        """
        first = bisect_left(self._batches, seq, key=itemgetter(0))
        return list(islice(self._batches, first, first + limit))
