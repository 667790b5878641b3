"""Prompts that are being computed, and how much of them a new one shares at each cache.

It is asked for every request, and a busy router has hundreds of such prompts, most of which begin
alike. So they hang in a tree of prefixes; those that are as long as the new one and equal to it are
found by their last key. Only where caches keep windows or states sparsely, at the boundaries of a
prompt and nowhere else, is each of them looked at, block by block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from router.index.mirror_types import STEP
from router.index.prompt import HashedPrompt
from tests.oracle.mirror.layout import UNKNOWN, Layout
from tests.oracle.mirror.prefix_tree import PrefixTree, equal_keys
from tests.support.index import Coming


class Prompt(Protocol):
    """One that is being computed."""

    @property
    def keys(self) -> Sequence[int]:
        """Every `STEP` tokens."""

    @property
    def tokens(self) -> int:
        """Its length."""


@runtime_checkable
class Known(Prompt, Protocol):
    """One that this router sent. Of one of others nothing but its keys is told."""

    @property
    def prompt(self) -> HashedPrompt | None:
        """For keys of other steps; None where there are several."""

    @property
    def kept(self) -> Sequence[int]:
        """Boundaries besides those of `Layout.boundaries_of`: what it found, what full attention
        had beyond that, what the engine was told."""


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
    kept = other.kept if isinstance(other, Known) else ()
    boundaries = sorted({*layout.boundaries_of(other.tokens), *kept})
    return Coming(layout.longest_hit(boundaries, shared), shared)


def _shared_tokens(prompt: HashedPrompt, tokens: int, other: Prompt, layout: Layout) -> int:
    """How many leading tokens two prompts share, as far as the keys of both tell."""
    if isinstance(other, Known) and other.prompt is not None and layout is not UNKNOWN:
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
