"""The proxy: streams requests, each to one replica, and watches the clients of those under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.proxy.relay import Relay
from router.proxy.types import (
    Attempt,
    End,
    Observer,
    Outcome,
    ProxyRequest,
    ProxySettings,
    Receive,
    Send,
)
from router.upstream import UpstreamClient


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Requests under way now, and how many ended in each way since the proxy was made."""

    active: int
    ended: dict[End, int] = field(default_factory=dict)


class Proxy:
    """Raw ASGI in front, `UpstreamClient` behind. Belongs to one event loop."""

    def __init__(self, client: UpstreamClient, settings: ProxySettings) -> None:
        self._client = client
        self._settings = settings
        self._relays: set[Relay] = set()
        self._ended = dict.fromkeys(End, 0)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def stream(
        self,
        plan: Sequence[Attempt],
        request: ProxyRequest,
        receive: Receive,
        send: Send,
        observer: Observer,
    ) -> Outcome:
        """Send the request to the first candidate of *plan* that gives a first byte, and its answer
        to the client.

        The answer begins when its first body byte is here, not with its headers: until then another
        candidate may serve. After the last one failed, the client gets 502, or 503 where a replica
        said so or *plan* is empty.

        Args:
            plan: Candidates, best first.
            request: The client's request, its body read to the end.
            receive: The server's; asked only whether the client is still there.
            send: The server's; its waiting for a slow client is what pauses the replica.
            observer: Told what happens; ``on_end`` exactly once, whatever happens.
        Raises:
            asyncio.CancelledError: The task was cancelled by somebody else. The replica's
                connection is closed.
        """
        loop = self._loop = self._loop or asyncio.get_running_loop()
        relay = Relay(self._client, self._settings, request, receive, send, observer, loop)
        self._relays.add(relay)
        if self._timer is None:
            self._timer = loop.call_later(self._settings.watch_s, self._watch, loop)
        try:
            await relay.run(plan)
        finally:
            self._relays.discard(relay)
            relay.stop_watching()
            self._ended[relay.end] += 1
            outcome = relay.outcome()
            observer.on_end(outcome)
        return outcome

    def statistics(self) -> ProxyStatistics:
        return ProxyStatistics(active=len(self._relays), ended=dict(self._ended))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for relay in self._relays:
            relay.watch(now)
        self._timer = (
            loop.call_later(self._settings.watch_s, self._watch, loop) if self._relays else None
        )
