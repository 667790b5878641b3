"""One prompt against one source: under which names it may be known there, and how much of it would
be reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from kvevents.events import GPU, BlockHash, pack_tokens
from kvevents.hashing import ExtraKeys, HashChain
from kvevents.hit_rule import Present, longest_accepted, longest_extended_hit, longest_hit
from kvevents.layout import GroupKind, KVCacheLayout
from router.index.base import GroupHit, Hit, PreparedPrompt
from router.index.reference.keys import KeySpace, besides_lora, marks_of, plain, tagged
from router.index.reference.learning import engine_hashes
from router.index.reference.source import Source

NameAt: TypeAlias = Callable[[int], BlockHash | None]
"""The engine's hash of the prompt's prefix of that many hash blocks plus one; None where it is not
known."""


class PromptKeys(PreparedPrompt):
    """A prompt under every name that some source may know its prefixes by; each list is computed
    once."""

    def __init__(
        self,
        keys: KeySpace,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.lora_name = lora_name
        self._space = keys
        self._salt = cache_salt
        self._extra_keys = extra_keys
        self._packed = pack_tokens(token_ids)
        self._keys: dict[tuple[int, int], list[int]] = {}
        self._prefix_keys: dict[int, list[int]] = {}
        self._hashes: dict[tuple[HashChain, int, int, bool], list[list[BlockHash]]] = {}

    def keys(self, step: int, lookahead: int = 0) -> list[int]:
        """Own keys at every multiple of *step* tokens, each *lookahead* tokens further along."""
        if (step, lookahead) not in self._keys:
            marks = marks_of(self._extra_keys, step, self.lora_name, self._salt, lookahead)
            ends = range(step + lookahead, len(self.token_ids) + 1, step)
            chain = self._space.chain(self._space.root(self.lora_name), self._packed, ends, marks)
            self._keys[step, lookahead] = list(chain)
        return self._keys[step, lookahead]

    def prefix_keys(self, step: int) -> Sequence[int]:
        if step not in self._prefix_keys:
            self._prefix_keys[step] = self._sampled(step) or self.keys(step)
        return self._prefix_keys[step]

    def _sampled(self, step: int) -> list[int] | None:
        """Every n-th key of those that are there already: hashing costs more than picking."""
        for finer, lookahead in self._keys:
            if not lookahead and step % finer == 0:
                return self._keys[finer, 0][step // finer - 1 :: step // finer]
        return None

    def engine_hashes(
        self, chain: HashChain, step: int, lookahead: int, as_int: bool
    ) -> list[list[BlockHash]]:
        """The engine's hashes at every multiple of *step*: a list for each way its versions spell
        extra keys."""
        wanted = (chain, step, lookahead, as_int)
        if wanted not in self._hashes:
            self._hashes[wanted] = [
                engine_hashes(chain, self.token_ids, step, extra, lookahead, as_int)
                for extra in self.spellings(step)
            ]
        return self._hashes[wanted]

    def spellings(self, step: int) -> Iterator[Sequence[ExtraKeys]]:
        """The ways in which engines may hash what besides tokens decides the prompt's blocks of
        *step* tokens."""
        if not (self.lora_name or self._salt or self._extra_keys):
            yield []
            return
        count = -(-len(self.token_ids) // step)
        extra = [besides_lora(entry, self.lora_name) for entry in self._extra_keys or ()]
        extra += [()] * (count - len(extra))
        if self._salt and self._salt not in extra[0]:
            extra[0] = (*extra[0], self._salt)
        name = (self.lora_name,) if self.lora_name else ()
        yield [
            plain((*name, *entry)) or None for entry in extra
        ]  # vLLM <= 0.30 hashes the bare values,
        # vLLM >= 0.31 tags them, and so do we; the adapter's path, which vLLM hashes too, is not to
        # be seen from here.
        adapter = (("lora", self.lora_name),) if self.lora_name else ()
        yield [(*adapter, *map(tagged, entry)) or None for entry in extra]


def hit_of(source: Source, prompt: PromptKeys) -> Hit:
    """What *source* would reuse of *prompt*."""
    layout, length = source.layout, len(prompt.token_ids)
    if layout is None or length < 2:
        return Hit(0, 0)
    names = list(_names(source, prompt, layout))
    on_gpu = _presence(source, names, layout, (GPU,))
    gpu = longest_hit(layout, on_gpu, length - 1, length)
    lower = sorted({tier for _, tier in source.held} - {GPU})
    if not lower:
        return Hit(gpu, gpu)
    below = _presence(source, names, layout, lower)
    return Hit(gpu, longest_extended_hit(layout, on_gpu, below, gpu, length))


def group_hits(source: Source, prompt: PromptKeys) -> Iterator[GroupHit]:
    """Each group's own longest prefix; none where the layout is not known."""
    layout, length = source.layout, len(prompt.token_ids)
    if layout is None or length < 2:
        return
    present = _presence(source, list(_names(source, prompt, layout)), layout, (GPU,))
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            yield GroupHit(
                index,
                group.kind.value,
                longest_accepted(layout, index, present, length - 1, length),
            )


def _names(source: Source, prompt: PromptKeys, layout: KVCacheLayout) -> Iterator[NameAt]:
    """The hashes that stand for the prompt's prefixes in this source: learned, or computed as the
    engine does."""
    step, lookahead = layout.hash_block_size, source.learner.lookahead
    source.learn_from_prompt(prompt.token_ids, prompt.spellings)
    chain = source.finder.chain
    # Salts that events hide make learned places doubtful: then the engine's own hash decides, and
    # alone.
    computed_only = chain is not None and source.hides_extra_keys and prompt.lora_name is None
    if not computed_only:
        yield _learned(source, prompt.keys(step, lookahead))
    if chain is not None and (computed_only or source.unplaced):
        for hashes in prompt.engine_hashes(chain, step, lookahead, source.uses_int_hashes):
            yield _computed(hashes)


def _learned(source: Source, keys: Sequence[int]) -> NameAt:
    hash_at, count = source.hash_at, len(keys)
    return lambda index: hash_at.get(keys[index]) if index < count else None


def _computed(hashes: Sequence[BlockHash]) -> NameAt:
    return lambda index: hashes[index] if index < len(hashes) else None


def _presence(
    source: Source, names: Sequence[NameAt], layout: KVCacheLayout, tiers: Sequence[str]
) -> Present:
    """`present(group, end)` for blocks held in one of *tiers*."""
    step = layout.hash_block_size
    held = [
        [source.held[group, tier] for tier in tiers if (group, tier) in source.held]
        for group in range(len(layout.groups))
    ]

    def present(group: int, end: int) -> bool:
        index = end // step - 1
        return any(name(index) in blocks for blocks in held[group] for name in names)

    if len(names) > 1 or any(len(blocks) > 1 for blocks in held):
        return present
    return _single_presence(step, names[0], [blocks[0] if blocks else {} for blocks in held])


def _single_presence(step: int, name: NameAt, held: Sequence[dict[BlockHash, int]]) -> Present:
    """The usual case without the loops: one tier, one way to name a block."""
    return lambda group, end: name(end // step - 1) in held[group]
