"""Many requests that come together, at the loop that decides them."""

from __future__ import annotations

import asyncio
import socket
import time

from router.plane.data_plane import MAX_TURN_S
from router.plane.exchanges import PlaneExchange
from tests.router.plane.server import Served, Waiting, plane_server
from tests.support.http_client import connect, request_bytes
from tests.support.waiting import DEADLINE_S


class Burst:
    """Requests that each take a whole turn to be decided."""

    def __init__(self, served: Served, count: int) -> None:
        self._served = served
        self._count = count
        self._turn = 0
        self._clients: list[socket.socket] = []
        self.turns: list[int] = []
        """In which each was decided."""

    def opens(self, exchange: PlaneExchange) -> Waiting:
        """One of them; the first brings the others about, which are there when it has been
        decided."""
        if not self._clients:
            self._come()
            asyncio.get_running_loop().call_soon(self._next_turn)
        elif exchange.path == "/burst":
            self._decide()
        return Waiting(self._served, exchange)

    def _next_turn(self) -> None:
        self._turn += 1
        if len(self.turns) < self._count:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _come(self) -> None:
        self._clients = [self._connected() for _ in range(self._count)]
        for client in self._clients:
            client.sendall(request_bytes("GET", "/burst"))
        with self._connected() as last:  # refused by the core, which has seen all before it
            last.sendall(b"nonsense\r\n\r\n")
            assert last.recv(65_536).startswith(b"HTTP/1.1 400 ")

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._served.port), timeout=DEADLINE_S)

    def _decide(self) -> None:
        self.turns.append(self._turn)
        until = time.monotonic() + MAX_TURN_S
        while time.monotonic() < until:
            pass
        if len(self.turns) == self._count:
            assert self._clients[0].recv(65_536).startswith(b"HTTP/1.1 200 "), "it did not wait"

    def close(self) -> None:
        """No client is left."""
        for client in self._clients:
            client.close()


async def test_requests_that_a_turn_has_no_time_for_are_served_in_the_next_ones() -> None:
    """A burst must not keep its own first requests, timers and event streams waiting until its last
    one is decided."""
    async with plane_server() as served, connect(served.port) as client:
        burst = Burst(served, 5)
        served.opens = lambda method, path, query: burst.opens  # type: ignore[method-assign]
        assert (await client.ask("GET", "/first")).status == 200
        while len(burst.turns) < 5:
            await asyncio.sleep(0)
        burst.close()
        assert len(set(burst.turns)) == 5, burst.turns
