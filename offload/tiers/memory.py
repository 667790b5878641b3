"""`cpu`: the tier in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from offload.base import OffloadingManager, OffloadingWorker
from offload.cpu.manager import CPUOffloadingManager
from offload.tiers.base import OffloadingSpec, TierHost
from offload.tiers.options import Count, TierOptions, read_options


class CPUTierOptions(TierOptions, frozen=True, kw_only=True):
    """Options of `cpu`."""

    num_blocks: Count
    """Room in offloaded blocks."""
    cache_policy: str = "lru"
    """See `offload.cpu.policies`."""


class CPUOffloadingSpec(OffloadingSpec):
    """The tier in memory."""

    def __init__(self, options: Mapping[str, Any], host: TierHost) -> None:
        """
        Raises:
            CacheConfigError: An option does not fit.
        """
        self._options = read_options(CPUTierOptions, "cpu", options)
        self._host = host

    @property
    @override
    def blocks_per_offloaded_block(self) -> Sequence[int]:
        return self._options.sizes(self._host)

    @override
    def create_manager(self) -> OffloadingManager:
        options = self._options
        return options.filtered(
            CPUOffloadingManager(
                options.num_blocks, options.cache_policy, options.needs_events(self._host)
            )
        )

    @override
    def create_worker(self) -> OffloadingWorker:
        return self._host.backend.cpu_worker(
            self._options.num_blocks, self.blocks_per_offloaded_block
        )

    @override
    def close(self) -> None:
        """Do nothing: nothing was opened."""
