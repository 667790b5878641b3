"""The group-aware prefix index of one model: which source would reuse how much of a prompt.

This is the plain reference: dictionaries, no cleverness. Whatever is faster is tested to equal it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvevents.codec import decode
from kvevents.events import EventBatch
from kvevents.layout import KVCacheLayout
from router.index.reference.keys import KeySpace
from router.index.reference.learning import LayoutHints
from router.index.reference.match import (
    Explanation,
    GroupHit,
    Hit,
    Prompt,
    explain,
    group_hits,
    hit_of,
)
from router.index.reference.source import ApplyResult, Source
from router.index.reference.waiting import SourceLimits


class SourceId(NamedTuple):
    """One KV cache: a data-parallel rank of a replica."""

    replica: str
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """The state of one source in numbers."""

    blocks: dict[tuple[int, str], int]
    """(group, tier) -> distinct blocks."""
    unplaced: int
    """Blocks whose prefix is not known; without a known hash function no prompt can find them."""
    waiting_runs: int
    waiting_tokens: int
    given_up_runs: int
    ambiguous: int
    hash_algorithm: str | None
    """The engine's hash function, where it is known."""
    layout: KVCacheLayout | None
    assumptions: tuple[str, ...]
    is_incomplete: bool


@dataclass(slots=True)
class PrefixIndex:
    """The index of one model. Not thread-safe; no I/O."""

    keys: KeySpace = field(default_factory=KeySpace)
    limits: SourceLimits = field(default_factory=SourceLimits)
    sources: dict[SourceId, Source] = field(default_factory=dict)

    # --- feeding ----------------------------------------------------------------------------------

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
        """Forget all blocks of a source and what was learned of it; its configured hints stay."""
        if source in self.sources:
            self.add(source, self.sources[source].learner.hints)

    def drop(self, source: SourceId) -> None:
        """Forget a source altogether."""
        self.sources.pop(source, None)

    # --- asking -----------------------------------------------------------------------------------

    def prompt(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> Prompt:
        """Prepare a prompt for matching.

        Args:
            token_ids: All tokens of the prompt.
            lora_name: The adapter it runs with.
            cache_salt: The request's salt; only equal salts share blocks.
            extra_keys: What else decides a block's content, as the events' `extra_keys` carry it:
                one entry per hash block.
        """
        return Prompt(self.keys, token_ids, lora_name, cache_salt, extra_keys)

    def match(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[SourceId, Hit]:
        """How much of a prompt every source would reuse; the arguments are those of `prompt`."""
        return self.match_prompt(self.prompt(token_ids, lora_name, cache_salt, extra_keys))

    def match_prompt(self, prompt: Prompt) -> dict[SourceId, Hit]:
        """Like `match`, for a prepared prompt."""
        return {source_id: hit_of(source, prompt) for source_id, source in self.sources.items()}

    def explain(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> dict[SourceId, Explanation]:
        """Like `match`, with each group's own longest prefix, for people."""
        prompt = self.prompt(token_ids, lora_name, cache_salt, extra_keys)
        return {source_id: explain(source, prompt) for source_id, source in self.sources.items()}

    def group_hits(self, prompt: Prompt, source: SourceId) -> tuple[GroupHit, ...]:
        """Of one source and a prepared prompt each group's own longest prefix; empty where the
        source is unknown."""
        known = self.sources.get(source)
        return tuple(group_hits(known, prompt)) if known else ()

    def steps(self) -> set[tuple[int, int]]:
        """`(hash block size, lookahead)` of all layouts known: with these, `Prompt.keys` does a
        match's work beforehand."""
        sources = self.sources.values()
        return {
            (source.layout.hash_block_size, source.learner.lookahead)
            for source in sources
            if source.layout
        }

    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source_id: _statistics(source) for source_id, source in self.sources.items()}


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
        assumptions=source.assumptions(),
        is_incomplete=source.is_incomplete,
    )
