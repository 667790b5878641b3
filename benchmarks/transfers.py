"""How fast do blocks move between the GPU and the lower tiers? Compared with a plain copy of as
many bytes in the same run.

Without a GPU the cache is in host memory: then the CPU tier is compared with one large copy by all
cores (a transfer takes one, see `--copy-threads`), and the disk tier with one large file. With a
GPU, also with one large copy to and from pinned memory. `ratio` is the tier's speed relative to the
plain copy's. Files are written to and read from the system's page cache, unless `--durable` makes
writes wait for the disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks.figures import median_seconds, report
from kvevents.events import GroupIdx
from offload.base import (
    CPULoadStoreSpec,
    Direction,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LowerTierSpec,
    OffloadingWorker,
    OffloadKey,
    TransferJob,
    pack_offload_key,
)
from offload.cpu.worker import CPUTransferWorker
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker
from offload.transfer.canonical import CanonicalKVCache, DataRef
from offload.transfer.runner import TransferOptions

_JOB_IDS = itertools.count()

Lower: TypeAlias = Callable[[Direction], LowerTierSpec]


@dataclass(frozen=True)
class Layout:
    """A cache to copy from: the number of tensors, and the part of a row that each group uses."""

    name: str
    tensors: int
    parts: tuple[float, ...]


LAYOUTS = (
    Layout("1 group, 1 tensor", 1, (1.0,)),
    Layout("1 group, 16 tensors", 16, (1.0,)),
    Layout("3 groups, 8 tensors, pages 1 : 1 : 1/2", 8, (1.0, 1.0, 0.5)),
)


@dataclass(frozen=True)
class Case:
    """A cache and a job over all of it: scattered GPU blocks, an equal number for each group."""

    layout: Layout
    page_bytes: int
    k: int
    cache: CanonicalKVCache
    gpu: GPULoadStoreSpec
    lower_count: int

    @property
    def copied_bytes(self) -> int:
        """Return the bytes that the job moves."""
        return sum(
            size * page
            for size, page in zip(self.gpu.group_sizes, self.cache.page_bytes, strict=True)
        )

    @property
    def factors(self) -> list[int]:
        """k for every group."""
        return [self.k] * self.cache.num_groups

    @property
    def payload_bytes(self) -> list[int]:
        """Return the bytes of an offloaded block, per group."""
        return [self.k * page for page in self.cache.page_bytes]


def make_case(layout: Layout, page_bytes: int, k: int, total_bytes: int, device: str) -> Case:
    """Return a cache twice as large as the job, with blocks of *page_bytes* over all tensors of a
    group."""
    groups = len(layout.parts)
    row_bytes = page_bytes // layout.tensors
    per_group = max(1, total_bytes // page_bytes // groups // k) * k
    rows = 2 * groups * per_group
    tensors = [
        torch.zeros((rows, row_bytes), dtype=torch.int8, device=device)
        for _ in range(layout.tensors)
    ]
    refs = [
        [DataRef(index, int(row_bytes * part)) for index in range(layout.tensors)]
        for part in layout.parts
    ]
    blocks = random.Random(1).sample(range(rows), groups * per_group)
    gpu = GPULoadStoreSpec(blocks, [per_group] * groups, [0] * groups)
    return Case(
        layout, page_bytes, k, CanonicalKVCache(tensors, refs), gpu, groups * per_group // k
    )


def run(worker: OffloadingWorker, case: Case, direction: Direction, lower: Lower) -> None:
    """Run one job from its submission to its end."""
    job_id = next(_JOB_IDS)
    worker.submit(TransferJob(job_id, direction, case.gpu, lower(direction)))
    worker.wait([job_id])
    (result,) = worker.get_finished()
    if not result.success:
        raise SystemExit(f"a {direction.value} failed")


def measure(
    case: Case,
    worker: OffloadingWorker,
    lower: Lower,
    plain: dict[Direction, float],
    repeats: int,
    **labels: str,
) -> None:
    """Report both directions of a job."""
    for direction in (Direction.STORE, Direction.LOAD):
        rate = _rate(case.copied_bytes, partial(run, worker, case, direction, lower), repeats)
        report(
            "transfers",
            device=case.cache.device.type,
            **labels,
            direction=direction.value,
            layout=case.layout.name,
            block_kib=case.page_bytes // 1024,
            blocks_per_offloaded_block=case.k,
            megabytes=round(case.copied_bytes / 1e6),
            gb_per_s=round(rate, 2),
            plain_gb_per_s=round(plain[direction], 2),
            ratio=round(rate / plain[direction], 2),
        )
    worker.shutdown()


def measure_cpu_tier(
    case: Case, plain: dict[Direction, float], options: argparse.Namespace
) -> None:
    """Measure with slots in order, as a fresh tier provides them, and scattered, as a used one
    does."""
    slots = list(range(case.lower_count))
    scattered = random.Random(2).sample(slots, len(slots))
    for order, ids in (("consecutive", slots), ("scattered", scattered)):
        transfer_options = TransferOptions(copy_threads=options.copy_threads)
        worker = CPUTransferWorker(case.cache, case.lower_count, case.factors, transfer_options)
        measure(case, worker, partial(_slots, ids), plain, options.repeats, tier="cpu", slots=order)


def measure_disk_tier(
    case: Case, plain: dict[Direction, float], options: argparse.Namespace
) -> None:
    """Measure with files in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = BlockStore(Path(directory), case.payload_bytes, durable=options.durable)
        worker = FileTransferWorker(case.cache, store, case.factors, options.io_threads)
        measure(case, worker, _Files(case), plain, options.repeats, tier="disk")


