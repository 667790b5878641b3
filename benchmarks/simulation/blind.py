"""Indexes of routers that know no groups: what they make of the events of engines that have
some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from typing_extensions import override

from kvevents.codec import decode
from kvevents.events import BlockRemoved, BlockStored, EventBatch
from kvroute_engine.demo.blind import GroupBlindIndex
from router.index.base import ApplyResult, SourceId
from router.index.index import PrefixIndex


class GroupZeroIndex(GroupBlindIndex):
    """Listens to the first group only, as a consumer that skips what it does not know."""

    @override
    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        events = [
            event
            for event in batch.events
            if not isinstance(event, BlockStored | BlockRemoved) or event.group_idx in (None, 0)
        ]
        return super().apply(source, msgspec.structs.replace(batch, events=events))


BLIND_INDEXES: dict[str, Callable[[], PrefixIndex]] = {
    "group_blind": GroupBlindIndex,
    "group_blind_any_copy": partial(GroupBlindIndex, any_copy=True),
    "group_0": GroupZeroIndex,
}
"""The first removal of a block deletes it; any copy of it counts; only events of group 0 are
read."""
