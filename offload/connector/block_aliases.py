"""Under which hashes the blocks of a tier can be asked for.

A tier whose offloaded blocks cover one GPU block each names them alike. Where they cover several,
each of those has a hash of its own: the router, and a prompt that parts inside an offloaded block,
ask for these. Offloaded blocks that share their first GPU blocks share those names too, so a name
is there as long as any block is that bears it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.events import GroupIdx
from offload.base import OffloadKey, pack_offload_key, unpack_offload_key


class TierNames:
    """What a tier's blocks are called; bounded by what the tier holds or is being given."""

    def __init__(self, blocks_per_offloaded_block: Sequence[int]) -> None:
        """
        Args:
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group.
        """
        self._sizes = blocks_per_offloaded_block
        self._inner: dict[OffloadKey, Sequence[bytes]] = {}
        self._bearers: dict[tuple[GroupIdx, bytes], dict[OffloadKey, None]] = {}

    def note(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> None:
        """A block is about to be stored: the hashes of its GPU blocks, the last of them its own."""
        if len(block_hashes) > 1:
            self._inner[key] = block_hashes

    def forget(self, key: OffloadKey) -> None:
        """The block will not be stored after all."""
        self._inner.pop(key, None)

    def add(self, key: OffloadKey) -> list[bytes]:
        """The block can be loaded now; returns the names that it is the first to bear."""
        own, group_idx = unpack_offload_key(key)
        if self._sizes[group_idx] == 1:
            return [own]
        return self._bear(key, group_idx, self._inner.setdefault(key, (own,)))

    def learn(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> list[bytes]:
        """What a block is called that was stored by an earlier process; returns the names that it
        is the first to bear.

        Until then it is known by its own hash alone, and nobody can ask for the GPU blocks before
        its last.
        """
        known = self._inner.get(key, ())
        own, group_idx = unpack_offload_key(key)
        if len(known) != 1 or key not in self._bearers.get((group_idx, own), ()):
            return []
        self._inner[key] = block_hashes
        return self._bear(key, group_idx, block_hashes)

    def _bear(
        self, key: OffloadKey, group_idx: GroupIdx, block_hashes: Sequence[bytes]
    ) -> list[bytes]:
        new: list[bytes] = []
        for block_hash in block_hashes:
            bearers = self._bearers.setdefault((group_idx, block_hash), {})
            if not bearers:
                new.append(block_hash)
            bearers[key] = None
        return new

    def remove(self, key: OffloadKey) -> list[bytes]:
        """The block is gone; returns the names that nobody bears any more."""
        own, group_idx = unpack_offload_key(key)
        if self._sizes[group_idx] == 1:
            return [own]
        gone: list[bytes] = []
        for block_hash in self._inner.pop(key, ()):
            bearers = self._bearers[group_idx, block_hash]
            del bearers[key]
            if not bearers:
                del self._bearers[group_idx, block_hash]
                gone.append(block_hash)
        return gone

    def bearer(self, group_idx: GroupIdx, block_hash: bytes) -> OffloadKey | None:
        """A block that bears the name; where names and blocks are one, it may not be there."""
        if self._sizes[group_idx] == 1:
            return pack_offload_key(block_hash, group_idx)
        return next(iter(self._bearers.get((group_idx, block_hash), ())), None)
