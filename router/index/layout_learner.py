"""Learns a source's cache layout from its events.

Facts beat assumptions: a `CacheLayout` event, else the events' own fields, else the configuration.
Assumptions are listed for the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvevents.errors import LayoutError
from kvevents.events import GPU, BlockStored, CacheLayout
from kvevents.hashing import DEFAULT_SEED
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout, kind_from_wire

_UNKNOWN_SIZE = "unknown, taken as full attention"


# --- the configuration ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierHint:
    """Holds the configuration of a lower tier: how much it keeps together.

    Without it that is learned. A tier with larger blocks than the GPU's names their size: the
    largest is its unit, a smaller one the end of a prompt that does not fill it (LMCache's
    `save_unfull_chunk`).
    """

    unit_blocks: int | None = None
    """Blocks of a group in a unit."""
    unit_size: int | None = None
    """Tokens in a unit, in every group."""


@dataclass(frozen=True, slots=True)
class StoreHint:
    """A store that a source shares with others of its model: what one wrote, all can load."""

    name: str
    """Sources that name the same store share it."""
    tiers: tuple[str, ...] = ()
    """In upper case: blocks in these tiers are in the store, unless they are announced as local.
    None named: blocks of any lower tier that are announced as remote."""
    ownership: str | None = None
    """Only blocks announced with this ownership."""


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """Holds the configuration of a model's cache."""

    groups: tuple[KVCacheGroup, ...] = ()
    """The groups by index; used where events do not name them."""
    hash_block_size: int | None = None
    """Tokens between two engine hashes; None: the greatest common divisor of the block sizes."""
    scheduler_block_size: int | None = None
    """Granularity of hits, in tokens; None: the least common multiple of the block sizes."""
    eagle: bool | tuple[int, ...] = False
    """The groups, by index, in which the engine drops the last matched block (EAGLE or MTP
    drafting), True for all; no engine sends this."""
    eagle_sees_last_token: bool = True
    """See `KVCacheLayout`; False for vLLM before 0.32."""
    prefix_replay_tokens: int = 0
    """See `KVCacheLayout`; no engine sends this."""
    authoritative: bool = False
    """The groups are facts that events cannot change; only a publisher's own `CacheLayout` can."""
    assume_unseen: bool = True
    """Groups that no event has named yet exist all the same."""
    hash_seeds: tuple[str, ...] = (DEFAULT_SEED, "0", "1", "42", "123", "1234")
    """Values of `PYTHONHASHSEED` the engines may run with."""
    tiers: tuple[tuple[str, TierHint], ...] = ()
    """Hints by the tier's name on the wire, in upper case."""
    stores: tuple[StoreHint, ...] = ()
    """The stores that the source shares; an event belongs to the first that it fits."""


# --- what events say ------------------------------------------------------------------------------


@dataclass(slots=True)
class SeenGroup:
    """Holds the facts from the events of one group so far. Sizes in tokens."""

    kind: str | None = None
    """The wire's name."""
    sliding_window: int | None = None
    block_size: int = 0
    """The largest seen."""
    smallest_size: int = 0
    """Entries inside a block are announced with a smaller size than the group's own (vLLM >=
    0.24)."""

    def see(self, kind: str | None, sliding_window: int | None, block_size: int) -> bool:
        """Take one event's fields; return True if something is new.

        Args:
            kind: None or empty is ignored, as for the window.
        """
        before = (self.kind, self.sliding_window, self.block_size, self.smallest_size)
        self.kind = kind or self.kind
        self.sliding_window = sliding_window or self.sliding_window
        self.smallest_size = min(self.smallest_size or block_size, block_size)
        self.block_size = max(self.block_size, block_size)
        return before != (self.kind, self.sliding_window, self.block_size, self.smallest_size)


