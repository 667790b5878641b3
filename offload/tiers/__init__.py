"""Lower tiers by name: each has a specification, which reads its options and makes its parts.

    tiers = create_tiers([TierConfig("cpu", {"num_blocks": 1000})], host)
    connector = OffloadingConnector(cache, [made.tier for made in tiers])

A specification of another package is found by an entry point: a callable that takes the options as
they were configured and the engine it is for, and returns an `OffloadingSpec`.

    [project.entry-points."kvroute.offload_tiers"]
    remote = "my_package:RemoteSpec"

The files; each imports only what is listed above it:

    base.py      the interface of a specification, and its host
    options.py   options that are checked
    local.py     `cpu` and `fs`
    peers.py     `p2p`
    creation.py  from names to tiers
"""

from __future__ import annotations

from offload.tiers.base import OffloadingSpec, TierConfig, TierHost, TransferBackend
from offload.tiers.creation import BUILT_IN, GROUP, MadeTier, create_tiers, tier_names
from offload.tiers.options import Count, TierOptions, read_options
from offload.tiers.peers import PeerTierSpec

__all__ = [
    "BUILT_IN",
    "GROUP",
    "Count",
    "MadeTier",
    "OffloadingSpec",
    "PeerTierSpec",
    "TierConfig",
    "TierHost",
    "TierOptions",
    "TransferBackend",
    "create_tiers",
    "read_options",
    "tier_names",
]
