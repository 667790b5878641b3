"""What goes over the wire between a publisher and a subscriber without encryption; no sockets.

ZMTP 3.0 (rfc.zeromq.org/spec/23) with the mechanism NULL, as a SUB socket speaks it.
`SubscriberEnd` shakes hands, subscribes, answers heartbeats and takes messages apart:

    greeting   ff, 8 bytes, 7f, version, mechanism in 20 bytes, as-server, 31 bytes
    frame      flags (1: more follow, 2: size in 8 bytes, 4: a command), size, body
    message    [topic] [seq: 8 bytes] [payload]
"""

from __future__ import annotations

import struct

from kvevents.errors import HandshakeFailed
from kvevents.messages import MAX_FRAMES, MAX_SEQ, Batch, WireRun, read_live

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_NULL = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)
_READY, _ERROR, _PING, _PONG = b"\x05READY", b"\x05ERROR", b"\x04PING", b"\x04PONG"
_OUR_READY = _READY + b"\x0bSocket-Type\x00\x00\x00\x03SUB"
_PUBLISHERS = (b"PUB", b"XPUB")
_MOST_LEFT_OUT = 1000
"""Frames of one message."""
_MAX_COMMAND_BYTES = 4096
_PING_HEAD_BYTES = len(_PING) + 2
"""With how long the peer waits for us."""
_MAX_CONTEXT_BYTES = 16
"""Of a heartbeat, to be sent back."""
_MAX_OUTGOING_BYTES = 4096

# What follows the topic and the head of the number: the number, flags and size of the payload.
_TAIL = struct.Struct(">QBB")
_LONG_TAIL = struct.Struct(">QBQ")
_LONG_SIZE = struct.Struct(">Q")


