"""Reading the bodies of requests: whole and bounded; as JSON; and one field of a multipart form, as
audio is sent in. The form itself goes to the replica as it is. And JSON as a response."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from async_timeout import timeout
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from kvevents.errors import UNREADABLE
from router.config.server import ServerConfig
from router.errors import BadRequest, BodyTooLarge
from router.plane.exchanges import announced_bytes

_Body = TypeVar("_Body", bound=msgspec.Struct)

JSON = "application/json"
MSGPACK = "application/msgpack"
MAX_FORM_PARTS = 256
_MAX_PART_HEAD_BYTES = 8192
_MAX_FIELD_BYTES = 1024
_SEARCH_STEP_BYTES = 1024 * 1024
"""The part of a form searched at a time: other threads get their turn in between."""

_BOUNDARY = re.compile(rb"""boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;,"]{1,200}))""", re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_FIELD = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_-]*[ \t]*:[^\r\n]*")
"""A header line that is neither folded nor a boundary."""
_PARAMETER = re.compile(
    rb""";\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\\r\n]|\\[^\r\n])*)"|([^\s;"]*))\s*(?=;|\Z)"""
)
"""A parameter of a header (RFC 9110, 5.6.6)."""


class ClientLeft(Exception):
    """The client closed its connection before its whole request had arrived."""


async def read_request(
    request: Request,
    server: ServerConfig,
    hold: Callable[[int], None],
    max_bytes: int | None = None,
) -> bytes:
    """Read the whole body of a request to an endpoint.

    Args:
        hold: Called with the size of each piece, before it is kept; may raise `Overloaded`.
        max_bytes: None: as for the proxied paths.
    Raises:
        BodyTooLarge: It is, or announces to be, longer than that.
        BadRequest: It comes in pieces, and was not complete in time.
        ClientLeft: The client left before the end.
    """
    most, body_s = max_bytes or server.max_body_bytes, server.timeouts.client_body_s
    if announced_bytes(request.headers.raw) > most:
        raise BodyTooLarge(most)
    message = await request.receive()
    if not message.get("more_body"):  # there is nothing to wait for
        return await _read_rest(message, request.receive, most, hold)
    try:
        async with timeout(body_s):
            return await _read_rest(message, request.receive, most, hold)
    except asyncio.TimeoutError:
        raise BadRequest("body", "not complete", f"must arrive within {body_s:g} s") from None


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


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Read a body of a known form.

    Args:
        body: JSON.
    Raises:
        BadRequest: It is of another form. The error shows the place and the rule (a type, a bound,
            the pattern of an id), and none of the values.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        raise BadRequest(place.strip("`") or "$", "of another form", rule) from None
    except UNREADABLE:
        raise BadRequest("$", f"{len(body)} bytes", "must be a JSON object") from None


def decode_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        BadRequest: It is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        raise BadRequest("$", f"{len(body)} bytes", "must be JSON") from None


def is_object(body: bytes) -> bool:
    """Return whether a body can only be a JSON object, if it is JSON."""
    return body[:64].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


def is_form(content_type: bytes) -> bool:
    """Return whether a body of this type is a multipart form."""
    return content_type.lstrip()[:19].lower() == b"multipart/form-data"


def check_charset(content_type: bytes) -> None:
    """Check that a form's fields are UTF-8, which is what is looked for in them.

    Raises:
        BadRequest: Engines would decode them by another name, of which Python has many.
    """
    if b"charset" not in content_type.lower():
        return
    if [value.lower() for value in _values(content_type, b"charset")] != [b"utf-8"]:
        found = f"{len(content_type)} bytes"
        raise BadRequest("content-type", found, "a form's charset must be utf-8")


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of a short field; None if the form has none that can be read.

    Args:
        content_type: The header, which names the boundary between parts.
    """
    span = _field_span(content_type, body, name)
    if span is None:
        return None
    start, end = span
    return body[start : min(end, start + _MAX_FIELD_BYTES)].decode("utf-8", "replace").strip()


def with_form_field(content_type: bytes, name: bytes, body: bytes, value: str) -> bytes:
    """A form with another value of one field; all other bytes stay. The form itself if it has none.

    Args:
        value: Without line ends.
    """
    span = _field_span(content_type, body, name)
    return body if span is None else body[: span[0]] + value.encode() + body[span[1] :]


def _field_span(content_type: bytes, body: bytes, name: bytes) -> tuple[int, int] | None:
    """Return where the value of a field begins and ends."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2])
    at = _find(body, delimiter, 0)
    for _ in range(MAX_FORM_PARTS):
        if at < 0:
            return None
        start = at + len(delimiter)
        if body.startswith(b"--", start):
            return None  # what follows the last boundary is not of the form
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        disposition = _DISPOSITION.search(body, start, head_end)
        at = _find(body, b"\r\n" + delimiter, head_end + 2)
        if disposition is not None and at >= 0 and name in _values(disposition[1], b"name"):
            return head_end + 4, at
        at += 2 if at >= 0 else 0
    return None


