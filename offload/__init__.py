"""The engine's side: a paged KV cache with prefix caching for hybrid models, and its lower tiers.

Every change is reported as an event. An engine's scheduler holds one `CacheManager` and, if it
offloads, one `OffloadingConnector` with a `Tier` for memory and for disk:

    from offload import CacheConfig, CacheManager, CacheRequest, RequestHasher

    config = CacheConfig.build(groups, num_blocks=1000, scheduler_block_size=16, ...)
    cache = CacheManager(config, config.scheduler_block_size)
    request = CacheRequest("a", prompt_token_ids, RequestHasher(chain, hash_block_size=16))
    computed = cache.get_computed_blocks(request)
    cache.allocate_slots(request, request.num_tokens - computed.num_tokens, computed)

The tiers' managers are imported from `offload.cpu.manager` and `offload.fs.manager`, and their
workers, which run beside the model and are all that needs torch, from `offload.cpu.worker` and
`offload.fs.worker`. `examples/hybrid_engine.py` is an engine around all of it, `docs/offloading.md`
the guide.

The files; each imports only what is listed above it:

    errors.py          exception tree
    config.py          one cache's configuration, checked when it is built
    request.py         what the cache knows of a request: tokens, block hashes, progress
    block.py           a block, and the queue of free blocks
    cached_blocks.py   hash -> block of one group, with duplicates
    event_log.py       what a step changed, reported presence-exactly
    block_pool.py      blocks: given out, taken back, cached, evicted
    groups/            block tables, and what each kind of attention needs of them
    coordinator.py     one hit for all groups, and a request's blocks in each
    cache_manager.py   the scheduler's interface: look up, allocate, cache, free, take events
    base.py            keys, specs, and the protocols of lower tiers
    tier_manager.py    what happens to a tier's blocks, in memory or on disk; events
    reuse_filter.py    lets a tier store only what several requests used
    tensor_parallel.py one engine's tiers where each of several workers holds its shard
    transfer/          copies between an engine's pages and a tier
    cpu/               the tier in memory
    fs/                the tier on disk
    peer/              prefixes pulled from the memory of other engines
    connector/         loads and stores, from plan to completion
    tiers/             tiers by name: specifications with their options, plug-ins
"""

from offload.base import OffloadingManager, OffloadingWorker
from offload.cache_manager import AllocatedBlocks, CacheManager, CacheStatistics
from offload.config import CacheConfig
from offload.connector.connector import ConnectorStatistics, FinishedLoads, OffloadingConnector
from offload.connector.load_plan import ExternalHit
from offload.connector.store_plan import StoreScope
from offload.connector.tier import Tier
from offload.coordinator import ComputedBlocks
from offload.errors import (
    BlockFileError,
    BlockRangeError,
    CacheConfigError,
    OffloadError,
    RequestStateError,
    TierStateError,
    TransferError,
)
from offload.request import CacheRequest, RequestHasher
from offload.reuse_filter import ReuseFilter

__all__ = [
    "AllocatedBlocks",
    "BlockFileError",
    "BlockRangeError",
    "CacheConfig",
    "CacheConfigError",
    "CacheManager",
    "CacheRequest",
    "CacheStatistics",
    "ComputedBlocks",
    "ConnectorStatistics",
    "ExternalHit",
    "FinishedLoads",
    "OffloadError",
    "OffloadingConnector",
    "OffloadingManager",
    "OffloadingWorker",
    "RequestHasher",
    "RequestStateError",
    "ReuseFilter",
    "StoreScope",
    "Tier",
    "TierStateError",
    "TransferError",
]
