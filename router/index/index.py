"""The group-aware prefix index of one model: which source would reuse how much of a prompt.

This is the plain reference: dictionaries, no cleverness. Whatever is faster is tested to equal it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvevents.codec import decode
from kvevents.events import GPU, BlockHash, EventBatch
from kvevents.hashing import ExtraKeys, HashChain
from kvevents.layout import GroupKind, KVCacheLayout, longest_accepted, longest_hit
from router.index.keys import KeySpace, marks_of, pack_tokens
from router.index.learning import LayoutHints, engine_hashes
from router.index.source import ApplyResult, Source, SourceLimits, plain


class SourceId(NamedTuple):
    """One KV cache: a data-parallel rank of a replica."""

    replica: str
    dp_rank: int = 0


class Hit(NamedTuple):
    """What a source would reuse of a prompt, in tokens."""

    gpu: int
    total: int
    """With the blocks that lower tiers would bring back."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The longest prefix that one group alone accepts on the GPU, in tokens."""

    group: int
    kind: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """A hit, and which group limits it."""

    hit: Hit
    groups: tuple[GroupHit, ...]


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """The state of one source in numbers."""

    blocks: dict[tuple[int, str], int]
    """(group, tier) -> distinct blocks."""
    unplaced: int
    """Blocks whose prefix is not known; without a known hash function they count for no prompt."""
    waiting_runs: int
    waiting_tokens: int
    given_up_runs: int
    ambiguous: int
    hash_algorithm: str | None
    layout: KVCacheLayout | None
    assumptions: tuple[str, ...]


class Prompt:
    """A prompt under every name that some source may know its prefixes by; each computed once."""

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
        self._keys: dict[tuple[int, int, int], list[int]] = {}
        self._hashes: dict[tuple[HashChain, int, int, bool], list[list[BlockHash]]] = {}

    def keys(self, step: int, hash_block_size: int, lookahead: int = 0) -> list[int]:
        """Own keys at every multiple of *step*, each *lookahead* tokens further along."""
        wanted = (step, hash_block_size, lookahead)
        if wanted not in self._keys:
            marks = marks_of(self._extra_keys, hash_block_size, self.lora_name, self._salt)
            ends = range(step + lookahead, len(self.token_ids) + 1, step)
            self._keys[wanted] = list(self._space.chain(self._space.root(self.lora_name), self._packed, ends, marks))
        return self._keys[wanted]

    def engine_hashes(self, chain: HashChain, step: int, lookahead: int, as_int: bool) -> list[list[BlockHash]]:
        """The engine's hashes at every multiple of *step*: one list for each way its versions spell extra keys."""
        wanted = (chain, step, lookahead, as_int)
        if wanted not in self._hashes:
            self._hashes[wanted] = [
                engine_hashes(chain, self.token_ids, step, extra, lookahead, as_int) for extra in self._spellings()
            ]
        return self._hashes[wanted]

    def _spellings(self) -> Iterator[Sequence[ExtraKeys]]:
        if self._extra_keys:
            yield [plain(entry) if entry else None for entry in self._extra_keys]
        elif self._salt:
            yield [(self._salt,)]  # vLLM <= 0.30 hashes the bare value,
            yield [(("cache_salt", self._salt),)]  # vLLM >= 0.31 tags it.
        else:
            yield []


@dataclass(slots=True)
class _View:
    """One source's blocks, seen along one prompt."""

    source: Source
    step: int
    names: list[list[BlockHash | None]]
    """Candidate hashes at every multiple of *step*, most trusted first."""

    def present(self, tier_of: Callable[[int], Sequence[str]]) -> Callable[[int, int], bool]:
        held, step, names = self.source.held, self.step, self.names

        def is_present(group: int, end: int) -> bool:
            index = end // step - 1
            for candidates in names:
                name = candidates[index] if index < len(candidates) else None
                if name is not None and any(name in held.get((group, tier), ()) for tier in tier_of(end)):
                    return True
            return False

        return is_present


