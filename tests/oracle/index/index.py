"""All sources of one model, and the hit of a prompt at each: what `router.index.index.PrefixIndex`
does, in dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

from kvevents.codec import decode
from kvevents.events import GPU, BlockHash, CacheLayout, EventBatch, pack_tokens
from kvevents.hashing import ExtraKeys, HashChain
from kvevents.hit_rule import (
    Present,
    longest_accepted,
    longest_extended_hit,
    longest_hit,
    longest_run,
)
from kvevents.layout import GroupKind, KVCacheLayout
from router.index.base import (
    NO_HIT,
    ApplyResult,
    GroupHit,
    Hit,
    SourceId,
    SourceLimits,
    SourceStatistics,
)
from router.index.hash_finder import HashForm, engine_hashes
from router.index.layout_learner import LayoutHints
from router.index.prompt import spellings
from tests.oracle.index.block_table import BlockTable
from tests.oracle.index.export import records_of, sources_of
from tests.oracle.index.keys import KeySpace
from tests.oracle.index.marks import marks_of
from tests.oracle.index.shared_store import SharedStore
from tests.oracle.index.source import LowerTier, SourceCache

HashAt: TypeAlias = Callable[[int], BlockHash | None]
"""`hash_at(i)`: the engine's hash of the prompt's first `i + 1` hash blocks, if it is known."""


class Match(dict[SourceId, Hit]):
    """What every source would reuse of a prompt, and where it could have been more."""

    def __init__(self) -> None:
        super().__init__()
        self.junctions: dict[SourceId, int] = {}
        """By source, see `token_columns`; 0 where left out."""

    def columns(self, sources: list[SourceId]) -> tuple[list[int], list[int], list[int]]:
        """See `token_columns`."""
        hits = [self.get(source, NO_HIT) for source in sources]
        return (
            [hit.gpu_cached_tokens for hit in hits],
            [hit.cached_tokens for hit in hits],
            [self.junctions.get(source, 0) for source in sources],
        )


class ReferenceIndex:
    """One `SourceCache` per source, and a key space that they share."""

    def __init__(
        self,
        keys: KeySpace | None = None,
        limits: SourceLimits | None = None,
        secret: bytes | None = None,
    ) -> None:
        """
        Args:
            keys: Where it is left out, that of the secret.
            limits: Of each source.
            secret: Indexes that are made with the same one have the same keys; None: a random one.
        """
        self.keys = keys or (KeySpace() if secret is None else KeySpace.from_secret(secret))
        self.limits = limits or SourceLimits()
        self.sources: dict[SourceId, SourceCache] = {}
        self.stores: dict[str, SharedStore] = {}
        """By name: those that some source shares."""

    # --- feeding ----------------------------------------------------------------------------------

    def add(self, source: SourceId, hints: LayoutHints | None = None) -> None:
        hints = hints or LayoutHints()
        for store in hints.stores:
            if store.name not in self.stores:
                self.stores[store.name] = SharedStore(store.name, self.limits, hints.tiers)
        self.sources[source] = SourceCache(self.keys, hints, self.limits, self.stores)

    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        if source not in self.sources:
            self.add(source)
        return self.sources[source].apply(batch)

    def clear(self, source: SourceId) -> None:
        if source in self.sources:
            self.add(source, self.sources[source].learner.hints)

    def drop(self, source: SourceId) -> None:
        gone = self.sources.pop(source, None)
        if gone is not None and gone.stores:
            # What nobody reads counts for nobody.
            shared = {store.name for kept in self.sources.values() for store in kept.stores}
            self.stores = {name: self.stores[name] for name in self.stores if name in shared}

    # --- asking -----------------------------------------------------------------------------------

    def prepare(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        extra_steps: Sequence[int] = (),
    ) -> PromptKeys:
        prompt = PromptKeys(self.keys, token_ids, lora_name, cache_salt, extra_keys)
        for hash_block_size, lookahead in self.steps():
            prompt.keys(hash_block_size, lookahead)
        for step in extra_steps:
            prompt.prefix_keys(step)
        return prompt

    def match_prompt(self, prompt: PromptKeys) -> Match:
        found = Match()
        for source_id, source in self.sources.items():
            found[source_id], found.junctions[source_id] = hit_and_junction(source, prompt)
        return found

    def match(self, *prompt: Any) -> Match:
        """`prepare` and `match_prompt` in one."""
        return self.match_prompt(self.prepare(*prompt))

    def match_source(self, prompt: PromptKeys, source: SourceId) -> Hit:
        known = self.sources.get(source)
        return hit_and_junction(known, prompt)[0] if known else NO_HIT

    def match_tier(self, prompt: PromptKeys, source: SourceId, tier: str) -> int:
        known = self.sources.get(source)
        return tier_hit(known, prompt, tier) if known else 0

    def explain(self, prompt: PromptKeys, source: SourceId) -> tuple[GroupHit, ...]:
        known = self.sources.get(source)
        return tuple(group_hits(known, prompt)) if known else ()

    def steps(self) -> set[tuple[int, int]]:
        """`(hash block size, lookahead)` of all layouts known."""
        # A list, in one go: events may be applied in another thread.
        learners = [source.learner for source in list(self.sources.values())]
        return {
            (layout.hash_block_size, learner.lookahead)
            for learner in learners
            if (layout := learner.layout) is not None
        }

    # --- keeping ----------------------------------------------------------------------------------

    def export(self, only: SourceId | None = None) -> Iterator[bytes]:
        if only is None:
            return records_of(self.keys, self.sources)
        named = {only: self.sources[only]} if only in self.sources else {}
        return records_of(self.keys, named)

    def restore(self, records: Iterable[bytes | memoryview]) -> None:
        self.keys, self.sources, self.stores = sources_of(records, self.limits)

    # --- looking ----------------------------------------------------------------------------------

    def holds(self, source: SourceId) -> bool:
        return source in self.sources

    def blocks_held(self, source: SourceId) -> int:
        return self.sources[source].table.total(GPU) if source in self.sources else 0

    def removals(self, source: SourceId) -> int:
        return self.sources[source].removals if source in self.sources else 0

    def announced(self, source: SourceId) -> CacheLayout | None:
        return self.sources[source].learner.announced if source in self.sources else None

    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source_id: source.statistics() for source_id, source in self.sources.items()}


# --- a prompt ------------------------------------------------------------------------------------


class PromptKeys:
    """A prompt under every key and hash that some source may know its prefixes by; each list is
    computed once."""

    def __init__(
        self,
        space: KeySpace,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.lora_name = lora_name
        self._space = space
        self._salt = cache_salt
        self._extra_keys = extra_keys
        self._keys: dict[tuple[int, int], list[int]] = {}
        self._prefix_keys: dict[int, list[int]] = {}
        self._hashes: dict[tuple[HashChain, int, int, bool], list[list[BlockHash]]] = {}

    @cached_property
    def _packed(self) -> bytes:
        return pack_tokens(self.token_ids)

    def keys(self, step: int, lookahead: int = 0) -> list[int]:
        """Keys at every multiple of *step* tokens, each *lookahead* tokens further along.

        Args:
            step: Tokens per entry of the prompt's extra keys.
            lookahead: Tokens behind a block that its hash covers too.
        """
        if (step, lookahead) not in self._keys:
            marks = marks_of(self._extra_keys, step, self.lora_name, self._salt, lookahead)
            ends = range(step + lookahead, len(self.token_ids) + 1, step)
            chain = self._space.chain(self._space.root(self.lora_name), self._packed, ends, marks)
            self._keys[step, lookahead] = list(chain)
        return self._keys[step, lookahead]

    def prefix_keys(self, step: int) -> Sequence[int]:
        if step not in self._prefix_keys:
            self._prefix_keys[step] = self._picked(step) or self.keys(step)
        return self._prefix_keys[step]

    def _picked(self, step: int) -> list[int] | None:
        """Every n-th of finer keys that were computed before; None if there are no such keys."""
        for finer, lookahead in self._keys:
            if not lookahead and step % finer == 0:
                nth = step // finer
                return self._keys[finer, 0][nth - 1 :: nth]
        return None

    def engine_hashes(
        self, chain: HashChain, step: int, lookahead: int, as_int: bool
    ) -> list[list[BlockHash]]:
        """An engine's hashes at every multiple of *step*: one list for each spelling of extra keys.

        Args:
            chain: The engine's.
            step: Tokens between two hashes.
            lookahead: Tokens behind a block that its hash covers too.
            as_int: As 64-bit integers, else as digests.
        """
        wanted = HashForm(chain, step, lookahead, as_int)
        if wanted not in self._hashes:
            self._hashes[wanted] = [
                engine_hashes(wanted, self.token_ids, extra_keys)
                for extra_keys in self.spellings(step)
            ]
        return self._hashes[wanted]

    def spellings(self, step: int) -> Iterator[Sequence[ExtraKeys]]:
        """The ways in which engines may hash the extra keys of blocks of *step* tokens."""
        blocks = -(-len(self.token_ids) // step)
        return spellings(self._extra_keys, blocks, self.lora_name, self._salt)


# --- its hit at one source ------------------------------------------------------------------------


def hit_and_junction(source: SourceCache, prompt: PromptKeys) -> tuple[Hit, int]:
    """How much of a prompt a source would reuse, and how much further full attention by itself
    would reach on its GPU.

    Args:
        source: Nothing where its layout is not known.
        prompt: Of the same key space.
    """
    layout, length = source.layout, len(prompt.token_ids)
    if layout is None or length < 2:
        return NO_HIT, 0
    hashes = list(_hashes(source, prompt, layout))
    on_gpu = _presence(hashes, layout, [(source.table, GPU)])
    gpu = longest_hit(layout, on_gpu, length - 1, length)
    has_full = any(group.kind is GroupKind.FULL for group in layout.groups)
    run = longest_run(layout, on_gpu, length - 1, length) if has_full else gpu
    best = Hit(gpu, gpu)
    lower = source.lower_tiers()
    if lower:
        hashes += _hashes_below(source, prompt, layout)
        for units, tiers in _by_units(source, lower, hashes, layout, length).items():
            best = max(best, _extended(source, layout, hashes, gpu, length, units, tiers), key=_all)
    if best.cached_tokens <= layout.prefix_replay_tokens:
        # It would be computed again as a whole; what full attention holds may be longer.
        return NO_HIT, run if run > layout.prefix_replay_tokens else 0
    return best, run - gpu


def tier_hit(source: SourceCache, prompt: PromptKeys, tier: str) -> int:
    """How much of a prompt one lower tier of a source would give a cache that holds nothing.

    Args:
        source: Nothing where its layout is not known.
        prompt: Of the same key space.
        tier: Its name, in upper case; a tier of a store that it shares is none of its own.
    """
    layout, length = source.layout, len(prompt.token_ids)
    own = [
        each for each in source.lower_tiers() if each.tier == tier and each.table is source.table
    ]
    if layout is None or length < 2 or not own:
        return 0
    hashes = [*_hashes(source, prompt, layout), *_hashes_below(source, prompt, layout)]
    ((units, tiers),) = _by_units(source, own, hashes, layout, length).items()
    hit = _extended(source, layout, hashes, 0, length, units, tiers).cached_tokens
    return hit if hit > layout.prefix_replay_tokens else 0


_all = attrgetter("cached_tokens")


def _extended(
    source: SourceCache,
    layout: KVCacheLayout,
    hashes: Sequence[HashAt],
    gpu: int,
    length: int,
    units: Sequence[int],
    tiers: Sequence[LowerTier],
) -> Hit:
    """The GPU's hit with what *tiers* can bring back, and what each of them adds: a block counts
    for the first that has it."""
    # Our own engine announces its layout, and asks for no more than a window needs.
    as_vllm = source.learner.announced is None

    def reach(count: int) -> int:
        below = _presence(hashes, layout, [(tier.table, tier.tier) for tier in tiers[:count]])
        return longest_extended_hit(layout, below, gpu, length, units, as_vllm)

    hit = reach(len(tiers))
    if len(tiers) == 1:
        return Hit(gpu, hit, ((tiers[0].label, hit - gpu),) if hit > gpu else ())
    by_tier: dict[str, int] = {}
    so_far = gpu
    for count, tier in enumerate(tiers, start=1):
        if so_far == hit:
            break
        reached = hit if count == len(tiers) else min(hit, max(so_far, reach(count)))
        if reached > so_far:
            by_tier[tier.label] = by_tier.get(tier.label, 0) + reached - so_far
        so_far = reached
    return Hit(gpu, hit, tuple(by_tier.items()))


def _by_units(
    source: SourceCache,
    lower: Sequence[LowerTier],
    hashes: Sequence[HashAt],
    layout: KVCacheLayout,
    length: int,
) -> dict[tuple[int, ...], list[LowerTier]]:
    """The lower tiers, those with equal units together: a hit may take from each of them. What
    keeps other units is another connector of the engine, and it loads from one."""
    together: dict[tuple[int, ...], list[LowerTier]] = {}
    for tier in lower:
        if source.learner.announced is None:
            _see_ends(tier, hashes, layout, length)
        together.setdefault(source.units_of(tier), []).append(tier)
    return together


def _see_ends(
    lower: LowerTier, hashes: Sequence[HashAt], layout: KVCacheLayout, length: int
) -> None:
    """Learn a tier's units from what it holds of the prompt, if its events did not show them:
    their hashes had no known place then, or still have none."""
    step, units = layout.hash_block_size, lower.units
    for where, blocks in lower.table.held.items():
        has_unplaced = lower.table.unplaced > 0
        if where[1] != lower.tier or not units.wants_ends(where, layout, has_unplaced):
            continue
        ends = (
            (index + 1) * step
            for index in range(length // step)
            if any(hash_at(index) in blocks for hash_at in hashes)
        )
        units.see(where, ends)


def group_hits(source: SourceCache, prompt: PromptKeys) -> Iterator[GroupHit]:
    """The longest prefix that each group would accept.

    Args:
        source: Nothing where its layout is not known.
        prompt: Of the same key space.
    """
    layout, length = source.layout, len(prompt.token_ids)
    if layout is None or length < 2:
        return
    present = _presence(list(_hashes(source, prompt, layout)), layout, [(source.table, GPU)])
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            accepted = longest_accepted(layout, index, present, length - 1, length)
            yield GroupHit(index, group.kind.value, accepted)


def _hashes(source: SourceCache, prompt: PromptKeys, layout: KVCacheLayout) -> Iterator[HashAt]:
    """The ways to find the source's hashes of the prompt's prefixes: learned from its events, or
    computed as its engine does."""
    step, lookahead = layout.hash_block_size, source.lookahead
    source.learn_from_prompt(prompt.token_ids, prompt.spellings)
    chain, computed_only = source.finder.chain, _computed_only(source, prompt)
    if not computed_only:
        yield _found_in(source.table.hash_by_key, prompt.keys(step, lookahead))
    if chain is not None and (computed_only or source.has_unplaced):
        as_int = source.table.uses_int_hashes
        for hashes in prompt.engine_hashes(chain, step, lookahead, as_int):
            yield _computed(hashes)


def _hashes_below(
    source: SourceCache, prompt: PromptKeys, layout: KVCacheLayout
) -> Iterator[HashAt]:
    """Further ways, for what lower tiers hold: hashes of their own, and those that other sources
    stored in a shared place."""
    keys = prompt.keys(layout.hash_block_size, source.lookahead)
    if source.has_own_blocks_below and _computed_only(source, prompt):
        # What no hash of the engine's stands for is found by its tokens.
        yield _found_in(source.table.hash_by_key, keys)
    if source.table.tier_hash_by_key:
        yield _found_in(source.table.tier_hash_by_key, keys)
    for store in source.stores:
        for learned in (store.table.hash_by_key, store.table.tier_hash_by_key):
            if learned:
                yield _found_in(learned, keys)


def _computed_only(source: SourceCache, prompt: PromptKeys) -> bool:
    """Whether the engine's own hash decides: hidden salts make learned places doubtful."""
    is_known = source.finder.chain is not None
    return is_known and source.hides_extra_keys and prompt.lora_name is None


