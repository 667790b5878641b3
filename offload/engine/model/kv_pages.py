"""The engine's pages: one tensor per layer of a group, seen as keys and values, or as states, or as
bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.engine.core.model_config import TransformerConfig
from offload.transfer.canonical import CanonicalKVCache, DataRef


class KVPages:
    """`tensors[j]` is `(num_blocks, page_bytes)` int8 and holds the j-th layer of every group:
    groups share the blocks."""

    def __init__(self, model: TransformerConfig, num_blocks: int, device: torch.device) -> None:
        self._model = model
        shape = (num_blocks, model.page_bytes)
        self.tensors = [
            torch.zeros(shape, dtype=torch.int8, device=device)
            for _ in range(model.layers_per_group)
        ]

    def keys_and_values(self, place: int) -> Tensor:
        """`(num_blocks, 2, block_size, kv heads, head_dim)` float32 of the layer at *place* in its
        group."""
        model = self._model
        floats = self.tensors[place][:, : model.attention_page_bytes].view(torch.float32)
        return floats.view(-1, 2, model.block_size, model.num_kv_heads, model.head_dim)

    def states(self, place: int) -> Tensor:
        """`(num_blocks, kv heads, head_dim, head_dim)` float32 of the layer at *place* in its
        group."""
        model = self._model
        floats = self.tensors[place][:, : model.state_page_bytes].view(torch.float32)
        return floats.view(-1, model.num_kv_heads, model.head_dim, model.head_dim)

    def canonical(self) -> CanonicalKVCache:
        """As the transfer workers want it: every group uses all tensors, as much of a page as it
        fills."""
        places = range(self._model.layers_per_group)
        groups = self._model.layer_groups()
        refs = [
            [DataRef(place, self._model.group_page_bytes(group.kind)) for place in places]
            for group in groups
        ]
        return CanonicalKVCache(self.tensors, refs)
