"""The engine's side: a paged KV cache with prefix caching for hybrid models, lower tiers, and an
event for every change.

An engine's scheduler holds one `offload.cache_manager.CacheManager` and, where it offloads, one
`offload.connector.OffloadingConnector`; each of its workers holds the tiers' transfer workers. Only
those import torch.
"""
