"""Random caches and jobs, and the plain loop that copies are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kvevents.events import GroupIdx
from offload.base import Direction, GPULoadStoreSpec, OffloadKey, TransferResult, pack_offload_key
from offload.transfer.canonical import CanonicalKVCache, DataRef

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]

Lower = TypeVar("Lower")


@dataclass(frozen=True)
class World:
    """A cache's shape.

    The rows and bytes of its tensors, padding between rows, refs per group, and each group's k.
    """

    tensors: Sequence[tuple[int, int, int]]
    refs: Sequence[Sequence[DataRef]]
    k: Sequence[int]
    seed: int

    def cache(self, device: str) -> CanonicalKVCache:
        """A cache of that shape with random contents."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = [
            torch.randint(
                -128, 128, (rows, row_bytes + padding), dtype=torch.int8, generator=generator
            ).to(device)
            for rows, row_bytes, padding in self.tensors
        ]
        views = [tensor[:, : shape[1]] for tensor, shape in zip(tensors, self.tensors, strict=True)]
        return CanonicalKVCache(views, self.refs)


@dataclass
class Job:
    """A job in the plain loop's terms: what each group copies."""

    direction: Direction
    block_ids: list[list[int]]
    block_indices: list[int]
    lower_ids: list[list[int]]

    @property
    def gpu(self) -> GPULoadStoreSpec:
        """The same job as the worker's GPU side."""
        sizes = [len(ids) for ids in self.block_ids]
        return GPULoadStoreSpec(
            [block for ids in self.block_ids for block in ids], sizes, self.block_indices
        )


@dataclass
class PlainLoop:
    """The same copies, one block and one tensor after the other.

    A lower block's bytes are found by its id.
    """

    world: World
    rows: list[np.ndarray]
    lower: Callable[[int, int], np.ndarray]
    """Group and id to the bytes of an offloaded block, at least as many as it has."""
    copied_bytes: list[int] = field(default_factory=list)

    def run(self, job: Job) -> None:
        """Copy, and count the bytes."""
        copied = 0
        for group, ids in enumerate(job.block_ids):
            k = self.world.k[group]
            for number, block_id in enumerate(ids):
                position = job.block_indices[group] % k + number
                lower = self.lower(group, job.lower_ids[group][position // k])
                copied += self._copy_block(job.direction, group, block_id, lower, position % k)
        self.copied_bytes.append(copied)

    def _copy_block(
        self, direction: Direction, group: int, block_id: int, lower: np.ndarray, place: int
    ) -> int:
        page = sum(ref.page_bytes for ref in self.world.refs[group])
        first = place * page
        for ref in self.world.refs[group]:
            gpu = self.rows[ref.tensor_idx][block_id, : ref.page_bytes]
            staged = lower[first : first + ref.page_bytes]
            if direction is Direction.STORE:
                staged[:] = gpu
            else:
                gpu[:] = staged
            first += ref.page_bytes
        return page


def copies_of(cache: CanonicalKVCache) -> list[np.ndarray]:
    """The cache's contents as they are now."""
    return [tensor.cpu().numpy().copy() for tensor in cache.tensors]


def assert_same(cache: CanonicalKVCache, rows: Sequence[np.ndarray]) -> None:
    """Every byte of the cache is as the loop left it."""
    for tensor, expected in zip(cache.tensors, rows, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected)


def results_of(worker: object, job_ids: Sequence[int]) -> list[TransferResult]:
    """Wait for jobs and take what is finished."""
    worker.wait(job_ids)
    return worker.get_finished()


def key_of(group: int, lower_id: int) -> OffloadKey:
    """The key of a lower block."""
    return pack_offload_key(random.Random(lower_id).randbytes(32), GroupIdx(group))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to three groups over up to four tensors, with odd sizes, padding, shared tensors and
    different k."""
    tensors = draw(
        st.lists(
            st.tuples(st.integers(24, 30), st.integers(1, 40), st.sampled_from([0, 8])),
            min_size=1,
            max_size=4,
        )
    )
    refs = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.sampled_from(range(len(tensors))), min_size=1, unique=True))
        refs.append([DataRef(index, draw(st.integers(1, tensors[index][1]))) for index in used])
    k = [draw(st.integers(1, 4)) for _ in refs]
    return World(tensors, refs, k, draw(st.integers(0, 1000)))


@st.composite
def jobs(
    draw: st.DrawFn, world: World, num_lower: int, loadable: Sequence[Sequence[int]] | None = None
) -> Job:
    """A job that fits; *loadable* lists the lower ids that each group may load, by default all."""
    direction = draw(st.sampled_from(list(Direction)))
    rows = draw(st.permutations(range(24)))
    free_lower = list(draw(st.permutations(range(num_lower))))
    job = Job(direction, [], [], [])
    for group, k in enumerate(world.k):
        store = direction is Direction.STORE
        choice = free_lower if store or loadable is None else loadable[group]
        count = draw(st.integers(0, min(2, len(choice))))
        lead, trail = (
            (0, 0) if store else (draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1)))
        )
        size = max(0, count * k - lead - trail)
        touched = -(-(lead + size) // k) if size else 0
        take = (
            [choice.pop() for _ in range(touched)]
            if store
            else [draw(st.sampled_from(choice)) for _ in range(touched)]
        )
        job.lower_ids.append(take)
        job.block_indices.append(lead + k * draw(st.integers(0, 3)))
        job.block_ids.append([rows.pop() for _ in range(size)])
    return job
