"""Messages between a supervisor and a worker, over a socket that nobody else has."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, TypeAlias

import msgspec

from router.errors import RouterError

MAX_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class LineError(RouterError):
    """The other end broke the protocol."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """To a worker, before all else: all that it needs to be one."""

    number: int
    workers: int
    port: int
    board: int
    """File descriptor of the memory that all share."""
    secret: bytes
    """For keys of prefixes."""
    config: str
    """Text of the configuration."""
    directory: str | None
    """Where its relative paths start."""
    overrides: dict[str, Any]
    """Of the command line."""
    changes: list[bytes]
    """What others were asked that has changed something: the kind, a zero, the question."""
    restarts: int
    """How often this worker was started again."""
    started_at: float
    """Unix time, the same for all workers."""
    others_listen: bool
    """Then there is time to read the caches first."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """To a worker: the configuration has changed, perhaps to one that is refused."""

    config: str


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """To a worker that starts: nobody else listens any more."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a worker: a signal to stop came. The second cuts requests, the third ends at once."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it listens."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question of a worker to all others, and from the supervisor to each of these."""

    number: int
    """Comes back with the answer."""
    what: str
    body: bytes
    key: str = ""
    """Of a change, which workers that are started later have to hear, too: the last of each key."""


class WorkerReply(msgspec.Struct, frozen=True, tag=True):
    """From a worker that was asked."""

    number: int
    body: bytes


class WorkerReplies(msgspec.Struct, frozen=True, tag=True):
    """To the worker that asked: the replies by worker, of those that gave one in time."""

    number: int
    bodies: dict[int, bytes]
    missing: list[int]


Message: TypeAlias = Start | Reload | Hurry | Stop | Ready | Ask | WorkerReply | WorkerReplies

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def framed(message: Message) -> bytes:
    """The bytes of a message, behind their length."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def receive_now(line: socket.socket) -> Message:
    """The next message, waited for without an event loop.

    Raises:
        LineError: The other end is gone, or broke the protocol.
    """
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _decoded(_exactly(line, length))


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = line.recv(count - len(data))
        if not piece:
            raise LineError("the supervisor is gone")
        data += piece
    return bytes(data)


def _decoded(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise LineError(f"a message of {len(body)} bytes is none of ours") from error


class WorkerLine:
    """One end, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, line: socket.socket) -> WorkerLine:
        """The end that this socket is."""
        return cls(*await asyncio.open_connection(sock=line))

    def send(self, message: Message) -> None:
        """Send it, some time; to one that is gone, never."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def receive(self) -> Message | None:
        """The next message; None once the other end is gone.

        Raises:
            LineError: It broke the protocol.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_BYTES:
                raise LineError(f"a message of {length} bytes: it must have at most {MAX_BYTES}")
            return _decoded(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Let the other end know that this one is gone."""
        self._writer.close()
