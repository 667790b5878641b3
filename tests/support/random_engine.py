"""An engine without a model, which stores and evicts blocks at random and publishes that
exactly."""

from __future__ import annotations

import random
from collections import Counter

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


class CopyingEngine:
    """One group of full attention in a small pool, where a hash may have several physical copies.

    Two requests that need a block at once both store it, as in vLLM; blocks are evicted one copy at
    a time, least recently used first.
    """

    def __init__(self, seed: int, tells: str, blocks: int = 120) -> None:
        """
        Args:
            seed: Of everything random.
            tells: Which removals it announces: "every", "last", or "count": every one, with how
                many copies are left.
            blocks: In the pool.
        """
        self._rng = random.Random(seed)
        self._tells = tells
        self._num_blocks = blocks
        self._lru: list[BlockHash] = []
        self.copies: Counter[BlockHash] = Counter()
        """What the pool really has."""
        self.prompts = _prompts(self._rng)
        self._hashes = [list(CHAIN.block_hashes(prompt, BLOCK)) for prompt in self.prompts]

    def step(self) -> list[Event]:
        """One request, or several with one prompt at once."""
        which = self._rng.randrange(len(self.prompts))
        hashes = self._hashes[which]
        hit = next((i for i, each in enumerate(hashes) if each not in self.copies), len(hashes))
        for each in hashes[:hit]:
            self._lru.remove(each)
            self._lru.append(each)
        # A prompt that is cached whole still computes its last block.
        first = min(hit, len(hashes) - 1)
        events: list[Event] = []
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            events.append(self._stored(which, first))
            self._lru += reversed(hashes[first:])
            self.copies.update(hashes[first:])
        while len(self._lru) > self._num_blocks:
            events += self._evict(self._lru.pop(0))
        return events

    def _stored(self, which: int, first: int) -> BlockStored:
        hashes = self._hashes[which]
        return BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=self.prompts[which][first * BLOCK :],
            medium=GPU,
            group_idx=0,
            kv_cache_spec_kind=GroupKind.FULL.value,
        )

    def _evict(self, gone: BlockHash) -> list[Event]:
        self.copies[gone] -= 1
        left = self.copies[gone]
        if not left:
            del self.copies[gone]
        if self._tells == "last" and left:
            return []
        counts = [left] if self._tells == "count" else None
        return [BlockRemoved([gone], GPU, 0, remaining_copy_counts=counts)]


def _prompts(rng: random.Random) -> list[list[int]]:
    """Twenty conversations with shared prefixes."""
    roots = [[rng.randrange(50_000) for _ in range(8 * BLOCK)] for _ in range(3)]
    return [
        rng.choice(roots)[: rng.randrange(1, 9) * BLOCK]
        + [rng.randrange(50_000) for _ in range(rng.randrange(1, 25) * BLOCK)]
        for _ in range(20)
    ]
