"""Defines the hit rule: how much of a prompt a cache can serve.

The rule is written over one question, "is the block of group g that ends at token e present?". A
block's hash covers the whole prefix up to its end, so the end identifies the block. A prefix of
length L is *accepted* by

- full attention (also MLA and sink): every block of `[0, L)` is present; where L lies in a block
  (vLLM's `--prefix-match-unit`), an entry ends there or later in that block;
- a sliding window w: the last `ceil((w - 1) / block_size)` blocks before L are present, or all if
  there are fewer;
- chunked local attention c: the blocks from `floor(L / c) * c` to L are present;
- Mamba and linear attention: the one block that ends at L is present.

A group that holds layers of an EAGLE or MTP drafter (`KVCacheLayout.eagle`) must accept one block
more than is reused, unless it is one of states. The hit is the largest L, a multiple of the
layout's `scheduler_block_size`, that every group accepts. `longest_hit` finds it by walking from
block to block, and tests compare that with this definition (`tests/kvevents/test_hit_rule.py`).

In three cases the code follows vLLM's coordinator rather than the definition, since a hit is what
the engine really reuses: how groups agree with EAGLE (`_agree`), a short window with EAGLE and
mixed block sizes (`_longest_window`), and chunks that are not a multiple of the block size
(`_longest_chunk`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout

Present: TypeAlias = Callable[[int, int], bool]
"""`present(group_idx, end)`: is the block of that group that ends at token *end* present?"""


def longest_hit(layout: KVCacheLayout, present: Present, limit: int, prompt_tokens: int) -> int:
    """The longest prefix, in tokens and at most *limit*, that every group accepts.

    Args:
        present: Called for block ends up to *prompt_tokens*.
        limit: Longest hit allowed; for a GPU hit `len(prompt) - 1`, since the last token is always
            computed.
        prompt_tokens: Length of the prompt; EAGLE's extra block may end between *limit* and here.
    """
    together = equal_groups(layout)
    reach = _reach(layout, limit, prompt_tokens)
    hit = longest_run(layout, present, limit, prompt_tokens)
    others = [
        members for members in together if layout.groups[members[0]].kind is not GroupKind.FULL
    ]
    return _agree(layout, {members[0]: _in_all(members, present) for members in others}, hit, reach)


def longest_run(layout: KVCacheLayout, present: Present, limit: int, prompt_tokens: int) -> int:
    """The longest prefix that all groups of full attention accept by themselves; *limit* without
    such groups.

    Where it is longer than the hit, a window or a state has been evicted.

    Args:
        limit: Longest prefix wanted, in tokens.
    """
    run, reach = limit, _reach(layout, limit, prompt_tokens)
    for members in equal_groups(layout):
        if layout.groups[members[0]].kind is GroupKind.FULL:
            run = longest_accepted(layout, members[0], _in_all(members, present), run, reach)
    return run


def _reach(layout: KVCacheLayout, limit: int, prompt_tokens: int) -> int:
    # vLLM looks up a single group up to the limit and then drops a block; several groups that must
    # agree may look beyond it.
    several = sum(map(len, equal_groups(layout))) > 1
    return prompt_tokens if several and layout.eagle_sees_last_token else limit


def longest_extended_hit(
    layout: KVCacheLayout,
    below: Present,
    gpu_hit: int,
    prompt_tokens: int,
    units: Sequence[int] | None = None,
    as_vllm: bool = False,
) -> int:
    """The hit with what a lower tier can load, in tokens, at least *gpu_hit*.

    The rule of vLLM's offloading connector. It looks up whole units from the one that holds the end
    of the GPU's hit: what a window needs before that is on the GPU. If all groups are full
    attention the whole prompt may be hit: the engine computes the last token again over the same
    blocks. With any other kind the last token is left out, but the unit that holds it is looked up,
    and a window has to be whole at that unit's end; with Mamba the hit ends between units. Less
    than a unit beyond the GPU's hit is not loaded.

    Full attention and a window of 64, in units of 32 after a GPU hit of 64:

        end                  96  128  160  192
        full attention        x    x    x    x
        window                -    x    x    x
        a prompt of 192                      |    191: the window needs 160 and 192, and has them
        a prompt of 193                      |    192
        a prompt of 190                |          160: only five units are whole

    Args:
        below: The tier's units, by the token at which they end.
        gpu_hit: The result of `longest_hit` for the GPU.
        units: The tokens of a unit by group, each a multiple of the group's block size; None: a
            unit is a block.
        as_vllm: Ask for as many units as vLLM does: for a window of 17 those of 17 tokens, although
            the next token sees 16 before it, and for chunked attention always those of a chunk.
    """
    units = units or [group.block_size for group in layout.groups]
    search = _UnitSearch(layout, below, gpu_hit, prompt_tokens, units, as_vllm)
    return max(gpu_hit, search.longest())


@dataclass(eq=False, repr=False)
class _UnitSearch:
    """One search of a tier; the arguments are those of `longest_extended_hit`."""

    layout: KVCacheLayout
    below: Present
    gpu_hit: int
    prompt_tokens: int
    units: Sequence[int]
    as_vllm: bool

    def __post_init__(self) -> None:
        kinds = [group.kind for group in self.layout.groups]
        self._full = [index for index, kind in enumerate(kinds) if kind is GroupKind.FULL]
        self._others = [
            index
            for index, kind in enumerate(kinds)
            if kind not in (GroupKind.FULL, GroupKind.NOT_CACHED)
        ]
        self._others.sort(key=self._units_of_window, reverse=True)

    def longest(self) -> int:
        """Each group in turn cuts the hit; the windows go on until none cuts what another found."""
        hit, before = self._limit(), 0
        groups, gave_extra = [*self._full, *self._others], set[int]()
        while groups:
            agreeing, groups = groups, []
            has_window = False
            for index in agreeing:
                hit = self._cut(index, hit, index in gave_extra)
                if hit - self.gpu_hit < self.units[index]:
                    return 0
                is_eagle = _drops(self.layout, index)
                if is_eagle:
                    gave_extra.add(index)
                if hit < before:
                    if not is_eagle:
                        gave_extra.clear()
                    groups = self._others if has_window else groups
                has_window |= index in self._others
                before = hit
        return before

    def _limit(self) -> int:
        if not self._others:
            return self.prompt_tokens
        groups = self.layout.groups
        states = [
            self.units[index] for index in self._others if groups[index].kind is GroupKind.MAMBA
        ]
        return _align(self.prompt_tokens - 1, math.lcm(*states))

    def _cut(self, index: int, hit: int, gave_extra: bool) -> int:
        """The longest prefix of at most *hit* tokens that the units of a group allow."""
        unit = self.units[index]
        whole = self.prompt_tokens // unit
        hit = min(hit, whole * unit)
        if self.layout.groups[index].kind is GroupKind.MAMBA:
            hit = _align(hit, unit)
        if hit - self.gpu_hit < unit:
            return 0
        extra = int(_drops(self.layout, index) and not gave_extra)
        start, stop = self.gpu_hit // unit, min(-(-hit // unit) + extra, whole)
        if index in self._full:
            stop = self._end_of_run(index, start, stop)
        else:
            stop = self._end_of_window(index, start, stop, hit, extra)
        return min(hit, (stop - extra) * unit) if stop > start else 0

    def _end_of_run(self, index: int, start: int, stop: int) -> int:
        unit = self.units[index]
        missing = (n for n in range(start, stop) if not self.below(index, (n + 1) * unit))
        return next(missing, stop)

    def _end_of_window(self, index: int, start: int, stop: int, hit: int, extra: int) -> int:
        """The last unit behind which the window is whole, or reaches back to *start*."""
        unit = self.units[index]
        while stop - extra > start:
            last = stop - extra
            first = max(start, last - self._needed_units(index, min(hit, last * unit)))
            missing = next(
                (
                    n
                    for n in range(stop - 1, first - 1, -1)
                    if not self.below(index, (n + 1) * unit)
                ),
                None,
            )
            if missing is None:
                return stop
            # Every end from the missing unit on would need that unit too.
            stop = missing
        return start

    def _needed_units(self, index: int, end: int) -> int:
        """Units before *end*, the one around it included."""
        group, unit = self.layout.groups[index], self.units[index]
        tokens = 1
        if group.kind is GroupKind.SLIDING_WINDOW:
            assert group.sliding_window is not None
            tokens = max(1, group.sliding_window - 1 - end % -unit)
        elif group.kind is GroupKind.CHUNKED_LOCAL:
            assert group.attention_chunk_size is not None
            in_chunk = end % group.attention_chunk_size
            tokens = in_chunk and in_chunk - end % -unit
        needed = -(-tokens // unit)
        return max(needed, self._units_of_window(index)) if self.as_vllm else needed

    def _units_of_window(self, index: int) -> int:
        """Count the units of a window as vLLM counts them."""
        group = self.layout.groups[index]
        tokens = 1
        if group.kind is GroupKind.SLIDING_WINDOW:
            tokens = group.sliding_window or 1
        elif group.kind is GroupKind.CHUNKED_LOCAL:
            tokens = group.attention_chunk_size or 1
        return -(-tokens // self.units[index])


@lru_cache(maxsize=32)
def equal_groups(layout: KVCacheLayout) -> tuple[tuple[int, ...], ...]:
    """The indexes of all groups that cache, those with equal specs together.

    Equal groups are looked up as one, so they give up EAGLE's block once and not one by one. One
    that gives it up equals none that does not: a drafter's own layers differ from the model's in
    what a spec does not show.
    """
    together: dict[tuple[KVCacheGroup, bool], list[int]] = {}
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            together.setdefault((group, index in layout.eagle), []).append(index)
    return tuple(map(tuple, together.values()))


def _in_all(members: Sequence[int], present: Present) -> Present:
    """Return presence in all of *members*, under the index of the first."""
    if len(members) == 1:
        return present
    return lambda _, end: all(present(member, end) for member in members)


def _agree(layout: KVCacheLayout, groups: Mapping[int, Present], hit: int, reach: int) -> int:
    """The longest prefix of at most *hit* tokens that all *groups* accept.

    Each group in turn cuts the hit to the longest prefix that it accepts, until no group cuts it.
    Groups of full attention take no part: they accept every prefix of what they accepted before.
    Two windows A and B over blocks of 16, where A accepts 96 and 48, and B accepts 64 and 48:

        round   hit    A     B
          1      96    96    64     B cut the hit
          2      64    48    48     A cut it
          3      48    48    48     no cut: the hit is 48

    With EAGLE, as in vLLM's coordinator, a group that has given up its extra block once is asked
    without it from then on: it has been subtracted already. If a group then cuts the hit, the hit
    ends at other blocks, and every group has to give one up again:

        round   hit    A           B
          1      96    80 (96)     64 (80)     each accepts the block in brackets too
          2      64    48          16 (32)     A, asked without a block, cuts; B gives one up again
          3      16    16 (32)     16          A too; no cut: the hit is 16
    """
    gave_extra: set[int] = set()
    while hit:
        shorter = hit
        for index, present in groups.items():
            before, gives = shorter, index in layout.eagle and index not in gave_extra
            shorter = longest_accepted(
                layout, index, present, before, reach, without_extra=not gives
            )
            if gives:
                gave_extra.add(index)
            elif shorter < before:
                gave_extra.clear()
        if shorter == hit or len(groups) == 1:
            return shorter
        hit = shorter
    return 0


def longest_accepted(
    layout: KVCacheLayout,
    index: int,
    present: Present,
    limit: int,
    reach: int,
    without_extra: bool = False,
) -> int:
    """The longest prefix, in tokens, that one group accepts.

    Args:
        present: Called for that group.
        limit: Longest prefix allowed.
        reach: Where EAGLE's extra block must end at the latest.
        without_extra: Ask without EAGLE's extra block.
    """
    group = layout.groups[index]
    if group.kind is GroupKind.NOT_CACHED:
        return limit
    if group.kind is GroupKind.MAMBA:
        return _longest_state(layout, index, present, limit)
    extra = 0 if without_extra else _eagle_tokens(layout, index)
    length = min(limit, reach - extra)
    if length <= 0:
        return 0
    if group.kind is GroupKind.FULL:
        return _longest_run(
            layout, index, present, _align(length, layout.scheduler_block_size), extra
        )
    if group.kind is GroupKind.SLIDING_WINDOW:
        return _longest_window(layout, index, present, length, extra)
    if not extra:
        return _longest_chunk(layout, index, present, length)
    return _longest_chunk_with_extra(layout, index, present, length, extra)


def _align(length: int, step: int) -> int:
    return length - length % step


def _drops(layout: KVCacheLayout, index: int) -> bool:
    """Return whether a group gives up EAGLE's block: no drafter has states."""
    return index in layout.eagle and layout.groups[index].kind is not GroupKind.MAMBA


