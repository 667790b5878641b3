"""Reading the bodies of requests: whole and bounded; as JSON; and one field of a multipart form, as
audio is sent in. The form itself goes to the replica as it is."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable
from typing import Any

import msgspec
from async_timeout import timeout
from starlette.types import Message, Receive

from router.errors import BadRequest, BodyTooLarge

MAX_FORM_PARTS = 256
_MAX_PART_HEAD_BYTES = 8192
_MAX_FIELD_BYTES = 1024
_SEARCH_STEP_BYTES = 1024 * 1024
"""Of a form, at a time: other threads get their turn in between."""

_BOUNDARY = re.compile(rb"""boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;,"]{1,200}))""", re.IGNORECASE)
_FIELD_NAME = re.compile(
    rb"""^content-disposition\s*:[^\r\n]*?;\s*name\s*=\s*(?:"([^"\r\n]*)"|([^\s;"]+))""",
    re.IGNORECASE | re.MULTILINE,
)


class ClientLeft(Exception):
    """The client closed its connection before its whole request had arrived."""


def announced_bytes(headers: dict[bytes, bytes]) -> int:
    """The length of a request's body by its head; 0 if that does not tell."""
    # `int` refuses thousands of digits, also where all but the last are zeros.
    digits = headers.get(b"content-length", b"").lstrip(b"0")
    return int(digits) if digits.isdigit() else 0


async def read_body(
    headers: dict[bytes, bytes],
    receive: Receive,
    limit_bytes: int,
    timeout_s: float,
    hold: Callable[[int], None],
) -> bytes:
    """Read the whole body of a request.

    Args:
        headers: The request's, names in lower case.
        receive: Of the ASGI application.
        limit_bytes: Bound on the body.
        timeout_s: Time within which a body that comes in pieces must be complete.
        hold: Called with the size of each piece, before it is kept; may raise `Overloaded`.
    Raises:
        BodyTooLarge: It is, or announces to be, longer than *limit_bytes*.
        BadRequest: It did not arrive within *timeout_s*.
        ClientLeft: The client left in the middle.
    """
    if announced_bytes(headers) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        hold(len(body))
        return body
    try:
        async with timeout(timeout_s):
            return await _read_rest(message, receive, limit_bytes, hold)
    except asyncio.TimeoutError:
        raise BadRequest("body", "not complete", f"must arrive within {timeout_s:g} s") from None


async def _read_rest(
    message: Message, receive: Receive, limit_bytes: int, hold: Callable[[int], None]
) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        hold(len(parts[-1]))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def decode_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        BadRequest: It is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("$", f"{len(body)} bytes", "must be JSON") from None


def is_object(body: bytes) -> bool:
    """Whether a body can only be a JSON object, if it is JSON."""
    return body[:64].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


def is_form(content_type: bytes) -> bool:
    """Whether a body of this type is a multipart form."""
    return content_type.lstrip()[:19].lower() == b"multipart/form-data"


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of a short field; None if the form has none that can be read.

    Args:
        content_type: The header, which names the boundary between parts.
        body: The whole form.
        name: The field.
    """
    span = _field_span(content_type, body, name)
    if span is None:
        return None
    start, end = span
    return body[start : min(end, start + _MAX_FIELD_BYTES)].decode("utf-8", "replace").strip()


def with_form_field(content_type: bytes, name: bytes, body: bytes, value: str) -> bytes:
    """A form with another value of one field; all other bytes stay. The form itself if it has none.

    Args:
        content_type: As for `form_field`.
        name: The field.
        body: The whole form.
        value: Without line ends.
    """
    span = _field_span(content_type, body, name)
    return body if span is None else body[: span[0]] + value.encode() + body[span[1] :]


def _field_span(content_type: bytes, body: bytes, name: bytes) -> tuple[int, int] | None:
    """Where the value of a field begins and ends."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2])
    at = _find(body, delimiter, 0)
    for _ in range(MAX_FORM_PARTS):
        if at < 0:
            return None
        start = at + len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        disposition = _FIELD_NAME.search(body[start:head_end])
        at = _find(body, b"\r\n" + delimiter, head_end + 2)
        if disposition is not None and (disposition[1] or disposition[2]) == name and at >= 0:
            return head_end + 4, at
        at += 2 if at >= 0 else 0
    return None


def _find(body: bytes, needle: bytes, start: int) -> int:
    """As `bytes.find`, but in steps."""
    while start < len(body):
        found = body.find(needle, start, start + _SEARCH_STEP_BYTES + len(needle))
        if found >= 0:
            return found
        start += _SEARCH_STEP_BYTES
    return -1
