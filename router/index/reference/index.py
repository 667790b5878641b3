"""The group-aware prefix index of one model: which source would reuse how much of a prompt.

This is the plain reference: dictionaries, no cleverness. Whatever is faster is tested to equal it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from kvevents.codec import decode
from kvevents.events import EventBatch
from router.index.base import (
    ApplyResult,
    GroupHit,
    HashedPrompt,
    Hit,
    LayoutHints,
    PrefixIndex,
    SourceId,
    SourceLimits,
    SourceStatistics,
)
from router.index.reference.export import records_of, sources_of
from router.index.reference.keys import KeySpace
from router.index.reference.match import group_hits, hit_of
from router.index.reference.prompt import PromptKeys
from router.index.reference.shared_store import SharedStore
from router.index.reference.source import SourceCache


class ReferenceIndex(PrefixIndex):
    """One `SourceCache` per source, and a key space that they share."""

    def __init__(self, keys: KeySpace | None = None, limits: SourceLimits | None = None) -> None:
        """
        Args:
            keys: A random one where it is left out.
            limits: Of each source.
        """
        self.keys = keys or KeySpace()
        self.limits = limits or SourceLimits()
        self.sources: dict[SourceId, SourceCache] = {}
        self.stores: dict[str, SharedStore] = {}
        """By name: those that some source shares."""

    # --- feeding ----------------------------------------------------------------------------------

    @override
    def add(self, source: SourceId, hints: LayoutHints | None = None) -> None:
        hints = hints or LayoutHints()
        for store in hints.stores:
            if store.name not in self.stores:
                self.stores[store.name] = SharedStore(store.name, self.limits, hints.tiers)
        self.sources[source] = SourceCache(self.keys, hints, self.limits, self.stores)

    @override
    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        batch = payload if isinstance(payload, EventBatch) else decode(payload)
        if source not in self.sources:
            self.add(source)
        return self.sources[source].apply(batch)

    @override
    def clear(self, source: SourceId) -> None:
        if source in self.sources:
            self.add(source, self.sources[source].learner.hints)

    @override
    def drop(self, source: SourceId) -> None:
        gone = self.sources.pop(source, None)
        if gone is not None and gone.stores:
            # What nobody reads counts for nobody.
            shared = {store.name for kept in self.sources.values() for store in kept.stores}
            self.stores = {name: self.stores[name] for name in self.stores if name in shared}

    # --- asking -----------------------------------------------------------------------------------

    @override
    def prepare(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        extra_steps: Sequence[int] = (),
    ) -> HashedPrompt:
        prompt = PromptKeys(self.keys, token_ids, lora_name, cache_salt, extra_keys)
        for hash_block_size, lookahead in self._steps():
            prompt.keys(hash_block_size, lookahead)
        for step in extra_steps:
            prompt.prefix_keys(step)
        return prompt

    @override
    def match_prompt(self, prompt: HashedPrompt) -> dict[SourceId, Hit]:
        assert isinstance(prompt, PromptKeys)
        return {source_id: hit_of(source, prompt) for source_id, source in self.sources.items()}

    @override
    def explain(self, prompt: HashedPrompt, source: SourceId) -> tuple[GroupHit, ...]:
        assert isinstance(prompt, PromptKeys)
        known = self.sources.get(source)
        return tuple(group_hits(known, prompt)) if known else ()

    def _steps(self) -> set[tuple[int, int]]:
        """`(hash block size, lookahead)` of all layouts known."""
        # A list, in one go: events may be applied in another thread.
        learners = [source.learner for source in list(self.sources.values())]
        return {
            (layout.hash_block_size, learner.lookahead)
            for learner in learners
            if (layout := learner.layout) is not None
        }

    # --- keeping ----------------------------------------------------------------------------------

    @override
    def export(self, only: SourceId | None = None) -> Iterator[bytes]:
        if only is None:
            return records_of(self.keys, self.sources)
        named = {only: self.sources[only]} if only in self.sources else {}
        return records_of(self.keys, named)

    @override
    def restore(self, records: Iterable[bytes | memoryview]) -> None:
        self.keys, self.sources, self.stores = sources_of(records, self.limits)

    # --- looking ----------------------------------------------------------------------------------

    @override
    def holds(self, source: SourceId) -> bool:
        return source in self.sources

    @override
    def statistics(self) -> dict[SourceId, SourceStatistics]:
        return {source_id: source.statistics() for source_id, source in self.sources.items()}
