"""An event stream on its way through: whole lines only, so that it can be ended cleanly at any
moment."""

from __future__ import annotations

MAX_HELD_BYTES = 64 * 1024
_LINE_ENDS = (b"\n", b"\r")
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
# What the last event of a finished stream looks like, OpenAI's and Anthropic's.
_LAST_EVENTS = (b"data: [DONE]", b"data:[DONE]", b'"message_stop"}', b'"message_stop" }')
_TAIL_BYTES = 32


class EventLines:
    """Lets an event stream through line by line, unchanged.

    A line means nothing to a reader before its end, so holding back a beginning delays nobody; but
    once half a line of JSON is sent, no error event can follow without the client meeting the
    broken half first. Engines write whole events, so in the usual case nothing is held. A line
    longer than `MAX_HELD_BYTES` is let through as it comes.
    """

    __slots__ = ("_held", "_tail")

    def __init__(self) -> None:
        self._held = b""
        self._tail = b""

    def release(self, chunk: bytes, final: bool) -> bytes:
        """Return what may be sent now; everything if *final*."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not final and not chunk.endswith(_LINE_ENDS):
            chunk = self._hold(chunk)
        self._tail = chunk if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]
        return chunk

    @property
    def finished(self) -> bool:
        """Whether the last event that was let through is one that ends a stream."""
        return self._tail[-_TAIL_BYTES:].rstrip().endswith(_LAST_EVENTS)

    @property
    def separator(self) -> bytes:
        """The line ends that are missing before the next event may begin."""
        if not self._tail or self._tail.endswith(_BLANK_LINES):
            return b""
        return b"\n" if self._tail.endswith(_LINE_ENDS) else b"\n\n"

    def _hold(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if len(chunk) - end > MAX_HELD_BYTES:
            return chunk
        self._held = chunk[end:]
        return chunk[:end]
