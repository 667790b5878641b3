"""An engine without a model, which stores and evicts blocks at random and publishes that
exactly."""

from __future__ import annotations

import random

from kvevents.codec import encode
from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout

BLOCK = 16
CPU = "CPU"
LAYOUT = KVCacheLayout.build(
    [
        KVCacheGroup(GroupKind.FULL, BLOCK),
        KVCacheGroup(GroupKind.SLIDING_WINDOW, BLOCK, sliding_window=64),
    ]
)
CHAIN = HashChain.from_seed("sha256", "a seed")


class RandomEngine:
    """Two groups, one of full attention and one with a sliding window; two tiers, or one.

    Presence-exact: only an absent block is stored, and only a present one is removed.
    """

    def __init__(self, seed: int, with_cpu: bool = True) -> None:
        self._rng = random.Random(seed)
        self._with_cpu = with_cpu
        self.prompts = _prompts(self._rng)
        self._hashes = [list(CHAIN.block_hashes(prompt, BLOCK)) for prompt in self.prompts]
        self._held: dict[tuple[int, str], dict[BlockHash, None]] = {
            (group, tier): {} for group in (0, 1) for tier in (GPU, CPU)
        }
        self._ts = 1000.0 * seed

    def step(self) -> list[Event]:
        """What one step does to the cache."""
        which = self._rng.randrange(len(self.prompts))
        end = self._rng.randrange(1, len(self._hashes[which]) + 1)
        events = [*self._store(which, end), *self._evict(GPU, 0.15)]
        if self._with_cpu and self._rng.random() < 0.5:
            events += [*self._offload(which, end), *self._evict(CPU, 0.1)]
        return events

    def prefill(self) -> list[Event]:
        """Store everything of one prompt that can be reused: a hit in both groups until the next
        step."""
        which = self._rng.randrange(len(self.prompts))
        return self._store(which, len(self._hashes[which]) - 1)

    def clear(self) -> list[Event]:
        """Empty the GPU."""
        for group in (0, 1):
            self._held[group, GPU].clear()
        return [AllBlocksCleared()]

    def payload(self, events: list[Event]) -> bytes:
        """One batch in its wire form."""
        self._ts += 0.01
        return encode(EventBatch(self._ts, events, 0))

    def _store(self, which: int, end: int) -> list[Event]:
        """Store the missing blocks before *end*, in runs; of the window group only the last
        four."""
        events: list[Event] = []
        for group, first in ((0, 0), (1, max(0, end - 4))):
            held, run = self._held[group, GPU], []
            for place in range(first, end + 1):
                if place < end and self._hashes[which][place] not in held:
                    run.append(place)
                elif run:
                    events.append(self._stored(which, group, run))
                    run = []
        return events

    def _stored(self, which: int, group: int, run: list[int]) -> BlockStored:
        hashes = [self._hashes[which][place] for place in run]
        self._held[group, GPU].update(dict.fromkeys(hashes))
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=self._hashes[which][run[0] - 1] if run[0] else None,
            token_ids=self.prompts[which][run[0] * BLOCK : (run[-1] + 1) * BLOCK],
            medium=GPU,
            group_idx=group,
            kv_cache_spec_kind=LAYOUT.groups[group].kind.value,
            kv_cache_spec_sliding_window=LAYOUT.groups[group].sliding_window,
        )

    def _offload(self, which: int, end: int) -> list[Event]:
        """Publish copies in the lower tier as engines do: without tokens."""
        events: list[Event] = []
        for group in (0, 1):
            gpu, cpu = self._held[group, GPU], self._held[group, CPU]
            new = [each for each in self._hashes[which][:end] if each in gpu and each not in cpu]
            if new:
                cpu.update(dict.fromkeys(new))
                events.append(BlockStored(new, None, [], CPU, group))
        return events

    def _evict(self, tier: str, share: float) -> list[Event]:
        events: list[Event] = []
        for group in (0, 1):
            held = self._held[group, tier]
            gone = [each for each in held if self._rng.random() < share * len(held) / 400]
            for each in gone:
                del held[each]
            if gone:
                events.append(BlockRemoved(gone, tier, group))
        return events


def _prompts(rng: random.Random) -> list[list[int]]:
    """Twenty conversations with shared prefixes."""
    roots = [[rng.randrange(50_000) for _ in range(8 * BLOCK)] for _ in range(3)]
    return [
        rng.choice(roots)[: rng.randrange(1, 9) * BLOCK]
        + [rng.randrange(50_000) for _ in range(rng.randrange(1, 25) * BLOCK)]
        for _ in range(20)
    ]
