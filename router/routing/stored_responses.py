"""Stored responses of `/v1/responses`: which replica has one, since only that one can continue,
show, cancel or delete it; and whose it is, since only the key that made it may."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

from kvevents.field_docs import counter, gauge
from router.errors import UnknownResponse
from router.fleet.replica import Replica

MAX_RESPONSES = 65_536
"""Ids that are remembered; the one used longest ago is forgotten first."""
MAX_ASKED = 16
"""Replicas that are asked for a response whose id is not known."""
ASKED_AT_ONCE = 32
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}\Z")

_NAME = re.compile(r"(resp_[0-9a-f]{32})([0-9a-f]{32})\Z")
_STRETCHED = 10_000
"""Rounds between a key and the seal of its ids, so that they do not help to guess it."""

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


class ResponseOwner:
    """The holder of a key, where there are several: it names the responses made with it, and
    recognises its names.

    The router sends `request_id`, which engines take as the response's id: half of it is random,
    the other half a seal that only the same key gives. So every router knows whose a
    response is, also after a restart, and none has to remember it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def name_response(self, body: bytes) -> bytes:
        """The JSON object *body* with an id for the response that it asks for. An id that the
        client has chosen comes before it, and engines take the last."""
        random = f"resp_{secrets.token_hex(16)}"
        end = len(body.rstrip()) - 1
        comma = b"" if body[:end].rstrip().endswith(b"{") else b","
        name = f'"request_id":"{random}{self._seal(random)}"}}'.encode()
        return b"".join((memoryview(body)[:end], comma, name))

    def check(self, response_id: str) -> None:
        """Check that a response was made with this key.

        Raises:
            UnknownResponse: It was not, or does not exist.
        """
        found = _NAME.match(response_id)
        if found is None or not hmac.compare_digest(found[2], self._seal(found[1])):
            raise UnknownResponse

    def _seal(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()[:32]

    @cached_property
    def _secret(self) -> bytes:
        return hashlib.pbkdf2_hmac("sha256", self._key, b"kvroute stored responses", _STRETCHED)


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