def _eagle_tokens(layout: KVCacheLayout, index: int) -> int:
    """Tokens that the draft model must see again: a block, or less in a group of full attention if
    hits may end inside a block."""
    if index not in layout.eagle:
        return 0
    group = layout.groups[index]
    return (
        min(group.block_size, layout.scheduler_block_size)
        if group.kind is GroupKind.FULL
        else group.block_size
    )


def _longest_state(layout: KVCacheLayout, index: int, present: Present, limit: int) -> int:
    step = layout.scheduler_block_size
    return next((end for end in range(_align(limit, step), 0, -step) if present(index, end)), 0)


def _longest_run(
    layout: KVCacheLayout, index: int, present: Present, length: int, extra: int
) -> int:
    size, step = layout.groups[index].block_size, layout.scheduler_block_size
    bound = length + extra
    run = next(
        (end - size for end in range(size, bound + 1, size) if not present(index, end)),
        _align(bound, size),
    )
    if step < size:
        inside = range(min(bound, run + size - step), run, -step)
        run = next((end for end in inside if present(index, end)), run)
    return _align(max(run - extra, 0), step)


def _chunk_ends(group: KVCacheGroup, length: int) -> range:
    """Ends of the blocks from the beginning of the chunk around *length* up to there.

    For 96 tokens, in blocks of 16 and chunks of 64: `80, 96`.
    """
    assert group.attention_chunk_size is not None
    size = group.block_size
    first = length // group.attention_chunk_size * group.attention_chunk_size // size * size
    return range(first + size, length + 1, size)


