"""The engine's pages: one tensor per layer of a group, seen as keys and values, states or bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvroute_engine.core.model_config import TransformerConfig
from offload.transfer.canonical import CanonicalKVCache, DataRef


class KVPages:
    """The pages of every block, which all groups share.

    `tensors[j]` is `(num_blocks, page_bytes)` int8. It holds layer *j* of every group: a block
    belongs to one group at a time, and its page in `tensors[j]` is that group's layer *j*.
    """

    def __init__(self, model: TransformerConfig, num_blocks: int, device: torch.device) -> None:
        """Allocate zeroed pages.

        Args:
            model: Sizes of pages, and how many layers a group has.
            num_blocks: Blocks of the cache, with the null block.
        """
        self._model = model
        shape = (num_blocks, model.page_bytes)
        self.tensors = [
            torch.zeros(shape, dtype=torch.int8, device=device)
            for _ in range(model.layers_per_group)
        ]

    def keys_and_values(self, layer_in_group: int) -> Tensor:
        """View a layer's pages as keys (0) and values (1).

        Args:
            layer_in_group: The layer's index in its group.

        Returns:
            `(num_blocks, 2, block_size, num_kv_heads, head_dim)` float32, sharing memory.
        """
        model = self._model
        floats = self.tensors[layer_in_group][:, : model.attention_page_bytes].view(torch.float32)
        return floats.view(-1, 2, model.block_size, model.num_kv_heads, model.head_dim)

    def states(self, layer_in_group: int) -> Tensor:
        """View a layer's pages as recurrent states.

        Args:
            layer_in_group: The layer's index in its group.

        Returns:
            `(num_blocks, num_kv_heads, head_dim, head_dim)` float32, sharing memory.
        """
        model = self._model
        floats = self.tensors[layer_in_group][:, : model.state_page_bytes].view(torch.float32)
        return floats.view(-1, model.num_kv_heads, model.head_dim, model.head_dim)

    def canonical(self) -> CanonicalKVCache:
        """Return the pages as transfer workers want them.

        Every group uses all tensors, and of each page as many bytes as its kind fills.
        """
        model = self._model
        refs = [
            [
                DataRef(index, model.group_page_bytes(group.kind))
                for index in range(model.layers_per_group)
            ]
            for group in model.layer_groups()
        ]
        return CanonicalKVCache(self.tensors, refs)
