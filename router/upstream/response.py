"""One response of an upstream server: filled by its connection, read by its caller."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from router.upstream.errors import FirstByteTimeout, GivenUp, IdleTimeout, UpstreamError
from router.upstream.origin import Origin, Timeouts

Header = tuple[bytes, bytes]


class ResponseSource(Protocol):
    """What a response needs of the connection it arrives on."""

    def resume(self) -> None:
        """Continue to read from the socket, now that the buffer is empty."""

    def cut(self) -> None:
        """Close the socket: the rest is not wanted."""


class UpstreamResponse:
    """Status, headers and a body that is still arriving.

    Read it with `read_chunk` until that returns None, or call `abort`. A response that has been
    received whole has given its connection back by then, even if chunks remain to be read. Only one
    task may read it.

    Args:
        source: The connection it arrives on.
        origin: The server, for messages.
        timeouts: How long the reader waits.
        loop: The running event loop.
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
        self,
        source: ResponseSource,
        origin: Origin,
        timeouts: Timeouts,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.status = 0
        self.headers: list[Header] = []
        """As received, names in lower case."""
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
        """Whether everything has been received and read."""
        return self.complete and not self._chunks

    async def wait_for_first_byte(self) -> None:
        """Wait for the first byte of the body, or the end of an empty response.

        Raises:
            UpstreamError: There is neither.
        """
        if self.error is None:
            await self._wait(self._timeouts.first_byte_s)
        if self.error is not None and not self._chunks:
            raise self.error
        self.started = True

    async def read_chunk(self) -> bytes | None:
        """Return all that arrived since the last call, waiting only if that is nothing; None at the
        end.

        Raises:
            IdleTimeout: Nothing arrived for `idle_s`.
            ResponseBroken: The response ended early. What arrived before it did was returned first.
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
        """Give up the rest: close the connection unless the response is complete.

        It must not be read after this.
        """
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
        """Received and not yet read."""
        return self._buffered

    def add(self, data: bytes) -> None:
        """Append to the body."""
        self._chunks.append(data)
        self._buffered += len(data)

    def discard(self) -> None:
        """Throw away what has been received and not read."""
        self._chunks.clear()
        self._buffered = 0

    def fail(self, error: UpstreamError) -> None:
        """End with *error*, unless the response has ended already."""
        if self.error is None and not self.complete:
            self.error = error

    def wake(self) -> None:
        """Wake the reader if there is something for it."""
        waiter = self._waiter
        if (
            waiter is not None
            and (self._chunks or self.complete or self.error is not None)
            and not waiter.done()
        ):
            # Now: the timer that checks deadlines may run before the reader does.
            self.deadline = math.inf
            waiter.set_result(None)

    # The client's side.

    @property
    def origin(self) -> Origin:
        """The server."""
        return self._origin

    def waited_s(self, now: float) -> float | None:
        """For how long the reader has waited for the next byte; None while it does not wait.

        Args:
            now: On the event loop's clock.
        """
        if self._waiter is None or self.deadline == math.inf:
            return None
        timeouts = self._timeouts
        return now - self.deadline + (timeouts.idle_s if self.started else timeouts.first_byte_s)

    def give_up(self, why: str) -> None:
        """End the exchange with `GivenUp`."""
        self.fail(GivenUp(f"{self._origin}: {why}", received=self.received))
        self._source.cut()
        self.wake()

    def expire(self) -> None:
        """The deadline has passed: end the exchange with the error of its phase."""
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
