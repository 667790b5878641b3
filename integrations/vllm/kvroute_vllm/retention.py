"""vLLM keeps what requests name as worth keeping.

By default vLLM keeps of windows and states only the end of a prompt, and a junction where a hit was
cut short. The named boundaries join these: for both kinds where blocks are cached
(`SingleTypeKVCacheManager.cache_blocks`), and for states also where chunks of a prefill end
(`Scheduler._mamba_block_aligned_split`), since a state exists nowhere else. Full attention keeps
everything anyway. Without hints both do what they did before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager

from kvroute_vllm.hints import (
    NO_HINTS,
    HitGrid,
    KeepHints,
    MalformedHints,
    first_stop,
    read_hints,
)
from kvroute_vllm.layout import drafter_groups, hit_step
from kvroute_vllm.recognition import check_parameters

logger = logging.getLogger("vllm.plugins.kvroute")

_WITHOUT_BOUNDARIES = "self request num_tokens retention_interval"
"""vLLM 0.29, which finds the end of the prompt by itself."""
_WITH_BOUNDARIES = f"{_WITHOUT_BOUNDARIES} replay_boundaries"
_SPLIT = "self request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens"
_HINTS, _GRID = "_kvroute_hints", "_kvroute_grid"
"""Attributes that are added to vLLM's requests; to its schedulers and managers."""

CacheBlocks = Callable[..., None]


def install() -> None:
    """Make all cache managers and schedulers of this process take hints; again: do nothing.

    Raises:
        UnknownVllm: A method has another signature; nothing was changed.
    """
    if is_installed():
        return
    cache_blocks = SingleTypeKVCacheManager.cache_blocks
    split = Scheduler._mamba_block_aligned_split
    form = check_parameters(cache_blocks, _WITH_BOUNDARIES, _WITHOUT_BOUNDARIES)
    check_parameters(split, _SPLIT)
    wrap = _with_boundaries if form == _WITH_BOUNDARIES else _with_mask
    keep_named = wrap(cache_blocks)
    setattr(keep_named, _HINTS, True)
    SingleTypeKVCacheManager.cache_blocks = keep_named
    Scheduler._mamba_block_aligned_split = _with_stops(split)
    Scheduler.__init__ = _with_grid(Scheduler.__init__)


def is_installed() -> bool:
    """Return whether managers of this process take hints."""
    return hasattr(SingleTypeKVCacheManager.cache_blocks, _HINTS)


def _with_grid(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        try:
            grid = _grid_of(self, coordinator)
        except (AttributeError, ValueError) as error:
            logger.warning("kvroute: hints are ignored: this cache is not as expected: %s", error)
            return
        for owner in (self, *coordinator.single_type_managers):
            setattr(owner, _GRID, grid)

    return make_with_grid


def _grid_of(scheduler: Any, coordinator: Any) -> HitGrid:
    step = hit_step(coordinator)
    lookahead = getattr(scheduler, "num_hash_lookahead_tokens", 0)
    return HitGrid(step, lookahead, step if drafter_groups(coordinator) else 0)


# --- a request's hints ----------------------------------------------------------------------------


class _Refusals:
    """Counts requests with malformed hints; logs the first, and again at every tenfold."""

    def __init__(self) -> None:
        self.count = 0
        self._next = 1

    def note(self, error: MalformedHints) -> None:
        self.count += 1
        if self.count >= self._next:
            self._next *= 10
            logger.warning(
                "kvroute: hints of a request were ignored (%d so far): %s", self.count, error
            )


refusals = _Refusals()


def hints_of(request: Any) -> KeepHints:
    """Return the hints of a vLLM request, read once; none where they are malformed."""
    known = request.__dict__.get(_HINTS)
    if known is None:
        known = _read(request)
        setattr(request, _HINTS, known)
    return known  # type: ignore[no-any-return]


def _read(request: Any) -> KeepHints:
    # A pooling request has no sampling parameters.
    extra_args = getattr(request.sampling_params, "extra_args", None)
    try:
        return read_hints(extra_args, request.num_prompt_tokens)
    except MalformedHints as error:
        refusals.note(error)
        return NO_HINTS


# --- windows and states ---------------------------------------------------------------------------


def _with_boundaries(cache_blocks: CacheBlocks) -> CacheBlocks:
    """vLLM 0.30 and newer: the boundaries are an argument."""

    @functools.wraps(cache_blocks)
    def keep_named(
        self: Any,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Any,
    ) -> None:
        if hints_of(request) is not NO_HINTS:
            replay_boundaries = (*replay_boundaries, *_kept(self, request, num_tokens))
        cache_blocks(
            self, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    return keep_named


def _with_mask(cache_blocks: CacheBlocks) -> CacheBlocks:
    """vLLM 0.29: they are added where the manager asks which blocks they need."""

    @functools.wraps(cache_blocks)
    def keep_named(
        self: Any, request: Any, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        if hints_of(request) is NO_HINTS:
            cache_blocks(self, request, num_tokens, retention_interval)
            return
        kept, mask = tuple(_kept(self, request, num_tokens)), self.reachable_block_mask

        def with_kept(*, reachable_boundaries: Any, **given: Any) -> Any:
            return mask(reachable_boundaries=(*reachable_boundaries, *kept), **given)

        self.reachable_block_mask = with_kept  # shadows the class's for this call
        try:
            cache_blocks(self, request, num_tokens, retention_interval)
        finally:
            del self.reachable_block_mask

    return keep_named


def _kept(manager: Any, request: Any, num_tokens: int) -> Iterator[int]:
    """Yield the positions in tokens that blocks of this manager's group are kept for."""
    hints, grid = hints_of(request), getattr(manager, _GRID, None)
    if grid is None:
        return  # not a scheduler's
    yield from grid.hits_of(hints.boundaries)
    if hints.keep_end:
        yield from _response_ends(manager, request, num_tokens)


def _response_ends(manager: Any, request: Any, num_tokens: int) -> range:
    """Return where a hit in the response could end, as far as it was not cached before, in tokens.

    The end is known only when it has come, and its window has slid by then: so every block behind
    the prompt is kept. A state that drafts ran past may be another's, and is not.
    """
    if isinstance(manager, MambaManager) and manager.num_speculative_blocks:
        return range(0)
    step = getattr(manager, _GRID).step
    cached = manager.num_cached_block.get(request.request_id, 0) * manager.block_size
    first = max(cached, request.num_prompt_tokens) // step * step
    return range(first, max(num_tokens, first) + step, step)


# --- states ---------------------------------------------------------------------------------------


def _with_stops(split: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(split)
    def stop_at_named(
        self: Any,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        computed = num_new_local_computed_tokens, num_external_computed_tokens
        num_tokens = split(self, request, num_new_tokens, *computed)
        boundaries, grid = hints_of(request).boundaries, getattr(self, _GRID, None)
        if not boundaries or grid is None or num_tokens <= 0:
            return num_tokens
        start: int = request.num_computed_tokens + sum(computed)
        hits = grid.hits_of(boundaries)
        block_size = self.cache_config.block_size
        return first_stop(hits, start, start + num_tokens, block_size) - start

    return stop_at_named
