"""How a cache is laid out in groups, and the hit rule: how much of a prompt such a cache can serve.

The rule is written over one question, "is the block of group g that ends at token e present?". A
block's hash stands for the whole prefix up to its end, so its end names it. A prefix of length L is
*accepted* by

- full attention (also MLA and sink): every block of `[0, L)` is present;
- a sliding window w: the last `ceil((w - 1) / block_size)` blocks before L are present, or all if
  there are fewer;
- chunked local attention c: the blocks from `floor(L / c) * c` to L are present;
- Mamba and linear attention: the one block that ends at L is present.

With EAGLE or MTP an attention group must accept one block more than is reused. The hit is the
largest L, a multiple of the layout's `scheduler_block_size`, that every group accepts. `accepts` is
that definition; `longest_hit` finds the same L by walking from block to block, and the tests hold
the two together (`tests/kvevents/test_layout.py`).

Three things follow vLLM's coordinator rather than the definition, since a hit is what the engine
really reuses: how groups agree with EAGLE (`_agree`), a short window with EAGLE and mixed block
sizes (`_longest_window`), and chunks that are no multiple of the block size (`_longest_chunk`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TypeAlias

from kvevents.errors import LayoutError
from kvevents.events import CacheLayout, GroupSpec

Present: TypeAlias = Callable[[int, int], bool]
"""`present(group_idx, end)`: is the block of that group that ends at token *end* there?"""

MAX_BLOCK_SIZE = 2**20


class GroupKind(Enum):
    """What a group's layers need of the past."""

    FULL = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"
    NOT_CACHED = "not_cached"
    """Cross and encoder-only attention: its blocks are never shared, so it has no say in a hit."""


_WIRE_KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
    "chunked_local_attention": GroupKind.CHUNKED_LOCAL,
    "mamba": GroupKind.MAMBA,
    "linear_attention": GroupKind.MAMBA,
    "cross_attention": GroupKind.NOT_CACHED,
    "encoder_only_attention": GroupKind.NOT_CACHED,
    "not_cached": GroupKind.NOT_CACHED,
}


