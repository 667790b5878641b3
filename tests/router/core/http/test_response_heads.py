"""The heads of responses: a replica is not trusted."""

from __future__ import annotations

import pytest

from router import _core as core
from tests.router.core.http.heads import read_response, response

MALFORMED = "not a well-formed HTTP/1.1 response"


@pytest.mark.parametrize(
    ("first", "lines", "framing"),
    [
        (b"HTTP/1.1 200 OK", (b"content-length: 2",), "length"),
        (b"HTTP/1.1 200 OK", (b"Transfer-Encoding: Chunked",), "chunked"),
        (b"HTTP/1.1 200 OK", (), "until_close"),
        (b"HTTP/1.0 200 OK", (), "until_close"),
        (b"HTTP/1.1 200", (b"content-length: 0",), "length"),
        (b"HTTP/1.1 200 ", (b"content-length: 0",), "length"),
        (b"HTTP/1.1 204 No Content", (b"content-length: 5",), "none"),
        (b"HTTP/1.1 304 Not Modified", (b"transfer-encoding: chunked",), "none"),
        (b"HTTP/1.1 100 Continue", (), "none"),
        (b"HTTP/1.1 103 Early Hints", (b"link: x",), "none"),
    ],
)
def test_the_head_says_where_its_body_ends(
    first: bytes, lines: tuple[bytes, ...], framing: str
) -> None:
    """RFC 9112 6.3: some have none whatever they say, and a response to HEAD never has."""
    data = response(*lines, first=first)
    assert read_response(data)["framing"] == framing
    assert read_response(data)["used"] == len(data)
    assert read_response(data, is_of_head_request=True)["framing"] == "none"
    for size in range(len(data)):
        assert core.read_response_head(data[:size]) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", MALFORMED),
        (b"\r\nHTTP/1.1 200 OK\r\n\r\n", MALFORMED),
        (response(first=b"HTTP/2.0 200 OK"), MALFORMED),
        (response(first=b"HTTP/1.2 200 OK"), MALFORMED),
        (response(first=b"HTTP/1.1  200 OK"), MALFORMED),
        (response(first=b"HTTP/1.1 20 OK"), MALFORMED),
        (response(first=b"HTTP/1.1 2000 OK"), MALFORMED),
        (response(first=b"HTTP/1.1 200 O\x01K"), MALFORMED),
        (response(b"content-length: 1", b"content-length: 2"), MALFORMED),
        (response(b"content-length: 1", b"transfer-encoding: chunked"), MALFORMED),
        (response(b"content-length: -1"), MALFORMED),
        (response(b"content-length: 99999999999999999999999"), MALFORMED),
        (response(b"x: a\x01b"), MALFORMED),
        (response(b"x: a", b" b"), MALFORMED),
        (response(b"transfer-encoding: chunked, chunked"), MALFORMED),
        (response(b"transfer-encoding: gzip, chunked"), "a transfer coding other than chunked"),
        (response(b"content-length: 12", first=b"HTTP/1.1 104 Odd"), MALFORMED),
        (response(b"transfer-encoding: chunked", first=b"HTTP/1.1 100 Continue"), MALFORMED),
        (response(first=b"HTTP/1.1 101 Switching"), "an upgrade that was not requested"),
        (response(first=b"HTTP/1.1 600 Odd"), "status 600 is not from 200 to 599"),
        (response(first=b"HTTP/1.1 099 Odd"), "status 99 is not from 200 to 599"),
        (response(*[b"a: b"] * 300), "more than 256 headers"),
        (
            response(b"a: " + b"b" * 100_000),
            "more than 65536 bytes of headers or framing in a row",
        ),
    ],
)
def test_a_malformed_or_unbounded_head_breaks_a_rule_with_a_name(data: bytes, message: str) -> None:
    """The name is what an operator reads in the log; what cannot be framed is not passed on."""
    assert core.read_response_head(data) == (502, "response_broken", message)


@pytest.mark.parametrize(
    ("first", "lines", "is_kept"),
    [
        (b"HTTP/1.1 200 OK", (b"content-length: 0",), True),
        (b"HTTP/1.1 200 OK", (b"content-length: 0", b"connection: close"), False),
        (b"HTTP/1.1 200 OK", (), False),
        (b"HTTP/1.0 200 OK", (b"content-length: 0",), False),
        (b"HTTP/1.0 200 OK", (b"content-length: 0", b"connection: keep-alive"), True),
        (b"HTTP/1.0 200 OK", (b"transfer-encoding: chunked", b"connection: keep-alive"), False),
        (b"HTTP/1.1 200 OK", (b"content-length: 0", b"connection: upgrade", b"upgrade: h2"), True),
    ],
)
def test_a_connection_is_kept_where_the_server_keeps_it(
    first: bytes, lines: tuple[bytes, ...], is_kept: bool
) -> None:
    """RFC 9112 9.3; one that is kept by mistake loses the next request."""
    assert read_response(response(*lines, first=first))["keeps_alive"] is is_kept
