"""Describes the layers of a model, and their groups in the KV cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from kvevents.layout import GroupKind, KVCacheGroup
from offload.errors import CacheConfigError

FLOAT_BYTES = 4


class LayerKind(Enum):
    """The part of earlier tokens that a layer sees."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE = "state"
    """A recurrent state instead of keys and values: linear attention with a decay."""


_GROUP_KINDS = {
    LayerKind.FULL: GroupKind.FULL,
    LayerKind.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_LOCAL: GroupKind.CHUNKED_LOCAL,
    LayerKind.STATE: GroupKind.MAMBA,
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind that share block tables; one block holds a page of each of them."""

    kind: LayerKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """A decoder-only transformer with seeded random weights."""

    name: str
    layers: tuple[LayerKind, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 512
    max_model_len: int = 4096
    """Longest sequence in tokens, prompt and output together."""
    sliding_window: int = 128
    """In tokens."""
    attention_chunk_size: int = 256
    """In tokens."""
    block_size: int = 16
    """Block size of every group, in tokens."""
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    seed: int = 0

    @property
    def layers_per_group(self) -> int:
        """Return the layers of each group: as many as the rarest kind has, so that the blocks of
        all groups have one size."""
        return min(Counter(self.layers).values())

    @property
    def attention_page_bytes(self) -> int:
        """Return the bytes of the keys and values of one block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def state_page_bytes(self) -> int:
        """Return the bytes of the state of one layer."""
        return self.num_kv_heads * self.head_dim * self.head_dim * FLOAT_BYTES

    def group_page_bytes(self, kind: LayerKind) -> int:
        """Return the bytes that a group of *kind* uses of a page in one layer."""
        return self.state_page_bytes if kind is LayerKind.STATE else self.attention_page_bytes

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page in one layer: the same for every group."""
        return max(map(self.group_page_bytes, self.layers))

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in all layers of its group."""
        return self.page_bytes * self.layers_per_group

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the layers in groups of `layers_per_group`, one kind each.

        Full attention comes first, then the other kinds in the order of their first layers. With
        `layers` W W W W W F (five sliding windows, one full) there is one F per group, so the
        groups are (F,) (W,) (W,) (W,) (W,) (W,).

        Raises:
            CacheConfigError: A kind's layers do not fill whole groups.
        """
        size = self.layers_per_group
        groups: list[LayerGroup] = []
        for kind in sorted(dict.fromkeys(self.layers), key=lambda kind: kind is not LayerKind.FULL):
            layers = [index for index, of_kind in enumerate(self.layers) if of_kind is kind]
            if len(layers) % size:
                raise CacheConfigError(
                    f"model {self.name}: {len(layers)} {kind.value} layers must be a multiple of "
                    f"{size}, the rarest kind's"
                )
            groups += [
                LayerGroup(kind, tuple(layers[at : at + size]))
                for at in range(0, len(layers), size)
            ]
        return tuple(groups)

    def cache_groups(self) -> list[KVCacheGroup]:
        """Return the same groups as the cache and the router see them."""
        return [
            KVCacheGroup(
                _GROUP_KINDS[group.kind],
                self.block_size,
                sliding_window=(
                    self.sliding_window if group.kind is LayerKind.SLIDING_WINDOW else None
                ),
                attention_chunk_size=(
                    self.attention_chunk_size if group.kind is LayerKind.CHUNKED_LOCAL else None
                ),
            )
            for group in self.layer_groups()
        ]
