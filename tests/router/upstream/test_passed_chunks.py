"""Chunks that are handed on as they came, beside the parser."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream import Origin, ResponseBroken, Timeouts, UpstreamClient
from router.upstream.connection import HttpConnection
from router.upstream.response import UpstreamResponse
from router.upstream.turns import LoopTurns
from tests.support.late_loop import LateLoop

ORIGIN = Origin.parse("http://127.0.0.1:1")
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Unread(asyncio.Transport):
    """A socket that is written to and closed by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "socket" else default

    def setsockopt(self, *_: object) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Reader:
    """Takes what a response has, in either way."""

    def __init__(self) -> None:
        loop = LateLoop()
        client = UpstreamClient()
        client.turns = LoopTurns(loop)  # type: ignore[arg-type]
        client._loop = loop  # type: ignore[assignment]
        self.connection = HttpConnection(client, ORIGIN)
        self.transport = Unread()
        self.connection.connection_made(self.transport)
        self.response = UpstreamResponse(self.connection, ORIGIN, Timeouts(1, 1, 1), loop)  # type: ignore[arg-type]
        self.body = b""
        self.passed = 0
        self.connection.start(self.response, b"GET / HTTP/1.1\r\n\r\n", b"")
        self.response.when_ready(self.take, self.take_chunk)

    def take(self) -> None:
        self.body += self.response.take()
        if not self.response.at_end and self.response.error is None:
            self.response.when_ready(self.take, self.take_chunk)

    def take_chunk(self, chunk: bytes, size: int) -> bool:
        data = chunk[-2 - size : -2]
        assert chunk == b"%x\r\n%b\r\n" % (size, data)
        self.body += data
        self.passed += 1
        return True


def framed(pieces: Sequence[bytes], form: bytes = b"%x\r\n%b\r\n") -> list[bytes]:
    """Each piece as a chunk."""
    return [form % (len(piece), piece) for piece in pieces]


def test_a_token_of_a_stream_does_not_go_through_the_parser() -> None:
    """It is what a router does most."""
    pieces = [b"data: " + b"x" * length + b"\n\n" for length in (1, 40, 300, 4000)]
    reader = Reader()
    reader.connection.data_received(HEAD)
    for chunk in framed(pieces):
        reader.connection.data_received(chunk)
    assert (reader.passed, reader.body) == (3, b"".join(pieces))
    reader.connection.data_received(b"0\r\n\r\n")
    assert reader.response.at_end


def test_what_only_looks_like_a_chunk_is_a_part_of_one() -> None:
    """Else an engine's text could change the framing of its stream, and the next response would
    be read from the middle of this one."""
    inner = b"%x\r\n%b\r\n" % (40, b"y" * 39 + b"\n")
    reader = Reader()
    reader.connection.data_received(HEAD + b"%x\r\n" % (2 * len(inner) + 2))
    reader.connection.data_received(b"\r\n")
    reader.connection.data_received(inner)
    reader.connection.data_received(inner)
    reader.connection.data_received(b"\r\n0\r\n\r\n")
    assert (reader.passed, reader.body) == (0, b"\r\n" + 2 * inner)
    assert reader.response.at_end


def test_a_chunk_behind_a_part_of_a_size_is_not_passed() -> None:
    """`3` and `2f` are the size 32f."""
    chunk = b"%x\r\n%b\r\n" % (47, b"y" * 46 + b"\n")
    reader = Reader()
    reader.connection.data_received(HEAD + b"1\r\nx\r\n")
    reader.connection.data_received(b"3")
    reader.connection.data_received(chunk)
    assert (reader.passed, reader.body) == (0, b"x" + chunk[4:])


def test_a_large_chunk_without_its_end_is_not_passed() -> None:
    """With five digits the size of the whole is that of a part, if its text ends in line ends."""
    piece = b"data: " + b"y" * 70_000 + b"\r\n\r\n"
    (chunk,) = framed([piece])
    reader = Reader()
    reader.connection.data_received(HEAD)
    reader.connection.data_received(chunk[:-2])
    reader.connection.data_received(b"\r\n")
    reader.connection.data_received(b"0\r\n\r\n")
    assert (reader.passed, reader.body) == (0, piece)
    assert reader.response.at_end
    forged = b"%x\r\n" % 4097 + b"y" * 4095 + b"\n\r\n"
    reader = Reader()
    reader.connection.data_received(HEAD)
    with pytest.raises(ResponseBroken):
        reader.connection.data_received(forged)
    assert reader.passed == 0


def test_a_reader_that_stops_gets_no_more_chunks() -> None:
    """Its client is slow: what comes is kept until it asks, and no time runs."""
    (chunk,) = framed([b"data: " + b"x" * 40 + b"\n\n"])
    reader = Reader()
    reader.connection.data_received(HEAD + chunk)
    reader.response.when_ready(reader.take, lambda _chunk, _size: False)
    reader.connection.data_received(chunk)
    reader.connection.data_received(chunk)
    assert reader.response.deadline == float("inf")
    assert reader.response.take() == chunk[4:-2]


@given(
    st.lists(st.integers(1, 5000), max_size=8),
    st.sampled_from([b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n"]),
    st.lists(st.integers(0, 20_000), max_size=12),
    st.booleans(),
)
def test_a_body_is_the_same_however_it_is_cut(
    lengths: list[int], form: bytes, cuts: list[int], at_chunks: bool
) -> None:
    """A byte too many or too few would be a response that its client cannot read."""
    pieces = [bytes([97 + length % 26]) * (length - 1) + b"\n" for length in lengths]
    chunks = [HEAD, *framed(pieces, form), b"0\r\n\r\n"]
    whole = b"".join(chunks)
    if not at_chunks:
        places = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
        chunks = [whole[a:b] for a, b in itertools.pairwise(places) if a < b]
    reader = Reader()
    for chunk in chunks:
        reader.connection.data_received(chunk)
    assert reader.response.at_end
    assert reader.body == b"".join(pieces)
    assert not reader.transport.is_aborted
