"""A tiny model of an engine's cache that knows the true state, and the hit rule in the words of the
design.

The model stores, keeps, offloads, evicts and clears blocks, returns the event an engine would send,
and computes what it would reuse of a prompt by trying every length from the longest down. Nothing
here shares code with what it is compared with.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvevents.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout

Has: TypeAlias = Callable[[int, int], bool]
"""`has(group, end)`: is the group's block that ends at token *end* present?"""


# --- the hit rule, in the words of the design -----------------------------------------------------


def needs(group: KVCacheGroup, length: int, one_more: int = 0) -> range:
    """Ends of the blocks that *group* needs to accept *length* tokens; with *one_more* a window
    needs one block more."""
    size, first = group.block_size, 0
    if group.kind is GroupKind.SLIDING_WINDOW:
        assert group.sliding_window is not None
        blocks = max(1, -(-(group.sliding_window - 1) // size) + one_more)
        first = max(0, length - blocks * size)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        assert group.attention_chunk_size is not None
        first = length // group.attention_chunk_size * group.attention_chunk_size
    return range(first + size, length + 1, size)


def one_block_further(layout: KVCacheLayout, index: int) -> int:
    """What EAGLE needs in addition in a group with its layers: a block, or for full attention one
    unit where hits may end inside a block."""
    group = layout.groups[index]
    if index not in layout.eagle or group.kind in (GroupKind.MAMBA, GroupKind.NOT_CACHED):
        return 0
    return (
        min(group.block_size, layout.scheduler_block_size)
        if group.kind is GroupKind.FULL
        else group.block_size
    )


def defined_accept(
    group: KVCacheGroup, length: int, further: int, has: Callable[[int], bool], reach: int
) -> bool:
    """Does the group accept *length* tokens, tested *further* tokens on, if blocks are looked at up
    to *reach*?"""
    if length == 0 or group.kind is GroupKind.NOT_CACHED:
        return True
    if group.kind is GroupKind.MAMBA:
        return has(length)
    tested = length + further
    if tested > reach:
        return False
    inside = tested % group.block_size
    if inside and group.kind is not GroupKind.FULL:
        return False  # the hit of a window ends with a block
    if not all(has(end) for end in needs(group, tested - inside, int(further > 0))):
        return False
    # A hit may end inside a block if the block has an entry there or later.
    last = min(tested - inside + group.block_size, reach)
    return not inside or any(has(end) for end in range(tested, last + 1))


def defined_own(
    layout: KVCacheLayout, index: int, has: Has, limit: int, furthest: int, with_extra: bool = True
) -> int:
    """The longest prefix that this group accepts, found by trying all of them from the longest
    down."""
    group = layout.groups[index]
    if group.kind is GroupKind.NOT_CACHED:
        return limit
    further = one_block_further(layout, index) if with_extra else 0
    reach = min(furthest, limit + further)
    tried = lengths(layout, limit)
    own = next(
        length
        for length in tried
        if defined_accept(group, length, further, lambda end: has(index, end), reach)
    )
    return max(0, own - _lost_step(layout, group, own, further))


def _lost_step(layout: KVCacheLayout, group: KVCacheGroup, own: int, further: int) -> int:
    """With EAGLE, vLLM rounds twice if the run is shorter than the window and the block size is not
    its step."""
    step = math.lcm(layout.scheduler_block_size, group.block_size)
    if (
        not (own and further)
        or group.kind is not GroupKind.SLIDING_WINDOW
        or group.block_size == step
    ):
        return 0
    wanted = len(needs(group, 10**6 * step, 1))
    return step if len(needs(group, own + further, 1)) < wanted else 0


def defined_hit(layout: KVCacheLayout, has: Has, limit: int, prompt_tokens: int) -> int:
    """The largest length that every group accepts; with EAGLE, the one on which vLLM's groups agree
    when asked in turn."""
    caching = [
        index for index, group in enumerate(layout.groups) if group.kind is not GroupKind.NOT_CACHED
    ]
    furthest = prompt_tokens if len(caching) > 1 and layout.eagle_sees_last_token else limit
    if layout.eagle:
        firsts = [index for index in caching if min(_equals(layout, index)) == index]
        return _agreed(layout, firsts, _of_equals(layout, has), limit, furthest)
    return next(
        length
        for length in lengths(layout, limit)
        if all(_accepts(layout, index, length, has, limit) for index in caching)
    )


def defined_tier_hit(
    layout: KVCacheLayout,
    has: Has,
    gpu_hit: int,
    prompt_tokens: int,
    units: Sequence[int],
    as_vllm: bool = False,
) -> int:
    """The hit with a tier that keeps *units*: the groups are asked in turn, those of full attention
    once, and each tries every length; with EAGLE, one unit further until it has given that up."""
    tier = _Tier(layout, has, gpu_hit, prompt_tokens, units, as_vllm)
    hit, asked, gave = tier.limit(), [*tier.full, *tier.others], set[int]()
    is_first = True
    while True:
        before = hit
        for index in asked:
            drafts = one_block_further(layout, index) > 0
            further = int(drafts and index not in gave)
            own = next((n for n in range(hit, 0, -1) if tier.accepts(index, n, hit, further)), 0)
            if own - gpu_hit < units[index]:
                return gpu_hit
            if further:
                gave.add(index)
            elif own < hit and not drafts and not is_first:
                gave.clear()
            hit, is_first = own, False
        if hit == before or not tier.others:
            return hit
        asked = tier.others


@dataclass
class _Tier:
    layout: KVCacheLayout
    has: Has
    gpu_hit: int
    prompt_tokens: int
    units: Sequence[int]
    as_vllm: bool

    @property
    def full(self) -> list[int]:
        return [i for i, g in enumerate(self.layout.groups) if g.kind is GroupKind.FULL]

    @property
    def others(self) -> list[int]:
        """The longest window first."""
        ignored = (GroupKind.FULL, GroupKind.NOT_CACHED)
        found = [i for i, g in enumerate(self.layout.groups) if g.kind not in ignored]
        return sorted(found, key=lambda i: -self.vllm_units(i))

    def limit(self) -> int:
        if not self.others:
            return self.prompt_tokens
        kinds = enumerate(self.layout.groups)
        states = math.lcm(*(self.units[i] for i, g in kinds if g.kind is GroupKind.MAMBA))
        return (self.prompt_tokens - 1) // states * states

    def accepts(self, index: int, length: int, limit: int, further: int) -> bool:
        """A group's own length is the limit, or ends with a unit."""
        unit = self.units[index]
        last = -(-length // unit)
        if length % unit and self.layout.groups[index].kind is GroupKind.MAMBA:
            return False
        if (last + further) * unit > self.prompt_tokens or (length % unit and length != limit):
            return False
        first = self.gpu_hit // unit
        if self.layout.groups[index].kind is not GroupKind.FULL:
            first = max(first, last - self.window_units(index, length))
        return all(self.has(index, (number + 1) * unit) for number in range(first, last + further))

    def window_units(self, index: int, length: int) -> int:
        """Units that hold what a token behind *length* sees before it."""
        group, unit = self.layout.groups[index], self.units[index]
        first = length - 1
        if group.kind is GroupKind.SLIDING_WINDOW:
            assert group.sliding_window is not None
            first = min(length - group.sliding_window + 1, length - 1)
        if group.kind is GroupKind.CHUNKED_LOCAL:
            assert group.attention_chunk_size is not None
            first = length // group.attention_chunk_size * group.attention_chunk_size
        seen = len({token // unit for token in range(first, length)})
        return max(seen, self.vllm_units(index)) if self.as_vllm else seen

    def vllm_units(self, index: int) -> int:
        """All tokens of a window or chunk."""
        group = self.layout.groups[index]
        tokens = {
            GroupKind.SLIDING_WINDOW: group.sliding_window,
            GroupKind.CHUNKED_LOCAL: group.attention_chunk_size,
        }
        return -(-(tokens.get(group.kind) or 1) // self.units[index])


def _of_equals(layout: KVCacheLayout, has: Has) -> Has:
    """The engine treats groups with equal specs as one: a block counts if all of them have it."""
    return lambda group, end: all(has(i, end) for i in _equals(layout, group))


def _equals(layout: KVCacheLayout, index: int) -> list[int]:
    """Groups with the same spec that hold a drafter's layers as well, or none as well."""
    wanted = layout.groups[index], index in layout.eagle
    return [i for i, spec in enumerate(layout.groups) if (spec, i in layout.eagle) == wanted]


def _accepts(layout: KVCacheLayout, index: int, length: int, has: Has, limit: int) -> bool:
    return defined_accept(layout.groups[index], length, 0, lambda end: has(index, end), limit)


def _agreed(layout: KVCacheLayout, caching: list[int], has: Has, hit: int, furthest: int) -> int:
    """Full attention once, then the others round after round; a group that has already given up
    EAGLE's block keeps its length until the hit moves."""
    full = [index for index in caching if layout.groups[index].kind is GroupKind.FULL]
    others = [index for index in caching if index not in full]
    for index in full:
        hit = defined_own(layout, index, has, hit, furthest)
    spared: set[int] = set()
    before = hit + 1
    while before > hit > 0:
        before = hit
        for index in others:
            is_spared = index in spared or index not in layout.eagle
            own = defined_own(layout, index, has, hit, furthest, with_extra=not is_spared)
            spared = set() if is_spared and own < hit else spared | {index}
            hit = own
        if len(others) == 1:
            break
    return hit


def lengths(layout: KVCacheLayout, limit: int) -> range:
    """Every length a hit may have, longest first."""
    step = layout.scheduler_block_size
    return range(limit - limit % step, -1, -step)


# --- the cache ------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Tokens, and whatever else determines the content of their blocks."""

    tokens: tuple[int, ...]
    lora: str | None = None
    salt: str | None = None

    def upto(self, end: int) -> Prompt:
        return self._replace(tokens=self.tokens[:end])


class Block(NamedTuple):
    """One block: which group and tier it is in, and the whole prefix up to its end."""

    group: int
    tier: str
    prefix: Prompt


@dataclass
class EngineModel:
    """What one engine holds, and what its events have said about it."""

    layout: KVCacheLayout
    as_int: bool = True
    names_block_size: bool = True
    """vLLM's form; ours leaves out the size and so has no events with holes."""
    seed: str = "of the engine's own"
    copies: Counter[Block] = field(default_factory=Counter)
    described: set[Prompt] = field(default_factory=set)
    """Prefixes whose hash an event without holes has shown with all tokens: only these can be found
    by a consumer."""
    _undescribed: dict[Prompt, list[Prompt]] = field(default_factory=dict)
    """Parent not described yet -> prefixes that will be described together with it."""

    def hash_of(self, prefix: Prompt) -> BlockHash:
        """The engine's hash of a prefix, by a function that is unknown outside."""
        digest = hashlib.blake2b(repr((self.seed, prefix)).encode(), digest_size=32).digest()
        return int.from_bytes(digest[:8], "big") if self.as_int else digest

    # --- what an engine does, as the event it sends -----------------------------------------------

    def store(
        self, group: int, prompt: Prompt, start: int, end: int, tier: str = "GPU"
    ) -> BlockStored:
        """Store all blocks of a group in `[start, end)`: an event without holes."""
        ends = range(
            start + self.layout.groups[group].block_size,
            end + 1,
            self.layout.groups[group].block_size,
        )
        self._add(group, tier, prompt, ends)
        self._describe(prompt, start, ends)
        return self._stored(group, prompt, start, end, ends, tier)

    def keep(
        self, group: int, prompt: Prompt, start: int, end: int, kept: Sequence[int]
    ) -> BlockStored:
        """Store only the blocks of `[start, end)` that end at *kept*: an event with holes that does
        not say where they are."""
        self._add(group, "GPU", prompt, kept)
        if len(kept) * self.layout.groups[group].block_size == end - start:
            self._describe(prompt, start, kept)
        return self._stored(group, prompt, start, end, kept, "GPU")

    def offload(self, group: int, prompt: Prompt, ends: Sequence[int], tier: str) -> BlockStored:
        """Store copies in a lower tier: an event with only hashes."""
        self._add(group, tier, prompt, ends)
        hashes = [self.hash_of(prompt.upto(end)) for end in ends]
        return BlockStored(
            hashes, None, [], tier, group_idx=group, block_size=0 if self.names_block_size else None
        )

    def evict(self, block: Block) -> BlockRemoved:
        """Remove one copy."""
        self.copies[block] -= 1
        self.copies = +self.copies
        return BlockRemoved([self.hash_of(block.prefix)], block.tier, block.group)

    def clear(self) -> AllBlocksCleared:
        """Remove the GPU's blocks; those of lower tiers stay."""
        self.copies = Counter(
            {block: count for block, count in self.copies.items() if block.tier != "GPU"}
        )
        return AllBlocksCleared()

    def _add(self, group: int, tier: str, prompt: Prompt, ends: Iterable[int]) -> None:
        self.copies.update(Block(group, tier, prompt.upto(end)) for end in ends)

    def _describe(self, prompt: Prompt, start: int, ends: Iterable[int]) -> None:
        prefixes, parent = [prompt.upto(end) for end in ends], prompt.upto(start)
        if start and parent not in self.described:
            self._undescribed.setdefault(parent, []).extend(prefixes)
            return
        self.described.update(prefixes)
        for prefix in prefixes:
            for child in self._undescribed.pop(prefix, []):
                self._describe(child, 0, [len(child.tokens)])

    def _stored(
        self, group: int, prompt: Prompt, start: int, end: int, ends: Sequence[int], tier: str
    ) -> BlockStored:
        spec = self.layout.groups[group]
        return BlockStored(
            block_hashes=[self.hash_of(prompt.upto(block_end)) for block_end in ends],
            parent_block_hash=self.hash_of(prompt.upto(start)) if start else None,
            token_ids=list(prompt.tokens[start:end]),
            medium=tier,
            group_idx=group,
            lora_name=prompt.lora,
            extra_keys=[_extra_keys(prompt, block_end == spec.block_size) for block_end in ends],
            kv_cache_spec_kind=spec.kind.value,
            kv_cache_spec_sliding_window=spec.sliding_window,
            block_size=spec.block_size if self.names_block_size else None,
        )

    # --- the truth --------------------------------------------------------------------------------

    def hit(self, prompt: Prompt, as_vllm: bool = True) -> tuple[int, int]:
        """The tokens it would reuse from the GPU, and together with lower tiers; *as_vllm* counts,
        or as our own engine does."""
        length = len(prompt.tokens)
        if length < 2:
            return 0, 0
        found = self._found(prompt)
        on_gpu = {(group, end) for group, tier, end in found if tier == "GPU"}
        below = {(group, end) for group, tier, end in found if tier != "GPU"}
        gpu = defined_hit(
            self.layout, lambda group, end: (group, end) in on_gpu, length - 1, length
        )
        blocks = [group.block_size for group in self.layout.groups]
        total = defined_tier_hit(
            self.layout, lambda group, end: (group, end) in below, gpu, length, blocks, as_vllm
        )
        return gpu, total

    def _found(self, prompt: Prompt) -> set[tuple[int, str, int]]:
        """Group, tier and end of the prompt's blocks that are present and whose hash was shown with
        tokens."""
        return {
            (block.group, block.tier, len(block.prefix.tokens))
            for block in self.copies
            if block.prefix == prompt.upto(len(block.prefix.tokens))
            and block.prefix in self.described
        }

    def counts(self) -> dict[tuple[int, str], int]:
        """Distinct blocks by group and tier."""
        return dict(Counter((block.group, block.tier) for block in self.copies))


def _extra_keys(prompt: Prompt, is_first: bool) -> list[str] | None:
    """The adapter's name in every block, the salt in the first."""
    name = [prompt.lora] if prompt.lora else []
    return [*name, prompt.salt] if prompt.salt and is_first else name or None
