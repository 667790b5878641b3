"""One prompt against one source: the hit, and each group's part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from kvevents.events import GPU, BlockHash
from kvevents.hit_rule import Present, longest_accepted, longest_extended_hit, longest_hit
from kvevents.layout import GroupKind, KVCacheLayout
from router.index.base import GroupHit, Hit
from router.index.reference.block_table import BlockTable
from router.index.reference.prompt import PromptKeys
from router.index.reference.source import LowerTier, SourceCache

HashAt: TypeAlias = Callable[[int], BlockHash | None]
"""`hash_at(i)`: the engine's hash of the prompt's first `i + 1` hash blocks, if it is known."""


def hit_of(source: SourceCache, prompt: PromptKeys) -> Hit:
    """How much of a prompt a source would reuse.

    Args:
        source: Nothing where its layout is not known.
        prompt: Of the same key space.
    """
    layout, length = source.layout, len(prompt.token_ids)
    if layout is None or length < 2:
        return Hit(0, 0)
    hashes = list(_hashes(source, prompt, layout))
    on_gpu = _presence(hashes, layout, [(source.table, GPU)])
    gpu = longest_hit(layout, on_gpu, length - 1, length)
    best = Hit(gpu, gpu)
    lower = source.lower_tiers()
    if lower:
        hashes += _hashes_below(source, prompt, layout)
        for units, tiers in _by_units(source, lower, hashes, layout, length).items():
            best = max(best, _extended(source, layout, hashes, gpu, length, units, tiers), key=_all)
    return best


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
    """Learn a tier's units from what it holds of the prompt, if its events did not tell: their
    hashes had no place then, or have none."""
    step, units = layout.hash_block_size, lower.units
    for where, blocks in lower.table.held.items():
        is_known = where in units.seen and not lower.table.unplaced
        if where[1] != lower.tier or is_known or not units.may_shrink(where, layout):
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
    chain = source.finder.chain
    # Salts that events hide make learned places doubtful: only the engine's own hash decides then.
    computed_only = chain is not None and source.hides_extra_keys and prompt.lora_name is None
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
    if source.table.tier_hash_by_key:
        yield _found_in(source.table.tier_hash_by_key, keys)
    for store in source.stores:
        for learned in (store.table.hash_by_key, store.table.tier_hash_by_key):
            if learned:
                yield _found_in(learned, keys)


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
