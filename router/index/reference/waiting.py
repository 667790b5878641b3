"""Runs of blocks whose parent is not known yet: kept until it is, bounded in number, tokens and
age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvevents.events import BlockHash
from router.index.base import SourceLimits, WaitingStatistics
from router.index.reference.keys import Mark


@dataclass(slots=True)
class Run:
    """A dense event that waits for its parent's place."""

    hashes: Sequence[BlockHash]
    packed: bytes
    block_size: int
    lookahead: int
    marks: Sequence[Mark]
    batch: int

    @property
    def weight(self) -> int:
        """What it takes to keep, in tokens, of which an honest run has more than of anything
        else."""
        return max(len(self.packed) // 4, len(self.hashes) + len(self.marks))


@dataclass(slots=True)
class WaitingRuns:
    """Runs by the parent hash they wait for, oldest first, bounded."""

    by_parent: dict[BlockHash, list[Run]] = field(default_factory=dict)
    runs: int = 0
    tokens: int = 0
    given_up: int = 0

    def statistics(self) -> WaitingStatistics:
        return WaitingStatistics(self.runs, self.tokens, self.given_up)

    def add(self, parent: BlockHash, run: Run) -> None:
        self.by_parent.setdefault(parent, []).append(run)
        self.runs += 1
        self.tokens += run.weight

    def take(self, parent: BlockHash) -> list[Run]:
        runs = self.by_parent.pop(parent, [])
        self.runs -= len(runs)
        self.tokens -= sum(run.weight for run in runs)
        return runs

    def trim(self, limits: SourceLimits, batch: int) -> None:
        """Give up the oldest until all bounds hold."""
        while self.by_parent:
            parent = next(iter(self.by_parent))
            too_old = self.by_parent[parent][0].batch + limits.waiting_batches < batch
            if (
                not too_old
                and self.runs <= limits.waiting_runs
                and self.tokens <= limits.waiting_tokens
            ):
                return
            self.given_up += len(self.take(parent))