def _found_in(hash_by_key: dict[int, BlockHash], keys: Sequence[int]) -> HashAt:
    count = len(keys)
    return lambda index: hash_by_key.get(keys[index]) if index < count else None


def _computed(hashes: Sequence[BlockHash]) -> HashAt:
    return lambda index: hashes[index] if index < len(hashes) else None


def _presence(
    hashes: Sequence[HashAt], layout: KVCacheLayout, tiers: Sequence[tuple[BlockTable, str]]
) -> Present:
    """`present(group, end)` for blocks held in one of *tiers*, each of a table."""
    step = layout.hash_block_size
    held = [
        [table.held[group, tier] for table, tier in tiers if (group, tier) in table.held]
        for group in range(len(layout.groups))
    ]

    def present(group: int, end: int) -> bool:
        index = end // step - 1
        return any(hash_at(index) in blocks for blocks in held[group] for hash_at in hashes)

    if len(hashes) > 1 or any(len(blocks) > 1 for blocks in held):
        return present
    return _single_presence(step, hashes[0], [blocks[0] if blocks else {} for blocks in held])


def _single_presence(step: int, hash_at: HashAt, held: Sequence[dict[BlockHash, int]]) -> Present:
    """The usual case without the loops: one tier, one way to find a hash."""
    return lambda group, end: hash_at(end // step - 1) in held[group]
