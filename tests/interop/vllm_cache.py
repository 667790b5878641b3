"""vLLM's own `KVCacheManager` behind the comparison's protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvevents.layout import GroupKind, KVCacheGroup
from tests.interop.cache import CachedBlock, FirstStep, Hit
from tests.interop.layouts import Layout

register_all_kvcache_specs(SimpleNamespace())

MAX_MODEL_LEN = 200_000


class VllmCache:
    """Args: layout: Groups and sizes. num_blocks: Size of the pool, its null block included.
    max_in_flight_tokens: Tokens of one step at most. partial_tails: Whether full attention
    registers the end of a prompt inside a coarse block (see `drop_partial_tails`). events: Whether
    the manager keeps a list of events.
    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        max_in_flight_tokens: int,
        partial_tails: bool = True,
        events: bool = False,
    ) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self.none_hash: bytes = kv_cache_utils.NONE_HASH
        self.manager = build_manager(layout, num_blocks, max_in_flight_tokens, events)
        if not partial_tails:
            drop_partial_tails(self.manager)
        self._pool = self.manager.block_pool
        self._tells_boundary = layout.retention_interval is not None or layout.has_mamba
        self.hasher = kv_cache_utils.get_request_block_hasher(layout.hash_block_size, hash_function)
        self._requests: dict[str, Request] = {}

    def add(self, name: str, token_ids: list[int], salt: str | None) -> None:
        self._requests[name] = build_request(name, token_ids, self.hasher, salt=salt)

    def hit(self, name: str) -> Hit:
        _, num_tokens, boundary = self.manager.get_computed_blocks(self._requests[name])
        # vLLM always reports the boundary, ours only where it determines what is kept or where a
        # chunk should end.
        return Hit(num_tokens, boundary if self._tells_boundary else 0)

    def admit(self, name: str, step: FirstStep) -> bool:
        request = self._requests[name]
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request,
            step.num_new_tokens,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=step.num_lookahead_tokens,
            num_external_computed_tokens=step.num_external_tokens,
            full_sequence_must_fit=step.full_sequence_must_fit,
        )
        if allocated is None:
            return False
        request.status = RequestStatus.RUNNING
        self._end_step()
        return True

    def extend(self, name: str, num_new_tokens: int, num_lookahead_tokens: int) -> bool:
        request = self._requests[name]
        allocated = self.manager.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens
        )
        self._end_step()
        return allocated is not None

    def set_computed(self, name: str, num_tokens: int) -> None:
        self._requests[name].num_computed_tokens = num_tokens

    def append(self, name: str, token_ids: list[int]) -> None:
        self._requests[name].append_output_token_ids(token_ids)

    def free(self, name: str) -> None:
        request = self._requests[name]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def forget(self, name: str) -> None:
        del self._requests[name]

    def evict(self, blocks: frozenset[CachedBlock]) -> None:
        doomed = {
            block.block_id
            for block in self._pool.blocks
            if block.block_hash and as_cached(block.block_hash) in blocks
        }
        self.manager.evict_blocks(doomed)

    def reset(self) -> bool:
        return bool(self.manager.reset_prefix_cache())

    def cached(self) -> set[CachedBlock]:
        return {as_cached(key) for key in self._pool.cached_block_hash_to_block._cache}

    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def _end_step(self) -> None:
        # A Mamba group allocates new states per step; every operation here is a separate step.
        self.manager.coordinator.new_step_starts()


def as_cached(key: Any) -> CachedBlock:
    return CachedBlock(kv_cache_utils.get_group_id(key), bytes(kv_cache_utils.get_block_hash(key)))


def build_request(name: str, token_ids: list[int], hasher: Any, **options: Any) -> Request:
    """Make a request as the engine's front end does; *salt* and *lora_request* isolate its
    blocks."""
    return Request(
        request_id=name,
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1_000_000),
        pooling_params=None,
        cache_salt=options.get("salt"),
        lora_request=options.get("lora_request"),
        block_hasher=hasher,
    )


def build_manager(
    layout: Layout, num_blocks: int, max_in_flight_tokens: int, events: bool
) -> KVCacheManager:
    return KVCacheManager(
        cache_config(layout, num_blocks),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=layout.scheduler_block_size,
        hash_block_size=layout.hash_block_size,
        max_in_flight_tokens=max_in_flight_tokens,
        use_eagle=bool(layout.eagle),
        enable_kv_cache_events=events,
    )


def cache_config(layout: Layout, num_blocks: int) -> KVCacheConfig:
    """What vLLM's planning would hand to the scheduler, each group with a layer."""
    flagged = () if isinstance(layout.eagle, bool) else layout.eagle
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [f"layer {index}"],
                _spec(group, heads=2 if layout.own_spec and index in flagged else 1),
                is_eagle_group=index in flagged,
            )
            for index, group in enumerate(layout.groups)
        ],
        prefix_cache_retention_interval=layout.retention_interval,
    )


def drop_partial_tails(manager: KVCacheManager) -> None:
    """Keep full attention from registering a prompt's end inside a block.

    A full-attention group whose blocks are coarser than the hash registers the hash at the prompt's
    last hash boundary for the block that is not full yet. Without partial hits (they need a Mamba
    group that is coarser than the hash, too) such an entry never serves a hit, but it gives the
    block a name, so the free queue treats it as cached. Ours does not do that.
    """
    for group in manager.coordinator.single_type_managers:
        if isinstance(group, FullAttentionManager):
            group._cache_partial_tail_block = lambda request, num_tokens: None


def _spec(group: KVCacheGroup, heads: int) -> KVCacheSpec:
    size = group.block_size
    if group.kind is GroupKind.MAMBA:
        return MambaSpec(
            block_size=size, shapes=((8,),), dtypes=(torch.float16,), mamba_cache_mode="align"
        )
    common: dict[str, Any] = {
        "block_size": size,
        "num_kv_heads": heads,
        "head_size": 8,
        "dtype": torch.float16,
    }
    if group.kind is GroupKind.SLIDING_WINDOW:
        return SlidingWindowSpec(**common, sliding_window=group.sliding_window)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.attention_chunk_size)
    return FullAttentionSpec(**common)
