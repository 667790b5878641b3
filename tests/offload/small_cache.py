"""Parts of a small cache for tests: requests, single groups, readable block tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvevents.events import BlockRemoved, BlockStored, Event, GroupIdx
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheGroup, KVCacheLayout
from offload.block import Block
from offload.block_pool import BlockPool
from offload.config import CacheConfig
from offload.event_log import EventLog
from offload.groups.base import GroupManager, RequestNeed, Retention
from offload.request import CacheRequest, RequestHasher

CHAIN = HashChain.from_seed("sha256", "a seed")
GROUP_0, GROUP_1 = GroupIdx(0), GroupIdx(1)
KEEP_ALL = Retention(None)


def request(
    request_id: str, tokens: Iterable[int], hash_block_size: int = 4, **settings: Any
) -> CacheRequest:
    """A request whose blocks are hashed every *hash_block_size* tokens."""
    return CacheRequest(request_id, list(tokens), RequestHasher(CHAIN, hash_block_size), **settings)


def take_events(pool: BlockPool) -> list[Event]:
    """What changed since the last call."""
    assert pool.event_log is not None
    return pool.event_log.take()


def ids(blocks: Iterable[Block]) -> list[int]:
    """A readable block table: block ids, 0 for the null block."""
    return [block.block_id for block in blocks]


def manager_of(
    kind: Callable[..., GroupManager],
    group: KVCacheGroup,
    *,
    num_blocks: int = 50,
    scheduler_block_size: int | None = None,
    max_in_flight_tokens: int = 16,
    max_model_len: int = 200,
    eagle: bool = False,
) -> GroupManager:
    """One group with a pool of its own, whose blocks are given out as 1, 2, 3 and so on."""
    config = CacheConfig(
        layout=KVCacheLayout(
            groups=(group,),
            hash_block_size=group.block_size,
            scheduler_block_size=scheduler_block_size or group.block_size,
            eagle=frozenset({0} if eagle else ()),
        ),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        enable_caching=True,
        enable_events=True,
        retention_interval=None,
    )
    return kind(GROUP_0, config, BlockPool(num_blocks, [group], EventLog([group])))


def need(
    num_tokens: int,
    computed: int = 0,
    blocks: Sequence[Block] = (),
    slots: int | None = None,
    encoder: int = 0,
) -> RequestNeed:
    """What a request of one group needs to reach *num_tokens*, *computed* of which it has."""
    return RequestNeed(
        num_tokens,
        num_tokens if slots is None else slots,
        computed,
        (blocks,),
        num_encoder_tokens=encoder,
    )


def table_after(manager: GroupManager, num_tokens: int) -> list[int]:
    """What a new request holds once it has computed *num_tokens* in one step."""
    manager.allocate_new_blocks("new", need(num_tokens))
    manager.free_skipped_blocks("new", num_tokens)
    return ids(manager.block_table("new"))


def cached_and_free(manager: GroupManager, prompt: CacheRequest, num_tokens: int) -> list[Block]:
    """Cache a prompt's first *num_tokens*, give them back, and return the blocks in order."""
    manager.allocate_new_blocks(prompt.request_id, need(num_tokens))
    manager.cache_blocks(prompt, num_tokens, KEEP_ALL)
    blocks = list(manager.block_table(prompt.request_id))
    manager.free(prompt.request_id)
    return blocks


def stored(events: Iterable[Event]) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored)]


def removed(events: Iterable[Event]) -> list[BlockRemoved]:
    return [event for event in events if isinstance(event, BlockRemoved)]
