"""Prompts that are being computed, and how much of them a new one shares at each cache.

It is asked for every request, and a busy router has hundreds of such prompts, most of which begin
alike. So they hang in a tree of prefixes; those that are as long as the new one and equal to it are
found by their last key. Only where caches keep windows or states sparsely, at the boundaries of a
prompt and nowhere else, is each of them looked at, block by block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvevents.events import GPU
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from router.index import HashedPrompt, PrefixIndex, SourceId, SourceStatistics
from router.mirror.prefix_tree import PrefixTree, equal_keys

STEP = 64
"""Tokens between two keys of a prefix; the same for all prompts of a model."""
DENSE = 0.97
"""Of the tokens that full attention stored, the share from which on windows are kept densely."""


class Layout(NamedTuple):
    """What matters of a cache's layout."""

    hit_tokens: int
    """Hits are multiples of it."""
    is_sparse: bool
    """Of a prompt, windows or states are kept only at some lengths, its boundaries."""
    tail_tokens: int
    """Before a boundary, what is kept of the group that keeps least: 0 of a state."""
    eagle: bool
    """Whether some group must have a block more of a hit than is reused."""
    has_gaps: bool
    """A prompt may be reusable as a whole and not in part: windows move on."""
    blocks_per_key: float
    """That `STEP` tokens take in all groups when they are computed."""
    full_blocks_per_key: float
    """Of these, those that a request needs until its end."""

    def boundaries_of(self, prompt_tokens: int) -> tuple[int, ...]:
        """Lengths at which an engine keeps windows and states of a prompt whatever it found."""
        step = self.hit_tokens
        if not self.eagle:
            return ((prompt_tokens - 1) // step * step,)
        # Its last block is computed again, so the one before is kept as well.
        ends = ((prompt_tokens - 1) // step * step, prompt_tokens // step * step)
        return tuple(sorted({max(end - step, 0) for end in ends}))

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
            if boundary - self.tail_tokens > last:
                first = boundary
            last = boundary
            if first <= most_tokens:
                found = min(last, most_tokens)
        return found


UNKNOWN = Layout(
    hit_tokens=1,
    is_sparse=False,
    tail_tokens=0,
    eagle=False,
    has_gaps=False,
    blocks_per_key=0.0,
    full_blocks_per_key=0.0,
)


class Prompt(Protocol):
    """One that is being computed."""

    @property
    def keys(self) -> Sequence[int]:
        """Every `STEP` tokens."""

    @property
    def tokens(self) -> int:
        """Its length."""

    @property
    def prompt(self) -> HashedPrompt | None:
        """For keys of other steps; None where others tell of it."""

    @property
    def kept(self) -> Sequence[int]:
        """Boundaries besides those of `Layout.boundaries_of`: what it found, what full attention
        had beyond that, what the engine was told."""


class Coming(NamedTuple):
    """What a cache will have of a prompt, though no event says so yet. In tokens."""

    tokens: int
    """A hit."""
    run: int
    """What full attention will have, at least as much: beyond the hit it is a junction."""


_Prompt = TypeVar("_Prompt", bound=Prompt)
_Holder = TypeVar("_Holder", bound=Hashable)


class InPrefill(Generic[_Prompt, _Holder]):
    """Such prompts, by who computes them.

    Args:
        layout_of: Of a holder's cache, as far as it is known.
    """

    def __init__(self, layout_of: Callable[[_Holder], Layout]) -> None:
        self._layout_of = layout_of
        self._by_root: dict[int, dict[_Prompt, _Holder]] = {}
        """By their first keys."""
        self._prefixes: PrefixTree[_Holder] = PrefixTree()
        self._equals: dict[tuple[int, int], dict[_Holder, int]] = {}
        """How many of these there are, by last key and tokens."""

    def __iter__(self) -> Iterator[tuple[_Prompt, _Holder]]:
        for prompts in self._by_root.values():
            yield from prompts.items()

    def add(self, prompt: _Prompt, holder: _Holder) -> None:
        """It is computed from now on.

        Args:
            prompt: One that has a key at least; the same object only once.
            holder: Where.
        """
        keys = prompt.keys
        self._by_root.setdefault(keys[0], {})[prompt] = holder
        self._prefixes.add(keys, holder)
        equals = self._equals.setdefault((keys[-1], prompt.tokens), {})
        equals[holder] = equals.get(holder, 0) + 1

    def remove(self, prompt: _Prompt) -> None:
        """One that was added counts no more."""
        keys = prompt.keys
        same_root = self._by_root[keys[0]]
        holder = same_root.pop(prompt)
        if not same_root:
            del self._by_root[keys[0]]
        self._prefixes.remove(keys, holder)
        equals = self._equals[keys[-1], prompt.tokens]
        equals[holder] -= 1
        if not equals[holder]:
            del equals[holder]
            if not equals:
                del self._equals[keys[-1], prompt.tokens]

    def shared(self, prompt: HashedPrompt, tokens: int, is_sparse: bool) -> dict[_Holder, Coming]:
        """How much of a prompt each holder is computing; those with nothing are left out.

        Args:
            prompt: Has a key at least.
            tokens: Its length; 0 if it is unknown, so that what is behind the last key never
                counts.
            is_sparse: Whether a cache may keep sparsely.
        """
        if is_sparse:
            return self._compared_with_each(prompt, tokens)
        shared = self._shared_runs(prompt.prefix_keys(STEP), tokens)
        return {holder: Coming(tokens, tokens) for holder, tokens in shared.items()}

    def _shared_runs(self, keys: Sequence[int], tokens: int) -> dict[_Holder, int]:
        found = {holder: count * STEP for holder, count in self._prefixes.shared(keys).items()}
        for holder in self._equals.get((keys[-1], tokens), ()):
            most = _most_reusable(tokens, self._layout_of(holder))
            found[holder] = max(found.get(holder, 0), most)
        if tokens % STEP == 0:  # only then do keys cover the last token
            for holder, shared in found.items():
                found[holder] = min(shared, _most_reusable(tokens, self._layout_of(holder)))
        return found

    def _compared_with_each(self, prompt: HashedPrompt, tokens: int) -> dict[_Holder, Coming]:
        best: dict[_Holder, Coming] = {}
        first = prompt.prefix_keys(STEP)[0]
        for other, holder in self._by_root.get(first, {}).items():
            layout, known = self._layout_of(holder), best.get(holder, _NOTHING)
            found = coming_of(prompt, tokens, other, layout)
            best[holder] = Coming(max(found.tokens, known.tokens), max(found.run, known.run))
        return best


_NOTHING = Coming(0, 0)


_KEPT_AT_ENDS = GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


def layout_of(index: PrefixIndex, source: SourceId) -> Layout:
    """What an index has learned of a cache's layout.

    Args:
        index: The model's.
        source: The cache.
    """
    cache = index.source_statistics(source)
    layout = None if cache is None else cache.layout
    if cache is None or layout is None:
        return UNKNOWN
    groups = [group for group in layout.groups if group.kind is not GroupKind.NOT_CACHED]
    tails = [group for group in groups if group.kind in _KEPT_AT_ENDS]
    has_states = any(group.kind is GroupKind.MAMBA for group in tails)
    return Layout(
        hit_tokens=layout.scheduler_block_size,
        is_sparse=has_states or (bool(tails) and not _is_dense(cache, layout)),
        tail_tokens=min((_tail_tokens(group) for group in tails), default=0),
        eagle=bool(layout.eagle),
        has_gaps=any(group.kind is not GroupKind.FULL for group in groups),
        blocks_per_key=sum(STEP / group.block_size for group in groups),
        full_blocks_per_key=sum(
            STEP / group.block_size for group in groups if group.kind is GroupKind.FULL
        ),
    )


def _tail_tokens(group: KVCacheGroup) -> int:
    """What is kept of a group before a boundary, without what EAGLE needs behind it."""
    if group.kind is GroupKind.MAMBA:
        return 0
    return group.window_blocks() * group.block_size


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
            windows.append(tokens / min(1.0, _tail_tokens(spec) / layout.scheduler_block_size))
    return bool(full and windows) and min(windows) >= DENSE * max(full) > 0


def are_equal(keys: Sequence[int], tokens: int, other: Prompt) -> bool:
    """Whether two prompts are taken for the same: as long, and equal up to the last key.

    Args:
        keys: Of the one; there are some.
        tokens: Its length.
        other: The other.
    """
    theirs = other.keys
    return tokens == other.tokens and len(keys) == len(theirs) and keys[-1] == theirs[-1]


def coming_of(prompt: HashedPrompt, tokens: int, other: Prompt, layout: Layout) -> Coming:
    """What of a prompt will be there when another has been computed.

    Args:
        prompt: The one; it has a key.
        tokens: Its length; 0 if it is unknown.
        other: What is being computed.
        layout: Of the cache where that is.
    """
    step = layout.hit_tokens
    shared = min(_shared_tokens(prompt, tokens, other, layout), _most_reusable(tokens, layout))
    shared = shared // step * step
    boundaries = sorted({*layout.boundaries_of(other.tokens), *other.kept})
    return Coming(layout.longest_hit(boundaries, shared), shared)


def _shared_tokens(prompt: HashedPrompt, tokens: int, other: Prompt, layout: Layout) -> int:
    """How many leading tokens two prompts share, as far as the keys of both tell."""
    if other.prompt is not None and layout is not UNKNOWN:
        step = layout.hit_tokens
        keys, theirs = prompt.prefix_keys(step), other.prompt.prefix_keys(step)
        return equal_keys(keys, theirs, 0, min(len(keys), len(theirs))) * step
    keys, theirs = prompt.prefix_keys(STEP), other.keys
    if are_equal(keys, tokens, other):
        return tokens
    return equal_keys(keys, theirs, 0, min(len(keys), len(theirs))) * STEP


def _most_reusable(tokens: int, layout: Layout) -> int:
    """The most that can be reused of a prompt: its last token is always computed. Of one of unknown
    length (0), all that there is."""
    return (tokens - 1) // layout.hit_tokens * layout.hit_tokens if tokens else sys.maxsize