def _longest_chunk(layout: KVCacheLayout, index: int, present: Present, limit: int) -> int:
    # A chunk that is not a multiple of the block size: vLLM looks only at the chunk of *limit*, not
    # at the one before, although the first block of the chunk begins there. For all others this
    # equals the definition.
    group = layout.groups[index]
    missing = (end for end in _chunk_ends(group, limit) if not present(index, end))
    run = next((end - group.block_size for end in missing), _align(limit, group.block_size))
    return _align(run, layout.scheduler_block_size)


def _longest_chunk_with_extra(
    layout: KVCacheLayout, index: int, present: Present, length: int, extra: int
) -> int:
    group = layout.groups[index]
    step = math.lcm(layout.scheduler_block_size, group.block_size)
    length = _align(length, step)
    while length > 0:
        ends = reversed(_chunk_ends(group, length + extra))
        missing = next((end for end in ends if not present(index, end)), None)
        if missing is None:
            return length
        # Every length from the missing block on would need that block too.
        length = _align(max(missing - group.block_size - extra, 0), step)
    return 0


def _longest_window(
    layout: KVCacheLayout, index: int, present: Present, length: int, extra: int
) -> int:
    """Walk back from *length* until a run of present blocks is as long as the window needs, or
    reaches the start; each block is looked at once.

    A window that needs 3 blocks of 16, in a prompt of 96:

        end             16   32   48   64   80   96
        present          x    x    x    -    x    x
        length 96                       -----------     80 and 96, but 64 is missing
        length 48       --------------                  a run of 3: the hit is 48

    The lengths 64, 80 and 96 all need the block that ends at 64, so the walk goes on at 48. With
    EAGLE the run begins *extra* tokens beyond the length and must be one block longer.
    """
    group = layout.groups[index]
    size, step = group.block_size, math.lcm(layout.scheduler_block_size, group.block_size)
    needed = group.window_blocks(1 if extra else 0)
    length = _align(length, step)
    run, end = 0, length + extra
    while length > 0 and end > 0 and run < needed:
        if present(index, end):
            run += 1
            end -= size
        else:
            # Every length from the missing block on would need that block too.
            length = _align(max(end - size - extra, 0), step)
            run, end = 0, length + extra
    if length and extra and run < needed and size != step:
        # vLLM rounds down a run that is shorter than its window both before and after it drops
        # EAGLE's block, which costs one step.
        return length - step
    return length
