"""A toy engine that publishes what its KV cache holds.

A prompt per line as a JSON list in, the number of cached tokens out.
"""

import json
import sys
from itertools import takewhile

from kvevents import (
    GPU,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventPublisher,
    GroupKind,
    HashChain,
    KVCacheGroup,
    KVCacheLayout,
    PublisherConfig,
    create_publisher,
)

BLOCK_SIZE, NUM_BLOCKS = 16, 64
LAYOUT = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, BLOCK_SIZE)])
CHAIN = HashChain.from_seed("sha256")


class Engine:
    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._cached: dict[BlockHash, None] = {}  # least recently used first

    def prefill(self, token_ids: list[int]) -> int:
        hashes: list[BlockHash] = list(CHAIN.block_hashes(token_ids, BLOCK_SIZE))
        known = sum(1 for _ in takewhile(self._cached.__contains__, hashes))
        # A block is useless without all blocks before it, so the last ones are evicted first.
        for block in reversed(hashes):
            self._cached.pop(block, None)
            self._cached[block] = None
        events: list[Event] = []
        if stored := hashes[known:]:
            parent = hashes[known - 1] if known else None
            tokens = token_ids[known * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]
            events.append(BlockStored(stored, parent, tokens, GPU, group_idx=0))
        if removed := list(self._cached)[:-NUM_BLOCKS]:
            events.append(BlockRemoved(removed, GPU, group_idx=0))
        for block in removed:
            del self._cached[block]
        # One batch a step, in order. It takes microseconds and never waits.
        self._publisher.publish(events)
        # The last token is always computed.
        return min(known, (len(token_ids) - 1) // BLOCK_SIZE) * BLOCK_SIZE


if __name__ == "__main__":
    config = PublisherConfig(endpoint=sys.argv[1], replay_endpoint=sys.argv[2], topic="kv-events")
    with create_publisher(config, LAYOUT, CHAIN) as publisher:
        engine = Engine(publisher)
        for line in sys.stdin:
            print(engine.prefill(json.loads(line)), flush=True)
