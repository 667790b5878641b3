"""One prompt against one source: the hit, and each group's part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvevents.events import GPU, BlockHash
from kvevents.hit_rule import Present, longest_accepted, longest_extended_hit, longest_hit
from kvevents.layout import GroupKind, KVCacheLayout
from router.index.base import GroupHit, Hit
from router.index.reference.prompt import PromptKeys
from router.index.reference.source import SourceCache

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
    on_gpu = _presence(source, hashes, layout, (GPU,))
    gpu = longest_hit(layout, on_gpu, length - 1, length)
    lower = sorted({tier for _, tier in source.table.held} - {GPU})
    if lower and source.table.tier_hash_by_key:
        keys = prompt.keys(layout.hash_block_size, source.learner.lookahead)
        hashes.append(_found_in(source.table.tier_hash_by_key, keys))
    # Our own engine announces its layout, and asks for no more than a window needs.
    as_vllm, hit = source.learner.announced is None, gpu
    for units, tiers in _by_units(source, lower, hashes, layout, length).items():
        below = _presence(source, hashes, layout, tiers)
        hit = max(hit, longest_extended_hit(layout, below, gpu, length, units, as_vllm))
    return Hit(gpu, hit)


def _by_units(
    source: SourceCache,
    lower: Sequence[str],
    hashes: Sequence[HashAt],
    layout: KVCacheLayout,
    length: int,
) -> dict[tuple[int, ...], list[str]]:
    """The lower tiers, those with equal units together: a hit may take from each of them. What
    keeps other units is another connector of the engine, and it loads from one."""
    together: dict[tuple[int, ...], list[str]] = {}
    for tier in lower:
        _see_ends(source, tier, hashes, layout, length)
        together.setdefault(source.units_of(tier), []).append(tier)
    return together


def _see_ends(
    source: SourceCache, tier: str, hashes: Sequence[HashAt], layout: KVCacheLayout, length: int
) -> None:
    """Learn a tier's units from what it holds of the prompt, if its events did not tell: their
    hashes had no place then, or have none."""
    step, units = layout.hash_block_size, source.units
    if source.learner.announced is not None:
        return
    for where, blocks in source.table.held.items():
        is_known = where in units.seen and not source.table.unplaced
        if where[1] != tier or is_known or not units.may_shrink(where, layout):
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
    present = _presence(source, list(_hashes(source, prompt, layout)), layout, (GPU,))
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            accepted = longest_accepted(layout, index, present, length - 1, length)
            yield GroupHit(index, group.kind.value, accepted)


def _hashes(source: SourceCache, prompt: PromptKeys, layout: KVCacheLayout) -> Iterator[HashAt]:
    """The ways to find the source's hashes of the prompt's prefixes: learned from its events, or
    computed as its engine does."""
    step, lookahead = layout.hash_block_size, source.learner.lookahead
    source.learn_from_prompt(prompt.token_ids, prompt.spellings)
    chain = source.finder.chain
    # Salts that events hide make learned places doubtful: only the engine's own hash decides then.
    computed_only = chain is not None and source.hides_extra_keys and prompt.lora_name is None
    if not computed_only:
        yield _found_in(source.table.hash_by_key, prompt.keys(step, lookahead))
    if chain is not None and (computed_only or source.table.unplaced):
        as_int = source.table.uses_int_hashes
        for hashes in prompt.engine_hashes(chain, step, lookahead, as_int):
            yield _computed(hashes)


def _found_in(hash_by_key: dict[int, BlockHash], keys: Sequence[int]) -> HashAt:
    count = len(keys)
    return lambda index: hash_by_key.get(keys[index]) if index < count else None


def _computed(hashes: Sequence[BlockHash]) -> HashAt:
    return lambda index: hashes[index] if index < len(hashes) else None


def _presence(
    source: SourceCache, hashes: Sequence[HashAt], layout: KVCacheLayout, tiers: Sequence[str]
) -> Present:
    """`present(group, end)` for blocks held in one of *tiers*."""
    step, table = layout.hash_block_size, source.table
    held = [
        [table.held[group, tier] for tier in tiers if (group, tier) in table.held]
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
