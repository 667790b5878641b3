"""How many bytes does the index need for a block that a replica holds, by the number of groups that
hold it?"""

from __future__ import annotations

import argparse
import gc
import tracemalloc

from benchmarks.figures import BLOCK_SIZE, prompt_tokens, report, stored_events
from kvevents.events import Event, EventBatch
from router.index import SourceId, create_index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50_000, help="blocks a replica")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 6])
    options = parser.parse_args()
    for groups in options.groups:
        used = _bytes_used(options.blocks, options.replicas, groups)
        held = options.blocks * options.replicas
        report("index_memory", groups=groups, bytes_per_replica_and_block=round(used / held, 1))


def _bytes_used(blocks: int, replicas: int, groups: int) -> int:
    index = create_index()
    gc.collect()
    tracemalloc.start()
    for replica in range(replicas):
        tokens = prompt_tokens(blocks * BLOCK_SIZE, seed=replica)
        for group in range(groups):
            events: list[Event] = list(stored_events(tokens, 64, group, seed=replica))
            index.apply(SourceId(f"replica-{replica}"), EventBatch(0.0, events))
            del events
        del tokens
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used


if __name__ == "__main__":
    main()