class SubscriberEnd:
    """The bytes of one connection, and so of one process.

    Args:
        prefix: What is subscribed to: every topic that begins with it.
        frame_bytes: A longer frame is not read.
    """

    def __init__(self, prefix: bytes, frame_bytes: int) -> None:
        self.outgoing = bytearray(_GREETING + _frame(_COMMAND, _OUR_READY))
        """To be sent."""
        self.is_ready = False
        """The peer has shaken hands; messages come only then."""
        self.missing_bytes = 0
        """What ends the frame under way; 0: not known. With no more than these, what comes later
        need not be joined to what is here."""
        self._prefix = prefix
        self._frame_bytes = frame_bytes
        self._is_greeted = False
        self._data = b""
        self._at = 0
        self._behind = bytearray()
        """What came behind `_data` before that was read to its end."""
        self._frames: list[bytes] = []
        """Of the message under way; what is over `MAX_FRAMES` is left out."""
        self._frames_left_out = 0
        self._head = b""
        """What the last usual message began with, up to its number."""

    @property
    def waiting_bytes(self) -> int:
        """What was given and is not read yet."""
        return len(self._data) - self._at + len(self._behind)

    def give(self, data: bytes) -> None:
        """Take in what came.

        Raises:
            HandshakeFailed: The peer is not a publisher without encryption.
        """
        self.missing_bytes = 0
        if self._at < len(self._data) or self._behind:
            self._behind += data
        else:
            self._data, self._at = data, 0
        if not self.is_ready:
            self._shake_hands()

    def drop(self) -> None:
        """Forget all that was given and not read."""
        self._behind.clear()
        self._frames.clear()
        self._let_go()

    def run(self) -> WireRun | None:
        """What is here, for one who takes several messages at once and then says `skip_to`; None
        where the next one has to be looked at as `next_batch` does."""
        if not self._head or self._frames or self._at >= len(self._data):
            return None
        return WireRun(self._data, self._at, self._head, self._frame_bytes)

    def skip_to(self, at: int) -> None:
        """Go on there: whole messages of the `run` were taken."""
        self._at = at
        if at == len(self._data):
            self._let_go()

    def next_batch(self, topic: bytes | None) -> Batch | None:
        """The next message, None if it is not here as a whole.

        Args:
            topic: The only topic that counts; None: every one.

        Raises:
            MalformedBatch: It is not a batch.
            HandshakeFailed: What comes is not this protocol, or too long.
        """
        data, at, head = self._data, self._at, self._head
        if head and data.startswith(head, at) and not self._frames:
            # Almost every message: the topic of the one before it.
            at += len(head)
            if at + _LONG_TAIL.size <= len(data):
                seq, flags, size = _TAIL.unpack_from(data, at)
                start = at + _TAIL.size
                if flags == _LONG:
                    seq, flags, size = _LONG_TAIL.unpack_from(data, at)
                    start = at + _LONG_TAIL.size
                end = start + size
                is_whole = end <= len(data) and size <= self._frame_bytes
                if is_whole and seq <= MAX_SEQ and not flags & ~_LONG:
                    self._at = end
                    return Batch(seq, data[start:end])
        return self._next_of_any_form(topic)

    # --- inside -----------------------------------------------------------------------------------

    def _next_of_any_form(self, topic: bytes | None) -> Batch | None:
        while (found := self._next_frame(self._frame_bytes)) is not None:
            flags, body = found
            if flags & _COMMAND:
                self._obey(body)
                continue
            if len(self._frames) <= MAX_FRAMES:
                self._frames.append(body)
            if flags & _MORE:
                self._frames_left_out += len(self._frames) > MAX_FRAMES
                if self._frames_left_out > _MOST_LEFT_OUT:
                    raise HandshakeFailed(f"a message of more than {_MOST_LEFT_OUT} frames")
                continue
            frames, self._frames, self._frames_left_out = self._frames, [], 0
            if not frames[0].startswith(self._prefix):
                continue  # as libzmq does: the publisher may not know yet what we want
            batch = read_live(frames, topic)
            if len(frames[0]) < 256:
                self._head = bytes((_MORE, len(frames[0]))) + frames[0] + bytes((_MORE, 8))
            return batch
        if self._at == len(self._data):
            self._let_go()
        return None

    def _let_go(self) -> None:
        """Keep nothing of what was read to its end: of many quiet streams that is much."""
        self._data, self._at = bytes(self._behind), 0
        if self._behind:
            self._behind = bytearray()

    def _next_frame(self, most_bytes: int) -> tuple[int, bytes] | None:
        if not self._has(2):
            return None
        flags, size, start = self._data[self._at], self._data[self._at + 1], 2
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise HandshakeFailed(f"a frame with flags {flags:#04x}: they are not those of ZMTP 3")
        if flags & _LONG:
            if not self._has(9):
                return None
            (size,), start = _LONG_SIZE.unpack_from(self._data, self._at + 1), 9
        if size > (_MAX_COMMAND_BYTES if flags & _COMMAND else most_bytes):
            raise HandshakeFailed(f"a frame of {size} bytes: it is too long")
        if not self._has(start + size):
            self.missing_bytes = start + size - self.waiting_bytes
            return None
        start += self._at
        self._at = start + size
        return flags, self._data[start : self._at]

    def _has(self, count: int) -> bool:
        """Whether so many bytes are here; then they lie in one piece."""
        if len(self._data) - self._at >= count:
            return True
        if self.waiting_bytes < count:
            return False
        self._data = self._data[self._at :] + self._behind
        self._at = 0
        self._behind = bytearray()
        return True

    def _shake_hands(self) -> None:
        if not self._is_greeted:
            if self._data[:1] not in (b"", b"\xff"):
                raise HandshakeFailed("the peer is no ZMQ")
            if not self._has(_GREETING_BYTES):
                return
            self._read_greeting(self._data[self._at : self._at + _GREETING_BYTES])
            self._at += _GREETING_BYTES
            self._is_greeted = True
        while not self.is_ready and (found := self._next_frame(0)) is not None:
            self._read_handshake(*found)

    @staticmethod
    def _read_greeting(greeting: bytes) -> None:
        major, mechanism = greeting[10], greeting[12:32]
        if not greeting[9] & 1 or major < 3:
            raise HandshakeFailed("the peer is no ZMQ, or one from before 2013")
        if mechanism != _NULL:
            raise HandshakeFailed("the peer wants CURVE keys, or another mechanism")

    def _read_handshake(self, flags: int, body: bytes) -> None:
        if flags & _COMMAND and body.startswith(_READY):
            kind = _property(body[len(_READY) :], b"socket-type")
            if kind not in _PUBLISHERS:
                raise HandshakeFailed("the peer is no PUB socket")
            self.is_ready = True
            self.outgoing += _frame(0, b"\x01" + self._prefix)
        elif not flags & _COMMAND or body.startswith(_ERROR):
            raise HandshakeFailed("the peer refuses us")

    def _obey(self, command: bytes) -> None:
        if command.startswith(_PING) and len(self.outgoing) < _MAX_OUTGOING_BYTES:
            context = command[_PING_HEAD_BYTES:][:_MAX_CONTEXT_BYTES]
            self.outgoing += _frame(_COMMAND, _PONG + context)


def _frame(flags: int, body: bytes) -> bytes:
    size = len(body)
    head = bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + _LONG_SIZE.pack(size)
    return head + body


def _property(metadata: bytes, wanted: bytes) -> bytes | None:
    """A value of a handshake's metadata: `[size: 1 byte] name [size: 4 bytes] value`, repeated."""
    at = 0
    while at < len(metadata):
        name = metadata[at + 1 : at + 1 + metadata[at]]
        at += 1 + metadata[at]
        size = int.from_bytes(metadata[at : at + 4], "big")
        at += 4 + size
        if name.lower() == wanted:
            return metadata[at - size : at]
    return None
