"""The engine's side: a paged KV cache with prefix caching for hybrid models, lower tiers, and an
event for every change.

An engine's scheduler holds one `offload.cache_manager.CacheManager` and, where it offloads, one
`offload.connector.OffloadingConnector`; each of its workers holds the tiers' transfer workers. Only
those import torch.

The files; each imports only what is listed above it:

    errors.py          exception tree
    config.py          one cache's configuration, checked at the door
    request.py         what the cache knows of a request: tokens, block hashes
    block.py           a block; the free ones in the order in which they go
    cached_blocks.py   hash -> block of one group, with duplicates
    event_log.py       what a step changed, told presence-exactly
    block_pool.py      blocks: given, taken back, cached, evicted
    groups/            block tables and what each kind needs of them
    coordinator.py     one hit for all groups; without caching, one group, hybrid
    cache_manager.py   the engine's face: look up, allocate, cache, free, take events
    base.py            keys, places and protocols of lower tiers
    tier_entries.py    what is in a tier and in flight, lookups, events: for every tier
    reuse_filter.py    lets a tier store only what was used before
    transfer/          copies between pages and a tier
    cpu/               the tier in memory
    fs/                the tier on disk
    connector/         loads, stores, what became of them: the scheduler's side
    engine/            a small real engine, or the same without tensors
"""
