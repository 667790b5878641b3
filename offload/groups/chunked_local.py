"""Chunked local attention: a token looks at those before it in its own chunk (Llama 4)."""

from __future__ import annotations

from typing_extensions import override

from offload.groups.base import GroupManager, blocks_for


class ChunkedLocalManager(GroupManager):
    """A chunk's blocks are given back when the next chunk begins; a hit needs its own chunk's."""

    @property
    def attention_chunk_size(self) -> int:
        """In tokens."""
        assert self.group.attention_chunk_size is not None
        return self.group.attention_chunk_size

    @override
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    @override
    def max_held_blocks(self) -> int:
        in_flight = self.attention_chunk_size + self.config.max_in_flight_tokens
        return blocks_for(min(in_flight, self.config.max_model_len), self.block_size)
