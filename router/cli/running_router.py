"""Queries to a running router over HTTP, and its text made safe for a terminal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from kvevents.errors import UNREADABLE
from router.config.origin import Header, Origin, OriginError, Timeouts
from router.errors import RouterError
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import UpstreamError

_MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_MAX_LINE_BYTES = 256 * 1024 * 1024
NAME_COLUMNS = 16
"""A name gets so many at least, where there are any."""
OPERATOR_KEY_VARIABLE = "KVROUTE_OPERATOR_API_KEY"


Response = TypeVar("Response")


class QueryFailed(RouterError):
    """The router did not respond, or refused the query."""


class RunningRouter:
    """A router to query; a context manager that closes its connections."""

    def __init__(self, url: str, key_variable: str, timeouts: Timeouts) -> None:
        """
        Args:
            key_variable: The environment variable that holds a key, if one is needed.
        Raises:
            QueryFailed: The URL cannot be connected to, or the key cannot be sent in a header.
        """
        try:
            self._origin = Origin.parse(url, "--url")
        except OriginError as error:
            raise QueryFailed(str(error)) from None
        self._url = url
        self._timeouts = timeouts
        self._key = os.environ.get(key_variable, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise QueryFailed(f"{key_variable}: holds what no header can; a key is printable ASCII")
        self._client = UpstreamClient()

    async def __aenter__(self) -> RunningRouter:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._client.close()

    async def ask(
        self, method: str, target: str, kind: type[Response], body: bytes = b""
    ) -> Response:
        """Send one query and decode the JSON of its response.

        Args:
            kind: The type to decode to, one of those in `router.doors.http`.
            body: JSON; empty for none.
        Raises:
            QueryFailed: There was no response, its status was not 200, or it is not a *kind*.
        """
        try:
            status, response = await self._client.fetch(
                self._origin,
                target.encode(),
                self._timeouts,
                _MAX_RESPONSE_BYTES,
                self._headers(body),
                method.encode(),
                body,
            )
        except UpstreamError as error:
            raise QueryFailed(str(error)) from None
        if status != 200:
            raise QueryFailed(f"{self._url}: status {status}: {_message(response)}")
        try:
            return msgspec.json.decode(response, type=kind)
        except UNREADABLE as error:
            raise QueryFailed(
                f"{self._url}: not the response of a router of this version: {error}"
            ) from None

    async def lines(self, target: str) -> AsyncIterator[bytes]:
        """Yield the lines of a response that goes on, each with its line break.

        Raises:
            QueryFailed: There was no response, its status was not 200, it broke off, or a line is
                too long.
        """
        try:
            response = await self._client.send(
                self._origin, b"GET", target.encode(), self._headers(b""), b"", self._timeouts
            )
            try:
                rest = bytearray()
                while (chunk := await response.read_chunk()) is not None:
                    rest += chunk
                    if len(rest) > _MAX_LINE_BYTES:
                        raise QueryFailed(f"{self._url}: a line over {_MAX_LINE_BYTES} bytes")
                    if response.status == 200 and b"\n" in chunk:
                        *whole, last = bytes(rest).split(b"\n")
                        rest = bytearray(last)
                        for line in whole:
                            yield line + b"\n"
            finally:
                response.abort()
        except UpstreamError as error:
            raise QueryFailed(str(error)) from None
        if response.status != 200:
            raise QueryFailed(f"{self._url}: status {response.status}: {_message(bytes(rest))}")

    def _headers(self, body: bytes) -> list[Header]:
        headers = [(b"content-type", b"application/json")] if body else []
        if self._key:
            headers.append((b"authorization", b"Bearer " + self._key.encode()))
        return headers


def _message(response: bytes) -> str:
    try:
        return str(msgspec.json.decode(response)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        return f"{len(response)} bytes that are not a router's error"


class Name:
    """A name in a cell: where there is no room, its middle is left out. Names of one fleet often
    differ only at their ends."""

    def __init__(self, name: str, style: str = "") -> None:
        self._text = plain(name, style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(NAME_COLUMNS, len(self._text)), len(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, room = self._text, options.max_width
        if len(text) > room:
            tail = room // 2
            parts = text[: room - tail - 1], Text("…", text.style), text[len(text) - tail :]
            text = Text.assemble(*parts)
        text.no_wrap, text.overflow = True, "crop"
        yield text


def plain(value: object, style: str = "") -> Text:
    """Return text that cannot command the terminal, nor rich: names come from outside.

    Args:
        value: What to show; every character that is not printable becomes `?`.
        style: One of rich's styles for the whole text.
    """
    return Text("".join(char if char.isprintable() else "?" for char in str(value)), style)
