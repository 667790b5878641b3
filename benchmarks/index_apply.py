"""How many blocks per second does the index apply, decoding included, by the number of blocks per
event?

The peer in the same run is a group-blind index: one dictionary from block hash to the replicas that
hold it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from benchmarks.figures import (
    BLOCK_SIZE,
    processor_seconds,
    prompt_tokens,
    removed_events,
    report,
    stored_events,
)
from kvevents.codec import decode, encode
from kvevents.events import BlockRemoved, BlockStored, Event, EventBatch
from router.index.base import SourceId
from router.index.index import PrefixIndex


class HashHolders:
    """The state of a router without groups: block hash -> replicas."""

    def __init__(self) -> None:
        self.holders: dict[int | bytes, set[str]] = {}

    def apply(self, replica: str, payload: bytes) -> None:
        """Decode and apply a batch.

        Args:
            replica: Whose events they are.
            payload: As received.
        """
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self.holders.setdefault(block_hash, set()).add(replica)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.holders.get(block_hash, set()).discard(replica)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--blocks", type=int, default=60_000, help="blocks to store and remove again"
    )
    parser.add_argument("--blocks-per-event", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    for size in options.blocks_per_event:
        _measure(options.blocks, size)


def _measure(blocks: int, blocks_per_event: int) -> None:
    tokens = prompt_tokens(blocks * BLOCK_SIZE)
    stored = _payloads(list(stored_events(tokens, blocks_per_event)))
    removed = _payloads(list(removed_events(tokens, blocks_per_event)))
    index = PrefixIndex()
    blind = HashHolders()
    for action, payloads in (("stored", stored), ("removed", removed)):
        theirs = _seconds(payloads, lambda payload: blind.apply("replica", payload))
        ours = _seconds(payloads, _apply_to(index))
        report(
            "index_apply",
            action=action,
            blocks_per_event=blocks_per_event,
            blocks_per_second=round(blocks / ours),
            group_blind_blocks_per_second=round(blocks / theirs),
            ratio=round(theirs / ours, 3),
        )


def _apply_to(index: PrefixIndex) -> Callable[[bytes], object]:
    return lambda payload: index.apply(SourceId("replica"), payload)


def _payloads(events: Sequence[Event], events_per_batch: int = 16) -> list[bytes]:
    batches = [
        events[start : start + events_per_batch]
        for start in range(0, len(events), events_per_batch)
    ]
    return [encode(EventBatch(0.0, batch, 0)) for batch in batches]


def _seconds(payloads: list[bytes], apply: Callable[[bytes], object]) -> float:
    return processor_seconds(lambda: [apply(payload) for payload in payloads])


if __name__ == "__main__":
    main()
