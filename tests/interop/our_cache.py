"""Our `CacheManager` behind the comparison's protocol.

What is cached is read only from the events, as a router would do, and not from the manager's own
state.
"""

from __future__ import annotations

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents.hashing import HashChain
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.request import NO_HINTS, CacheRequest, RequestHasher, RetentionHints
from tests.interop.cache import CachedBlock, FirstStep, Hit
from tests.interop.layouts import Layout

MAX_MODEL_LEN = 200_000


class OurCache:
    """Args:
    layout: Groups and sizes.
    num_blocks: Size of the pool, its null block included.
    max_in_flight_tokens: Tokens of one step at most.
    none_hash: Root of the hash chain, as in the peer.
    """

    def __init__(
        self, layout: Layout, num_blocks: int, max_in_flight_tokens: int, none_hash: bytes
    ) -> None:
        self.manager = build_manager(layout, num_blocks, max_in_flight_tokens, events=True)
        self._hasher = RequestHasher(HashChain("sha256", none_hash), layout.hash_block_size)
        self._requests: dict[str, CacheRequest] = {}
        self._cached: set[CachedBlock] = set()

    def add(
        self, name: str, token_ids: list[int], salt: str | None, hints: RetentionHints = NO_HINTS
    ) -> None:
        self._requests[name] = CacheRequest(
            name, token_ids, self._hasher, cache_salt=salt, hints=hints
        )

    def hit(self, name: str) -> Hit:
        computed = self.manager.get_computed_blocks(self._requests[name])
        return Hit(computed.num_tokens, computed.shared_prefix_boundary)

    def admit(self, name: str, step: FirstStep) -> bool:
        request = self._requests[name]
        computed = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request,
            step.num_new_tokens,
            computed,
            num_lookahead_tokens=step.num_lookahead_tokens,
            num_external_tokens=step.num_external_tokens,
            full_sequence_must_fit=step.full_sequence_must_fit,
        )
        self.manager.start_step()
        return allocated is not None

    def extend(self, name: str, num_new_tokens: int, num_lookahead_tokens: int) -> bool:
        request = self._requests[name]
        allocated = self.manager.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens
        )
        if allocated is None:
            # A refusal by ours changes nothing; vLLM's has already released the blocks that left
            # the window.
            self.manager.free_skipped_blocks(request)
        self.manager.start_step()
        return allocated is not None

    def set_computed(self, name: str, num_tokens: int) -> None:
        self._requests[name].num_computed_tokens = num_tokens

    def append(self, name: str, token_ids: list[int]) -> None:
        self._requests[name].append(token_ids)

    def free(self, name: str) -> None:
        self.manager.free(name)
        self._requests[name].num_computed_tokens = 0

    def forget(self, name: str) -> None:
        del self._requests[name]

    def evict(self, blocks: frozenset[CachedBlock]) -> None:
        held = [block for block in self.manager.pool._blocks if block.block_hash is not None]
        self.manager.evict_blocks(
            [block.block_id for block in held if (block.group_idx, block.block_hash) in blocks]
        )

    def reset(self) -> bool:
        return self.manager.reset()

    def cached(self) -> set[CachedBlock]:
        for event in self.manager.take_events():
            self._apply(event)
        return set(self._cached)

    def num_free_blocks(self) -> int:
        return self.manager.pool.num_free_blocks

    def _apply(self, event: Event) -> None:
        """Raises KeyError where a block is removed that was never stored: our events are
        presence-exact."""
        if isinstance(event, BlockStored):
            new = named_by(event)
            assert not new & self._cached, "a block that is cached was announced again"
            self._cached |= new
        elif isinstance(event, BlockRemoved):
            for block in named_by(event):
                self._cached.remove(block)
        elif isinstance(event, AllBlocksCleared):
            self._cached.clear()


def named_by(event: BlockStored | BlockRemoved) -> set[CachedBlock]:
    assert event.group_idx is not None
    return {CachedBlock(event.group_idx, bytes(block_hash)) for block_hash in event.block_hashes}


def build_manager(
    layout: Layout, num_blocks: int, max_in_flight_tokens: int, events: bool
) -> CacheManager:
    config = CacheConfig.build(
        layout.groups,
        num_blocks=num_blocks,
        scheduler_block_size=layout.scheduler_block_size,
        hash_block_size=layout.hash_block_size,
        enable_events=events,
        eagle=layout.eagle,
        retention_interval=layout.retention_interval,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight_tokens=max_in_flight_tokens,
    )
    return CacheManager(config, layout.scheduler_block_size)
