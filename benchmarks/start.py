"""What does a start cost a router whose replicas are full? Their caches are read from the engines'
replays, or taken as a snapshot from a router that runs.

    python -m benchmarks.start --replicas 64 --blocks 20000

Both in one process, in processor time: every batch decoded and applied, as after a replay; and the
snapshot, made and sealed by one router, opened and restored by the other. The time on the wire is
not in it; the bytes are.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.figures import BLOCK_SIZE, prompt_tokens, report, stored_events
from kvevents.codec import encode
from kvevents.events import EventBatch
from kvevents.sequence import StreamPosition
from kvevents.stream_state import SourceState
from router.feed.snapshot_peers import Sender, read_sealed
from router.feed.snapshot_records import restore
from router.feed.source_feed import SavedSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.index import blocks_held

SECRET = b"shared"
_PROMPT_BLOCKS = 500
_BLOCKS_PER_EVENT = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=20_000, help="that each replica holds")
    options = parser.parse_args()
    running = PrefixIndex(secret=SECRET)
    replay_s = replay_bytes = 0.0
    for number in range(options.replicas):
        source = SourceId(f"replica-{number}")
        running.add(source)
        for batch in batches(number, options.blocks):
            replay_bytes += len(batch)
            started = time.process_time()
            running.apply(source, batch)
            replay_s += time.process_time() - started
    asyncio.run(take(running, options, replay_s, replay_bytes))


def batches(replica: int, blocks: int) -> Iterator[bytes]:
    """Yield what an engine has announced of the blocks that it holds."""
    for prompt in range(blocks // _PROMPT_BLOCKS):
        seed = 1000 * replica + prompt
        tokens = prompt_tokens(_PROMPT_BLOCKS * BLOCK_SIZE, seed)
        for event in stored_events(tokens, _BLOCKS_PER_EVENT, seed=seed):
            yield encode(EventBatch(1.0, [event], 0))


class KnownCaches:
    """The part of a feed that a snapshot is made of: every stream is whole."""

    def __init__(self, index: PrefixIndex, sources: list[SourceId]) -> None:
        self._index = index
        self._sources = sources
        self.longest_s = 0.0
        """The longest time for one source: requests wait for so long."""

    def sources(self) -> list[SourceId]:
        return self._sources

    def state(self, source: SourceId) -> SourceState:
        return SourceState.LIVE if source in self._sources else SourceState.DEAD

    def save(self, source: SourceId) -> tuple[SavedSource, list[bytes]]:
        started = time.process_time()
        records = list(self._index.export(source))
        self.longest_s = max(self.longest_s, time.process_time() - started)
        position = StreamPosition(1, 1, None, has_ring=True)
        return SavedSource("m", source, "stream", position, has_had_lower_tiers=False), records


async def take(running: PrefixIndex, options: Any, replay_s: float, replay_bytes: float) -> None:
    """Send the snapshot of *running*, and start with it."""
    feed = KnownCaches(running, [SourceId(f"replica-{each}") for each in range(options.replicas)])
    started = time.process_time()
    sender = Sender(feed, SECRET, 2**32, within_s=600.0)  # type: ignore[arg-type]
    pieces = [piece async for piece in sender.open()]
    sending_s, data = time.process_time() - started, b"".join(pieces)
    started = time.process_time()
    index = PrefixIndex(secret=SECRET)
    restored = restore(read_sealed(data, SECRET, 900.0), "m", index, needs_own_keys=True)
    taking_s = time.process_time() - started
    assert len(restored) == options.replicas
    assert blocks_held(index, restored[-1].source) == blocks_held(running, restored[-1].source)
    report(
        "start",
        replicas=options.replicas,
        blocks=options.replicas * blocks_held(index, restored[0].source),
        replay_s=round(replay_s, 2),
        replay_mb=round(replay_bytes / 1e6, 1),
        sending_s=round(sending_s, 2),
        longest_ms=round(feed.longest_s * 1000, 1),
        snapshot_mb=round(len(data) / 1e6, 1),
        taking_s=round(taking_s, 2),
        ratio=round(replay_s / taking_s, 1),
    )


if __name__ == "__main__":
    main()
