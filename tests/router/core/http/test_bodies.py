"""Bodies as they come."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router._core import BodyReader
from tests.router.core.http.heads import MALFORMED


@dataclass
class Read:
    """What came out of a reader."""

    payload: bytes = b""
    used: int = 0
    is_last: bool = False
    is_bad: bool = False


def read(reader: BodyReader, *pieces: bytes) -> Read:
    """Feed it pieces, each for as long as something of it is left."""
    found = Read()
    for piece in pieces:
        while piece and not found.is_last and not found.is_bad:
            used, payload, found.is_last, found.is_bad = reader.next(piece)
            assert used > 0 or found.is_last or found.is_bad
            found.payload += payload
            found.used += used
            piece = piece[used:]
    assert reader.payload_bytes == len(found.payload)
    assert reader.has_ended == found.is_last
    return found


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", b"hello world"),
        (b"A\r\n0123456789\r\n000\r\n\r\n", b"0123456789"),
        (b"0000000000000000000000001\r\nx\r\n0\r\n\r\n", b"x"),
        (b"2;a=b\r\n\r\n\r\n0;c\r\n\r\n", b"\r\n"),
        (b'1;a="b; c" ; d\r\nx\r\n0\r\n\r\n', b"x"),
        (b"1\r\nx\r\n0\r\nx: 1\r\ny:\r\nz: a b\t\r\n\r\n", b"x"),
        (b"1\r\nx\r\n0\r\ncontent-length: 9\r\ntransfer-encoding: gzip\r\n\r\n", b"x"),
    ],
)
def test_chunks_are_read_without_extensions_and_trailers(data: bytes, payload: bytes) -> None:
    """RFC 9112 7.1.1 and 7.1.2: they are dropped whatever they say, and what follows is the next
    message."""
    assert read(BodyReader("chunked"), data + b"GET /") == Read(payload, len(data), is_last=True)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\r\n", b"x\r\n", b"-1\r\n", b"+1\r\nx", b"0x1\r\nx", b" 1\r\nx", b"1 \r\nx", b"1\nx"),
        *(b"1\r\r\nx", b"1;a\nx\r\n", b"1;a\0\r\nx", b"1;a\rb\r\nx", b"1,\r\nx", b";a\r\nx"),
        *(b"1\r\nxy", b"1\r\nx\n0\r\n", b"1\r\nx\r0", b"1\r\nx0\r\n\r\n", b"1\r\nx\r\n\r\n"),
        *(b"10000000000000000\r\n", b"fffffffffffffffff\r\n", b"0\r\n\n", b"0\r\n\r\r"),
        *(b"0\r\nno colon\r\n", b"0\r\n: x\r\n", b"0\r\nx : y\r\n", b"0\r\nx: y\nz: w\r\n"),
        *(b"0\r\nx: y\r\n z\r\n", b"0\r\nx: \x01\r\n", b"0\n\r\n", b"0\r\nx: y\r\r\n"),
    ],
)
def test_a_chunk_that_can_be_read_in_two_ways_is_refused(data: bytes) -> None:
    """Where one reader sees the end of a line and another does not, a request hides."""
    reader = BodyReader("chunked")
    assert read(reader, data).is_bad
    assert reader.problem == MALFORMED
    assert reader.next(b"0\r\n\r\n")[3], "and it stays refused"


def test_framing_is_bounded() -> None:
    """Nothing of it is passed on: its sender has work done for nothing."""
    reader = BodyReader("chunked", chunk_line_bytes=10)
    assert read(reader, b"1;abcdefgh\r\nx\r\n" * 2 + b"00000000001").is_bad
    assert reader.payload_bytes == 2
    assert reader.problem == (
        431,
        "headers_too_large",
        "chunk: its first line is longer than the limit of 10 bytes",
    )
    reader = BodyReader("chunked", trailer_bytes=10)
    assert read(reader, b"0\r\na: b\r\n\r\n").is_last
    reader = BodyReader("chunked", trailer_bytes=10)
    assert read(reader, b"0\r\na: b\r\nc: de").is_bad
    assert reader.problem == (
        431,
        "headers_too_large",
        "trailers: longer than the limit of 10 bytes",
    )


def test_a_length_ends_a_body_and_a_close_ends_the_other() -> None:
    """What follows a length belongs to the next message; without one there is none."""
    assert read(BodyReader("length", 5), b"hel", b"lo\r\n") == Read(b"hello", 5, is_last=True)
    assert BodyReader("length", 0).has_ended
    assert BodyReader("none").next(b"GET /") == (0, b"", True, False)
    assert read(BodyReader("until_close"), b"a", b"b") == Read(b"ab", 2)


def test_a_whole_chunk_is_one_piece_with_its_line_end() -> None:
    """One token of a stream: whoever passes it on sends these bytes as they are."""
    reader = BodyReader("chunked")
    assert reader.next(b"2\r\nhi\r\n3\r\nabc") == (7, b"hi", False, False)
    assert reader.next(b"3\r\nabc") == (6, b"abc", False, False)
    assert reader.next(b"\r\n0\r\n\r\n") == (7, b"", True, False)


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a=b"]),
    st.sampled_from([b"", b"x: y\r\n", b"content-length: 3\r\nz:\r\n"]),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.one_of(st.none(), st.tuples(st.integers(0, 300), st.binary(max_size=3))),
)
def test_a_body_is_the_same_however_it_is_cut(
    pieces: list[bytes],
    size: bytes,
    trailers: bytes,
    cuts: list[int],
    damage: tuple[int, bytes] | None,
) -> None:
    """A byte too many or too few would be a request of one client in the place of another's. A
    damaged one is refused at the same byte."""
    pieces = [piece for piece in pieces if piece]
    data = b"".join(size % len(piece) + b"\r\n%b\r\n" % piece for piece in pieces)
    data += b"0\r\n" + trailers + b"\r\n"
    if damage is not None:
        at, found = damage
        data = data[:at] + found + data[at + len(found) :]
    whole = read(BodyReader("chunked"), data)
    if damage is None:
        assert whole == Read(b"".join(pieces), len(data), is_last=True)
    parts, rest = [], data
    while rest:
        cut = cuts[len(parts) % len(cuts)]
        parts.append(rest[:cut])
        rest = rest[cut:]
    assert read(BodyReader("chunked"), *parts) == whole
