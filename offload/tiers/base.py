"""Defines the interface of a tier's specification, its configuration and its host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvevents.layout import KVCacheGroup
from offload.base import OffloadingManager, OffloadingWorker
from offload.connector.tier import Tier
from offload.fs.store import BlockFiles
from offload.peer.client import PeerClient


@dataclass(frozen=True)
class TierConfig:
    """One lower tier, as an operator configures it."""

    name: str
    """A built-in specification, `cpu`, `fs` or `p2p`, or a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The specification's own; numbers may be written as text."""


class TransferBackend(Protocol):
    """Makes the workers of an engine's tiers."""

    def cpu_worker(
        self, num_blocks: int, blocks_per_offloaded_block: Sequence[int]
    ) -> OffloadingWorker:
        """Return the worker that copies to and from memory.

        Args:
            num_blocks: Room in offloaded blocks.
            blocks_per_offloaded_block: GPU blocks in each, per group.
        """

    def disk(
        self,
        directory: Path,
        payload_bytes: Sequence[int],
        identity: str,
        blocks_per_offloaded_block: Sequence[int],
    ) -> tuple[BlockFiles, OffloadingWorker]:
        """Open a directory, and make the worker that copies to and from its files.

        Args:
            payload_bytes: Bytes of an offloaded block, per group.
            identity: The weights'; files of other weights are refused.
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group.
        """

    def worker(self, make: Callable[[Any], OffloadingWorker]) -> OffloadingWorker:
        """Return the worker that copies to and from a tier of another package.

        Args:
            make: Given the engine's pages, a `CanonicalKVCache`. An engine without tensors does not
                call it, and returns a worker that only takes the time.
        """

    def peer_worker(self, peers: PeerClient) -> OffloadingWorker:
        """Return the worker that copies from other engines' memories."""


@dataclass(frozen=True)
class TierHost:
    """The engine that tiers are made for."""

    groups: Sequence[KVCacheGroup]
    page_bytes: Sequence[int]
    """Bytes of a GPU block, per group."""
    identity: str
    """The identity of the weights: blocks of equal hashes have equal bytes only under one
    identity."""
    enable_events: bool
    """True if the engine takes and publishes the tiers' events."""
    backend: TransferBackend
    above: Mapping[str, tuple[Tier, OffloadingWorker]] = field(default_factory=dict)
    """The tiers that were made before, by name."""


class OffloadingSpec(Protocol):
    """One tier that is being made: called in this order, `close` once its worker was shut down."""

    @property
    def blocks_per_offloaded_block(self) -> Sequence[int]:
        """GPU blocks in an offloaded block, per group."""

    def create_manager(self) -> OffloadingManager:
        """Make the scheduler's side.

        Raises:
            CacheConfigError: The options contradict the engine.
        """

    def create_worker(self) -> OffloadingWorker:
        """Make the side that moves bytes.

        Raises:
            CacheConfigError: The options contradict the engine.
        """

    def close(self) -> None:
        """Close everything opened; also called if a part could not be made."""
