"""What one source - one data-parallel rank of one replica - holds, block by block.

Presence is counted under the engine's own hashes, per group and tier. A block is *placed* once we
know which prefix its hash stands for, as a key of `keys.py`; that is learned from dense events,
which carry tokens for every hash. Everything else - a tier without tokens, a group with holes, a
suffix whose parent has not come yet - is counted at once and becomes visible when its hash is
placed, or when the engine's hash function is known and a prompt hashes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvevents.events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    pack_tokens,
)
from kvevents.hashing import ExtraKeys
from kvevents.layout import KVCacheLayout
from router.index.base import ApplyResult, LayoutHints, SourceLimits, SourceStatistics
from router.index.reference.keys import KeySpace, Mark, marks_of
from router.index.reference.learning import (
    HashFinder,
    LayoutLearner,
    engine_hashes,
)
from router.index.reference.waiting import Run, WaitingRuns

GroupTier: TypeAlias = tuple[int, str]

_DIGEST_BYTES = 32
"""Of SHA-256; the xxhash family's are shorter."""


class _Block(msgspec.Struct, gc=False):
    """Millions of these: the garbage collector must not walk them."""

    copies: int = 0
    """Over all groups and tiers."""
    key: int | None = None


class Source:
    """One source's blocks. Not thread-safe; no I/O."""

    def __init__(
        self, keys: KeySpace, hints: LayoutHints | None = None, limits: SourceLimits | None = None
    ) -> None:
        self.limits = limits or SourceLimits()
        self.learner = LayoutLearner(hints or LayoutHints())
        self.finder = HashFinder(self.learner.hints)
        self.held: dict[GroupTier, dict[BlockHash, int]] = {}
        self.hash_at: dict[int, BlockHash] = {}
        """Own key of a prefix -> the engine's hash of it, for placed blocks."""
        self.ambiguous = 0
        """Times two live hashes claimed one prefix: something the events do not show goes into the
        hash."""
        self.shows_extra_keys = False
        self.uses_int_hashes = False
        self._keys = keys
        self._blocks: dict[BlockHash, _Block] = {}
        self._forgotten: dict[BlockHash, int] = {}
        self._waiting = WaitingRuns()
        self._held_total = 0
        self._overflowed = False
        self._unplaced = 0
        self._batches = 0

    # --- reading ----------------------------------------------------------------------------------

    @property
    def layout(self) -> KVCacheLayout | None:
        return self.learner.layout

    @property
    def unplaced(self) -> int:
        """Distinct hashes held whose prefix is not known."""
        return self._unplaced

    @property
    def has_lower_tiers(self) -> bool:
        return any(tier != GPU for _, tier in self.held)

    @property
    def hides_extra_keys(self) -> bool:
        """True for engines whose events say nothing of salts and the like (vLLM < 0.17)."""
        return bool(self._blocks) and not self.shows_extra_keys

    def blocks(self) -> Iterator[tuple[int, str, int]]:
        """`(group, tier, distinct hashes)` for everything held."""
        return ((group, tier, len(hashes)) for (group, tier), hashes in sorted(self.held.items()))

    @property
    def is_incomplete(self) -> bool:
        """True once blocks were refused or given up that no look-up can find: the feed should
        rebuild the source."""
        return self._overflowed or (self._waiting.given_up > 0 and self.finder.chain is None)

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed or cannot be known, one sentence each, for an operator."""
        if not self._unplaced or self.finder.chain is not None:
            return self.learner.assumptions()
        unknown = f"{self._unplaced} blocks cannot be placed: the engine's hash function is not known; configure hash_seeds"
        return (*self.learner.assumptions(), unknown)

    def statistics(self) -> SourceStatistics:
        return SourceStatistics(
            blocks={(group, tier): count for group, tier, count in self.blocks()},
            unplaced=self.unplaced,
            ambiguous=self.ambiguous,
            waiting=self._waiting.statistics(),
            layout=self.layout,
            hash_algorithm=self.finder.chain.algorithm if self.finder.chain else None,
            assumptions=self.assumptions(),
            is_incomplete=self.is_incomplete,
        )

    # --- applying ---------------------------------------------------------------------------------

    def apply(self, batch: EventBatch) -> ApplyResult:
        """Take one batch; nothing in it can fail half-way."""
        result = ApplyResult(skipped=batch.skipped)
        layout_before, given_up_before = self.layout, self._waiting.given_up
        self._batches += 1
        for event in batch.events:
            self._learn_layout(event)
        for event in batch.events:
            self._apply_event(event, result)
        self._waiting.trim(self.limits, self._batches)
        self._find_hash_function(batch)
        result.given_up = self._waiting.given_up - given_up_before
        # A known hash function makes up for a prefix that was never learned.
        result.is_incomplete = result.overflow > 0 or (
            result.given_up > 0 and self.finder.chain is None
        )
        result.has_lower_tiers = self.has_lower_tiers
        result.layout_changed = self.layout != layout_before
        return result

    def _learn_layout(self, event: Event) -> None:
        if isinstance(event, CacheLayout):
            self.shows_extra_keys = True
            self.learner.see_announcement(event)
            self.finder.see_announcement(event)
        elif isinstance(event, BlockStored):
            self.learner.see_stored(event)

    def _apply_event(self, event: Event, result: ApplyResult) -> None:
        if isinstance(event, BlockStored):
            self._store(_stored_with_short_hashes(event), result)
        elif isinstance(event, BlockRemoved):
            self._remove(_removed_with_short_hashes(event), result)
        elif isinstance(event, AllBlocksCleared):
            self._clear_gpu(result)

    def _store(self, event: BlockStored, result: ApplyResult) -> None:
        self.shows_extra_keys |= event.extra_keys is not None
        tier = _group_tier(event)
        room = self._room(tier)
        taken = event.block_hashes[:room]
        for block_hash in taken:
            self._add_copy(tier, block_hash)
        block_size = event.tokens_per_block
        if block_size:
            self._place_run(event, block_size)
        result.stored += len(taken)
        result.overflow += len(event.block_hashes) - len(taken)
        result.skipped += len(event.block_hashes) - len(taken)
        self._overflowed |= len(taken) < len(event.block_hashes)
        result.waiting += sum(self._blocks[block_hash].key is None for block_hash in taken)

    def _room(self, tier: GroupTier) -> int:
        if (
            tier not in self.held
            and len({name for _, name in self.held} | {tier[1]}) > self.limits.tiers
        ):
            return 0
        return max(0, self.limits.blocks - self._held_total)

    def _add_copy(self, tier: GroupTier, block_hash: BlockHash) -> None:
        held = self.held.setdefault(tier, {})
        copies = held.get(block_hash, 0)
        held[block_hash] = copies + 1
        self._held_total += not copies
        block = self._blocks.get(block_hash)
        if block is None:
            block = self._blocks[block_hash] = _Block()
            self.uses_int_hashes = isinstance(block_hash, int)
            self._unplaced += 1
            self._place_again(block_hash)
        block.copies += 1

    def _place_again(self, block_hash: BlockHash) -> None:
        key = self._forgotten.pop(block_hash, None)
        if key is not None:
            self._place(block_hash, key)

    def _remove(self, event: BlockRemoved, result: ApplyResult) -> None:
        tier = _group_tier(event)
        for block_hash in event.block_hashes:
            if self._drop_copies(tier, block_hash, 1):
                result.removed += 1
            else:
                result.skipped += 1

    def _drop_copies(self, tier: GroupTier, block_hash: BlockHash, count: int) -> bool:
        held = self.held.get(tier)
        copies = held.get(block_hash, 0) if held else 0
        if held is None or not copies:
            return False
        if copies > count:
            held[block_hash] = copies - count
        else:
            self._drop_presence(tier, held, block_hash)
        block = self._blocks[block_hash]
        block.copies -= min(count, copies)
        if not block.copies:
            self._forget(block_hash, block)
        return True

    def _drop_presence(
        self, tier: GroupTier, held: dict[BlockHash, int], block_hash: BlockHash
    ) -> None:
        del held[block_hash]
        self._held_total -= 1
        if not held:
            del self.held[tier]

    def _forget(self, block_hash: BlockHash, block: _Block) -> None:
        del self._blocks[block_hash]
        if block.key is None:
            self._unplaced -= 1
            return
        if self.hash_at.get(block.key) == block_hash:
            del self.hash_at[block.key]
        self._remember(block_hash, block.key)

    def _remember(self, block_hash: BlockHash, key: int) -> None:
        """Keep the place of a block that nobody holds, for the tier that announces it late."""
        self._forgotten[block_hash] = key
        if len(self._forgotten) > self.limits.forgotten:
            del self._forgotten[next(iter(self._forgotten))]

    def _clear_gpu(self, result: ApplyResult) -> None:
        result.cleared = True
        for tier in [tier for tier in self.held if tier[1] == GPU]:
            for block_hash, copies in list(self.held[tier].items()):
                self._drop_copies(tier, block_hash, copies)
                result.removed += copies

    # --- keeping ----------------------------------------------------------------------------------

    def waiting_runs(self) -> Iterator[tuple[BlockHash, Run]]:
        """Runs that wait, each with the parent hash it waits for."""
        return ((parent, run) for parent, runs in self._waiting.by_parent.items() for run in runs)

    def restore(
        self,
        held: dict[GroupTier, dict[BlockHash, int]],
        placed: Iterable[tuple[BlockHash, int]],
        waiting: Iterable[tuple[BlockHash, Run]],
    ) -> None:
        """Take back the blocks of an earlier source into this empty one."""
        for tier, copies in held.items():
            for block_hash, count in copies.items():
                for _ in range(count):
                    self._add_copy(tier, block_hash)
        for block_hash, key in placed:
            self._place(block_hash, key)
        for parent, run in waiting:
            self._waiting.add(parent, run)

    # --- placing ----------------------------------------------------------------------------------

    def _place_run(self, event: BlockStored, block_size: int) -> None:
        """Learn the prefixes of a dense event, now or when its parent's place is known."""
        if self._is_opaque(event):
            return
        lookahead = self.learner.lookahead
        tail = event.lookahead_token_ids[-1] if event.lookahead_token_ids else []
        parent = event.parent_block_hash
        # A hash that covers the next tokens names a longer prefix: its key includes them, and a
        # child's run starts behind them.
        first = lookahead if parent is not None else 0
        run = Run(
            event.block_hashes,
            pack_tokens(event.token_ids[first:] + tail),
            block_size,
            lookahead - first,
            _behind(
                first, marks_of(event.extra_keys, block_size, event.lora_name, lookahead=lookahead)
            ),
            self._batches,
        )
        if parent is None:
            self._place_behind(self._keys.root(event.lora_name), run)
        elif (key := self._key_of(parent)) is not None:
            self._place_behind(key, run)
        elif self._needs_parent(event):
            self._waiting.add(parent, run)

    def _needs_parent(self, event: BlockStored) -> bool:
        """Can only the parent's place tell where this run belongs? A known hash function tells it
        at every look-up."""
        if self.finder.chain is not None and not event.lora_name:
            return False
        return any(
            block.key is None for block in map(self._blocks.get, event.block_hashes) if block
        )

    def _is_opaque(self, event: BlockStored) -> bool:
        """Does something the event hides go into its hashes? Only a known hash function can
        tell."""
        if event.parent_block_hash is not None or event.extra_keys is not None or event.lora_name:
            return False
        step = self._hash_block_size()
        if self.finder.chain is None or not step or event.lookahead_token_ids:
            return False
        size = len(event.token_ids) // len(event.block_hashes)
        first = engine_hashes(
            self.finder.chain, event.token_ids[:size], step, (), 0, self.uses_int_hashes
        )
        return bool(first) and first[-1] != event.block_hashes[0]

    def _key_of(self, block_hash: BlockHash) -> int | None:
        block = self._blocks.get(block_hash)
        return block.key if block and block.key is not None else self._forgotten.get(block_hash)

    def _place_behind(self, key: int, run: Run) -> None:
        """Place a run and, one after the other, everything that waited for one of its blocks."""
        ready = [(key, run)]
        while ready:
            key, run = ready.pop()
            shift = run.lookahead
            ends = range(
                run.block_size + shift, len(run.hashes) * run.block_size + shift + 1, run.block_size
            )
            for block_hash, block_key in zip(
                run.hashes, self._keys.chain(key, run.packed, ends, run.marks), strict=False
            ):
                self._place(block_hash, block_key)
                if block_hash in self._waiting.by_parent:
                    ready += [(block_key, child) for child in self._waiting.take(block_hash)]

    def _place(self, block_hash: BlockHash, key: int) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            self._remember(block_hash, key)
        if block is None or block.key is not None:
            return
        block.key = key
        self._unplaced -= 1
        self.ambiguous += key in self.hash_at
        self.hash_at[key] = block_hash

    # --- the engine's own hashes ------------------------------------------------------------------

    def _hash_block_size(self) -> int | None:
        return self.layout.hash_block_size if self.layout else None

    def learn_from_prompt(
        self, token_ids: Sequence[int], spell: Callable[[int], Iterable[Sequence[ExtraKeys]]]
    ) -> None:
        """Look for the hash function with a prompt, if blocks wait for one.

        Args:
            token_ids: The prompt.
            spell: For a hash block size, the ways in which engines may hash its extra keys.
        """
        step = self._hash_block_size()
        if step and self._unplaced and self.finder.may_find:
            self.finder.try_prompt(
                token_ids, spell(step), step, self.learner.lookahead, self._blocks
            )

    def _find_hash_function(self, batch: EventBatch) -> None:
        """Try, where placing alone leaves blocks unfound: holes without a dense group, lost
        parents, hidden salts."""
        step = self._hash_block_size()
        if (
            step is None
            or not self.finder.may_find
            or not (self._unplaced or self.hides_extra_keys)
        ):
            return
        for event in batch.events:
            if isinstance(event, BlockStored) and self.finder.may_find and event.tier == GPU:
                self.finder.try_event(event, step)