@dataclass(slots=True)
class PrefixIndex:
    """The index of one model. Not thread-safe; no I/O."""

    keys: KeySpace = field(default_factory=KeySpace)
    limits: SourceLimits = field(default_factory=SourceLimits)
    sources: dict[SourceId, Source] = field(default_factory=dict)

    # --- feeding ----------------------------------------------------------------------------------------------------------

    def add(self, source: SourceId, hints: LayoutHints | None = None) -> Source:
        """Make a source known, empty; what it held before is gone."""
        self.sources[source] = Source(self.keys, hints, self.limits)
        return self.sources[source]

    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        """Decode and apply one batch; an unknown source is added.

        Raises:
            MalformedBatch: The payload breaks the format; nothing was applied.
        """
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        known = self.sources.get(source) or self.add(source)
        return known.apply(batch)

    def clear(self, source: SourceId) -> None:
        """Forget all blocks of a source; its configured hints stay."""
        if source in self.sources:
            self.add(source, self.sources[source].learner.hints)

    def drop(self, source: SourceId) -> None:
        """Forget a source altogether."""
        self.sources.pop(source, None)

    # --- asking -----------------------------------------------------------------------------------------------------------

    def prompt(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> Prompt:
        """Prepare a prompt for `match_prompt` and `explain_prompt`; `extra_keys` as the events carry them, per hash block."""
        return Prompt(self.keys, token_ids, lora_name, cache_salt, extra_keys)

    def match(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[SourceId, Hit]:
        """How much of a prompt every source would reuse."""
        return self.match_prompt(self.prompt(token_ids, lora_name, cache_salt, extra_keys))

    def match_prompt(self, prompt: Prompt) -> dict[SourceId, Hit]:
        return {source_id: hit_of(source, prompt) for source_id, source in self.sources.items()}

    def explain(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[SourceId, Explanation]:
        """Like `match`, with each group's own longest prefix."""
        return self.explain_prompt(self.prompt(token_ids, lora_name, cache_salt, extra_keys))

    def explain_prompt(self, prompt: Prompt) -> dict[SourceId, Explanation]:
        return {
            source_id: Explanation(hit_of(source, prompt), tuple(_group_hits(source, prompt)))
            for source_id, source in self.sources.items()
        }

    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source_id: _statistics(source) for source_id, source in self.sources.items()}


# --- one source, one prompt -----------------------------------------------------------------------------------------------


def hit_of(source: Source, prompt: Prompt) -> Hit:
    """What *source* would reuse of *prompt*."""
    view = _view(source, prompt)
    layout = source.layout
    length = len(prompt.token_ids)
    if view is None or layout is None or length < 2:
        return Hit(0, 0)
    gpu = longest_hit(layout, view.present(lambda _end: (GPU,)), length - 1, length)
    if not source.has_lower_tiers:
        return Hit(gpu, gpu)
    lower = sorted({tier for _, tier in source.held} - {GPU})
    # Beyond the GPU hit only what a lower tier holds counts; before it a window may lean on the GPU's blocks.
    extended = longest_hit(layout, view.present(lambda end: lower if end > gpu else (GPU,)), length, length)
    return Hit(gpu, max(gpu, extended))


def _view(source: Source, prompt: Prompt) -> _View | None:
    layout = source.layout
    if layout is None or not source.held:
        return None
    names = list(_names(source, prompt, layout))
    return _View(source, layout.hash_block_size, names)


def _names(source: Source, prompt: Prompt, layout: KVCacheLayout) -> Iterator[list[BlockHash | None]]:
    """The hashes that stand for the prompt's prefixes in this source: learned, or computed as the engine does."""
    step, lookahead = layout.hash_block_size, source.learner.lookahead
    chain = source.finder.chain
    # Salts that events hide make learned places doubtful: then the engine's own hash decides, and alone.
    computed_only = chain is not None and source.hides_extra_keys and prompt.lora_name is None
    if not computed_only:
        yield [source.hash_at.get(key) for key in prompt.keys(step, step, lookahead)]
    if chain is not None and (computed_only or source.unplaced):
        for spelling in prompt.engine_hashes(chain, step, lookahead, source.uses_int_hashes):
            yield list(spelling)


def _group_hits(source: Source, prompt: Prompt) -> Iterator[GroupHit]:
    view, layout, length = _view(source, prompt), source.layout, len(prompt.token_ids)
    if view is None or layout is None:
        return
    present = view.present(lambda _end: (GPU,))
    for index, group in enumerate(layout.groups):
        if group.kind is not GroupKind.NOT_CACHED:
            tokens = longest_accepted(layout, index, present, max(length - 1, 0), length)
            yield GroupHit(index, group.kind.value, tokens)


def _statistics(source: Source) -> SourceStatistics:
    runs, tokens, given_up = source.waiting()
    return SourceStatistics(
        blocks={(group, tier): count for group, tier, count in source.blocks()},
        unplaced=source.unplaced,
        waiting_runs=runs,
        waiting_tokens=tokens,
        given_up_runs=given_up,
        ambiguous=source.ambiguous,
        hash_algorithm=source.finder.chain.algorithm if source.finder.chain else None,
        layout=source.layout,
        assumptions=source.learner.assumptions(),
    )
