"""From names and options to tiers with all their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvevents.plugins import PlugIns
from offload.base import OffloadingWorker
from offload.connector.tier import Tier
from offload.errors import CacheConfigError
from offload.tiers.base import OffloadingSpec, TierConfig, TierHost
from offload.tiers.local import CPUOffloadingSpec, FileOffloadingSpec
from offload.tiers.peers import PeerTierSpec

GROUP = "kvroute.offload_tiers"

BUILT_IN: dict[str, Callable[[Mapping[str, Any], TierHost], OffloadingSpec]] = {
    "cpu": CPUOffloadingSpec,
    "fs": FileOffloadingSpec,
    "p2p": PeerTierSpec,
}

_METHODS = ("create_manager", "create_worker", "close")
_specs = PlugIns(GROUP, "offload tier", BUILT_IN, _METHODS, CacheConfigError)


@dataclass(frozen=True)
class MadeTier:
    """A tier with all its parts."""

    tier: Tier
    """The tier, for the connector."""
    worker: OffloadingWorker
    """Gets the tier's jobs."""
    spec: OffloadingSpec
    """The specification, closed last."""

    def close(self) -> None:
        """Finish the queued jobs, and close everything opened."""
        self.worker.shutdown()
        self.spec.close()


def tier_names() -> list[str]:
    """All names that `create_tiers` knows, built-in ones first."""
    return _specs.names()


def create_tiers(configs: Sequence[TierConfig], host: TierHost) -> list[MadeTier]:
    """Make tiers; if one cannot be made, those before it are closed.

    Args:
        configs: The fastest first.

    Raises:
        CacheConfigError: A name or an option is unknown or does not fit, or a plug-in cannot be
            used. A plug-in's own errors go through.
    """
    made: list[MadeTier] = []
    with ExitStack() as unfinished:
        for config in configs:
            tier = _create_tier(config, host)
            unfinished.callback(tier.close)
            made.append(tier)
            host = replace(host, above={**host.above, config.name: (tier.tier, tier.worker)})
        unfinished.pop_all()
    return made


def _create_tier(config: TierConfig, host: TierHost) -> MadeTier:
    spec = _specs.make(config.name, config.options, host)
    try:
        tier = Tier(spec.create_manager(), host.groups, spec.blocks_per_offloaded_block)
        return MadeTier(tier, spec.create_worker(), spec)
    except BaseException:
        spec.close()
        raise