def check_form(content_type: bytes, body: bytes, name: bytes) -> None:
    """Check that everybody who reads a form finds the same value of one field, or none.

    Raises:
        BadRequest: Of two values, or of two ways to read it, an engine may take the other one.
    """
    boundaries = _values(content_type, b"boundary")
    if len(boundaries) != 1:
        raise _ambiguous("content-type", content_type, "must name one boundary")
    names = [found for head in _part_heads(b"--" + boundaries[0], body) for found in _names(head)]
    if names.count(name) > 1:
        place = f"form field {name.decode()}"
        raise BadRequest(place, f"{names.count(name)} times", "with this key, it may appear once")


def _part_heads(delimiter: bytes, body: bytes) -> Iterator[bytes]:
    """The head of every part of a form that keeps to RFC 2046 and RFC 7578 by the letter."""
    start = 2 * body.startswith(b"\r\n")  # some clients begin with a line end
    at = start + len(delimiter) if body.startswith(delimiter, start) else -1
    for _ in range(MAX_FORM_PARTS):
        is_last = at + 2 == len(body) and body.endswith(b"--")
        if at >= 0 and (is_last or body.startswith(b"--\r\n", at)):
            return
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_PART_HEAD_BYTES) if at >= 0 else -1
        if head_end < 0 or not body.startswith(b"\r\n", at):
            break
        yield body[at + 2 : head_end]
        at = _find(body, delimiter, head_end + 2)
        # Nowhere else: some readers also take a boundary behind a line feed alone.
        at = at + len(delimiter) if at >= 2 and body.startswith(b"\r\n", at - 2) else -1
    rule = f"with this key, a form must have its boundaries and at most {MAX_FORM_PARTS} parts"
    raise BadRequest("$", f"{len(body)} bytes", rule)


def _names(head: bytes) -> Sequence[bytes]:
    """The name of a part."""
    lines = head.split(b"\r\n")
    values = [line.partition(b":")[2] for line in lines if _DISPOSITION.match(line)]
    kinds = [value.partition(b";")[0].strip().lower() for value in values]
    names = _values(values[0], b"name") if kinds == [b"form-data"] else ()
    if len(names) != 1 or not all(map(_FIELD.fullmatch, lines)):
        raise _ambiguous("content-disposition", head, "must have one name, and be plain")
    return names


def _values(header: bytes, parameter: bytes) -> Sequence[bytes]:
    """The values of a parameter; none where the header is not of the form that RFC 9110 gives it,
    or has the parameter in another encoding as well (RFC 8187)."""
    _, _, rest = header.strip(b" \t;").partition(b";")
    rest, at = b";" + rest, 0
    found: list[bytes] = []
    while at < len(rest):
        match = _PARAMETER.match(rest, at)
        if match is None or match[1].lower().startswith(parameter + b"*"):
            return ()
        if match[1].lower() == parameter:
            found.append(match[3] if match[2] is None else match[2])
        at = match.end()
    return () if any(b"\\" in value for value in found) else found


def _ambiguous(place: str, found: bytes, rule: str) -> BadRequest:
    return BadRequest(place, f"{len(found)} bytes", f"with this key, it {rule}")


def _find(body: bytes, needle: bytes, start: int) -> int:
    """Find like `bytes.find`, but in steps."""
    while start < len(body):
        found = body.find(needle, start, start + _SEARCH_STEP_BYTES + len(needle))
        if found >= 0:
            return found
        start += _SEARCH_STEP_BYTES
    return -1


def json_response(value: Any, status: int = 200) -> Response:
    """A response of the router's own."""
    content = msgspec.json.encode(value)
    return Response(content, status_code=status, media_type=JSON)
