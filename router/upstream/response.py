"""One answer of an upstream server: filled by its connection, read by its caller."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from router.upstream.errors import FirstByteTimeout, IdleTimeout, UpstreamError
from router.upstream.origin import Origin, Timeouts

Header = tuple[bytes, bytes]


class Source(Protocol):
    """What an answer needs of the connection it arrives on."""

    def resume(self) -> None:
        """Read on, after the buffer was emptied."""

    def cut(self) -> None:
        """Close the socket: nobody wants the rest."""


class UpstreamResponse:
    """Status, headers and a body that is still arriving.

    Read it with `read_chunk` until that returns None, or call `abort`. An answer that was received
    to its end has given its connection back by itself, also before the last chunk is read. One task
    reads; none may share it.
    """

    __slots__ = (
        "_buffered",
        "_chunks",
        "_loop",
        "_origin",
        "_source",
        "_timeouts",
        "_waiter",
        "complete",
        "deadline",
        "error",
        "headers",
        "received",
        "started",
        "status",
    )

    def __init__(
        self, source: Source, origin: Origin, timeouts: Timeouts, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.status = 0
        # As they came, names in lower case.
        self.headers: list[Header] = []
        self.deadline = math.inf
        self.received = False
        self.started = False
        self.complete = False
        self.error: UpstreamError | None = None
        self._source = source
        self._origin = origin
        self._timeouts = timeouts
        self._loop = loop
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None

    # The reader's side.

    @property
    def at_end(self) -> bool:
        """Whether everything was received and read."""
        return self.complete and not self._chunks

    async def wait_for_first_byte(self) -> None:
        """Wait for the first byte of the body, or the end of an answer without one."""
        if self.error is None:
            await self._wait(self._timeouts.first_byte_s)
        if self.error is not None and not self._chunks:
            raise self.error
        self.started = True

    async def read_chunk(self) -> bytes | None:
        """Return all that arrived since the last call, waiting only if that is nothing; None at the
        end.

        Raises:
            IdleTimeout: Nothing came for ``idle_s``.
            ResponseBroken: The answer ended early. What arrived before was returned first.
        """
        if not self._chunks:
            if self.complete:
                return None
            if self.error is None:
                await self._wait(self._timeouts.idle_s)
            if not self._chunks and self.error is not None:
                raise self.error
        return self._take() if self._chunks else None

    def abort(self) -> None:
        """Want no more of it: close the connection unless the answer is complete. Do not read after
        this."""
        if not self.complete and self.error is None:
            self._source.cut()
        self._chunks.clear()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if not self.complete and self.error is None:
            self._source.resume()
        return data

    async def _wait(self, timeout_s: float) -> None:
        waiter = self._waiter = self._loop.create_future()
        self.deadline = self._loop.time() + timeout_s
        try:
            await waiter
        finally:
            self._waiter = None
            self.deadline = math.inf

    # The connection's side.

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered += len(data)

    def fail(self, error: UpstreamError) -> None:
        if self.error is None and not self.complete:
            self.error = error

    def wake(self) -> None:
        """Let the reader go on if there is something for it."""
        waiter = self._waiter
        if (
            waiter is not None
            and (self._chunks or self.complete or self.error is not None)
            and not waiter.done()
        ):
            # At once: the timer that looks at deadlines may run before the reader does.
            self.deadline = math.inf
            waiter.set_result(None)

    # The client's side.

    def expire(self) -> None:
        """The deadline is over: end the exchange with the error of its phase."""
        if self.started:
            self.fail(
                IdleTimeout(
                    f"{self._origin}: silent for {self._timeouts.idle_s:g} s in mid-body",
                    received=True,
                )
            )
        else:
            limit_s = self._timeouts.first_byte_s
            self.fail(
                FirstByteTimeout(
                    f"{self._origin}: no first byte in {limit_s:g} s", received=self.received
                )
            )
        self._source.cut()
        self.wake()
