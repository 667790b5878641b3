"""What crosses between engines is read as it was written, and whatever else comes is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import TransferError
from offload.peer.wire import (
    MOST_ASKED,
    MOST_FETCHED,
    PeerFetch,
    PeerQuestion,
    decode,
    encode,
    pack_bits,
    unpack_bits,
)


@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back_as_they_were(bits: list[bool]) -> None:
    """A block that is held must not be taken for its neighbour."""
    assert unpack_bits(pack_bits(bits), len(bits)) == bits


def test_what_an_answer_leaves_out_is_not_held() -> None:
    """A peer that could not read the question answers with nothing."""
    assert unpack_bits(b"", 9) == [False] * 9


def test_a_request_comes_back_as_it_was() -> None:
    """Of both kinds."""
    for request in (PeerQuestion(b"weights", [b"a", b"b"]), PeerFetch(b"weights", [b"c"])):
        assert decode(encode(request)) == request


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\xa3\xff\xfe\xfd\xc4\x01a\x90",
        encode(["ask", b"weights"]),
        encode(["drop", b"weights", []]),
        encode(["ask", b"weights", [1]]),
        encode(PeerQuestion(b"weights", [b""] * (MOST_ASKED + 1))),
        encode(PeerFetch(b"weights", [b""] * (MOST_FETCHED + 1))),
    ],
)
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    """Anyone may connect; a request must not cost more than its bounds."""
    with pytest.raises(TransferError, match="peer tier"):
        decode(payload)
