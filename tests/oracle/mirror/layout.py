"""What matters of a cache's layout: where hits can end, and how many blocks prompts take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvevents.events import GPU
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index.base import SourceId, SourceStatistics
from router.index.index import PrefixIndex
from router.index.mirror_types import STEP

DENSE = 0.97
"""Of the tokens that full attention stored, the share from which on windows are kept densely."""


class Tail(NamedTuple):
    """What is kept of one group before a boundary."""

    tokens: int
    """Of a window; 0: a state."""
    block_size: int

    def blocks(self, most_tokens: int) -> int:
        """How many, if no more than so many tokens before the boundary count."""
        return min(self.tokens, most_tokens) // self.block_size if self.tokens else 1


class Layout(NamedTuple):
    """The groups of a cache, as far as they matter."""

    hit_tokens: int
    """Hits are multiples of it."""
    has_gaps: bool
    """A prompt may be reusable as a whole and not in part: windows move on."""
    is_sparse: bool
    """Of a prompt, windows or states are kept only at some lengths, its boundaries."""
    tails: tuple[Tail, ...]
    """Of the groups with windows or states."""
    least_tail: int
    """The tokens of the shortest of these."""
    longest_tail: int
    """Of the longest."""
    eagle: bool
    """Whether some group must have a block more of a hit than is reused."""
    windows_first: bool
    """Whether a request gives back windows and states before its full attention."""
    groups: int
    states: int
    """Groups with states: they take a block for what a step computes of a prompt."""
    full_blocks_per_key: float
    """That `STEP` tokens take in full attention, until the request ends."""
    window_blocks_per_key: float
    """That they take in windows when they are computed."""

    @property
    def held_blocks_per_key(self) -> float:
        """Of a prompt that has been computed, those that stay findable wherever they are."""
        if self.is_sparse:
            return self.full_blocks_per_key
        return self.full_blocks_per_key + self.window_blocks_per_key

    def boundaries_of(self, prompt_tokens: int) -> tuple[int, ...]:
        """Lengths at which an engine keeps windows and states of a prompt whatever it found."""
        step = self.hit_tokens
        if not self.eagle:
            return ((prompt_tokens - 1) // step * step,)
        # Its last block is computed again, so the one before is kept as well.
        ends = ((prompt_tokens - 1) // step * step, prompt_tokens // step * step)
        return tuple(sorted({max(end - step, 0) for end in ends}))

    def tail_blocks(self, boundaries: Iterable[int], before: int) -> list[tuple[int, int]]:
        """Boundaries with the blocks that are kept before each and not before another.

        Args:
            boundaries: Ascending; those up to *before* are left out.
            before: Where the first of these blocks begins at the earliest, in tokens.
        """
        found = []
        for boundary in boundaries:
            if boundary > before:
                blocks = sum(tail.blocks(boundary - before) for tail in self.tails)
                found.append((boundary, blocks))
                before = boundary
        return found

    def longest_hit(self, boundaries: Sequence[int], most_tokens: int) -> int:
        """How much can be reused of a prompt that was computed with some boundaries.

        Where the tails of two boundaries meet, a hit may end anywhere between them, and where one
        reaches the start, anywhere before it. With tails of 64 and the boundaries 48, 208 and 256:

            0     48                           208    256
            |xxxxxx|.............|xxxxxxxxxxxxxxx|xxxxxx|      hits end at 0 to 48 and 208 to 256

        Args:
            boundaries: Ascending.
            most_tokens: That are shared with it, a multiple of `hit_tokens`.
        """
        if not self.is_sparse:
            return most_tokens
        found = first = last = 0
        for boundary in boundaries:
            if boundary - self.least_tail > last:
                first = boundary
            last = boundary
            if first <= most_tokens:
                found = min(last, most_tokens)
        return found


UNKNOWN = Layout(
    hit_tokens=1,
    has_gaps=False,
    is_sparse=False,
    tails=(),
    least_tail=0,
    longest_tail=0,
    eagle=False,
    windows_first=False,
    groups=0,
    states=0,
    full_blocks_per_key=0.0,
    window_blocks_per_key=0.0,
)
_KEPT_AT_ENDS = GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


def layout_of(index: PrefixIndex, source: SourceId) -> Layout:
    """What an index has learned of a cache's layout.

    Args:
        index: The model's.
        source: The cache.
    """
    cache = index.statistics().get(source)
    layout = None if cache is None else cache.layout
    if cache is None or layout is None:
        return UNKNOWN
    groups = [group for group in layout.groups if group.kind is not GroupKind.NOT_CACHED]
    tails = [_tail(group) for group in groups if group.kind in _KEPT_AT_ENDS]
    states = sum(group.kind is GroupKind.MAMBA for group in groups)
    full = [group for group in groups if group.kind is GroupKind.FULL]
    return Layout(
        hit_tokens=layout.scheduler_block_size,
        has_gaps=len(full) < len(groups),
        is_sparse=states > 0 or (bool(tails) and not _is_dense(cache, layout)),
        tails=tuple(tails),
        least_tail=min((tail.tokens for tail in tails), default=0),
        longest_tail=max((tail.tokens for tail in tails), default=0),
        eagle=bool(layout.eagle),
        windows_first=groups[0].kind is not GroupKind.FULL,
        groups=len(groups),
        states=states,
        full_blocks_per_key=sum(STEP / group.block_size for group in full),
        window_blocks_per_key=sum(
            STEP / group.block_size
            for group in groups
            if group.kind not in (GroupKind.FULL, GroupKind.MAMBA)
        ),
    )


def _tail(group: KVCacheGroup) -> Tail:
    """Without what EAGLE needs behind a boundary."""
    if group.kind is GroupKind.MAMBA:
        return Tail(0, group.block_size)
    return Tail(group.window_blocks() * group.block_size, group.block_size)


def _is_dense(cache: SourceStatistics, layout: KVCacheLayout) -> bool:
    """Whether the engine keeps windows wherever a hit may end, by what it has stored so far: as
    much of each window as of full attention."""
    stored = dict(cache.removed)
    for (group, tier), blocks in cache.blocks.items():
        if tier == GPU:
            stored[group] = stored.get(group, 0) + blocks
    full: list[int] = []
    windows: list[float] = []
    for index, spec in enumerate(layout.groups):
        tokens = stored.get(index, 0) * spec.block_size
        if spec.kind is GroupKind.FULL:
            full.append(tokens)
        elif spec.kind is GroupKind.SLIDING_WINDOW:
            # Where hits end seldom, no more than a tail before each such place is kept.
            windows.append(tokens / min(1.0, _tail(spec).tokens / layout.scheduler_block_size))
    return bool(full and windows) and min(windows) >= DENSE * max(full) > 0
