"""The heads of requests: what is read, and what is refused with which response."""

from __future__ import annotations

import pytest

from router import _core as core
from tests.router.core.http.heads import MALFORMED, post, read_request
from tests.router.core.http.messages import REQUESTS, request

UNKNOWN_CODING = (
    501,
    "unknown_transfer_coding",
    "transfer-encoding: only chunked is decoded here; send the body without others",
)
BAD_HOST = (400, "bad_host", "host: missing, or there twice; an HTTP/1.1 request has one")
INVALID_HOST = (400, "bad_host", "host: not a host name with or without a port")
OTHER_VERSION = (
    505,
    "http_version_not_supported",
    "request: only HTTP/1.0 and HTTP/1.1 are spoken here",
)


def test_a_head_is_read_with_everything_the_router_asks_of_it() -> None:
    """Its values are views of what came: white space around them is no part of them."""
    head = read_request(
        post(b"Content-Length:  7 \t", b"X-Empty:", b"X-Text: \xc3\xa9\t!") + b"{...}\r\n"
    )
    assert head == {
        "method": b"POST",
        "target": b"/x",
        "origin_form": b"/x",
        "minor": 1,
        "fields": [
            (b"host", b"a"),
            (b"Content-Length", b"7"),
            (b"X-Empty", b""),
            (b"X-Text", b"\xc3\xa9\t!"),
        ],
        "framing": "length",
        "length": 7,
        "keeps_alive": True,
        "expects_continue": False,
        "upgrades": False,
        "used": 75,
    }


@pytest.mark.parametrize("message", REQUESTS)
def test_a_head_is_partial_until_its_last_byte(message: bytes) -> None:
    """Waiting for one byte too many would hold up a client that sends nothing more."""
    used = read_request(message)["used"]
    for size in range(used):
        assert core.read_request_head(message[:size]) is None
    assert read_request(message[:used]) == read_request(message)


@pytest.mark.parametrize(
    ("target", "origin_form"),
    [
        (b"/", b"/"),
        (b"/v1/x?a=/b&c=%20", b"/v1/x?a=/b&c=%20"),
        (b"//x", b"//x"),
        (b"/x#there", b"/x"),
        (b"/?#", b"/?"),
        (b"http://a/x?y", b"/x?y"),
        (b"HTTPS://[::1]:80/", b"/"),
        (b"*", b"*"),
    ],
)
def test_a_target_is_a_path_however_it_is_written(target: bytes, origin_form: bytes) -> None:
    """RFC 9112 3.2.2: clients of a proxy send the whole URL."""
    head = read_request(request(b"GET %b HTTP/1.1" % target, b"host: a"))
    assert (head["target"], head["origin_form"]) == (target, origin_form)


@pytest.mark.parametrize(
    "line",
    [
        *(b"GET x HTTP/1.1", b"GET *a HTTP/1.1", b"GET ?a HTTP/1.1", b"GET a:80 HTTP/1.1"),
        *(b"GET http://a HTTP/1.1", b"GET http:///x HTTP/1.1", b"GET ftp://a/x HTTP/1.1"),
        *(b"GET http://a:b/ HTTP/1.1", b"GET http://a?/ HTTP/1.1", b"GET http://:80/ HTTP/1.1"),
        *(b"GET http://u@a/x HTTP/1.1", b"CONNECT a:80 HTTP/1.1", b"CONNECT /x HTTP/1.1"),
        *(b"get / HTTP/1.1", b"FOO / HTTP/1.1", b"GET: / HTTP/1.1", b" GET / HTTP/1.1"),
        *(b"GET  / HTTP/1.1", b"GET /  HTTP/1.1", b"GET / HTTP/1.1 ", b"GET\t/ HTTP/1.1"),
        *(b"GET /a b HTTP/1.1", b"GET /\xc3\xa9 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /"),
        *(b"GET / HTTP/1.2", b"GET / HTTP/9.9", b"GET / http/1.1", b"GET / HTTP/1.10", b"GET "),
        *(b"GET / ICE/1.0", b"PRI * HTTP/2.0", b"nonsense", b'{"model": "m"}', b"GET / HTTP/1,1"),
    ],
)
def test_a_line_that_is_no_request_is_refused(line: bytes) -> None:
    """Two readers that repair it differently pass different requests on."""
    assert core.read_request_head(request(line, b"host: a")) == MALFORMED


