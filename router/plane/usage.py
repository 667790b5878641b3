"""Reads what a response reports from the bytes as they pass: token counts, and the id under which
the engine keeps it.

Three forms are known: OpenAI's completions (`usage.prompt_tokens_details.cached_tokens`), its
responses (`usage.input_tokens_details.cached_tokens`) and Anthropic's messages
(`usage.cache_read_input_tokens`, its input tokens counted without the cached ones). A stream
reports them in its last event, in every event, or (Anthropic) half of them in the first.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, NamedTuple

import msgspec

# Bytes kept of a JSON body, or of a single event (twice as many for a moment): the tail, where the
# usage is.
MAX_KEPT_BYTES = 64 * 1024

MAX_ID_BYTES = 16 * 1024
"""Bytes from the beginning of a body in which its id is looked for."""
_ID = re.compile(rb'(?:\A|"response"\s*:)\s*\{\s*"id"\s*:\s*"([A-Za-z0-9_.:-]{1,256})"')

_KEY = b'"usage"'
_NOTHING = (b'"usage":null', b'"usage": null')
_TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct):
    cached_tokens: _TokenCount | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _TokenCount | None = None
    completion_tokens: _TokenCount | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _TokenCount | None = None
    output_tokens: _TokenCount | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _TokenCount | None = None
    cache_creation_input_tokens: _TokenCount | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    # Anthropic's message_start and the events of /v1/responses wrap it once.
    message: _Inner | None = None
    response: _Inner | None = None


class ReportedUsage(NamedTuple):
    """Token counts of one response; None where it does not report them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class UsageReader:
    """Reads the usage of a response that it is fed piece by piece. Parses only the events that have
    one, and only when asked."""

    __slots__ = ("_first", "_is_json", "_last", "_rest", "data_events")

    def __init__(self) -> None:
        # About one per decoded token, plus the stream's own: role, usage and [DONE].
        self.data_events = 0
        self._is_json: bool | None = None
        # Of a JSON body its tail; of a stream the line that has not ended yet.
        self._rest = bytearray()
        self._first = b""
        self._last = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body, cut anywhere."""
        if self._is_json is False and not self._rest and data.endswith(b"\n") and _KEY not in data:
            # The usual piece: whole events, none with a usage.
            self.data_events += data.count(b"\ndata:") + data.startswith(b"data:")
            return
        if self._is_json is None:
            start = data.lstrip()[:1]
            if not start:
                return
            self._is_json = start in (b"{", b"[")
        if self._is_json:
            self._keep(data)
        else:
            self._feed_events(data)

    def take(self, is_json: bool, last: bytes, first: bytes) -> None:
        """Take what the core kept of the body.

        Args:
            is_json: Whether it is one JSON body; else it is a stream of events.
            last: The tail of the body, or the last event with a usage.
        """
        self._is_json = is_json
        if is_json:
            self._rest = bytearray(last)
        else:
            self._last, self._first = last, first or last

    def usage(self) -> ReportedUsage:
        """The counts reported so far."""
        if self._is_json:
            return _read(bytes(self._rest).strip())
        # A stream may end without a line end; its last event counts all the same.
        last = _read(_payload(bytes(self._rest))) if _KEY in self._rest else _read(self._last)
        first = _read(self._first)
        return ReportedUsage(
            *(new if new is not None else old for new, old in zip(last, first, strict=True))
        )

    def _feed_events(self, data: bytes) -> None:
        self.data_events += data.count(b"\ndata:")
        if not self._rest:
            self.data_events += data.startswith(b"data:")
        self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if end:
            lines = bytes(self._rest) + data[:end]
            self._rest.clear()
            if _KEY in lines:
                for line in lines.splitlines():
                    self._take_line(line)
        self._keep(data[end:])

    def _take_line(self, line: bytes) -> None:
        if line.count(_KEY) == sum(map(line.count, _NOTHING)):
            return
        self._last = _payload(line)
        self._first = self._first or self._last

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > 2 * MAX_KEPT_BYTES:
            del self._rest[:-MAX_KEPT_BYTES]


class ResponseIdReader:
    """Finds the id of a response of `/v1/responses`: at the beginning of the body, or of the
    response in the first event, where engines write it."""

    __slots__ = ("_is_over", "_read")

    def __init__(self) -> None:
        self._read = b""
        self._is_over = False

    def feed(self, data: bytes) -> str | None:
        """Take the next piece of the body, cut anywhere; return the id once, when it is known."""
        if self._is_over:
            return None
        self._read += data[:MAX_ID_BYTES]
        found = _ID.search(self._read)
        self._is_over = found is not None or len(self._read) >= MAX_ID_BYTES
        return None if found is None else found[1].decode()


def _payload(line: bytes) -> bytes:
    return line.removeprefix(b"data:").strip()[-MAX_KEPT_BYTES:]


def _read(body: bytes) -> ReportedUsage:
    """The usage in a JSON body, or in the tail of one whose beginning was not kept."""
    if _KEY not in body:
        return ReportedUsage()
    if not body.startswith(b"{"):
        return _read_tail(body)
    try:
        whole = msgspec.json.decode(body, type=_Body)
    except msgspec.ValidationError:
        # JSON, but with something else where a usage would stand.
        return ReportedUsage()
    except (msgspec.DecodeError, RecursionError):
        return _read_tail(body)
    inner = whole.message or whole.response
    found = whole.usage or (inner.usage if inner is not None else None)
    return ReportedUsage() if found is None else _normalise(found)


def _read_tail(tail: bytes) -> ReportedUsage:
    text = tail.decode("utf-8", errors="replace")
    start = text.find("{", text.rfind('"usage"'))
    if start < 0:
        return ReportedUsage()
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
        return _normalise(msgspec.convert(found, _Usage))
    except (ValueError, RecursionError):
        return ReportedUsage()


def _normalise(usage: _Usage) -> ReportedUsage:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    if prompt is not None and details is None:
        # Anthropic counts what was read from and written to the cache beside the input tokens, not
        # among them.
        prompt += (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    completion = (
        usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    )
    return ReportedUsage(prompt, completion, cached)
