"""The cache layouts on which both managers are compared.

Left out are layouts on which they cannot agree:

- Windows of one token. vLLM's mask for such a group keeps nothing, so there is never a hit; ours
  keeps blocks and hits. (With EAGLE vLLM keeps what it needs, and both agree.)
- Chunks that are not a multiple of the scheduler's block: our configuration refuses them.
- Mamba groups with a hash finer than their block: vLLM then hits inside blocks, which ours does
  not.

vLLM looks groups with equal specs up as one, and drops EAGLE's block for all of them if it flags
any. A drafter's own layers have another number of heads, which our groups do not show: there the
flagged group gets one of its own in vLLM (`own_spec`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvevents.layout import GroupKind, KVCacheGroup


@dataclass(frozen=True)
class Layout:
    """The parameters of both managers. All sizes are in tokens."""

    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int
    scheduler_block_size: int
    eagle: bool | tuple[int, ...] = False
    """Groups that vLLM flags; True: none is, and a block is dropped in all."""
    retention_interval: int | None = None
    own_spec: bool = False
    """Whether flagged groups have heads of their own."""

    @property
    def has_mamba(self) -> bool:
        return any(group.kind is GroupKind.MAMBA for group in self.groups)

    @property
    def has_coarse_groups(self) -> bool:
        """Whether a block of some group spans several hashes."""
        return any(group.block_size != self.hash_block_size for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold *num_tokens* in every group if none slides out."""
        return sum(-(-num_tokens // group.block_size) for group in self.groups)


def full(block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.FULL, block_size)


def window(sliding_window: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=sliding_window)


def chunked(attention_chunk_size: int, block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(
        GroupKind.CHUNKED_LOCAL, block_size, attention_chunk_size=attention_chunk_size
    )


def mamba(block_size: int = 16) -> KVCacheGroup:
    return KVCacheGroup(GroupKind.MAMBA, block_size)


def layout(
    *groups: KVCacheGroup,
    eagle: bool | tuple[int, ...] = False,
    retention_interval: int | None = None,
    hash_block_size: int | None = None,
    own_spec: bool = False,
) -> Layout:
    sizes = [group.block_size for group in groups]
    return Layout(
        groups,
        hash_block_size or math.gcd(*sizes),
        math.lcm(*sizes),
        eagle,
        retention_interval,
        own_spec,
    )


ONE_SIZE = {
    "full": layout(full()),
    "full_block_8": layout(full(8)),
    "full_block_64": layout(full(64)),
    "two_full": layout(full(), full()),
    "window_2": layout(window(2)),
    "window_17": layout(window(17)),
    "window_50": layout(window(50)),
    "window_64": layout(window(64)),
    "window_longer_than_any_prompt": layout(window(100_000)),
    "two_windows": layout(window(33), window(100)),
    "full_window_16": layout(full(), window(16)),
    "full_window_17": layout(full(), window(17)),
    "full_window_128": layout(full(), window(128)),
    "window_before_full": layout(window(40), full()),
    "full_two_windows": layout(full(), window(33), window(100)),
    "six_groups": layout(full(), window(2), window(17), window(33), window(50), window(100)),
    "one_full_five_equal_windows": layout(full(), *[window(64)] * 5),
    "windows_around_full": layout(window(17), full(), window(64), window(200)),
}

CHUNKED = {
    "chunk_64": layout(chunked(64)),
    "chunk_16": layout(chunked(16)),
    "chunk_of_three_blocks": layout(chunked(48)),
    "chunk_longer_than_any_prompt": layout(chunked(160_000)),
    "full_chunk_16": layout(full(), chunked(16)),
    "full_chunk_48_block_8": layout(full(8), chunked(48, 8)),
    "two_chunks": layout(chunked(48), chunked(128)),
    "full_chunk_128": layout(full(), chunked(128)),
    "full_two_chunks": layout(full(), chunked(64), chunked(160)),
    "full_chunk_window": layout(full(), chunked(64), window(50)),
    "full_two_chunks_two_windows": layout(
        full(), chunked(48), chunked(112), window(33), window(100)
    ),
}

MIXED_SIZES = {
    "full_64_window_16": layout(full(64), window(50)),
    "full_64_window_16_window_32": layout(full(64), window(50), window(100, 32)),
    "full_16_window_64": layout(full(16), window(100, 64)),
    "full_16_window_32_window_16": layout(full(16), window(33, 32), window(100)),
    "full_48_window_32": layout(full(48), window(50, 32)),
    "two_windows_of_two_sizes": layout(window(50), window(100, 32)),
    "hash_finer_than_every_group": layout(full(32), window(48), hash_block_size=8),
    "hash_finer_than_equal_groups": layout(full(), window(50), hash_block_size=8),
    "full_alone_with_finer_hash": layout(full(32), full(32), hash_block_size=16),
}

MAMBA = {
    "mamba": layout(mamba()),
    "full_mamba": layout(full(), mamba()),
    "mamba_full": layout(mamba(32), full(32)),
    "mamba_window_full": layout(mamba(), window(50), full()),
    "full_three_mambas": layout(full(), mamba(), mamba(), mamba()),
}

EAGLE = {
    "eagle_full": layout(full(), eagle=True),
    "eagle_two_full": layout(full(), full(), eagle=True),
    "eagle_window_50": layout(window(50), eagle=True),
    "eagle_window_1": layout(window(1), eagle=True),
    "eagle_two_windows": layout(window(33), window(100), eagle=True),
    "eagle_full_window_1": layout(full(), window(1), eagle=True),
    "eagle_full_window_50": layout(full(), window(50), eagle=True),
    "eagle_full_window_64": layout(full(), window(64), eagle=True),
    "eagle_full_three_windows": layout(full(), window(17), window(50), window(120), eagle=True),
}

EAGLE_MIXED_SIZES = {
    "eagle_full_64_window_16": layout(full(64), window(50), eagle=True),
    "eagle_full_64_window_16_window_32": layout(full(64), window(50), window(100, 32), eagle=True),
    "eagle_full_16_window_64": layout(full(16), window(100, 64), eagle=True),
    "eagle_two_windows_of_two_sizes": layout(window(50), window(100, 32), eagle=True),
}

EAGLE_MAMBA = {
    "eagle_full_mamba": layout(full(), mamba(), eagle=True),
    "eagle_mamba_window_full": layout(mamba(), window(50), full(), eagle=True),
}

FLAGGED = {
    "flagged_full_alone": layout(full(), eagle=(0,)),
    "flagged_full_of_two": layout(full(), window(50), eagle=(0,)),
    "flagged_full_of_three": layout(full(), window(33), window(100), eagle=(0,)),
    "flagged_window_of_two": layout(full(), window(50), eagle=(1,)),
    "flagged_window_of_three": layout(full(), window(33), window(100), eagle=(2,)),
    "flagged_window_of_two_windows": layout(window(33), window(100), eagle=(1,)),
    "flagged_first_window_of_two": layout(window(33), window(100), eagle=(0,)),
    "flagged_own_full": layout(full(), window(50), full(), eagle=(2,), own_spec=True),
    "flagged_own_full_before": layout(full(), window(50), full(), eagle=(0,), own_spec=True),
    "flagged_own_window": layout(full(), window(50), window(50), eagle=(2,), own_spec=True),
    "flagged_two_equal_full": layout(full(), window(50), full(), eagle=(0, 2)),
    "flagged_full_beside_chunks": layout(full(), chunked(64), eagle=(0,)),
    "flagged_full_beside_mamba": layout(full(), mamba(), eagle=(0,)),
    "flagged_window_beside_mamba": layout(mamba(), window(50), full(), eagle=(1,)),
    "flagged_own_full_beside_mamba": layout(full(), mamba(), full(), eagle=(2,), own_spec=True),
    "flagged_own_full_before_mamba": layout(full(), full(), mamba(), eagle=(1,), own_spec=True),
    "flagged_window_keep_ends": layout(full(), window(50), eagle=(1,), retention_interval=0),
    "flagged_full_keep_ends": layout(full(), window(50), eagle=(0,), retention_interval=0),
    "flagged_full_keep_every_64": layout(full(), window(50), eagle=(0,), retention_interval=64),
    "flagged_full_beside_mamba_keep_ends": layout(
        full(), mamba(), eagle=(0,), retention_interval=0
    ),
}

FLAGGED_MIXED_SIZES = {
    "flagged_full_64_window_16": layout(full(64), window(50), eagle=(0,)),
    "full_64_flagged_window_16": layout(full(64), window(50), eagle=(1,)),
    "flagged_full_16_window_64": layout(full(16), window(100, 64), eagle=(0,)),
    "full_16_flagged_window_64": layout(full(16), window(100, 64), eagle=(1,)),
    "flagged_window_32_of_three": layout(full(64), window(50), window(100, 32), eagle=(2,)),
    "flagged_own_full_16_window_32": layout(
        full(), window(50, 32), full(), eagle=(2,), own_spec=True
    ),
    "flagged_own_full_of_another_size": layout(full(32), window(50), full(), eagle=(2,)),
    "flagged_window_32_keep_ends": layout(
        full(64), window(50), window(100, 32), eagle=(2,), retention_interval=0
    ),
}

RETENTION = {
    "keep_ends_full": layout(full(), retention_interval=0),
    "keep_ends_window": layout(window(50), retention_interval=0),
    "keep_ends_two_windows": layout(window(33), window(100), retention_interval=0),
    "keep_ends_full_window_2": layout(full(), window(2), retention_interval=0),
    "keep_ends_full_window": layout(full(), window(128), retention_interval=0),
    "keep_ends_full_two_windows": layout(full(), window(33), window(100), retention_interval=0),
    "keep_ends_full_chunk_window": layout(full(), chunked(64), window(50), retention_interval=0),
    "keep_every_32": layout(full(), window(50), retention_interval=32),
    "keep_every_64": layout(full(), window(50), retention_interval=64),
    "keep_every_256": layout(full(), window(50), retention_interval=256),
    "keep_every_64_windows_only": layout(window(33), window(100), retention_interval=64),
    "eagle_keep_ends_window": layout(window(50), eagle=True, retention_interval=0),
    "eagle_keep_ends_full_window": layout(full(), window(128), eagle=True, retention_interval=0),
    "eagle_keep_ends_full_two_windows": layout(
        full(), window(33), window(100), eagle=True, retention_interval=0
    ),
    "eagle_keep_every_64": layout(full(), window(50), eagle=True, retention_interval=64),
}

RETENTION_MIXED_SIZES = {
    "keep_ends_mixed": layout(full(64), window(50), window(100, 32), retention_interval=0),
    "keep_every_128_mixed": layout(full(64), window(50), window(100, 32), retention_interval=128),
    "keep_ends_two_sizes_of_windows": layout(window(50), window(100, 32), retention_interval=0),
    "eagle_keep_ends_mixed": layout(
        full(64), window(50), window(100, 32), eagle=True, retention_interval=0
    ),
    "eagle_keep_every_128_mixed": layout(full(64), window(50), eagle=True, retention_interval=128),
}

RETENTION_MAMBA = {
    "keep_ends_full_mamba": layout(full(), mamba(), retention_interval=0),
    "keep_every_64_full_mamba": layout(full(), mamba(), retention_interval=64),
    "keep_ends_mamba_window_full": layout(mamba(), window(50), full(), retention_interval=0),
    "keep_ends_mamba": layout(mamba(), retention_interval=0),
    "eagle_keep_ends_full_mamba": layout(full(), mamba(), eagle=True, retention_interval=0),
}

ALL = (
    ONE_SIZE
    | CHUNKED
    | MIXED_SIZES
    | MAMBA
    | EAGLE
    | EAGLE_MIXED_SIZES
    | EAGLE_MAMBA
    | FLAGGED
    | FLAGGED_MIXED_SIZES
    | RETENTION
    | RETENTION_MIXED_SIZES
    | RETENTION_MAMBA
)
