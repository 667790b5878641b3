"""A router that runs somewhere, asked over HTTP; and its words, fit for a terminal."""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec
from rich.text import Text

from router.errors import RouterError
from router.upstream import Header, Origin, OriginError, Timeouts, UpstreamClient, UpstreamError

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


Answer = TypeVar("Answer")


class AskFailed(RouterError):
    """The router could not be asked, or refused."""


class RunningRouter:
    """Close it."""

    def __init__(self, url: str, key_variable: str, timeouts: Timeouts) -> None:
        """
        Args:
            url: Where it listens.
            key_variable: The environment variable that holds a key, if one is needed.
            timeouts: Of every question.

        Raises:
            AskFailed: No such URL can be asked, or no such key be sent.
        """
        try:
            self._origin = Origin.parse(url, "--url")
        except OriginError as error:
            raise AskFailed(str(error)) from None
        self._url = url
        self._timeouts = timeouts
        self._key = os.environ.get(key_variable, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise AskFailed(f"{key_variable}: holds what no header can; a key is printable ASCII")
        self._client = UpstreamClient()

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, method: str, target: str, kind: type[Answer], body: bytes = b"") -> Answer:
        """The answer's JSON, as a *kind*.

        Raises:
            AskFailed: No answer, none with status 200, or none of that kind.
        """
        try:
            status, _, answer = await self._client.fetch(
                self._origin,
                method.encode(),
                target.encode(),
                body,
                self._timeouts,
                _MAX_ANSWER_BYTES,
                self._headers(body),
            )
        except UpstreamError as error:
            raise AskFailed(str(error)) from None
        if status != 200:
            raise AskFailed(f"{self._url}: status {status}: {_message(answer)}")
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise AskFailed(
                f"{self._url}: not the answer of a router of this version: {error}"
            ) from None

    def _headers(self, body: bytes) -> list[Header]:
        headers = [(b"content-type", b"application/json")] if body else []
        return (
            [*headers, (b"authorization", b"Bearer " + self._key.encode())]
            if self._key
            else headers
        )


def _message(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"{len(answer)} bytes that are no error of a router"


def plain(value: object, style: str = "") -> Text:
    """Names come from elsewhere: what a terminal or a table would take for a command of its own is
    shown as `?`."""
    return Text("".join(char if char.isprintable() else "?" for char in str(value)), style)
