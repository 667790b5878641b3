"""Bytes of a slot come from other processes and machines."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.types import KeyCounts
from router.sharing.slots import (
    MAX_BYTES,
    MAX_PREFIX_BYTES,
    VERSION,
    SharedLoad,
    SharedPrefix,
    Slot,
    SlotError,
    decode_slot,
    encode_slot,
    fitting,
)

PREFIX = SharedPrefix(7, "m", b"space", "a", 0, 1000, 900, b"12345678")
SLOT = Slot(
    loads=(SharedLoad("a", None, 1, 300, 2, 4000), SharedLoad("a", 1, 1, 300, 0, 0)),
    prefixes=(PREFIX,),
    unhealthy=("b",),
    begun={"a": 3},
    keys={"team": KeyCounts(3, 400, 1)},
)


def test_a_slot_is_read_as_it_was_written() -> None:
    """Else load would be counted at the wrong replica."""
    assert decode_slot(encode_slot(SLOT)) == SLOT


@given(st.binary(max_size=200))
def test_bytes_that_are_no_slot_are_refused_with_our_own_error(data: bytes) -> None:
    """Anyone who reaches the board may write there."""
    try:
        decode_slot(data)
    except SlotError:
        return
    assert decode_slot(data) == decode_slot(encode_slot(decode_slot(data)))


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(SLOT, version=VERSION + 1),
        msgspec.structs.replace(SLOT, loads=(SharedLoad("a", None, -1, 0, 0, 0),)),
        msgspec.structs.replace(SLOT, loads=(SharedLoad("a" * 300, None, 1, 0, 0, 0),)),
        msgspec.structs.replace(SLOT, prefixes=(msgspec.structs.replace(PREFIX, keys=b"123"),)),
        msgspec.structs.replace(SLOT, keys={"team": KeyCounts(-3, 400, 1)}),
        msgspec.structs.replace(
            SLOT, prefixes=(msgspec.structs.replace(PREFIX, keys=b"8" * 8192),)
        ),
    ],
)
def test_values_out_of_bounds_are_refused(broken: Slot) -> None:
    """A negative load would draw all requests to one replica."""
    with pytest.raises(SlotError):
        decode_slot(msgspec.msgpack.encode(broken))


def test_what_is_too_large_for_a_slot_keeps_the_load_of_whole_replicas() -> None:
    """Load matters most; it must not be lost behind thousands of ranks."""
    ranks = [SharedLoad("replica-" + "r" * 200, rank, 1, 10, 0, 0) for rank in range(5000)]
    whole = SharedLoad("replica-" + "r" * 200, None, 5000, 50_000, 0, 0)
    data = encode_slot(Slot(loads=(whole, *ranks)))
    assert len(data) <= MAX_BYTES
    assert decode_slot(data).loads == (whole,)


def test_the_latest_prefixes_are_told_where_there_is_no_room_for_all() -> None:
    """The others are nearly computed."""
    many = [
        msgspec.structs.replace(PREFIX, number=number, keys=b"k" * 4096) for number in range(40)
    ]
    kept = fitting(many)
    assert kept == tuple(many[-(MAX_PREFIX_BYTES // 4096) :])
