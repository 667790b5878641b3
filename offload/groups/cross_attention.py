"""Cross attention: every token looks at the encoder's output, which belongs to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from offload.block import Block
from offload.groups.base import GroupManager, RequestNeed, Retention, blocks_for
from offload.request import CacheRequest


class CrossAttentionManager(GroupManager):
    """Blocks for the encoder's tokens, allocated once and never shared; it never limits a hit.

    What a decoder block holds depends on the encoder's input too: the engine puts a digest of it
    into the request's `extra_keys`.
    """

    @override
    def num_blocks_to_allocate(
        self, request_id: str, need: RequestNeed, is_admission: bool = False
    ) -> int:
        required = blocks_for(need.num_encoder_tokens, self.block_size)
        return max(required - len(self.block_table(request_id)), 0)

    @override
    def adopt_computed_blocks(
        self, request_id: str, blocks: Sequence[Block], num_computed_tokens: int
    ) -> None:
        """Start an empty table: other requests' blocks do not serve here."""
        super().adopt_computed_blocks(request_id, (), 0)

    @override
    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Do nothing: tiers do not keep an encoder's output."""

    @override
    def allocate_new_blocks(self, request_id: str, need: RequestNeed) -> list[Block]:
        need = replace(need, num_slots=need.num_encoder_tokens)
        return super().allocate_new_blocks(request_id, need)

    @override
    def cache_blocks(self, request: CacheRequest, num_tokens: int, retention: Retention) -> None:
        """Do nothing: other requests never ask for these blocks."""
