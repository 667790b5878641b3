"""What is kept of a response's body for its usage: the readable form of `router/core/plane`."""

from __future__ import annotations

MAX_KEPT_BYTES = 64 * 1024
"""Kept of a JSON body, or of a single event (twice as many for a moment): the tail, where the usage
is."""
_KEY = b'"usage"'
_NOTHING = (b'"usage":null', b'"usage": null')


class ReferenceCapture:
    """Keeps the tail of a JSON body, or the first and the last event with a usage."""

    def __init__(self) -> None:
        self.events = 0
        self._is_json: bool | None = None
        # Of a JSON body its tail; of a stream the line that has not ended yet.
        self._rest = bytearray()
        self._first = b""
        self._last = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body, cut anywhere."""
        if self._is_json is None:
            start = data.lstrip()[:1]
            if not start:
                return
            self._is_json = start in (b"{", b"[")
        if not self._is_json:
            self.events += data.count(b"\ndata:")
            self.events += not self._rest and data.startswith(b"data:")
            end = data.rfind(b"\n") + 1
            if end:
                for line in (bytes(self._rest) + data[:end]).splitlines():
                    self._take_line(line)
                self._rest.clear()
            data = data[end:]
        self._rest += data
        if len(self._rest) > 2 * MAX_KEPT_BYTES:
            del self._rest[:-MAX_KEPT_BYTES]

    def finish(self) -> tuple[int, bool, bytes, bytes]:
        """Return the events, whether it is JSON, and what `UsageReader.take` takes."""
        if self._is_json:
            return 0, True, bytes(self._rest), b""
        # A stream may end without a line end; its last event counts all the same.
        self._take_line(bytes(self._rest))
        return self.events, False, self._last, self._first

    def _take_line(self, line: bytes) -> None:
        if line.count(_KEY) == sum(map(line.count, _NOTHING)):
            return
        self._last = line.removeprefix(b"data:").strip()[-MAX_KEPT_BYTES:]
        self._first = self._first or self._last
