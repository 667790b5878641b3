"""One response of an upstream server: filled by its connection, read by its caller."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from router.upstream.errors import (
    ConnectTimeout,
    FirstByteTimeout,
    GivenUp,
    IdleTimeout,
    UpstreamError,
)
from router.upstream.origin import Origin, Timeouts

Header = tuple[bytes, bytes]


class ResponseSource(Protocol):
    """What a response needs of the connection it arrives on, or of the attempt to open one."""

    def resume(self) -> None:
        """Continue to read from the socket, now that the buffer is empty."""

    def cut(self) -> None:
        """Close the socket: the rest is not wanted."""


class Phase(Enum):
    """What the reader waits for; each has a time limit of its own."""

    CONNECTING = "connecting"
    WAITING = "waiting"
    """For the first byte: the request was sent."""
    READING = "reading"


class UpstreamResponse:
    """Status, headers and a body that is still arriving.

    Read it in one of two ways until its end, or call `abort`:

        in a task        `read_chunk`, until that returns None
        in callbacks     `when_ready`, then `take`, and again until `at_end`

    A response that has been received whole has given its connection back by then, even if chunks
    remain to be read. Only one reader may read it. While nobody asks for more, no more than a
    buffer is read from the socket, and no time runs.

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
        "_on_chunk",
        "_origin",
        "_timeouts",
        "_waiter",
        "complete",
        "deadline",
        "error",
        "headers",
        "phase",
        "received",
        "source",
        "status",
    )

    def __init__(
        self,
        source: ResponseSource | None,
        origin: Origin,
        timeouts: Timeouts,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.status = 0
        self.headers: list[Header] = []
        """As received, names in lower case."""
        self.deadline = math.inf
        self.phase = Phase.CONNECTING if source is None else Phase.WAITING
        self.source = source
        """None only until an attempt to connect has begun."""
        self.received = False
        self.complete = False
        self.error: UpstreamError | None = None
        self._origin = origin
        self._timeouts = timeouts
        self._loop = loop
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._waiter: Callable[[], object] | None = None
        self._on_chunk: Callable[[bytes, int], bool] | None = None

    # The reader's side.

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read: a piece of the body, its end, or an error."""
        return bool(self._chunks) or self.complete or self.error is not None

    @property
    def at_end(self) -> bool:
        """Whether everything has been received and read."""
        return self.complete and not self._chunks

    @property
    def started(self) -> bool:
        """Whether its reader has seen the first byte."""
        return self.phase is Phase.READING

    def when_ready(
        self, call: Callable[[], object], on_chunk: Callable[[bytes, int], bool] | None = None
    ) -> None:
        """Call back once, as soon as `is_ready`, which it must not be yet. The time limit of the
        phase starts now.

        Args:
            call: Called by the connection, in the middle of its work: it must not raise.
            on_chunk: Called instead, again and again, where exactly one chunk arrives that ends
                with a line: with the bytes of the chunk, its framing included, and the length of
                its data. Returns whether the reader goes on waiting. It must not raise, either.
        """
        self._waiter = call
        self._on_chunk = on_chunk
        self.deadline = self._loop.time() + self._limit_s

    def begin(self) -> None:
        """Note that the first byte of the body is here, or the end of an empty response.

        Raises:
            UpstreamError: There is neither.
        """
        if self.error is not None and not self._chunks:
            raise self.error
        self.phase = Phase.READING

    def take(self) -> bytes:
        """Return all that arrived since the last call; nothing at the end.

        Raises:
            UpstreamError: The response ended early. What arrived before it did was returned first.
        """
        if self._chunks:
            return self._take()
        if self.error is not None:
            raise self.error
        return b""

    async def wait_for_first_byte(self) -> None:
        """Wait for the first byte of the body, or the end of an empty response.

        Raises:
            UpstreamError: There is neither.
        """
        await self._wait()
        self.begin()

    async def read_chunk(self) -> bytes | None:
        """Return all that arrived since the last call, waiting only if that is nothing; None at the
        end.

        Raises:
            IdleTimeout: Nothing arrived for `idle_s`.
            ResponseBroken: The response ended early. What arrived before it did was returned first.
        """
        await self._wait()
        return self.take() or None

    def abort(self) -> None:
        """Give up the rest: close the connection unless the response is complete.

        It must not be read after this.
        """
        self._waiter = self._on_chunk = None
        if not self.complete and self.error is None and self.source is not None:
            self.source.cut()
        self._chunks.clear()
        if self.error is not None:
            # Its frames are those of the reader, who has this response.
            self.error.__traceback__ = None

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if not self.complete and self.error is None and self.source is not None:
            self.source.resume()
        return data

    async def _wait(self) -> None:
        if self.is_ready:
            return
        waiter = self._loop.create_future()
        self.when_ready(functools.partial(_resolve, waiter))
        try:
            await waiter
        finally:
            self._waiter = None
            self.deadline = math.inf

    @property
    def _limit_s(self) -> float:
        timeouts = self._timeouts
        if self.phase is Phase.READING:
            return timeouts.idle_s
        return timeouts.first_byte_s if self.phase is Phase.WAITING else timeouts.connect_s

    # The connection's side.

    @property
    def buffered_bytes(self) -> int:
        """Received and not yet read."""
        return self._buffered

    def sent(self, source: ResponseSource) -> None:
        """The request is being written: from now on the first byte is waited for.

        Args:
            source: The connection.
        """
        self.source = source
        self.phase = Phase.WAITING
        if self._waiter is not None:
            self.deadline = self._loop.time() + self._limit_s

    def add(self, data: bytes) -> None:
        """Append to the body."""
        self._chunks.append(data)
        self._buffered += len(data)

    def offer(self, chunk: bytes, size: int) -> bool:
        """Hand one whole chunk to the reader as it came, if it waits for one.

        Args:
            chunk: With its framing.
            size: Of its data.
        """
        on_chunk = self._on_chunk
        if on_chunk is None or self._waiter is None:
            return False
        self.deadline = self._loop.time() + self._timeouts.idle_s
        if not on_chunk(chunk, size):
            self._waiter = None
            self.deadline = math.inf
        return True

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
        if waiter is not None and (self._chunks or self.complete or self.error is not None):
            # Now: the timer that checks deadlines may run before the reader does.
            self._waiter = None
            self.deadline = math.inf
            waiter()

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
        if self._waiter is None or self.phase is Phase.CONNECTING:
            return None
        return now - self.deadline + self._limit_s

    def give_up(self, why: str) -> None:
        """End the exchange with `GivenUp`."""
        self._end(GivenUp(f"{self._origin}: {why}", received=self.received))

    def expire(self) -> None:
        """The deadline has passed: end the exchange with the error of its phase."""
        limit = f"{self._limit_s:g} s"
        error: UpstreamError
        if self.phase is Phase.READING:
            error = IdleTimeout(f"{self._origin}: silent for {limit} in mid-body", received=True)
        elif self.phase is Phase.WAITING:
            message = f"{self._origin}: no first byte in {limit}"
            error = FirstByteTimeout(message, received=self.received)
        else:
            error = ConnectTimeout(f"{self._origin}: no connection in {limit}")
        self._end(error)

    def _end(self, error: UpstreamError) -> None:
        self.fail(error)
        if self.source is not None:
            self.source.cut()
        self.wake()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
