"""Does the memory of an index stay flat while blocks, tiers and sources come and go?

Sources store runs of blocks in two groups, half of them runs that others have too, and remove their
oldest once they are full; some runs wait for a parent that comes late or never, some are offloaded.
Now and then a source announces a clear, is cleared, or dropped and added again. An operation is a
block stored or removed, or one of these. Every tenth of them, and at the end with all sources
dropped, what is held and the memory are reported.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BLOCK_SIZE, block_hash, prompt_tokens, report
from kvevents.codec import encode
from kvevents.events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    TierBlocksCleared,
)
from router.index.base import SourceId, SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.support.index import blocks_held

_RUN = 32
"""Blocks of a run."""
_RARE = 0.0005
"""The probability of each of the rare operations at a step."""


@dataclass(frozen=True)
class Sample:
    """The state after so many operations."""

    operations: int
    blocks: int
    """Held on all GPUs, counted by source and group."""
    table_bytes: int
    """The bytes of the index's tables."""
    resident_bytes: int
    """The bytes of the process."""


class Churn:
    """The traffic of engines that never rest.

    Args:
        index: Takes it.
        sources: How many.
        runs: What each source holds once it is full.
        seed: Of all that is left to chance.
    """

    def __init__(self, index: PrefixIndex, sources: int, runs: int, seed: int = 0) -> None:
        self.operations = 0
        self._index = index
        self._runs = runs
        self._rng = random.Random(seed)
        self._held = {SourceId(f"replica-{number}"): deque[int]() for number in range(sources)}
        self._next_run = 1 << 40
        self._tokens = prompt_tokens(_RUN * BLOCK_SIZE)
        for source in self._held:
            self._add(source)

    def samples(self, operations: int, count: int = 10) -> Iterator[Sample]:
        """Go on for so many operations; yields the state *count* times meanwhile.

        Args:
            operations: In all.
            count: Evenly spread.
        """
        start = self.operations
        for number in range(1, count + 1):
            while self.operations - start < operations * number // count:
                self._step()
            yield self.sample()

    def drop_all(self) -> Sample:
        """Drop every source; returns what is left."""
        for source in self._held:
            self._index.drop(source)
        return self.sample()

    def sample(self) -> Sample:
        """Return the state now."""
        core = getattr(self._index, "core", None)
        blocks = sum(blocks_held(self._index, source) for source in self._held)
        return Sample(self.operations, blocks, core.sizes()[1] if core else 0, _resident_bytes())

    def _add(self, source: SourceId) -> None:
        self._held[source].clear()
        self._index.add(source, LayoutHints(hash_seeds=()))

    def _step(self) -> None:
        source = self._rng.choice(list(self._held))
        roll = self._rng.random()
        if roll < 3 * _RARE:
            self._rare(source, int(roll / _RARE))
            self.operations += 1
            return
        held, events = self._held[source], [*self._stored()]
        held.append(self._last)
        if len(held) > self._runs:
            events += self._removed(held.popleft())
        self._apply(source, events)
        if roll > 0.98:
            self._index.match([*self._tokens, 1])

    def _rare(self, source: SourceId, which: int) -> None:
        if which == 0:
            self._index.drop(source)
            self._add(source)
        elif which == 1:
            self._held[source].clear()
            self._index.clear(source)
        else:
            self._held[source].clear()
            self._apply(source, [AllBlocksCleared(), TierBlocksCleared(CPU)])

    def _apply(self, source: SourceId, events: list[Event]) -> None:
        self._index.apply(source, encode(EventBatch(0.0, events)))
        self.operations += sum(
            len(event.block_hashes)
            for event in events
            if isinstance(event, (BlockStored, BlockRemoved))
        )

    def _stored(self) -> Iterator[Event]:
        """Yield a run in both groups; seldom behind a parent that is not known, or offloaded as
        well."""
        if self._rng.random() < 0.5:
            self._last = self._rng.randrange(self._runs * 8)
        else:
            self._next_run += 1
            self._last = self._next_run
        hashes = [block_hash(self._last, index) for index in range(_RUN)]
        tokens = [self._last % 100_000, *self._tokens[1:]]
        parent = block_hash(self._last, -1) if self._rng.random() < 0.02 else None
        for group, kind in enumerate(("full_attention", "sliding_window")):
            window = 128 if group else None
            yield BlockStored(
                [*hashes],
                parent,
                tokens,
                GPU,
                group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                block_size=BLOCK_SIZE,
            )
        if self._rng.random() < 0.05:
            yield BlockStored([*hashes], None, [], CPU, 0, block_size=0)

    def _removed(self, run: int) -> Iterator[Event]:
        hashes = [block_hash(run, index) for index in range(_RUN)]
        for group in (0, 1):
            yield BlockRemoved(hashes, GPU, group)
        yield BlockRemoved(hashes, CPU, 0)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--sources", type=int, default=70, help="more than 64 by default")
    parser.add_argument("--runs", type=int, default=64, help="of 32 blocks, held by each source")
    options = parser.parse_args()
    limits = SourceLimits(waiting_runs=256, waiting_batches=1000)
    churn = Churn(PrefixIndex(limits), options.sources, options.runs)
    for sample in churn.samples(options.operations):
        _report(sample)
    sample = churn.drop_all()
    gc.collect()
    _report(sample)


def _report(sample: Sample) -> None:
    report(
        "index_churn",
        operations=sample.operations,
        blocks=sample.blocks,
        table_megabytes=round(sample.table_bytes / 1e6, 2),
        resident_megabytes=round(sample.resident_bytes / 1e6, 1),
    )


if __name__ == "__main__":
    main()
