"""Messages as real clients and engines send them, and small changes to them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

BODY = b'{"model": "m", "prompt": [1, 2, 3], "stream": true}'


def request(*lines: bytes, body: bytes = b"") -> bytes:
    """A request of these lines."""
    return b"\r\n".join((*lines, b"", body))


def _chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


REQUESTS: tuple[bytes, ...] = (
    # curl
    request(
        b"POST /v1/completions HTTP/1.1",
        b"Host: 127.0.0.1:8000",
        b"User-Agent: curl/8.5.0",
        b"Accept: */*",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(BODY),
        b"Expect: 100-continue",
        body=BODY,
    ),
    # OpenAI's Python client
    request(
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: router.internal:8000",
        b"Accept-Encoding: gzip, deflate",
        b"Connection: keep-alive",
        b"Accept: application/json",
        b"Content-Type: application/json",
        b"User-Agent: OpenAI/Python 1.82.0",
        b"X-Stainless-Lang: python",
        b"X-Stainless-Retry-Count: 0",
        b"Authorization: Bearer sk-0123456789abcdef",
        b"Content-Length: %d" % len(BODY),
        body=BODY,
    ),
    # Node's fetch, and a body of unknown length
    request(
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost:8000",
        b"connection: keep-alive",
        b"content-type: application/json",
        b"accept: */*",
        b"accept-language: *",
        b"sec-fetch-mode: cors",
        b"user-agent: node",
        b"transfer-encoding: chunked",
        body=_chunked(BODY[:10], BODY[10:]) + b"0\r\n\r\n",
    ),
    # with extensions and trailers
    request(
        b"POST /v1/completions HTTP/1.1",
        b"Host: a",
        b"Transfer-Encoding: chunked",
        b"Trailer: Expires, Content-MD5",
        body=b'5;name=value\r\nhello\r\nA;q="a b"\r\n0123456789\r\n'
        b"000;last\r\nExpires: never\r\nContent-MD5: x\r\n\r\n",
    ),
    # Java's client offers HTTP/2 with its first request
    request(
        b"POST /v1/completions HTTP/1.1",
        b"Connection: Upgrade, HTTP2-Settings",
        b"Content-Length: %d" % len(BODY),
        b"Host: localhost:8000",
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        b"Upgrade: h2c",
        b"User-Agent: Java-http-client/21",
        body=BODY,
    ),
    # Go, and a proxy in front
    request(
        b"GET /v1/models?limit=10&after=%2Fx HTTP/1.1",
        b"Host: router",
        b"User-Agent: Go-http-client/1.1",
        b"X-Forwarded-For: 10.0.0.1, 10.0.0.2",
        b"Via: 1.1 varnish",
        b"Accept-Encoding: gzip",
    ),
    request(b"GET http://router:8000/healthz HTTP/1.1", b"Host: router:8000"),
    request(b"OPTIONS * HTTP/1.1", b"Host: [::1]:8000", b"Connection: close"),
    request(b"HEAD /metrics HTTP/1.0", b"Connection: keep-alive"),
    request(b"GET /a HTTP/1.1", b"Host:a", b"X-Empty:", b"X-Space: \t a \t b \t ", b"X: \xc3\xa9")
    + request(b"DELETE /b HTTP/1.1", b"Host: b", b"Content-Length: 0"),
    b"\r\n\r\n" + request(b"PUT /x HTTP/1.1", b"Host: a", b"Content-Length: 3", body=b"abc\r\n"),
)

RESPONSES: tuple[bytes, ...] = (
    # uvicorn before an engine: a stream
    request(
        b"HTTP/1.1 200 OK",
        b"date: Wed, 01 Jul 2026 00:00:00 GMT",
        b"server: uvicorn",
        b"content-type: text/event-stream; charset=utf-8",
        b"transfer-encoding: chunked",
        body=_chunked(b'data: {"a": 1}\n\n', b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ),
    request(
        b"HTTP/1.1 404 Not Found",
        b"date: Wed, 01 Jul 2026 00:00:00 GMT",
        b"server: uvicorn",
        b"content-length: 12",
        b"content-type: application/json",
        body=b'{"error": 1}',
    ),
    # an engine in Rust, and one behind nginx
    request(b"HTTP/1.1 200 OK", b"content-length: 2", b"vary: origin", body=b"{}"),
    request(
        b"HTTP/1.1 502 Bad Gateway",
        b"Server: nginx/1.22.1",
        b"Content-Type: text/html",
        b"Content-Length: 7",
        b"Connection: keep-alive",
        body=b"<html/>",
    ),
    request(b"HTTP/1.1 100 Continue")
    + request(b"HTTP/1.1 103 Early Hints", b"Link: </x>; rel=preload")
    + request(b"HTTP/1.1 200 OK", b"Content-Length: 5", body=b"hello"),
    request(b"HTTP/1.1 204 No Content", b"Content-Length: 5"),
    request(b"HTTP/1.1 304 Not Modified", b"ETag: x", b"Transfer-Encoding: chunked"),
    request(b"HTTP/1.0 200 OK", b"Server: SimpleHTTP/0.6", body=b"until it closes"),
    request(b"HTTP/1.0 200 OK", b"Connection: keep-alive", b"Content-Length: 2", body=b"hi"),
    request(b"HTTP/1.1 200 OK", b"Connection: close", b"Content-Length: 2", body=b"hi"),
    request(b"HTTP/1.1 200", b"Content-Length: 0"),
    request(
        b"HTTP/1.1 200 OK",
        b"Transfer-Encoding: chunked",
        body=b"1;a\r\nx\r\n0\r\nServer-Timing: a\r\n\r\n",
    ),
)

# What has confused readers of HTTP before.
_TELLING: tuple[bytes, ...] = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b"\x0b", b"\x7f", b"\x85"),
    *(b":", b",", b";", b'"', b"=", b"+", b"-", b"_", b"#", b"%", b"@", b"\xff", b"0", b"0x", b"9"),
    *(b"\r\n ", b"\r\n\t", b" \r\n", b"\r ", b"chunked", b", chunked", b"gzip, ", b"identity"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length: 5, 5\r\n"),
    *(b"Content-Length: +5\r\n", b"Content-Length: 5 5\r\n", b"Content-Length:\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding : chunked\r\n"),
    *(b"Transfer-Encoding: xchunked\r\n", b"Transfer-Encoding:\tchunked\r\n"),
    *(b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: chunked, chunked\r\n"),
    *(b"Host: b\r\n", b"Host: a, b\r\n", b"Connection: close\r\n", b"Connection: x, Upgrade\r\n"),
    *(b"Upgrade: h2c\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"5;\r\n", b"5 \r\n", b"\r\n0\r\n"),
    *(b"ffffffffffffffff\r\n", b"10000000000000000\r\n", b"00000000000000000005\r\n"),
    *(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9"),
    *(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b" 204 ", b" 100 ", b" 304 ", b" 101 "),
)

Mutation = Callable[[Random, bytes], bytes]


def mutated(random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    """Make one to three small changes.

    Args:
        data: A message.
        others: Where to take a line from.
    """
    for _ in range(1 + int(random.random() * 3)):
        data = _MUTATIONS[int(random.random() * len(_MUTATIONS))](random, data)
    if random.random() < 0.2:
        lines = others[int(random.random() * len(others))].split(b"\r\n")
        at = data.find(b"\r\n", int(random.random() * len(data))) + 2
        data = data[:at] + lines[int(random.random() * len(lines))] + b"\r\n" + data[at:]
    return data


def _at(random: Random, data: bytes) -> int:
    return int(random.random() * (len(data) + 1))


def _flip(random: Random, data: bytes) -> bytes:
    at = _at(random, data)
    return b"%b%c%b" % (data[:at], int(random.random() * 256), data[at + 1 :])


def _insert(random: Random, data: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + _TELLING[int(random.random() * len(_TELLING))] + data[at:]


def _replace(random: Random, data: bytes) -> bytes:
    at = _at(random, data)
    telling = _TELLING[int(random.random() * len(_TELLING))]
    return data[:at] + telling + data[at + len(telling) :]


def _at_a_line(random: Random, data: bytes) -> bytes:
    at = data.find(b"\r\n", _at(random, data)) + int(random.random() * 3)
    return data[:at] + _TELLING[int(random.random() * len(_TELLING))] + data[at:]


def _drop(random: Random, data: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + data[at + 1 + int(random.random() * 4) :]


def _drop_a_line(random: Random, data: bytes) -> bytes:
    at = data.find(b"\r\n", _at(random, data)) + 2
    return data[:at] + data[data.find(b"\r\n", at) + 2 :]


def _double_a_line(random: Random, data: bytes) -> bytes:
    at = data.find(b"\r\n", _at(random, data)) + 2
    return data[: data.find(b"\r\n", at) + 2] + data[at:]


def _append(random: Random, data: bytes) -> bytes:
    return data + (data if random.random() < 0.5 else _TELLING[int(random.random() * 60)])


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _insert, _insert, _replace, _at_a_line, _at_a_line),
    *(_drop, _drop_a_line, _double_a_line, _append),
)
