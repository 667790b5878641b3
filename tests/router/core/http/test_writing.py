"""What is written: no name and no value may break a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router import _core as core
from tests.router.core.http.heads import read_request, read_response

# RFC 9110 7.6.1 names the first five; the others apply to one hop by their own definitions: 11.7
# proxy authentication, 6.6.2 trailer (trailers are not passed on), RFC 7540 3.2.1.
HOP_BY_HOP = (
    *(b"connection", b"proxy-connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade"),
    *(b"proxy-authenticate", b"proxy-authorization", b"trailer", b"http2-settings"),
)

BYTES = st.one_of(
    st.binary(max_size=40), st.text("aZ09-_.: \t\r\n\0é", max_size=20).map(str.encode)
)


def test_lines_are_written_as_they_are_read() -> None:
    """Each form once."""
    assert core.write_status(200, b"") == b"HTTP/1.1 200 OK\r\n"
    assert core.write_status(431, b"") == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    assert core.write_status(299, b"") == b"HTTP/1.1 299 \r\n"
    assert core.write_status(418, b"Teapot") == b"HTTP/1.1 418 Teapot\r\n"
    assert core.write_status(200, b"O\r\nK") == b"HTTP/1.1 200 \r\n"
    assert core.write_request_line(b"POST", b"/v1/x?y") == b"POST /v1/x?y HTTP/1.1\r\n"
    assert core.write_field(b"x-a", b"b c") == b"x-a: b c\r\n"
    assert core.write_field(b"", b"a") == b""
    assert core.write_chunk(b"x" * 31) == b"1f\r\n" + b"x" * 31 + b"\r\n"


@given(BYTES, BYTES)
def test_a_field_is_one_line_or_is_left_out(name: bytes, value: bytes) -> None:
    """RFC 9110 5.5: a line break that comes through is a second field, or a second message."""
    name = b"x" + name  # those that frame a message have rules of their own
    written = core.write_field(name, value)
    head = read_request(b"GET / HTTP/1.0\r\n" + written + b"\r\n")
    assert head["fields"] == ([(name, value.strip(b" \t"))] if written else [])


@given(BYTES, BYTES)
def test_a_request_line_is_one_line_or_is_left_out(method: bytes, target: bytes) -> None:
    """The same, of a target."""
    written = core.write_request_line(method, target)
    assert written in (b"", method + b" " + target + b" HTTP/1.1\r\n")
    assert not written or (b" " not in method + target and written.count(b"\n") == 1)


@given(st.integers(200, 599), BYTES)
def test_a_status_line_can_always_be_read(status: int, reason: bytes) -> None:
    """A replica's reason is passed on, or none."""
    head = read_response(core.write_status(status, reason) + b"content-length: 0\r\n\r\n")
    assert head["status"] == status


def test_the_fields_of_one_connection_are_known_in_any_case() -> None:
    """They end here."""
    for name in HOP_BY_HOP:
        assert core.is_hop_by_hop(name)
        assert core.is_hop_by_hop(name.title())
    for name in (b"", b"content-length", b"host", b"tf", b"x-connection", b"trailers", b"upgraded"):
        assert not core.is_hop_by_hop(name)
