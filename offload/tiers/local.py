"""`cpu` and `fs`: the tiers in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from offload.base import OffloadingManager, OffloadingWorker
from offload.cpu.manager import CPUOffloadingManager
from offload.errors import CacheConfigError
from offload.fs.manager import FileOffloadingManager
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


class FileTierOptions(TierOptions, frozen=True, kw_only=True):
    """Options of `fs`."""

    directory: Path
    max_bytes: Count = 1 << 30
    """Limit for all block files together."""


class FileOffloadingSpec(OffloadingSpec):
    """The tier on disk."""

    def __init__(self, options: Mapping[str, Any], host: TierHost) -> None:
        """
        Raises:
            CacheConfigError: An option does not fit, or the directory is another cache's or cannot
                be used.
        """
        self._options = read_options(FileTierOptions, "fs", options)
        self._host = host
        sizes = self._options.sizes(host)
        payload_bytes = [page * k for page, k in zip(host.page_bytes, sizes, strict=True)]
        with self._reported():
            self._store, self._worker = host.backend.disk(
                self._options.directory, payload_bytes, host.identity, sizes
            )

    @property
    @override
    def blocks_per_offloaded_block(self) -> Sequence[int]:
        return self._options.sizes(self._host)

    @override
    def create_manager(self) -> OffloadingManager:
        options = self._options
        events = options.needs_events(self._host)
        with self._reported():
            manager = FileOffloadingManager(self._store, options.max_bytes, events)
        return options.filtered(manager)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report what the system says about the directory as a fault of the option."""
        try:
            yield
        except OSError as error:
            raise CacheConfigError(
                f"fs tier: directory {self._options.directory}: {error.strerror}"
            ) from None

    @override
    def create_worker(self) -> OffloadingWorker:
        return self._worker

    @override
    def close(self) -> None:
        self._worker.shutdown()
        self._store.close()
