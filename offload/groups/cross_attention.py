"""Cross attention: every token looks at the encoder's output, which is one request's own."""

from __future__ import annotations

from collections.abc import Sequence

from offload.block import Block
from offload.groups.base import GroupManager, Need, Retention, blocks_for
from offload.request import CacheRequest


class CrossAttentionManager(GroupManager):
    """Blocks for the encoder's tokens, given once and never shared: the group has no say in a hit.

    The coordinator passes the encoder's tokens where other groups get the decoder's. What a decoder
    block holds depends on the encoder's input too: the engine puts a digest of it into the
    request's `extra_keys`.
    """

    def num_blocks_to_allocate(
        self, request_id: str, need: Need, is_admission: bool = False
    ) -> int:
        del is_admission
        return max(
            blocks_for(need.num_slots, self.block_size) - len(self.block_table(request_id)), 0
        )

    def adopt_computed_blocks(
        self, request_id: str, blocks: Sequence[Block], num_computed_tokens: int
    ) -> None:
        """Nothing but an empty table: nobody else's blocks serve here."""
        del blocks, num_computed_tokens
        super().adopt_computed_blocks(request_id, (), 0)

    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing: no tier keeps an encoder's output."""

    def cache_blocks(self, request: CacheRequest, num_tokens: int, retention: Retention) -> None:
        """Nothing: no other request asks for it."""
