"""Layouts, events and secrets in the core's form."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvevents.events import CacheLayout, Event
from kvevents.layout import GroupKind, KVCacheLayout

_KINDS = {
    GroupKind.FULL: 0,
    GroupKind.SLIDING_WINDOW: 1,
    GroupKind.CHUNKED_LOCAL: 2,
    GroupKind.MAMBA: 3,
    GroupKind.NOT_CACHED: 4,
}
"""The numbers of `GroupKind` in core/index/layout.hpp."""
DIGEST_BYTES = 32


def key_drawn_from(secret: bytes) -> bytes:
    """Return 16 bytes that stand for a secret in the keys of prefixes."""
    return hashlib.blake2b(secret, digest_size=16, person=b"native keys").digest()


def layout_fields(layout: KVCacheLayout) -> tuple[Any, ...]:
    groups = [
        (
            _KINDS[group.kind],
            group.block_size,
            _size_or_none(group.sliding_window),
            _size_or_none(group.attention_chunk_size),
            index in layout.eagle,
        )
        for index, group in enumerate(layout.groups)
    ]
    return (
        groups,
        layout.hash_block_size,
        layout.scheduler_block_size,
        layout.eagle_sees_last_token,
        layout.prefix_replay_tokens,
    )


def _size_or_none(size: int | None) -> int | None:
    """Return None for a negative size, which a group of another kind has."""
    return None if size is None or size < 0 else size


def canonical(event: Event) -> Event:
    """Return the event with its tier spelled out."""
    assert not isinstance(event, CacheLayout)
    tier = event.tier
    return event if event.medium == tier else msgspec.structs.replace(event, medium=tier)
