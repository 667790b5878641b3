"""Tokenisation at replicas: which one is asked, and for how long."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from async_timeout import timeout

from router.errors import NoReplica
from router.replicas import Replica, ReplicaRegistry, ReplicaState
from router.replicas.load import LoadTracker
from router.upstream import ConnectionLimitReached, Timeouts, UpstreamClient, UpstreamError

MAX_ASKED = 2
"""Replicas that are asked for one prompt. Beyond that it is routed by load, which costs a hit, not
a response."""
AVOIDED_S = 5.0
"""A replica that did not respond is asked last for so long: otherwise each prompt would wait for
it, until its health checks have failed."""
_BYTES_PER_S = 1_000_000
"""What a slow tokenizer manages: a longer body is given more time."""
_RESPONSE_BYTES = 32 * 1024 * 1024
_HEADERS = ((b"content-type", b"application/json"),)


class ReplicaTokenizers:
    """The `/tokenize` endpoints of the replicas. Belongs to one event loop."""

    def __init__(
        self,
        upstream: UpstreamClient,
        registry: ReplicaRegistry,
        load: LoadTracker,
        tokenize_s: float,
        patient: Timeouts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked yet.

        Args:
            upstream: Sends the requests.
            registry: Knows the replicas.
            load: Counts these requests too.
            tokenize_s: For one replica to tokenise a short prompt, while a request waits.
            patient: Where nobody waits.
            clock: A monotonic clock, in seconds.
        """
        self._upstream = upstream
        self._registry = registry
        self._load = load
        self._tokenize_s = tokenize_s
        self._patient = patient
        self._clock = clock
        self._turn = itertools.count()
        self._last_turn: WeakKeyDictionary[Replica, int] = WeakKeyDictionary()
        self._failed_at: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()

    async def ask(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        """POST to one replica, patiently; return status and body.

        Args:
            replica: Which one.
            path: The endpoint's.
            body: The request's.
        Raises:
            ConnectionError: It does not respond.
        """
        try:
            return await self._post(replica, path, body, self._patient)
        except UpstreamError as error:
            raise ConnectionError(error) from error

    async def ask_one_of(self, names: Sequence[str], path: str, body: bytes) -> tuple[int, bytes]:
        """POST to the least busy replica, and to another one if it does not respond in time.

        Args:
            names: Of a model; replicas that serve it by one of them are asked.
            path: The endpoint's.
            body: The request's.
        Returns:
            Status and body.
        Raises:
            ConnectionError: None responded, or none is healthy.
        """
        failure: Exception = NoReplica(names[0], "none is healthy")
        for replica in self._order(names)[:MAX_ASKED]:
            self._last_turn[replica] = next(self._turn)
            try:
                with self._load.tokenizing(replica.id):
                    status, response = await self._ask_in_time(replica, path, body)
            except ConnectionLimitReached as error:
                raise ConnectionError(error) from error
            except (UpstreamError, asyncio.TimeoutError) as error:
                failure = error
                self._failed_at[replica] = self._clock()
                continue
            if status < 500:
                self._failed_at.pop(replica, None)
                return status, response
            failure = ConnectionError(f"{replica.origin}: POST {path} returned {status}")
            self._failed_at[replica] = self._clock()
        raise ConnectionError(failure) from failure

    def _order(self, names: Sequence[str]) -> list[Replica]:
        """Those that can be asked: the least busy first, of equal ones the longest unasked."""
        now = self._clock()

        def key(replica: Replica) -> tuple[bool, int, int]:
            load = self._load.load_of(replica.id)
            failed_at = self._failed_at.get(replica)
            return (
                failed_at is not None and now - failed_at < AVOIDED_S,
                load.requests + load.tokenizing_requests,
                self._last_turn.get(replica, -1),
            )

        return sorted(self._able(names), key=key)

    def _able(self, names: Sequence[str]) -> Iterable[Replica]:
        found = {replica: None for name in names for replica in self._registry.serving(name)}
        return (replica for replica in found if replica.state is ReplicaState.HEALTHY)

    async def _ask_in_time(self, replica: Replica, path: str, body: bytes) -> tuple[int, bytes]:
        limit_s = self._tokenize_s + len(body) / _BYTES_PER_S
        async with timeout(limit_s):
            return await self._post(replica, path, body, Timeouts(limit_s, limit_s, limit_s))

    async def _post(
        self, replica: Replica, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes]:
        status, _, response = await self._upstream.fetch(
            replica.origin,
            b"POST",
            path.encode(),
            body,
            timeouts,
            _RESPONSE_BYTES,
            (*_HEADERS, *replica.headers),
        )
        return status, response
