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

from router._core import UsageCapture

MAX_ID_BYTES = 16 * 1024
"""Bytes from the beginning of a body in which its id is looked for."""
_ID = re.compile(rb'(?:\A|"response"\s*:)\s*\{\s*"id"\s*:\s*"([A-Za-z0-9_.:-]{1,256})"')

_KEY = b'"usage"'
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
    """Reads the usage of a response from what the core keeps of its body: that of a response that
    it passes on, or of pieces that are fed here. Parses it only when asked."""

    __slots__ = ("_capture", "_first", "_is_at_line_start", "_is_json", "_last", "data_events")

    def __init__(self) -> None:
        self.data_events = 0
        """Events of a stream that was fed: about one per decoded token, plus the stream's own:
        role, usage and [DONE]."""
        self._is_at_line_start = True
        self._capture: UsageCapture | None = None
        self._is_json = False
        self._first = b""
        self._last = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body, cut anywhere; before `usage`."""
        if self._capture is None:
            self._capture = UsageCapture()
        self._capture.feed(data)
        self.data_events += data.count(b"\ndata:")
        self.data_events += self._is_at_line_start and data.startswith(b"data:")
        self._is_at_line_start = data.endswith(b"\n")

    def take(self, is_json: bool, last: bytes, first: bytes) -> None:
        """Take what the core kept of the body.

        Args:
            is_json: Whether it is one JSON body; else it is a stream of events.
            last: The tail of the body, or the last event with a usage.
        """
        self._is_json, self._last, self._first = is_json, last, first or last

    def usage(self) -> ReportedUsage:
        """The counts reported so far."""
        if self._capture is not None:
            _, is_json, last, first = self._capture.finish()
            self._capture = None
            self.take(is_json, last, first)
        found = _read(self._last.strip())
        if self._is_json:
            return found
        pairs = zip(found, _read(self._first), strict=True)
        return ReportedUsage(*(new if new is not None else old for new, old in pairs))


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
