"""Prompts that are being computed, and how much of them a new one shares at each cache.

It is asked for every request, and a busy router has hundreds of such prompts, most of which begin
alike. So they hang in a tree of prefixes; those that are as long as the new one and equal to it are
found by their last key. Only where caches keep states (Mamba), at the end of a prompt and nowhere
else, is each of them looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvevents.layout import GroupKind
from router.index import PrefixIndex, SourceId
from router.mirror.prefix_tree import PrefixTree, equal_keys

STEP = 64
"""Tokens between two keys of a prefix; the same for all prompts of a model."""


class Layout(NamedTuple):
    """What matters of a cache's layout."""

    hit_tokens: int
    """Hits are multiples of it."""
    has_states: bool
    """A hit needs a state (Mamba), which is kept at the end of a prompt only."""
    has_gaps: bool
    """A prompt may be reusable as a whole and not in part: windows move on."""
    blocks_per_key: float
    """That `STEP` tokens take in all groups when they are computed."""
    full_blocks_per_key: float
    """Of these, those that a request needs until its end."""


UNKNOWN = Layout(1, has_states=False, has_gaps=False, blocks_per_key=0.0, full_blocks_per_key=0.0)


class Prompt(Protocol):
    """One that is being computed."""

    @property
    def keys(self) -> Sequence[int]:
        """Every `STEP` tokens."""

    @property
    def tokens(self) -> int:
        """Its length."""


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

    def shared(self, keys: Sequence[int], tokens: int, with_states: bool) -> dict[_Holder, int]:
        """How many leading tokens of a prompt each holder is computing; those with none are left
        out.

        Args:
            keys: The prompt's; at least one.
            tokens: Its length; 0 if it is unknown, so that what is behind the last key never
                counts.
            with_states: Whether there may be states.
        """
        if with_states:
            return self._compared_with_each(keys, tokens)
        found = {holder: count * STEP for holder, count in self._prefixes.shared(keys).items()}
        for holder in self._equals.get((keys[-1], tokens), ()):
            most = _most_reusable(tokens, self._layout_of(holder))
            found[holder] = max(found.get(holder, 0), most)
        if tokens % STEP == 0:  # only then do keys cover the last token
            for holder, shared in found.items():
                found[holder] = min(shared, _most_reusable(tokens, self._layout_of(holder)))
        return found

    def _compared_with_each(self, keys: Sequence[int], tokens: int) -> dict[_Holder, int]:
        best: dict[_Holder, int] = {}
        count = len(keys)
        for prompt, holder in self._by_root.get(keys[0], {}).items():
            known, theirs = best.get(holder, 0), prompt.keys
            low = known // STEP
            if low < count and (low >= len(theirs) or theirs[low] != keys[low]):
                continue  # most of those that begin alike: they share no more than is known
            if found := tokens_shared(keys, tokens, prompt, self._layout_of(holder), known):
                best[holder] = found
        return best


def layout_of(index: PrefixIndex, source: SourceId) -> Layout:
    """What an index has learned of a cache's layout.

    Args:
        index: The model's.
        source: The cache.
    """
    cache = index.statistics().get(source)
    layout = None if cache is None else cache.layout
    if layout is None:
        return UNKNOWN
    groups = [group for group in layout.groups if group.kind is not GroupKind.NOT_CACHED]
    return Layout(
        layout.scheduler_block_size,
        any(group.kind is GroupKind.MAMBA for group in groups),
        any(group.kind is not GroupKind.FULL for group in groups),
        sum(STEP / group.block_size for group in groups),
        sum(STEP / group.block_size for group in groups if group.kind is GroupKind.FULL),
    )


def are_equal(keys: Sequence[int], tokens: int, other: Prompt) -> bool:
    """Whether two prompts are taken for the same: as long, and equal up to the last key.

    Args:
        keys: Of the one; there are some.
        tokens: Its length.
        other: The other.
    """
    theirs = other.keys
    return tokens == other.tokens and len(keys) == len(theirs) and keys[-1] == theirs[-1]


def tokens_shared(
    keys: Sequence[int], tokens: int, other: Prompt, layout: Layout, known: int
) -> int:
    """How many leading tokens of a prompt will be there when another has been computed.

    Args:
        keys: The prompt's; at least one.
        tokens: Its length; 0 if it is unknown.
        other: What is being computed.
        layout: Of the cache where that is.
        known: Tokens that are there anyhow; the least that is returned.
    """
    theirs, low = other.keys, known // STEP
    most, most_tokens = min(len(keys), len(theirs)), _most_reusable(tokens, layout)
    if not layout.has_states and are_equal(keys, tokens, other):
        return max(most_tokens, known)
    if low >= most or keys[low] != theirs[low]:
        return known
    if not layout.has_states:
        return max(min(equal_keys(keys, theirs, low + 1, most) * STEP, most_tokens), known)
    # A state is kept only at the end of what the request computes.
    end = other.tokens // layout.hit_tokens * layout.hit_tokens
    whole = -(-end // STEP)
    is_shared = 0 < whole <= most and keys[whole - 1] == theirs[whole - 1]
    return end if is_shared and end <= most_tokens else known


def _most_reusable(tokens: int, layout: Layout) -> int:
    """The most that can be reused of a prompt: its last token is always computed. Of one of unknown
    length (0), all that there is."""
    return (tokens - 1) // layout.hit_tokens * layout.hit_tokens if tokens else sys.maxsize
