"""The canonical view of an engine's KV cache, which every transfer worker copies from and to.
Attention kernels shape a cache in many ways; here it is a list of int8 tensors `[num_blocks,
row_bytes]`: one row per block. A cache group lists the tensors that hold its layers, and how many
leading bytes of a row are its own. Groups may share a tensor, as the groups of a hybrid model do
when they draw blocks from one pool:

    tensor 0  | row 0 | row 1 | ...     group 0: refs (0, 4096) and (1, 4096), a page of 8192 bytes
    tensor 1  | row 0 | row 1 | ...     group 1: ref  (1, 1024), the start of the same rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from offload.errors import CacheConfigError


@dataclass(frozen=True, slots=True)
class DataRef:
    """The tensor and bytes of some layers of a group."""

    tensor_idx: int
    page_bytes: int
    """How many leading bytes of each row belong to the group."""


class CanonicalKVCache:
    """Tensors, and which of their bytes belong to each group's blocks.

    It has no state of its own; the tensors are the engine's. Block *b* of a group is row *b* in
    each of the group's tensors. Its *page* is those rows' bytes concatenated in the order of the
    group's refs.
    """

    def __init__(self, tensors: Sequence[Tensor], group_refs: Sequence[Sequence[DataRef]]) -> None:
        """
        Args:
            tensors: Each `[num_blocks, row_bytes]` int8, rows contiguous, all on one device: the
                CPU or a CUDA device.
            group_refs: Per group, which tensors hold its layers.

        Raises:
            CacheConfigError: A tensor has another shape, type or device, or a ref names a tensor
                or bytes that do not exist.
        """
        self.tensors = tuple(tensors)
        self.group_refs = tuple(tuple(refs) for refs in group_refs)
        _check_tensors(self.tensors)
        _check_groups(self.tensors, self.group_refs)
        self.page_bytes = tuple(sum(ref.page_bytes for ref in refs) for refs in self.group_refs)
        """Per group, the bytes of one GPU block."""
        self.num_blocks = tuple(
            min(len(self.tensors[ref.tensor_idx]) for ref in refs) for refs in self.group_refs
        )
        """Per group, how many block ids are valid."""

    @property
    def num_groups(self) -> int:
        """How many groups the cache has."""
        return len(self.group_refs)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors[0].device

    def page_offsets(self, group: int) -> list[int]:
        """Per ref of a group, where in the group's page its bytes begin."""
        return [0, *accumulate(ref.page_bytes for ref in self.group_refs[group])][:-1]


def _check_tensors(tensors: tuple[Tensor, ...]) -> None:
    if not tensors:
        raise CacheConfigError("KV cache: there must be at least one tensor")
    for index, tensor in enumerate(tensors):
        _check_tensor(f"KV cache tensor {index}", tensor)
        if tensor.device != tensors[0].device:
            raise CacheConfigError(
                f"KV cache tensor {index}: device {tensor.device} must be that of tensor 0, "
                f"{tensors[0].device}"
            )


def _check_tensor(place: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int8:
        raise CacheConfigError(
            f"{place}: dtype {tensor.dtype} must be torch.int8; view it as bytes"
        )
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise CacheConfigError(
            f"{place}: shape {tuple(tensor.shape)} must be (num_blocks, row_bytes), both positive"
        )
    if tensor.stride(1) != 1 or (len(tensor) > 1 and tensor.stride(0) < tensor.size(1)):
        raise CacheConfigError(
            f"{place}: strides {tensor.stride()} must make each row contiguous and distinct from "
            "the others"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise CacheConfigError(f"{place}: device {tensor.device} must be the CPU or a CUDA device")


def _check_groups(tensors: tuple[Tensor, ...], group_refs: tuple[tuple[DataRef, ...], ...]) -> None:
    if not group_refs:
        raise CacheConfigError("KV cache: there must be at least one group")
    for group, refs in enumerate(group_refs):
        if not refs:
            raise CacheConfigError(f"KV cache group {group}: must have at least one data ref")
        named = [ref.tensor_idx for ref in refs]
        if len(set(named)) != len(named):
            raise CacheConfigError(
                f"KV cache group {group}: refs name tensors {named}; each at most once"
            )
        for ref in refs:
            _check_ref(f"KV cache group {group}", ref, tensors)


def _check_ref(place: str, ref: DataRef, tensors: tuple[Tensor, ...]) -> None:
    if not 0 <= ref.tensor_idx < len(tensors):
        raise CacheConfigError(
            f"{place}: tensor_idx {ref.tensor_idx} must be one of the {len(tensors)} tensors"
        )
    row_bytes = tensors[ref.tensor_idx].size(1)
    if not 1 <= ref.page_bytes <= row_bytes:
        raise CacheConfigError(
            f"{place}: page_bytes {ref.page_bytes} must be between 1 and the row of tensor "
            f"{ref.tensor_idx}, {row_bytes} bytes"
        )