def kind_from_wire(name: str | None) -> GroupKind | None:
    """The kind behind a `kv_cache_spec_kind`; None for a name we do not know."""
    return None if name is None else _WIRE_KINDS.get(name)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One group of layers that share block tables. All sizes in tokens."""

    kind: GroupKind
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def window_blocks(self, extra_blocks: int = 0) -> int:
        """How many blocks a sliding window needs, with EAGLE's; vLLM asks for one even where the
        window sees no other token."""
        assert self.sliding_window is not None
        return max(1, -(-(self.sliding_window - 1) // self.block_size) + extra_blocks)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """All groups of one cache, checked. All sizes in tokens."""

    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int
    scheduler_block_size: int
    eagle: bool = False
    eagle_sees_last_token: bool = True
    """Whether EAGLE's extra block may hold the prompt's last token, where several groups must
    agree: vLLM >= 0.32."""

    @classmethod
    def build(
        cls,
        groups: Sequence[KVCacheGroup],
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        eagle: bool = False,
        eagle_sees_last_token: bool = True,
    ) -> KVCacheLayout:
        """A checked layout; what is left out follows from the groups' block sizes.

        Raises:
            LayoutError: A size contradicts another; the message names group, value and rule.
        """
        for index, group in enumerate(groups):
            _check_group(index, group)
        sizes = [group.block_size for group in groups if group.kind is not GroupKind.NOT_CACHED]
        if not sizes:
            raise LayoutError("groups: a layout needs at least one group that caches")
        layout = cls(
            groups=tuple(groups),
            hash_block_size=hash_block_size or math.gcd(*sizes),
            scheduler_block_size=scheduler_block_size or math.lcm(*sizes),
            eagle=eagle,
            eagle_sees_last_token=eagle_sees_last_token,
        )
        _check_layout(layout)
        return layout

    @classmethod
    def from_event(cls, event: CacheLayout) -> KVCacheLayout:
        """The layout a publisher announced; raises `LayoutError` if it contradicts itself."""
        groups = [group_from_spec(index, spec) for index, spec in enumerate(event.groups)]
        return cls.build(groups, event.hash_block_size, event.scheduler_block_size, event.eagle)


def group_from_spec(index: int, spec: GroupSpec) -> KVCacheGroup:
    """A checked group from its wire form; raises `LayoutError`."""
    kind = kind_from_wire(spec.kind)
    if kind is None:
        raise LayoutError(
            f"group {index}: kind {spec.kind[:40]!r} is none of {', '.join(_WIRE_KINDS)}"
        )
    group = KVCacheGroup(kind, spec.block_size, spec.sliding_window, spec.attention_chunk_size)
    _check_group(index, group)
    return group


def _check_group(index: int, group: KVCacheGroup) -> None:
    place = f"group {index} ({group.kind.value})"
    _check_size(place, "block_size", group.block_size)
    if group.kind is GroupKind.SLIDING_WINDOW:
        _check_size(place, "sliding_window", group.sliding_window)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        _check_size(place, "attention_chunk_size", group.attention_chunk_size)


def _check_size(place: str, name: str, value: int | None) -> None:
    limit = MAX_BLOCK_SIZE if name.endswith("block_size") else 2**31
    if value is None or not 1 <= value <= limit:
        raise LayoutError(f"{place}: {name} {value} must lie in [1, {limit}]")


def _check_layout(layout: KVCacheLayout) -> None:
    _check_size("layout", "hash_block_size", layout.hash_block_size)
    _check_size("layout", "scheduler_block_size", layout.scheduler_block_size)
    if layout.scheduler_block_size % layout.hash_block_size:
        raise LayoutError(
            f"layout: scheduler_block_size {layout.scheduler_block_size} must be a multiple of "
            f"hash_block_size {layout.hash_block_size}"
        )
    for index, group in enumerate(layout.groups):
        if group.block_size % layout.hash_block_size and group.kind is not GroupKind.NOT_CACHED:
            raise LayoutError(
                f"group {index} ({group.kind.value}): block_size {group.block_size} must be a multiple of "
                f"hash_block_size {layout.hash_block_size}"
            )


# --- the rule, as it is defined -------------------------------------------------------------------


def accepts(group: KVCacheGroup, length: int, present: Callable[[int], bool]) -> bool:
    """Does *group* accept a prefix of *length* tokens? `present(end)` asks for the group's block
    that ends there."""
    if length == 0 or group.kind is GroupKind.NOT_CACHED:
        return True
    if group.kind is GroupKind.MAMBA:
        return present(length)
    if group.kind is GroupKind.FULL and length % group.block_size:
        return _accepts_inside_block(group, length, present)
    return all(present(end) for end in needed_ends(group, length))


def _accepts_inside_block(group: KVCacheGroup, length: int, present: Callable[[int], bool]) -> bool:
    # vLLM's `--prefix-match-unit`: a hit may end inside a block, which then has an entry of its own
    # at that point.
    whole = length - length % group.block_size
    return accepts(group, whole, present) and any(
        present(end) for end in range(length, whole + group.block_size + 1)
    )


def needed_ends(group: KVCacheGroup, length: int) -> range:
    """Ends of the blocks an attention group needs to accept *length* tokens, a multiple of its
    block size."""
    size = group.block_size
    first = 0
    if group.kind is GroupKind.SLIDING_WINDOW:
        first = max(0, length // size - group.window_blocks()) * size
    elif group.kind is GroupKind.CHUNKED_LOCAL:
        assert group.attention_chunk_size is not None
        chunk_start = length // group.attention_chunk_size * group.attention_chunk_size
        first = chunk_start // size * size
    return range(first + size, length + 1, size)


# --- the same, found quickly ----------------------------------------------------------------------


def longest_hit(layout: KVCacheLayout, present: Present, limit: int, prompt_tokens: int) -> int:
    """The longest prefix, in tokens and at most *limit*, that every group accepts.

    Args:
        layout: The cache's groups.
        present: Asked for block ends up to *prompt_tokens*.
        limit: Longest hit allowed; for a GPU hit `len(prompt) - 1`, since the last token is always
            computed.
        prompt_tokens: Where the prompt's blocks end; EAGLE's extra block may lie between *limit*
            and here.
    """
    together = equal_groups(layout)
    # vLLM looks a single group up to the limit and then drops a block; groups that must agree may
    # look further.
    several = sum(map(len, together)) > 1
    reach = prompt_tokens if several and layout.eagle_sees_last_token else limit
    hit = limit
    for members in together:
        if layout.groups[members[0]].kind is GroupKind.FULL:
            hit = longest_accepted(layout, members[0], _in_all(members, present), hit, reach)
    others = [
        members for members in together if layout.groups[members[0]].kind is not GroupKind.FULL
    ]
    return _agree(layout, {members[0]: _in_all(members, present) for members in others}, hit, reach)


def longest_extended_hit(
    layout: KVCacheLayout, on_gpu: Present, below: Present, gpu_hit: int, prompt_tokens: int
) -> int:
    """The hit with what lower tiers bring back, in tokens, at least *gpu_hit*.

    Beyond the GPU's hit only blocks count that a lower tier holds; before it a window may lean on
    the GPU's. With full attention alone the whole prompt may be hit: the engine computes the last
    token again over the same blocks. Every other kind would then need what lies before its window
    or state, so there the last token is left out, as in vLLM.

    Args:
        layout: The cache's groups.
        on_gpu: The GPU's blocks.
        below: The blocks of all lower tiers.
        gpu_hit: What `longest_hit` found on the GPU.
        prompt_tokens: Where the prompt's blocks end.
    """

    def present(group: int, end: int) -> bool:
        return below(group, end) if end > gpu_hit else on_gpu(group, end)

    kinds = {group.kind for group in layout.groups} - {GroupKind.NOT_CACHED}
    limit = prompt_tokens if kinds == {GroupKind.FULL} else prompt_tokens - 1
    return max(gpu_hit, longest_hit(layout, present, limit, prompt_tokens))


@lru_cache(maxsize=32)
def equal_groups(layout: KVCacheLayout) -> tuple[tuple[int, ...], ...]:
    """The groups that cache, those with equal specs together: they are looked up as one, so EAGLE's
    block is one for all."""
    together: dict[KVCacheGroup, list[int]] = {}
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            together.setdefault(group, []).append(index)
    return tuple(map(tuple, together.values()))


def _in_all(members: Sequence[int], present: Present) -> Present:
    """Asks for a block in all of *members*, under the name of the first."""
    if len(members) == 1:
        return present
    return lambda _, end: all(present(member, end) for member in members)


def _agree(layout: KVCacheLayout, groups: Mapping[int, Present], hit: int, reach: int) -> int:
    """Let groups cut *hit* in turn until none does. Full attention has no say here: what it
    accepted it accepts shorter.

    Like vLLM's coordinator, a group that has given EAGLE's block once is asked without it from then
    on, until a group that was asked without it cuts the hit again.
    """
    gave_extra: set[int] = set()
    while hit:
        shorter = hit
        for index, present in groups.items():
            before, is_free = shorter, index in gave_extra
            shorter = longest_accepted(layout, index, present, before, reach, without_extra=is_free)
            if not is_free:
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
    """The longest prefix of at most *limit* tokens that group *index* accepts; EAGLE's extra block
    ends by *reach*."""
    group = layout.groups[index]
    if group.kind is GroupKind.NOT_CACHED:
        return limit
    if group.kind is GroupKind.MAMBA:
        return _longest_state(layout, index, present, limit)
    extra = 0 if without_extra else _eagle_tokens(layout, group)
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


def _eagle_tokens(layout: KVCacheLayout, group: KVCacheGroup) -> int:
    """What the draft model must see again: a block, or of full attention a hash unit where hits may
    end inside a block."""
    if not layout.eagle:
        return 0
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


def _longest_chunk(layout: KVCacheLayout, index: int, present: Present, limit: int) -> int:
    # Chunks that are no multiple of the block size: vLLM looks at the chunk of *limit* alone, never
    # at the one before, though the first block of the chunk reaches back into it. For all others
    # this is what `accepts` says.
    group = layout.groups[index]
    assert group.attention_chunk_size is not None
    size = group.block_size
    first = limit // group.attention_chunk_size * group.attention_chunk_size // size * size
    ends = range(first + size, limit + 1, size)
    run = next((end - size for end in ends if not present(index, end)), _align(limit, size))
    return _align(run, layout.scheduler_block_size)


def _longest_chunk_with_extra(
    layout: KVCacheLayout, index: int, present: Present, length: int, extra: int
) -> int:
    group = layout.groups[index]
    step = math.lcm(layout.scheduler_block_size, group.block_size)
    length = _align(length, step)
    while length > 0:
        missing = next(
            (
                end
                for end in reversed(needed_ends(group, length + extra))
                if not present(index, end)
            ),
            None,
        )
        if missing is None:
            return length
        # Every length from the missing block on would need that block too.
        length = _align(max(missing - group.block_size - extra, 0), step)
    return 0


def _longest_window(
    layout: KVCacheLayout, index: int, present: Present, length: int, extra: int
) -> int:
    """From the end on, one look at a block: the first run as long as the window, or one that
    reaches the start."""
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
        # vLLM rounds a run that is shorter than its window before EAGLE's drop and again after it:
        # one step is lost.
        return length - step
    return length