def _slots(ids: list[int], _: Direction) -> LowerTierSpec:
    return CPULoadStoreSpec(ids)


class _Files:
    """Every store writes new files, as a tier does; every load reads the last ones."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._last = FileLoadStoreSpec([])
        self._hashes = random.Random(1)

    def __call__(self, direction: Direction) -> LowerTierSpec:
        if direction is Direction.STORE:
            self._last = FileLoadStoreSpec(list(self._new_keys()))
        return self._last

    def _new_keys(self) -> Iterator[OffloadKey]:
        groups = self._case.cache.num_groups
        for group in range(groups):
            for _ in range(self._case.lower_count // groups):
                yield pack_offload_key(self._hashes.randbytes(32), GroupIdx(group))


def plain_copies(total_bytes: int, device: str, repeats: int) -> dict[Direction, float]:
    """Return GB/s of one large copy, to and from the host's memory; pinned if there is a GPU."""
    cache = torch.zeros(total_bytes, dtype=torch.int8, device=device)
    host = torch.zeros(total_bytes, dtype=torch.int8, pin_memory=device == "cuda")
    return {
        Direction.STORE: _rate(total_bytes, lambda: _copy(host, cache), repeats),
        Direction.LOAD: _rate(total_bytes, lambda: _copy(cache, host), repeats),
    }


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plain_files(total_bytes: int, options: argparse.Namespace) -> dict[Direction, float]:
    """Return GB/s of one large file, written and read."""
    data = memoryview(bytearray(total_bytes))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "plain"
        return {
            Direction.STORE: _rate(
                total_bytes, lambda: _write(path, data, options.durable), options.repeats
            ),
            Direction.LOAD: _rate(total_bytes, lambda: _read(path, data), options.repeats),
        }


def _write(path: Path, data: memoryview, durable: bool) -> None:
    path.unlink(missing_ok=True)  # a tier writes new files
    with path.open("wb", buffering=0) as file:
        file.write(data)
        if durable:
            os.fsync(file.fileno())


def _read(path: Path, data: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(data)


def _rate(total_bytes: int, copy: Callable[[], None], repeats: int) -> float:
    copy()  # the first one touches the memory
    return total_bytes / median_seconds(copy, repeats) / 1e9


def cases(options: argparse.Namespace, device: str) -> Iterator[Case]:
    """Yield every requested layout, block size and k."""
    for layout, block_kib, k in itertools.product(LAYOUTS, options.block_kib, options.k):
        yield make_case(layout, block_kib * 1024, k, options.megabytes * 1_000_000, device)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="how much a job copies")
    parser.add_argument(
        "--block-kib",
        type=int,
        nargs="+",
        default=[32, 256, 1024],
        help="a GPU block over all its layers",
    )
    parser.add_argument(
        "--k", type=int, nargs="+", default=[1, 4], help="GPU blocks per offloaded block"
    )
    parser.add_argument("--tiers", nargs="+", choices=["cpu", "disk"], default=["cpu", "disk"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--copy-threads", type=int, default=None, help="threads that move rows of host memory"
    )
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--directory", default=None, help="where the disk tier's files go")
    parser.add_argument("--durable", action="store_true", help="writes wait for the disk")
    return parser.parse_args()


def main() -> None:
    """Measure every case on every available device."""
    options = parse_options()
    total_bytes = options.megabytes * 1_000_000
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        copies = plain_copies(total_bytes, device, options.repeats)
        files = plain_files(total_bytes, options) if "disk" in options.tiers else {}
        for case in cases(options, device):
            if "cpu" in options.tiers:
                measure_cpu_tier(case, copies, options)
            if "disk" in options.tiers:
                measure_disk_tier(case, files, options)


if __name__ == "__main__":
    main()
