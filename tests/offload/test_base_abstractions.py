"""Keys and specs of blocks, as all tiers share them."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import GroupIdx
from offload.base import GPULoadStoreSpec, OffloadKey, pack_offload_key, unpack_offload_key
from offload.errors import OffloadError, TransferError


def test_a_key_is_the_hash_and_four_bytes_of_group_index_with_the_highest_first() -> None:
    """Keys are file names on a disk that another process reads: their form is a contract."""
    assert pack_offload_key(b"\xaa\xbb", GroupIdx(0x01020304)) == b"\xaa\xbb\x01\x02\x03\x04"
    assert pack_offload_key(b"", GroupIdx(7)) == b"\x00\x00\x00\x07"


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_a_key_gives_back_what_it_was_made_of(block_hash: bytes, group_idx: int) -> None:
    """It works for every hash function, and for any bytes a hash ends with."""
    assert unpack_offload_key(pack_offload_key(block_hash, GroupIdx(group_idx))) == (
        block_hash,
        group_idx,
    )


@given(
    st.tuples(st.binary(max_size=6), st.integers(0, 300)),
    st.tuples(st.binary(max_size=6), st.integers(0, 300)),
)
def test_blocks_share_a_key_only_if_hash_and_group_are_equal(
    one: tuple[bytes, int], other: tuple[bytes, int]
) -> None:
    """The same prefix has a block in every group, and a tier must not mix them up."""
    keys = [
        pack_offload_key(block_hash, GroupIdx(group_idx)) for block_hash, group_idx in (one, other)
    ]
    assert (keys[0] == keys[1]) is (one == other)


@pytest.mark.parametrize("group_idx", [-1, 2**32])
def test_a_group_index_that_four_bytes_cannot_hold_is_an_error(group_idx: int) -> None:
    """A truncated index would address another group's block."""
    with pytest.raises(struct.error):
        pack_offload_key(b"hash", GroupIdx(group_idx))


def test_a_key_from_a_view_is_bytes() -> None:
    """A hash that is a view into a message would keep the message alive."""
    block_hash, _ = unpack_offload_key(OffloadKey(memoryview(b"hash\x00\x00\x00\x01")))  # type: ignore[arg-type]
    assert type(block_hash) is bytes


@pytest.mark.parametrize(
    ("block_ids", "group_sizes", "block_indices"),
    [((), (), ()), ((), (0, 0), (0, 5)), ((4, 2, 9), (1, 0, 2), (7, 99, 0))],
)
def test_groups_without_blocks_take_no_part(
    block_ids: tuple[int, ...], group_sizes: tuple[int, ...], block_indices: tuple[int, ...]
) -> None:
    """A window whose blocks all slid out stores nothing, while another group does."""
    spec = GPULoadStoreSpec(block_ids, group_sizes, block_indices)
    assert (spec.block_ids, spec.group_sizes, spec.block_indices) == (
        block_ids,
        group_sizes,
        block_indices,
    )


@pytest.mark.parametrize(
    ("block_ids", "group_sizes", "block_indices", "message"),
    [
        ((1, 2), (1,), (0,), "GPU spec: group_sizes add up to 1, there are 2 block_ids"),
        ((1,), (1, 1), (0, 0), "GPU spec: group_sizes add up to 2, there are 1 block_ids"),
        ((1, 2), (2,), (0, 0), "GPU spec: 1 group_sizes and 2 block_indices must be equally many"),
        ((1,), (2, -1), (0, 0), "GPU spec: group_sizes and block_indices must not be negative"),
        ((1,), (1,), (-1,), "GPU spec: group_sizes and block_indices must not be negative"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(
    block_ids: tuple[int, ...],
    group_sizes: tuple[int, ...],
    block_indices: tuple[int, ...],
    message: str,
) -> None:
    """A copy over raw memory depends on it."""
    with pytest.raises(TransferError, match=f"^{re.escape(message)}$") as caught:
        GPULoadStoreSpec(block_ids, group_sizes, block_indices)
    assert isinstance(caught.value, OffloadError)
