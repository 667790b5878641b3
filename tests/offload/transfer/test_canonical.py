"""The canonical view refuses every cache that a worker could not copy safely."""

from __future__ import annotations

import pytest
import torch

from offload.errors import CacheConfigError
from offload.transfer.canonical import CanonicalKVCache, DataRef


def pages(rows: int = 4, row_bytes: int = 16) -> torch.Tensor:
    return torch.zeros((rows, row_bytes), dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([], "at least one tensor"),
        ([pages(), torch.zeros((4, 16))], r"tensor 1: dtype torch.float32 must be torch.int8"),
        (
            [torch.zeros((4, 2, 8), dtype=torch.int8)],
            r"shape \(4, 2, 8\) must be \(num_blocks, row_bytes\)",
        ),
        ([torch.zeros((0, 16), dtype=torch.int8)], r"shape \(0, 16\)"),
        ([pages(16, 16).t()], r"strides \(1, 16\)"),
        ([pages(1).expand(4, 16)], r"strides \(0, 1\)"),
        ([pages().to("meta")], "device meta must be the CPU or a CUDA device"),
        ([pages(), pages().to("meta")], "device"),
    ],
)
def test_a_tensor_of_another_shape_type_or_device_is_refused(
    tensors: list[torch.Tensor], complaint: str
) -> None:
    """A copy of bytes by row number would read or write something else."""
    with pytest.raises(CacheConfigError, match=complaint):
        CanonicalKVCache(tensors, [[DataRef(0, 16)]])


@pytest.mark.parametrize(
    ("refs", "complaint"),
    [
        ([], "at least one group"),
        ([[DataRef(0, 16)], []], "group 1: must have at least one data ref"),
        ([[DataRef(1, 16)]], "group 0: tensor_idx 1 must be one of the 1 tensors"),
        ([[DataRef(-1, 16)]], "tensor_idx -1"),
        ([[DataRef(0, 0)]], "page_bytes 0 must be between 1 and the row of tensor 0, 16 bytes"),
        ([[DataRef(0, 17)]], "page_bytes 17"),
        ([[DataRef(0, 8), DataRef(0, 8)]], r"refs name tensors \[0, 0\]; each at most once"),
    ],
)
def test_a_ref_to_a_missing_tensor_or_bytes_is_refused(
    refs: list[list[DataRef]], complaint: str
) -> None:
    """The same, for the groups."""
    with pytest.raises(CacheConfigError, match=complaint):
        CanonicalKVCache([pages()], refs)


def test_a_page_is_the_refs_concatenated() -> None:
    """Every tier lays blocks out by these sizes.

    A group may use a part of a row and share its tensor.
    """
    cache = CanonicalKVCache(
        [pages(4, 16), pages(3, 8)], [[DataRef(1, 8), DataRef(0, 10)], [DataRef(0, 16)]]
    )
    assert cache.page_bytes == (18, 16)
    assert cache.page_offsets(0) == [0, 8]
    assert cache.num_blocks == (3, 4)
    assert (cache.num_groups, cache.device) == (2, torch.device("cpu"))


def test_rows_of_a_wider_tensor_are_accepted() -> None:
    """An engine may pad its rows."""
    assert CanonicalKVCache([pages(4, 32)[:, :16]], [[DataRef(0, 16)]]).page_bytes == (16,)