def _stored_with_short_hashes(event: BlockStored) -> BlockStored:
    """The event with each hash cut to one digest.

    Up to vLLM 0.23 a block of several hash blocks is named by all their digests, one after the
    other; the last is the hash that every other group and every newer version has for the same end.
    """
    if not any(map(_is_long, (event.parent_block_hash, *event.block_hashes))):
        return event
    parent = None if event.parent_block_hash is None else _last_digest(event.parent_block_hash)
    return msgspec.structs.replace(
        event, block_hashes=list(map(_last_digest, event.block_hashes)), parent_block_hash=parent
    )


def _removed_with_short_hashes(event: BlockRemoved) -> BlockRemoved:
    if not any(map(_is_long, event.block_hashes)):
        return event
    return msgspec.structs.replace(event, block_hashes=list(map(_last_digest, event.block_hashes)))


def _is_long(name: BlockHash | None) -> bool:
    return isinstance(name, bytes) and len(name) > _DIGEST_BYTES


def _last_digest(name: BlockHash) -> BlockHash:
    return name[-_DIGEST_BYTES:] if isinstance(name, bytes) else name


def _behind(start: int, marks: Sequence[Mark]) -> list[Mark]:
    """The marks from token *start* on, counted from there."""
    return [Mark(mark.position - start, mark.digest) for mark in marks if mark.position >= start]


def _group_tier(event: BlockStored | BlockRemoved) -> GroupTier:
    return event.group_idx or 0, event.tier
