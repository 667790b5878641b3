"""Full attention, also MLA and attention with sinks: a token looks at all tokens before it."""

from __future__ import annotations

from typing_extensions import override

from offload.groups.base import GroupManager, Retention


class FullAttentionManager(GroupManager):
    """Every block is held to the end, and every full one can serve a hit."""

    @override
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    @override
    def keep_mask(
        self, request_id: str, start: int, stop: int, retention: Retention
    ) -> list[bool] | None:
        return None
