"""The hashes under which a tier's offloaded blocks can be found.

An offloaded block is found by the hash of every GPU block it covers: its *aliases*. The router asks
for each of them, and so does a prompt that ends inside an offloaded block. Where an offloaded block
covers a single GPU block, its own hash is its only alias. Offloaded blocks that share their first
GPU blocks share those aliases, so an alias exists as long as any block covers it:

    offloaded block A   | 1  2  3  4 |      aliases 1, 2, 3, 4
    offloaded block B   | 1  2  3  4'|      aliases 1, 2, 3, 4': another continuation behind 3
    A is evicted                            4 is gone; 1, 2 and 3 still lead to B
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.events import GroupIdx
from offload.base import OffloadKey, pack_offload_key, unpack_offload_key


class BlockAliases:
    """Aliases of a tier's blocks; bounded by the blocks that the tier holds or takes."""

    def __init__(self, blocks_per_offloaded_block: Sequence[int]) -> None:
        """
        Args:
            blocks_per_offloaded_block: GPU blocks in an offloaded block, per group.
        """
        self._sizes = blocks_per_offloaded_block
        self._prepared: dict[OffloadKey, Sequence[bytes]] = {}
        """The block hashes of blocks that are about to be stored."""
        self._block_hashes: dict[OffloadKey, Sequence[bytes]] = {}
        """The block hashes of blocks that can be loaded."""
        self._covering: dict[tuple[GroupIdx, bytes], dict[OffloadKey, None]] = {}

    def prepare(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> None:
        """Remember the aliases of a block that is about to be stored.

        Args:
            block_hashes: The hashes of its GPU blocks, its own last.
        """
        if len(block_hashes) > 1:
            self._prepared[key] = block_hashes

    def cancel(self, key: OffloadKey) -> None:
        """Forget a prepared block: it will not be stored."""
        self._prepared.pop(key, None)

    def cancel_all(self) -> None:
        """Forget all prepared blocks: a reset ends their stores."""
        self._prepared.clear()

    def add(self, key: OffloadKey) -> list[bytes]:
        """The block can be loaded now: return the aliases that no other block covers."""
        own, group_idx = unpack_offload_key(key)
        if self._sizes[group_idx] == 1:
            return [own]
        self._block_hashes[key] = self._prepared.pop(key, (own,))
        return self._cover(key, group_idx, self._block_hashes[key])

    def learn(self, key: OffloadKey, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Complete the aliases of a block that an earlier process stored without them.

        Until then only its own hash is known, so it cannot be found by the GPU blocks before its
        last.

        Returns:
            The aliases that no other block covers; empty if the block's aliases were known.
        """
        known = self._block_hashes.get(key, ())
        own, group_idx = unpack_offload_key(key)
        if len(known) != 1 or key not in self._covering.get((group_idx, own), ()):
            return []
        self._block_hashes[key] = block_hashes
        return self._cover(key, group_idx, block_hashes)

    def _cover(
        self, key: OffloadKey, group_idx: GroupIdx, block_hashes: Sequence[bytes]
    ) -> list[bytes]:
        new: list[bytes] = []
        for block_hash in block_hashes:
            covering = self._covering.setdefault((group_idx, block_hash), {})
            if not covering:
                new.append(block_hash)
            covering[key] = None
        return new

    def remove(self, key: OffloadKey) -> list[bytes]:
        """The block is gone: return the aliases that no block covers any more."""
        own, group_idx = unpack_offload_key(key)
        if self._sizes[group_idx] == 1:
            return [own]
        gone: list[bytes] = []
        for block_hash in self._block_hashes.pop(key, ()):
            covering = self._covering[group_idx, block_hash]
            del covering[key]
            if not covering:
                del self._covering[group_idx, block_hash]
                gone.append(block_hash)
        return gone

    def covering_block(self, group_idx: GroupIdx, block_hash: bytes) -> OffloadKey | None:
        """An offloaded block that covers a GPU block; None if none does.

        Where offloaded blocks cover one GPU block each, the key follows from the hash, and the tier
        may not hold it.
        """
        if self._sizes[group_idx] == 1:
            return pack_offload_key(block_hash, group_idx)
        return next(iter(self._covering.get((group_idx, block_hash), ())), None)
