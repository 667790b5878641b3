"""The configuration of an engine's KV cache: one frozen model, checked when it is built."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvevents.errors import LayoutError
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from offload.errors import CacheConfigError

_RETAINABLE = (GroupKind.SLIDING_WINDOW, GroupKind.MAMBA)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """One engine's KV cache. Build it with `CacheConfig.build`, which checks it."""

    layout: KVCacheLayout
    num_blocks: int
    """Blocks in the pool, the null block included: requests can hold one fewer."""
    max_model_len: int
    """Longest request, prompt and output, in tokens."""
    max_in_flight_tokens: int
    """Most tokens one step computes for one request; bounds the blocks a window's group holds for
    it."""
    enable_caching: bool
    enable_events: bool
    retention_interval: int | None
    """Selects the blocks of sliding-window and Mamba groups that stay findable: None keeps all that
    can serve a hit, 0 those at the ends of prompts, where prompts parted, and where a request asks
    for it; n > 0 also those at every n-th token. 0 is the default, as in vLLM >= 0.29."""

    @property
    def scheduler_block_size(self) -> int:
        """Hits end at multiples of this, in tokens."""
        return self.layout.scheduler_block_size

    @classmethod
    def build(
        cls,
        groups: Sequence[KVCacheGroup],
        *,
        num_blocks: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_model_len: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        enable_events: bool = False,
        eagle: bool | Collection[int] = False,
        retention_interval: int | None = 0,
    ) -> CacheConfig:
        """Build a checked configuration. All sizes but *num_blocks* are in tokens.

        Args:
            num_blocks: Blocks in the pool, the null block included.
            scheduler_block_size: Hits end at its multiples; a multiple of every group's block size.
            hash_block_size: Tokens between two block hashes; divides every group's block size.
            max_model_len: Longest request, prompt and output.
            max_in_flight_tokens: Most tokens of a request in one step; default *max_model_len*.
            enable_caching: True if blocks can be found again by their hash.
            enable_events: True to record changes; then `take_events` must be called.
            eagle: Groups, by index, that must have one block more of a hit than is reused, since
                they hold layers of an EAGLE or MTP drafter; True: all.

        Raises:
            CacheConfigError: A size contradicts another; the message names place, value and rule.
        """
        layout = _build_layout(groups, scheduler_block_size, hash_block_size, eagle)
        _check_limits(num_blocks, max_model_len, max_in_flight_tokens)
        _check_retention(retention_interval, layout)
        _check_chunks(layout)
        return cls(
            layout=layout,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens or max_model_len,
            enable_caching=enable_caching,
            enable_events=enable_events,
            retention_interval=retention_interval,
        )


def _build_layout(
    groups: Sequence[KVCacheGroup],
    scheduler_block_size: int,
    hash_block_size: int,
    eagle: bool | Collection[int],
) -> KVCacheLayout:
    _check_scheduler_block_size(groups, scheduler_block_size, hash_block_size)
    try:
        return KVCacheLayout.build(groups, hash_block_size, scheduler_block_size, eagle)
    except LayoutError as error:
        raise CacheConfigError(str(error)) from None


def _check_scheduler_block_size(
    groups: Sequence[KVCacheGroup], scheduler_block_size: int, hash_block_size: int
) -> None:
    _check_at_least("scheduler_block_size", scheduler_block_size, 1, "hits end at its multiples")
    _check_at_least("hash_block_size", hash_block_size, 1, "hashes end at its multiples")
    sizes = [
        (f"group {index} ({group.kind.value}): block_size", group.block_size)
        for index, group in enumerate(groups)
        if group.kind is not GroupKind.NOT_CACHED
    ]
    for place, size in [("hash_block_size", hash_block_size), *sizes]:
        if size < 1 or scheduler_block_size % size:
            raise CacheConfigError(
                f"scheduler_block_size {scheduler_block_size} must be a multiple of {place} {size}"
            )


def _check_limits(num_blocks: int, max_model_len: int, max_in_flight_tokens: int | None) -> None:
    _check_at_least("num_blocks", num_blocks, 2, "the null block and one to hold")
    _check_at_least("max_model_len", max_model_len, 1, "a request has a token")
    if max_in_flight_tokens is not None:
        _check_at_least("max_in_flight_tokens", max_in_flight_tokens, 1, "a step computes a token")


def _check_at_least(name: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise CacheConfigError(f"{name} {value} must be at least {least}: {why}")


def _check_retention(interval: int | None, layout: KVCacheLayout) -> None:
    if interval is None:
        return
    if interval < 0 or interval % layout.scheduler_block_size:
        raise CacheConfigError(
            f"retention_interval {interval} must be 0 or a multiple of "
            f"scheduler_block_size {layout.scheduler_block_size}"
        )
    if interval and not any(group.kind in _RETAINABLE for group in layout.groups):
        raise CacheConfigError(
            f"retention_interval {interval} needs a sliding-window or Mamba group: all other kinds "
            "keep every block; leave it unset"
        )


def _check_chunks(layout: KVCacheLayout) -> None:
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.CHUNKED_LOCAL or group.attention_chunk_size is None:
            continue
        place = f"group {index} ({group.kind.value})"
        if group.attention_chunk_size % layout.scheduler_block_size:
            # The lookup checks one chunk's blocks; a hit that ends before that chunk would need
            # blocks that were never checked.
            raise CacheConfigError(
                f"{place}: attention_chunk_size {group.attention_chunk_size} must be a multiple of "
                f"scheduler_block_size {layout.scheduler_block_size}"
            )
        if index in layout.eagle:
            # Where EAGLE's block is the last of a chunk, the next chunk needs nothing, and the hit
            # before that block would go unproven.
            raise CacheConfigError(
                f"{place}: eagle must not name it: "
                "like vLLM, this cache does not support EAGLE with chunked local attention"
            )