@pytest.mark.parametrize(
    "start", [b"\x16\x03\x01\x02", b"\0", b"\n", b"GET\r", b"GET /\x01", b"{", b"SSH-", b"g"]
)
def test_what_is_not_http_is_refused_with_its_first_bytes(start: bytes) -> None:
    """A TLS client would wait for an answer to its greeting until one of both gives up."""
    assert core.read_request_head(start) == MALFORMED


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_another_version_is_named_as_the_reason(version: bytes) -> None:
    """RFC 9110 15.6.6: whoever set it by hand learns what to change."""
    assert core.read_request_head(request(b"GET / %b" % version, b"host: a")) == OTHER_VERSION


@pytest.mark.parametrize(
    "line",
    [
        *(b"x", b"x y", b": y", b"x : y", b"x\t: y", b" x: y", b"\tx: y", b"x\r: y", b"\xe9: y"),
        *(b"x: a\r\n b", b"x: a\r\n\tb", b"x: a\nb: c", b"x: a\rb", b"x: a\0b", b"x: \x01"),
        *(b"x: a\x7f", b"x: a\x0b", b"x(y): z", b"x\0: y", b"\r", b"\n"),
    ],
)
def test_a_line_that_is_no_field_is_refused(line: bytes) -> None:
    """RFC 9112 2.2, 5.1, 5.2: bare line ends, folding and a space before the colon are the classic
    ways to hide a field from one of two readers."""
    assert core.read_request_head(post(b"before: 1", line, b"after: 2")) == MALFORMED


@pytest.mark.parametrize(
    ("lines", "framing", "length"),
    [
        ((), "none", 0),
        ((b"content-length: 0",), "length", 0),
        ((b"CONTENT-LENGTH: 0005",), "length", 5),
        ((b"content-length: %b2" % (b"0" * 5000),), "length", 2),
        ((b"content-length: 18446744073709551615",), "length", 2**64 - 1),
        ((b"Transfer-Encoding: Chunked",), "chunked", 0),
    ],
)
def test_the_head_says_where_its_body_ends(
    lines: tuple[bytes, ...], framing: str, length: int
) -> None:
    """RFC 9112 6.3; leading zeros are digits."""
    head = read_request(post(*lines))
    assert (head["framing"], head["length"]) == (framing, length)


@pytest.mark.parametrize(
    "lines",
    [
        *((b"content-length: " + value,) for value in (b"", b"-1", b"+5", b"5 5", b"5, 5", b"0x5")),
        (b"content-length: 18446744073709551616",),
        (b"content-length: 99999999999999999999999",),
        (b"content-length: 5\xb2",),
        (b"content-length: 5", b"content-length: 5"),
        (b"content-length: 5", b"Content-Length: 6"),
        (b"transfer-encoding: chunked", b"content-length: 5"),
        (b"content-length: 5", b"transfer-encoding: chunked"),
        (b"content-length: 5", b"transfer-encoding: gzip"),
        (b"transfer-encoding:",),
        (b"transfer-encoding: chunked, chunked",),
        (b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
        (b"transfer-encoding: chunked, gzip",),
        (b"transfer-encoding: chunked,",),
        (b"connection: upgrade", b"upgrade: x", b"content-length: 5", b"content-length: 6"),
    ],
)
def test_framing_that_can_be_read_in_two_ways_is_refused(lines: tuple[bytes, ...]) -> None:
    """RFC 9112 11.2: that is how requests are smuggled."""
    assert core.read_request_head(post(*lines)) == MALFORMED


@pytest.mark.parametrize(
    "lines",
    [
        (b"transfer-encoding: gzip",),
        (b"transfer-encoding: gzip, chunked",),
        (b"transfer-encoding: identity",),
        (b"transfer-encoding: chunked;q=1",),
        (b"transfer-encoding: xchunked",),
        (b"transfer-encoding: ,chunked",),
        (b"transfer-encoding: gzip,",),
        (b"transfer-encoding: x", b"transfer-encoding: chunked"),
    ],
)
def test_a_coding_that_is_not_decoded_is_named(lines: tuple[bytes, ...]) -> None:
    """RFC 9112 6.1: "SHOULD respond with 501 (Not Implemented)"."""
    assert core.read_request_head(post(*lines)) == UNKNOWN_CODING


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((), BAD_HOST),
        ((b"host: a", b"host: a"), BAD_HOST),
        ((b"host: a", b"HOST: b"), BAD_HOST),
        ((b"host: a b",), INVALID_HOST),
        ((b"host: a, b",), INVALID_HOST),
        ((b"host: a,b",), INVALID_HOST),
        ((b"host: a/b",), INVALID_HOST),
        ((b"host: u@a",), INVALID_HOST),
        ((b"host: a:b",), INVALID_HOST),
        ((b"host: ::1",), INVALID_HOST),
        ((b"host: [::1",), INVALID_HOST),
        ((b"host: [::1]x",), INVALID_HOST),
        ((b"host: a]",), INVALID_HOST),
        ((b"host: \xc3\xa9",), INVALID_HOST),
    ],
)
def test_a_request_has_one_host(lines: tuple[bytes, ...], problem: tuple[int, str, str]) -> None:
    """RFC 9112 3.2: two readers of one message may take two hosts for the one meant."""
    assert core.read_request_head(request(b"GET / HTTP/1.1", *lines)) == problem


