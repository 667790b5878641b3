"""Stored responses of `/v1/responses`: which replica has one, since only that one can continue,
show, cancel or delete it."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from kvevents.field_docs import counter, gauge
from router.fleet.replica import Replica

MAX_RESPONSES = 65_536
"""Ids that are remembered; the one used longest ago is forgotten first."""
MAX_ASKED = 16
"""Replicas that are asked for a response whose id is not known."""
ASKED_AT_ONCE = 32
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}\Z")

HasResponse: TypeAlias = Callable[[Replica, str], Awaitable[bool]]
"""`(replica, response id)`: asks a replica. It must not raise, and must bound its time."""


@dataclass(frozen=True)
class StoredResponsesStatistics:
    """Counts since the start."""

    known: Annotated[int, gauge("kvroute_stored_responses")]
    """Stored responses of `/v1/responses` whose replica is known."""
    asked: Annotated[int, counter("kvroute_response_lookups")]
    """Times that the replicas were asked for a stored response."""
    found: int
    """Times that one had it."""


class StoredResponses:
    """Learns from responses as they pass, and asks the replicas for those it has not seen: another
    router's, or its own before a restart. Belongs to one event loop."""

    def __init__(self, has_response: HasResponse) -> None:
        self._has_response = has_response
        self._holders: OrderedDict[str, str] = OrderedDict()
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._asked = self._found = 0

    def learn(self, response_id: str, replica_id: str) -> None:
        """Remember the replica of a response."""
        self._holders[response_id] = replica_id
        self._holders.move_to_end(response_id)
        if len(self._holders) > MAX_RESPONSES:
            self._holders.popitem(last=False)

    async def holder(self, response_id: str, replicas: Mapping[str, Replica]) -> Replica | None:
        """The replica that has a response; None if none of *replicas* is known to have it.

        Args:
            replicas: By id, all that may have it.
        """
        known = self._holders.get(response_id)
        if known is not None and known in replicas:
            self._holders.move_to_end(response_id)
            return replicas[known]
        asked = [replica for replica in replicas.values() if replica.is_healthy][:MAX_ASKED]
        if len(asked) < 2 or not _ID.match(response_id):
            return None  # there is no choice, or no engine names a response so
        self._asked += 1
        answers = await asyncio.gather(*(self._ask(replica, response_id) for replica in asked))
        for replica, has_it in zip(asked, answers, strict=True):
            if has_it:
                self._found += 1
                self.learn(response_id, replica.id)
                return replica
        return None

    def statistics(self) -> StoredResponsesStatistics:
        return StoredResponsesStatistics(len(self._holders), self._asked, self._found)

    async def _ask(self, replica: Replica, response_id: str) -> bool:
        async with self._places:
            return await self._has_response(replica, response_id)
