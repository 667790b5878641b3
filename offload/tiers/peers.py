"""`p2p`: the tiers in memory of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
from typing_extensions import override

from offload.base import OffloadingManager, OffloadingWorker, OffloadKey, unpack_offload_key
from offload.cpu.manager import CPUOffloadingManager
from offload.errors import CacheConfigError
from offload.peer.client import PeerClient
from offload.peer.manager import PeerManager
from offload.peer.server import PeerServer
from offload.reuse_filter import ReuseFilter
from offload.tiers.base import OffloadingSpec, TierHost
from offload.tiers.options import read_options


class PeerTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `p2p`."""

    host: str = "127.0.0.1"
    """The address at which others read this engine's tier in memory."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Its port, 0 for any; without one, this engine pulls from others, and they do not from it."""
    answer_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.25
    """How long to wait for a peer's answer; then the prompt is computed."""


class PeerTierSpec(OffloadingSpec):
    """Other engines' tiers in memory, read as one, and the one that they read."""

    def __init__(self, options: Mapping[str, Any], host: TierHost) -> None:
        """
        Raises:
            CacheConfigError: An option does not fit, the address cannot be bound, or no tier in
                memory precedes this one for others to read.
        """
        self._options = read_options(PeerTierOptions, "p2p", options)
        self._host = host
        known = f"{host.identity} {list(host.page_bytes)}"
        identity = sha256(known.encode()).digest()
        self.peers = PeerClient(identity, max(host.page_bytes), self._options.answer_s)
        """Asks others for their blocks."""
        self.server: PeerServer | None = None
        """Answers others; None without a port."""
        if self._options.port is not None:
            memory = _memory_of(host)
            self.server = PeerServer(self._options.host, self._options.port, identity, memory)

    @property
    @override
    def blocks_per_offloaded_block(self) -> Sequence[int]:
        return (1,) * len(self._host.groups)

    @override
    def create_manager(self) -> OffloadingManager:
        return PeerManager()

    @override
    def create_worker(self) -> OffloadingWorker:
        return self._host.backend.peer_worker(self.peers)

    @override
    def close(self) -> None:
        if self.server is not None:
            self.server.close()


@runtime_checkable
class _ReadsBlocks(Protocol):
    def read_block(self, block_id: int, num_bytes: int) -> bytes:
        """Return the first bytes of a block of the tier."""


class _TierInMemory:
    """See `PeerMemory`."""

    def __init__(
        self, manager: CPUOffloadingManager, worker: OffloadingWorker, page_bytes: Sequence[int]
    ) -> None:
        self._manager = manager
        self._worker = worker
        self._page_bytes = page_bytes

    def holds(self, key: OffloadKey) -> bool:
        return self._manager.holds(key)

    def read(self, key: OffloadKey) -> bytes | None:
        worker = self._worker
        if not isinstance(worker, _ReadsBlocks):
            return None  # an engine without tensors
        if not self._manager.holds(key):
            return None  # what a peer asks for need not be a key
        _, group_idx = unpack_offload_key(key)
        size = self._page_bytes[group_idx]
        return self._manager.read(key, lambda block_id: worker.read_block(block_id, size))


def _memory_of(host: TierHost) -> _TierInMemory:
    """Return the tier that others may read.

    Raises:
        CacheConfigError: No such tier, or its blocks are of other sizes than the GPU's.
    """
    found = host.above.get("cpu")
    if found is None:
        raise CacheConfigError("p2p tier: port needs a cpu tier before it, for others to read")
    tier, worker = found
    if set(tier.sizes) != {1}:
        raise CacheConfigError(
            f"p2p tier: port needs a cpu tier with blocks_per_offloaded_block 1, "
            f"and not {list(tier.sizes)}"
        )
    manager = tier.manager.manager if isinstance(tier.manager, ReuseFilter) else tier.manager
    assert isinstance(manager, CPUOffloadingManager)
    return _TierInMemory(manager, worker, host.page_bytes)
