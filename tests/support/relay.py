"""Relays that lose things: one for live messages, one for the byte streams of replays."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

import zmq


@dataclass(frozen=True)
class Faults:
    """Probabilities, per message."""

    drop: float = 0.03
    duplicate: float = 0.03
    delay: float = 0.03
    """Held back behind up to twenty later messages: late and out of order."""
    cut: float = 0.004
    """The connection to the subscriber ends, with all that is under way."""


class LossyRelay:
    """SUB on one side, PUB on the other, a thread between that makes mistakes until `heal` is called."""

    def __init__(self, upstream: str, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.forwarded = self.dropped = self.cuts = 0
        self._upstream = upstream
        self._rng = random.Random(seed)
        self._late: list[tuple[int, list[bytes]]] = []
        self._context = zmq.Context()
        self._sub = self._subscribe()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = 0
        self._pub.bind("tcp://127.0.0.1:0")
        self.endpoint: str = self._pub.last_endpoint.decode()
        self._must_reconnect = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def heal(self) -> None:
        """Make no more mistakes; what was held back comes first."""
        self.faults = Faults(0, 0, 0, 0)

    def reconnect(self) -> None:
        """Both connections end and come back, as those of a TCP relay do when the engine restarts."""
        self._must_reconnect = True

    def __enter__(self) -> LossyRelay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing = True
        self._thread.join()

    def _subscribe(self) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        sub.linger = 0
        sub.rcvhwm = 0
        sub.subscribe(b"")
        sub.reconnect_ivl = 10
        sub.connect(self._upstream)
        return sub

    def _run(self) -> None:
        while not self._is_closing:
            if self._must_reconnect:
                self._must_reconnect = False
                self._sub.close()
                self._sub = self._subscribe()
                self._cut()
            if self._sub.poll(2):
                self._pass(self._sub.recv_multipart())
            elif not self.faults.delay:
                self._send_late(to=2**62)
        self._context.destroy(linger=0)

    def _pass(self, message: list[bytes]) -> None:
        self.forwarded += 1
        rng, faults = self._rng, self.faults
        if rng.random() < faults.cut:
            self._cut()
        if rng.random() < faults.drop:
            self.dropped += 1
        elif rng.random() < faults.delay:
            self._late.append((self.forwarded + rng.randrange(1, 20), message))
        else:
            for _ in range(1 + (rng.random() < faults.duplicate)):
                self._pub.send_multipart(message)
        self._send_late(to=self.forwarded)

    def _send_late(self, to: int) -> None:
        for due, message in self._late:
            if due <= to:
                self._pub.send_multipart(message)
        self._late = [entry for entry in self._late if entry[0] > to]

    def _cut(self) -> None:
        self.cuts += 1
        self._pub.close(linger=0)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = 0
        while not self._binds_again():
            # The old socket is closed by another thread, a moment later.
            time.sleep(0.001)

    def _binds_again(self) -> bool:
        try:
            self._pub.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True


class CuttingRelay:
    """Forwards TCP and ends connections in the middle."""

    def __init__(self, port: int, seed: int, cut: float) -> None:
        self.cut = cut
        """Probability per chunk of up to 16 KiB."""
        self.cuts = 0
        self.endpoint = ""
        self._port = port
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # Either end left, or the test is over.
        finally:
            writer.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = [
            asyncio.ensure_future(self._pump(reader, far_writer)),
            asyncio.ensure_future(self._pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(16_384):
                if self._rng.random() < self.cut:
                    self.cuts += 1
                    return
                writer.write(chunk)
                await writer.drain()


@asynccontextmanager
async def cutting_relay(endpoint: str, seed: int, cut: float) -> AsyncIterator[CuttingRelay]:
    """A relay in front of a `tcp://` endpoint."""
    relay = CuttingRelay(int(endpoint.rpartition(":")[2]), seed, cut)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield relay
        finally:
            server.close()
            await relay.close()