@dataclass(slots=True)
class LayoutLearner:
    """Learns the layout of one source; `layout` is the best guess so far."""

    hints: LayoutHints = field(default_factory=LayoutHints)
    lookahead: int = 0
    """Tokens after a block that its hash covers too."""
    announced: CacheLayout | None = None
    """The layout announced by the publisher."""
    layout: KVCacheLayout | None = None
    """None while too little is known, or where it contradicts itself."""
    error: str | None = None
    """The contradiction."""
    seen: dict[int, SeenGroup] = field(default_factory=dict)
    """The facts by group index."""
    tiers_seen: dict[int, SeenGroup] = field(default_factory=dict)
    """The facts from lower tiers; for groups without events of the GPU."""
    smallest_step: int = 0
    """Greatest common divisor of all block sizes seen."""

    def __post_init__(self) -> None:
        self._rebuild()

    def see_announcement(self, event: CacheLayout) -> None:
        """Believe the publisher from now on."""
        self.announced = event
        self._rebuild()

    def see_stored(self, event: BlockStored) -> None:
        lookaheads = event.lookahead_token_ids
        is_on_gpu, size = event.tier == GPU, event.tokens_per_block
        if is_on_gpu:
            size = (event.block_size or size) if event.token_ids else 0
        self.see_run(
            max(map(len, lookaheads)) if lookaheads else None,
            event.group_idx or 0,
            is_on_gpu,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            size,
        )

    def see_run(
        self,
        lookahead: int | None,
        group: int | None,
        is_on_gpu: bool,
        kind: str | None,
        sliding_window: int | None,
        block_size: int,
    ) -> None:
        """Learn from the fields of a stored run; repeating it changes nothing.

        Args:
            lookahead: Tokens after a block that its hash covers too; None: unknown.
            group: Its index; None: nothing is learned of a group.
            is_on_gpu: False in a lower tier.
            block_size: In tokens, as far as the run shows it; else 0.
        """
        if lookahead is not None:
            self.lookahead = lookahead
        if group is None:
            return
        if not is_on_gpu:
            self._see_below(group, kind, sliding_window, block_size)
        elif block_size:
            seen = self.seen.setdefault(group, SeenGroup())
            changed = seen.see(kind, sliding_window, block_size)
            step = math.gcd(self.smallest_step, block_size)
            if changed or step != self.smallest_step:
                self.smallest_step = step
                self._rebuild()

    def _see_below(
        self, group: int, kind: str | None, sliding_window: int | None, block_size: int
    ) -> None:
        """A tier's block may be a chunk: its size is used only where nothing else is known."""
        if group in self.seen or not (block_size or kind):
            return
        seen = self.tiers_seen.setdefault(group, SeenGroup())
        if seen.see(kind, sliding_window, block_size):
            self._rebuild()

    def _rebuild(self) -> None:
        try:
            self.layout, self.error = self._build(), None
        except LayoutError as error:
            self.layout, self.error = None, str(error)

    def _build(self) -> KVCacheLayout | None:
        if self.announced is not None:
            return KVCacheLayout.from_event(self.announced)
        hints = self.hints
        groups = hints.groups if hints.authoritative else self._groups()
        if not any(group.kind is not GroupKind.NOT_CACHED for group in groups):
            return None
        return KVCacheLayout.build(
            groups,
            hints.hash_block_size or (None if hints.authoritative else self.smallest_step or None),
            self._inner_step(groups) or hints.scheduler_block_size,
            self._eagle(len(groups)),
            hints.eagle_sees_last_token,
            hints.prefix_replay_tokens,
        )

    def _eagle(self, group_count: int) -> bool | list[int]:
        """The groups that drop a block, of those known so far.

        Hashes that cover the next tokens make the drop unnecessary: vLLM >= 0.33 then drops
        nothing.
        """
        eagle = self.hints.eagle
        if self.lookahead or isinstance(eagle, bool):
            return bool(eagle) and not self.lookahead
        return [index for index in eagle if index < group_count]

    def _inner_step(self, groups: Sequence[KVCacheGroup]) -> int | None:
        """The granularity of hits that end inside blocks, in tokens; None: they end between blocks.

        vLLM lets a hit end inside a block only where Mamba states are kept at such points. Full
        attention and states in blocks of 32, and both also announced in blocks of 16: hits are
        multiples of 16. The same with a window in place of the states: multiples of 32.
        """
        states = [
            index
            for index, group in enumerate(groups)
            if group.kind is GroupKind.MAMBA and index in self.seen
        ]
        largest = max(group.block_size for group in groups)
        inside = any(self.seen[index].smallest_size < largest for index in states)
        partial = any(
            seen.smallest_size < groups[index].block_size
            for index, seen in self.seen.items()
            if index < len(groups)
        )
        return self.smallest_step if inside and partial else None

    def _groups(self) -> tuple[KVCacheGroup, ...]:
        assumed = len(self.hints.groups) if self.hints.assume_unseen else 0
        named = max((*self.seen, *self.tiers_seen), default=-1)
        count = max(assumed, named + 1)
        return tuple(self._group(index) for index in range(count))

    def _group(self, index: int) -> KVCacheGroup:
        seen, hint = self.seen.get(index) or self._from_below(index), self._hint(index)
        if seen is None:
            if hint and self.hints.assume_unseen:
                return hint
            return self._assumed_full(index) or KVCacheGroup(GroupKind.NOT_CACHED, 1)
        kind = kind_from_wire(seen.kind) or (hint.kind if hint else GroupKind.FULL)
        window = seen.sliding_window or (hint.sliding_window if hint else None)
        chunk = self._chunk_size(hint)
        if (kind is GroupKind.SLIDING_WINDOW and not window) or (
            kind is GroupKind.CHUNKED_LOCAL and not chunk
        ):
            kind = GroupKind.FULL
        return KVCacheGroup(
            kind, seen.block_size, window, chunk if kind is GroupKind.CHUNKED_LOCAL else None
        )

    def _assumed_full(self, index: int) -> KVCacheGroup | None:
        """A group that no event has named, where those behind it are windows or states: seldom all
        that a model has. Its blocks are larger than any prompt so far, and none is cached."""
        named = {**self.tiers_seen, **self.seen}
        kinds = [kind_from_wire(seen.kind) for seen in named.values()]
        if index >= max(named, default=0) or None in kinds or GroupKind.FULL in kinds:
            return None
        found = [self.seen.get(each) or self._from_below(each) for each in named]
        size = self.smallest_step or math.gcd(*(seen.block_size for seen in found if seen))
        return KVCacheGroup(GroupKind.FULL, size) if size else None

    def _from_below(self, index: int) -> SeenGroup | None:
        """Return a group's facts from lower tiers; the size that events leave out is the other
        groups'."""
        below, hint = self.tiers_seen.get(index), self._hint(index)
        if below is None:
            return None
        sizes = [each.block_size for each in self.tiers_seen.values() if each.block_size]
        size = (hint.block_size if hint else 0) or below.block_size
        size = size or self.smallest_step or math.gcd(*sizes)
        if not size or size % (self.smallest_step or size):
            return None
        return SeenGroup(below.kind, below.sliding_window, size, size)

    def _hint(self, index: int) -> KVCacheGroup | None:
        return self.hints.groups[index] if index < len(self.hints.groups) else None

    def _chunk_size(self, hint: KVCacheGroup | None) -> int | None:
        groups = (hint, *self.hints.groups) if hint else self.hints.groups
        sizes = [group.attention_chunk_size for group in groups if group.attention_chunk_size]
        return sizes[0] if sizes else None

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions, one sentence each."""
        if self.announced is not None:
            return (self.error,) if self.error else ()
        return tuple(self._assumptions())

    def _assumptions(self) -> Iterator[str]:
        if self.error:
            yield self.error
        if self.hints.eagle:
            yield "eagle: from the configuration"
        if self.hints.prefix_replay_tokens:
            yield "prefix_replay_tokens: from the configuration"
        if self.hints.authoritative:
            yield "groups: from the configuration"
            return
        for index in range(len(self._groups())):
            yield from self._group_assumptions(index)

    def _group_assumptions(self, index: int) -> Iterator[str]:
        seen, hint = self.seen.get(index), self._hint(index)
        if seen is None and self._from_below(index) is not None:
            yield f"group {index}: from a lower tier, no event of the GPU has named it"
            return
        if seen is None:
            if hint and self.hints.assume_unseen:
                yield f"group {index}: from the configuration, no event has named it"
            elif self._assumed_full(index):
                yield f"group {index}: taken as full attention, no event has named it"
            return
        kind = kind_from_wire(seen.kind)
        if kind is None:
            yield f"group {index}: kind from the configuration, or full attention"
        elif kind is GroupKind.CHUNKED_LOCAL:
            yield f"group {index}: attention_chunk_size {self._chunk_size(hint) or _UNKNOWN_SIZE}"
        elif kind is GroupKind.SLIDING_WINDOW and not seen.sliding_window:
            window = (hint.sliding_window if hint else None) or _UNKNOWN_SIZE
            yield f"group {index}: sliding_window {window}"
