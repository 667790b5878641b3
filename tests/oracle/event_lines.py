"""How an event stream is let through in whole lines: the readable form of `router/core/plane`."""

from __future__ import annotations

MAX_HELD_BYTES = 64 * 1024
_LINE_ENDS = (b"\n", b"\r")
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
# How the last event of a finished stream ends, OpenAI's and Anthropic's.
_LAST_EVENTS = (b"data: [DONE]", b"data:[DONE]", b'"message_stop"}', b'"message_stop" }')
_TAIL_BYTES = 32


class EventLines:
    r"""Lets an event stream through in whole lines, unchanged, so that it can end with an error.

    A reader can do nothing with half a line, so holding it back delays no client; but once half a
    line of JSON is sent, an error event could only follow that broken half. Engines write whole
    events, so usually nothing is held. A line over `MAX_HELD_BYTES` is let through in pieces.

        from the replica         sent on at once          held back
        data: {"a":1}\n\nda      data: {"a":1}\n\n        da
        ta: {"b":                                         data: {"b":
        2}\n\n                   data: {"b":2}\n\n
    """

    __slots__ = ("_held", "_tail")

    def __init__(self) -> None:
        self._held = b""
        self._tail = b""

    def release(self, chunk: bytes, final: bool) -> bytes:
        """Return what may be sent now.

        Args:
            chunk: The next piece of the stream, cut anywhere.
            final: It is the last one: everything may be sent.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not final and not chunk.endswith(_LINE_ENDS):
            chunk = self._hold(chunk)
        self._tail = chunk if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]
        return chunk

    @property
    def holds(self) -> bool:
        """Whether a part of a line is held back."""
        return bool(self._held)

    def pass_whole(self, chunk: bytes) -> None:
        """As `release`, for whole lines while none is held back; at least as many bytes as the end
        of a stream may have."""
        self._tail = chunk

    @property
    def finished(self) -> bool:
        """Whether the last event that was let through is one that ends a stream."""
        return self._tail[-_TAIL_BYTES:].rstrip().endswith(_LAST_EVENTS)

    @property
    def separator(self) -> bytes:
        """The line ends still missing before another event may begin."""
        if not self._tail or self._tail.endswith(_BLANK_LINES):
            return b""
        return b"\n" if self._tail.endswith(_LINE_ENDS) else b"\n\n"

    def _hold(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if len(chunk) - end > MAX_HELD_BYTES:
            return chunk
        self._held = chunk[end:]
        return chunk[:end]
