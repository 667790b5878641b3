"""How many bytes does the index need for a block that a replica holds, by the number of groups that
hold it, and where all replicas hold the same blocks?
"""

from __future__ import annotations

import argparse

from benchmarks.figures import (
    BLOCK_SIZE,
    prompt_tokens,
    report,
    stored_events,
)
from kvevents.events import Event, EventBatch
from router.index.base import SourceId
from router.index.index import PrefixIndex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50_000, help="blocks a replica")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 6])
    options = parser.parse_args()
    settings = [(groups, False) for groups in options.groups] + [(1, True)]
    for groups, is_shared in settings:
        used = _bytes_used(options.blocks, options.replicas, groups, is_shared)
        report(
            "index_memory",
            groups=groups,
            shared_by=options.replicas if is_shared else 1,
            bytes_per_replica_and_block=round(used / options.blocks / options.replicas, 1),
        )


def _bytes_used(blocks: int, replicas: int, groups: int, is_shared: bool) -> int:
    """Return the bytes that the tables and nodes take."""
    index = PrefixIndex()
    for replica in range(replicas):
        seed = 0 if is_shared else replica
        tokens = prompt_tokens(blocks * BLOCK_SIZE, seed=seed)
        for group in range(groups):
            events: list[Event] = list(stored_events(tokens, 64, group, seed=seed))
            index.apply(SourceId(f"replica-{replica}"), EventBatch(0.0, events))
    return index.core.sizes()[1]


if __name__ == "__main__":
    main()
