"""Learns which prefix a block's hash stands for, from runs of blocks that carry their tokens.

A run follows its parent block. Where the parent's key is known, the run's keys follow from its
tokens; where it is not, the run waits until it is, bounded in number, tokens and age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvevents.events import GPU, BlockHash, BlockStored, pack_tokens
from router.index.base import SourceLimits, WaitingStatistics
from tests.oracle.index.keys import KeySpace, Mark
from tests.oracle.index.marks import marks_of

Place: TypeAlias = Callable[[BlockHash, int, bool], None]
"""`place(hash, key, is_below)`."""


@dataclass(slots=True)
class BlockRun:
    """Contiguous blocks with tokens for every hash, behind some parent or the root.

    With a lookahead a hash covers tokens behind its block, too, so its key stands for a longer
    prefix. Blocks of 4 with a lookahead of 1, where the parent's key already covers token 4:

        tokens        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12
        parent's key  0 ..... 4
        packed                  5 6 7 8   9 10 11 12
        ends, in packed               4            8
    """

    hashes: Sequence[BlockHash]
    packed: bytes
    """Tokens behind what the parent's key covers."""
    block_size: int
    lookahead: int
    """Tokens that the first hash covers beyond its block's share of *packed*."""
    marks: Sequence[Mark]
    batch: int
    """Number of the batch that carried it."""
    is_below: bool = False
    """A lower tier announced it."""

    @classmethod
    def of(cls, event: BlockStored, block_size: int, lookahead: int, batch: int) -> BlockRun:
        """The run of a dense event.

        Args:
            event: With `block_size` tokens for every hash.
            block_size: In tokens.
            lookahead: Tokens behind a block that its hash covers too.
            batch: Number of the batch that carried it.
        """
        tail = event.lookahead_token_ids[-1] if event.lookahead_token_ids else []
        # What the parent's key covers of this run already.
        covered = lookahead if event.parent_block_hash is not None else 0
        # The salt counts once, where the prompt begins; SGLang repeats it in every run.
        salt = event.cache_salt if event.parent_block_hash is None else None
        marks = marks_of(event.extra_keys, block_size, event.lora_name, salt, lookahead)
        return cls(
            hashes=event.block_hashes,
            packed=pack_tokens(event.token_ids[covered:] + tail),
            block_size=block_size,
            lookahead=lookahead - covered,
            marks=_from_token(covered, marks),
            batch=batch,
            is_below=event.tier != GPU,
        )

    @property
    def weight(self) -> int:
        """Memory cost in token equivalents; for a well-formed run its token count dominates."""
        return max(len(self.packed) // 4, len(self.hashes) + len(self.marks))

    def keys(self, key: int, space: KeySpace) -> Iterator[tuple[BlockHash, int]]:
        """Each block's hash and key; fewer where the tokens end early.

        Args:
            key: The parent's.
            space: The index's.
        """
        size, first = self.block_size, self.block_size + self.lookahead
        ends = range(first, len(self.hashes) * size + self.lookahead + 1, size)
        return zip(self.hashes, space.chain(key, self.packed, ends, self.marks), strict=False)


@dataclass(slots=True)
class WaitingRuns:
    """Runs by the parent hash they wait for, oldest first, bounded."""

    by_parent: dict[BlockHash, list[BlockRun]] = field(default_factory=dict)
    runs: int = 0
    tokens: int = 0
    given_up: int = 0

    def add(self, parent: BlockHash, run: BlockRun) -> None:
        """Keep *run* until its parent's key is known.

        Args:
            parent: The hash it waits for.
            run: The youngest so far.
        """
        self.by_parent.setdefault(parent, []).append(run)
        self.runs += 1
        self.tokens += run.weight

    def take(self, parent: BlockHash) -> list[BlockRun]:
        """Hand out all that wait for *parent*."""
        runs = self.by_parent.pop(parent, [])
        self.runs -= len(runs)
        self.tokens -= sum(run.weight for run in runs)
        return runs

    def trim(self, limits: SourceLimits, batch: int, is_missed: Callable[[BlockRun], bool]) -> int:
        """Give up the oldest until all bounds hold; returns how many of them are missed.

        Args:
            limits: The bounds.
            batch: Number of the present batch.
            is_missed: Whether one of a run's blocks is still held without a place.
        """
        before = self.given_up
        while self.by_parent:
            parent = next(iter(self.by_parent))
            too_old = self.by_parent[parent][0].batch + limits.waiting_batches < batch
            if (
                not too_old
                and self.runs <= limits.waiting_runs
                and self.tokens <= limits.waiting_tokens
            ):
                break
            self.given_up += sum(map(is_missed, self.take(parent)))
        return self.given_up - before

    def statistics(self) -> WaitingStatistics:
        """What waits, and how many were given up."""
        return WaitingStatistics(self.runs, self.tokens, self.given_up)


def place_run(run: BlockRun, key: int, space: KeySpace, place: Place, waiting: WaitingRuns) -> None:
    """Place a run and, one after the other, everything that waited for one of its blocks.

    A loop, since one run may set free a whole conversation of runs, each behind the other.

    Args:
        run: The run to start with.
        key: Of its parent, or the root.
        space: The index's.
        place: Learns the keys, as `BlockTable.place`.
        waiting: Runs that are placed leave it.
    """
    ready = [(key, run)]
    while ready:
        key, run = ready.pop()
        for block_hash, block_key in run.keys(key, space):
            place(block_hash, block_key, run.is_below)
            if block_hash in waiting.by_parent:
                ready += [(block_key, child) for child in waiting.take(block_hash)]


def _from_token(start: int, marks: Sequence[Mark]) -> Sequence[Mark]:
    """The marks from token *start* on, counted from there."""
    if not start:
        return marks
    return [Mark(mark.position - start, mark.digest) for mark in marks if mark.position >= start]
