"""The same messages as two other parsers read them: httptools, which served before, and h11."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import h11
import httptools

Fields = list[tuple[bytes, bytes]]
_ROOM = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What must be the same for all who read it."""

    method: bytes
    target: bytes
    minor: int
    fields: Fields
    """Names in lower case, values without white space around them."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """What must be the same for all who read it."""

    status: int
    minor: int
    fields: Fields
    body: bytes


def normal(fields: Fields) -> Fields:
    """httptools leaves white space behind a value, h11 writes codings in lower case, and the case
    of a name is the sender's."""
    found = [(name.lower(), value.strip(b" \t")) for name, value in fields]
    coding = b"transfer-encoding"
    return [(name, value.lower() if name == coding else value) for name, value in found]


class _Collector:
    """httptools' callbacks."""

    def __init__(self) -> None:
        self.url = b""
        self.fields: Fields = []
        self.body: list[bytes] = []
        self.is_in_body = False
        self.messages: list[Any] = []

    def on_message_begin(self) -> None:
        self.url, self.fields, self.body, self.is_in_body = b"", [], [], False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_in_body:
            self.fields.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body.append(body)


class _Requests(_Collector):
    parser: httptools.HttpRequestParser

    def on_headers_complete(self) -> None:
        self.is_in_body = True
        self.method, self.minor = self.parser.get_method(), self.parser.get_http_version()
        self._drop_trailers(any(name.lower() == b"transfer-encoding" for name, _ in self.fields))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._drop_trailers(False)
        self.messages.append(
            Request(
                self.method,
                self.url,
                {"1.0": 0, "1.1": 1}.get(self.minor, -1),
                normal(self.fields),
                b"".join(self.body),
            )
        )

    def _drop_trailers(self, is_body: bool) -> None:
        # As the core does: no trailer changes the framing.
        self.parser.set_dangerous_leniencies(
            lenient_chunked_length=is_body, lenient_transfer_encoding=is_body
        )


class _Responses(_Collector):
    parser: httptools.HttpResponseParser

    def on_headers_complete(self) -> None:
        self.is_in_body = True
        self.status, self.minor = self.parser.get_status_code(), self.parser.get_http_version()

    def on_message_complete(self) -> None:
        self.is_in_body = False
        self.messages.append(self.response())

    def response(self) -> Response:
        minor = {"1.0": 0, "1.1": 1}.get(self.minor, -1)
        return Response(self.status, minor, normal(self.fields), b"".join(self.body))

    @property
    def ends_with_its_connection(self) -> bool:
        return self.is_in_body and not any(
            name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.fields
        )


def httptools_requests(data: bytes) -> list[Request]:
    """Those that httptools reads before it refuses something or the bytes end."""
    collector = _Requests()
    collector.parser = parser = httptools.HttpRequestParser(collector)
    with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        parser.feed_data(data)
    return collector.messages


def httptools_responses(data: bytes) -> list[Response]:
    """The same for responses; the last may end with the bytes."""
    collector = _Responses()
    collector.parser = parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return collector.messages
    if collector.ends_with_its_connection:
        collector.messages.append(collector.response())
    return collector.messages


def h11_request(data: bytes) -> tuple[Request, int] | None:
    """The first request as h11 reads it, and where it ends; None if it refuses it or wants more."""
    # RFC 9112 2.2 asks servers to skip empty lines in front, which h11 does not.
    start = len(data)
    data = skipped(data)
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_ROOM)
    head, body = _h11_message(connection, data, h11.Request)
    if head is None:
        return None
    end = start - len(connection.trailing_data[0])
    fields = normal(head.headers.raw_items())
    minor = int(head.http_version[2:])
    return Request(head.method, head.target, minor, fields, body), end


def h11_response(data: bytes) -> tuple[Response, int] | None:
    """The first response as h11 reads it, and where it ends; None as for requests. An interim one
    counts."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_ROOM)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    head, body = _h11_message(connection, data, h11.Response)
    if head is None:
        return None
    minor = int(head.http_version[2:])
    response = Response(head.status_code, minor, normal(head.headers.raw_items()), body)
    return response, len(data) - len(connection.trailing_data[0])


def skipped(data: bytes) -> bytes:
    """Without the empty lines in front."""
    while data.startswith(b"\r\n"):
        data = data[2:]
    return data


def _h11_message(connection: h11.Connection, data: bytes, kind: type) -> tuple[Any, bytes]:
    head, body, has_closed = None, [], False
    try:
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if isinstance(event, h11.InformationalResponse):
                return event, b""
            if isinstance(event, kind):
                head = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return head, b"".join(body)
            elif event is h11.NEED_DATA and not has_closed and kind is h11.Response:
                connection.receive_data(b"")
                has_closed = True
            else:
                return None, b""
    except h11.RemoteProtocolError:
        return None, b""
