"""Reads what a request names as worth keeping, and finds where that is in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BOUNDARIES = 8
"""One request can name so many."""

RETENTION_HINTS = 1
"""Version of the hints, as `CacheLayout.retention_hints` announces it."""

KEEP, KEEP_END = "kvroute_keep", "kvroute_keep_end"
"""Names in `vllm_xargs` of a request's body, and so in `SamplingParams.extra_args`."""


class MalformedHints(ValueError):
    """A field has another form. The message shows no value: one may be too long to be written."""


@dataclass(frozen=True, slots=True)
class KeepHints:
    """The blocks of a request that later requests will ask for, by the router's knowledge."""

    boundaries: tuple[int, ...] = ()
    """Lengths of prefixes in tokens, ascending, each shorter than the prompt."""
    keep_end: bool = False
    """True where the session goes on: then the response stays findable as well."""


NO_HINTS = KeepHints()


def read_hints(extra_args: Any, num_prompt_tokens: int) -> KeepHints:
    """Read `kvroute_keep` and `kvroute_keep_end`; neither there: `NO_HINTS`.

    Args:
        extra_args: Of the request's sampling parameters, as they came.
        num_prompt_tokens: Boundaries that are no shorter are left out: vLLM keeps those itself.

    Raises:
        MalformedHints: A field has another form.
    """
    if not isinstance(extra_args, dict) or not (KEEP in extra_args or KEEP_END in extra_args):
        return NO_HINTS
    lengths = _lengths(extra_args.get(KEEP, ()))
    boundaries = tuple(sorted({length for length in lengths if length < num_prompt_tokens}))
    keep_end = _flag(extra_args.get(KEEP_END, False))
    return KeepHints(boundaries, keep_end) if boundaries or keep_end else NO_HINTS


def _lengths(value: Any) -> Sequence[int]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_BOUNDARIES:
        raise MalformedHints(f"{KEEP} must be a list of at most {MAX_BOUNDARIES} lengths")
    for index, length in enumerate(value):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise MalformedHints(f"{KEEP}[{index}] must be a whole number of at least 1")
    return value


def _flag(value: Any) -> bool:
    # The schema of `vllm_xargs` has no booleans: `true` in a body arrives as a 1.
    if not isinstance(value, (int, float)) or value not in (0, 1):
        raise MalformedHints(f"{KEEP_END} must be true or false")
    return bool(value)


@dataclass(frozen=True, slots=True)
class HitGrid:
    """The positions where hits of a cache can end, in tokens."""

    step: int
    """They are multiples of it."""
    lookahead: int = 0
    """Tokens behind a block that its hash also covers."""
    dropped: int = 0
    """A drafter makes hits shorter by so many: their last block is computed again."""

    def hits_of(self, boundaries: Iterable[int]) -> list[int]:
        """Return the longest hits at several boundaries, without those that are none."""
        return [hit for hit in map(self.hit_of, boundaries) if hit]

    def hit_of(self, boundary: int) -> int:
        """Return the longest hit of a prompt that shares *boundary* tokens and no more."""
        reach = max(boundary - self.lookahead, 0)
        return max(reach // self.step * self.step - self.dropped, 0)


def first_stop(hits: Iterable[int], start: int, end: int, block_size: int) -> int:
    """Return where the chunk `[start, end)` of a prefill must end so that a state is kept; *end*:
    nowhere.

    A state exists where a chunk ends, and is found at a multiple of its block. With blocks of 16,
    hits of 40 and 70, and a chunk from 0 to 96: 32. The next one, from 32 to 96: 64.

    Args:
        hits: Lengths of prefixes in tokens.
        start: In tokens, as *end*.
        end: Of the chunk that is planned.
        block_size: Tokens of a state's block.
    """
    stops = (hit // block_size * block_size for hit in hits)
    return min((stop for stop in stops if start < stop < end), default=end)