@pytest.mark.parametrize(
    "host", [b"", b"a", b"a_b.c-d:80", b"a:", b"127.0.0.1:8000", b"[::1]:8000"]
)
def test_a_host_may_be_any_name_or_address(host: bytes) -> None:
    """Which of them are served is not the parser's question; none is needed before HTTP/1.1."""
    read_request(request(b"GET / HTTP/1.1", b"host: " + host))
    read_request(request(b"GET / HTTP/1.0"))


@pytest.mark.parametrize(
    ("version", "line", "is_kept"),
    [
        (b"1.1", b"x: y", True),
        (b"1.1", b"connection: keep-alive", True),
        (b"1.1", b"Connection: Close", False),
        (b"1.1", b"connection: te,\tclose , x", False),
        (b"1.1", b"connection: closed", True),
        (b"1.1", b"connection: x, upgrade\r\nupgrade: h2c", False),
        (b"1.1", b"upgrade: h2c", True),
        (b"1.0", b"connection: keep-alive", False),
    ],
)
def test_a_connection_is_kept_where_both_can(version: bytes, line: bytes, is_kept: bool) -> None:
    """RFC 9112 9.3; a client that offered another protocol gets its answer and a close."""
    head = read_request(request(b"GET / HTTP/" + version, b"host: a", line))
    assert head["keeps_alive"] is is_kept
    assert head["upgrades"] is (b"upgrade: h2c" in line and b"connection" in line)


@pytest.mark.parametrize(
    ("version", "value", "expects"),
    [(b"1.1", b"100-Continue", True), (b"1.1", b"x", False), (b"1.0", b"100-continue", False)],
)
def test_only_a_client_that_understands_it_is_told_to_go_on(
    version: bytes, value: bytes, expects: bool
) -> None:
    """RFC 9110 10.1.1: one of HTTP/1.0 would take the interim response for the final one."""
    head = read_request(request(b"POST / HTTP/" + version, b"host: a", b"expect: " + value))
    assert head["expects_continue"] is expects


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_over_the_bound_is_refused_with_the_bound(end: bytes) -> None:
    """However it continues: the client must not send megabytes to learn that."""
    data = post(b"x: " + b"y" * 1000)
    problem = (431, "headers_too_large", "headers: longer than the limit of 500 bytes")
    assert core.read_request_head(data + end, head_bytes=500) == problem
    assert core.read_request_head(data[:500], head_bytes=500) is None
    assert core.read_request_head(b"\r\n" * 251, head_bytes=500) == problem
    assert read_request(data, head_bytes=len(data))["used"] == len(data)


def test_too_many_fields_are_refused_with_the_bound() -> None:
    """Each is looked at several times on its way."""
    lines = [b"x: y"] * 9
    assert core.read_request_head(post(*lines), fields=9) == (
        431,
        "headers_too_large",
        "headers: more than the limit of 9",
    )
    assert len(read_request(post(*lines), fields=10)["fields"]) == 10


def test_empty_lines_before_a_request_are_skipped() -> None:
    """RFC 9112 2.2: old clients send one behind a body."""
    assert read_request(b"\r\n\r\n" + post())["used"] == len(post()) + 4
    for line in (b"\n", b"\r", b"\r\r\n"):
        assert core.read_request_head(line + post()) == MALFORMED
