"""Tiers of a tensor-parallel engine, where each of several workers holds its shard of every block.

Where the scheduler decides a tier's content, one manager speaks for all workers: `ShardedWorker`
gives each job to all of them and reports it when the last has ended. Where the workers' own tiers
decide, each evicts in its own time, and `ShardEvents` turns their reports into the blocks that the
engine can load:

    worker 0    stored A    stored B                removed A
    worker 1                stored A    stored B
    the engine              stored A    stored B    removed A
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from typing_extensions import override

from kvevents.events import BlockHash, BlockRemoved, BlockStored, KVEventAggregator
from offload.base import OffloadingWorker, TransferJob, TransferResult
from offload.errors import CacheConfigError, TransferError

TierEvent: TypeAlias = BlockStored | BlockRemoved
_Block: TypeAlias = tuple[str, int | None, BlockHash]
"""Tier, group and hash."""


# --- workers that follow one manager --------------------------------------------------------------


@dataclass(slots=True)
class _ShardedJob:
    """A job on its way through all workers."""

    job: TransferJob
    waiting_for: set[int]
    success: bool = True
    transferred_bytes: int = 0
    time_s: float = 0.0


class ShardedWorker(OffloadingWorker):
    """Several workers as one: a job has ended when all have ended it, and succeeded if all did.

    A block that a single worker failed to copy is useless to the others.
    """

    def __init__(self, workers: Sequence[OffloadingWorker]) -> None:
        """
        Args:
            workers: One per shard, each with room for the same blocks.

        Raises:
            CacheConfigError: No worker is given.
        """
        if not workers:
            raise CacheConfigError("sharded worker: there must be at least one worker")
        self._workers = tuple(workers)
        self._jobs: dict[int, _ShardedJob] = {}
        """In the order of their submission."""

    @override
    def submit(self, job: TransferJob) -> None:
        """Give the job to all workers; one that cannot take it after the first fails the job."""
        self._workers[0].submit(job)
        sharded = _ShardedJob(job, {0})
        self._jobs[job.job_id] = sharded
        for rank in range(1, len(self._workers)):
            if self._takes(rank, job):
                sharded.waiting_for.add(rank)
            else:
                sharded.success = False

    def _takes(self, rank: int, job: TransferJob) -> bool:
        try:
            self._workers[rank].submit(job)
        except TransferError:
            return False
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        for rank, worker in enumerate(self._workers):
            for result in worker.get_finished():
                self._take(rank, result)
        finished: list[TransferResult] = []
        while self._jobs:
            first = next(iter(self._jobs.values()))
            if first.waiting_for:
                break
            finished.append(_result_of(self._jobs.pop(first.job.job_id)))
        return finished

    def _take(self, rank: int, result: TransferResult) -> None:
        sharded = self._jobs[result.job_id]
        sharded.waiting_for.discard(rank)
        sharded.success &= result.success
        sharded.transferred_bytes += result.transferred_bytes
        sharded.time_s = max(sharded.time_s, result.time_s)

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = list(job_ids)
        for rank, worker in enumerate(self._workers):
            # A worker that could not take a job does not know it.
            worker.wait(
                [
                    each
                    for each in wanted
                    if (job := self._jobs.get(each)) and rank in job.waiting_for
                ]
            )

    @override
    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()


def _result_of(sharded: _ShardedJob) -> TransferResult:
    return TransferResult(
        sharded.job.job_id,
        sharded.job.direction,
        sharded.success,
        sharded.transferred_bytes if sharded.success else 0,
        sharded.time_s,
    )


# --- workers with tiers of their own --------------------------------------------------------------


class ShardEvents:
    """Tracks the common content of all workers' tiers, presence-exactly: a block while all have it.

    Workers may report at different times and evict on their own. Each reports a block as stored
    when it has gone from absent to present in its tier, and as removed when it is gone.
    """

    def __init__(self, num_workers: int) -> None:
        """Expect reports of workers `0` to `num_workers - 1`.

        Raises:
            CacheConfigError: No worker is given.
        """
        if num_workers < 1:
            raise CacheConfigError(f"shard events: num_workers {num_workers} must be at least 1")
        self._num_workers = num_workers
        self._aggregator = KVEventAggregator(num_workers)
        """Holds the blocks that some workers have, and those that `take_events` will report."""
        self._stored: dict[_Block, BlockStored] = {}
        """Every block that any worker has, as the first that had it reported it."""
        self._reported: set[_Block] = set()
        """Blocks that `take_events` reported as stored."""
        self._removed: dict[_Block, None] = {}
        """The blocks among them that a worker has removed since."""

    def report(self, worker: int, events: Iterable[TierEvent]) -> None:
        """Take the changes of one worker's tier.

        Args:
            events: As its tier reported them, without tokens, in their order.

        Raises:
            CacheConfigError: No worker has that rank.
        """
        if not 0 <= worker < self._num_workers:
            raise CacheConfigError(
                f"shard events: worker {worker} must be in 0 to {self._num_workers - 1}"
            )
        for event in events:
            for block_hash in event.block_hashes:
                block = (event.tier, event.group_idx, block_hash)
                if isinstance(event, BlockStored):
                    one = msgspec.structs.replace(event, block_hashes=[block_hash])
                    self._add(worker, block, one)
                else:
                    self._remove(worker, block)

    def _add(self, worker: int, block: _Block, event: BlockStored) -> None:
        if block in self._reported:
            return
        event = self._stored.setdefault(block, event)
        if worker not in self._aggregator.get_workers(event):
            self._aggregator.add_events(worker, [event])

    def _remove(self, worker: int, block: _Block) -> None:
        event = self._stored.get(block)
        if event is None:
            return
        if block in self._reported:
            self._reported.discard(block)
            self._removed[block] = None
            for other in set(range(self._num_workers)) - {worker}:
                self._aggregator.add_events(other, [event])
        else:
            self._aggregator.withdraw_event(worker, event)
        if not self._aggregator.get_workers(event):
            del self._stored[block]

    def take_events(self) -> list[TierEvent]:
        """Take the changes of loadable blocks since the last call, to publish."""
        events: list[TierEvent] = list(_removals(self._removed))
        self._removed = {}
        stored = [
            each for each in self._aggregator.pop_common_events() if isinstance(each, BlockStored)
        ]
        for event in stored:
            self._reported.add((event.tier, event.group_idx, event.block_hashes[0]))
        return events + list(_runs(stored))


def _removals(blocks: Iterable[_Block]) -> Iterator[BlockRemoved]:
    """One event per tier and group."""
    hashes: dict[tuple[str, int | None], list[BlockHash]] = {}
    for tier, group_idx, block_hash in blocks:
        hashes.setdefault((tier, group_idx), []).append(block_hash)
    for (tier, group_idx), removed in hashes.items():
        yield BlockRemoved(removed, tier, group_idx)


def _runs(events: Iterable[BlockStored]) -> Iterator[BlockStored]:
    """Events of single blocks, those that differ only in their hash as one."""
    hashes: dict[BlockStored, list[BlockHash]] = {}
    for event in events:
        kind = msgspec.structs.replace(event, block_hashes=[])
        hashes.setdefault(kind, []).extend(event.block_hashes)
    for kind, stored in hashes.items():
        yield msgspec.structs.replace(kind, block_hashes=stored)
