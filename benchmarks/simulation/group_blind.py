"""The index to compare with: which replicas hold a block hash, whatever the group. What most routers have."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvevents.events import BlockHash, BlockRemoved, BlockStored, CacheLayout, Event, EventBatch
from kvevents.hashing import HashChain
from router.index.index import PrefixIndex, SourceId
from router.index.match import Hit, Prompt
from router.index.source import ApplyResult


@dataclass(slots=True)
class GroupBlindIndex(PrefixIndex):
    """Any group's event makes a block present, any group's removal makes it absent; a hit is the run of present blocks from
    the start. With full attention alone that is right."""

    _holders: dict[BlockHash, set[SourceId]] = field(default_factory=dict)
    _chain: HashChain | None = None
    _block_size: int = 0

    def apply(self, source: SourceId, payload: bytes | EventBatch) -> ApplyResult:
        """See `PrefixIndex`; takes batches only."""
        if not isinstance(payload, EventBatch):
            raise TypeError("the group-blind index takes EventBatch, not bytes")
        for event in payload.events:
            self._apply_event(source, event)
        return ApplyResult()

    def match_prompt(self, prompt: Prompt) -> dict[SourceId, Hit]:
        """See `PrefixIndex`; replicas without a hit are left out."""
        if self._chain is None:
            return {}
        names = prompt.engine_hashes(self._chain, self._block_size, 0, False)[0]
        names = names[: (len(prompt.token_ids) - 1) // self._block_size]
        return {source: Hit(tokens, tokens) for source, tokens in self._runs(names).items()}

    def _runs(self, names: list[BlockHash]) -> dict[SourceId, int]:
        runs: dict[SourceId, int] = {}
        going_on = self._holders.get(names[0], set()) if names else set()
        for count, name in enumerate(names):
            going_on = going_on & self._holders.get(name, set())
            if not going_on:
                break
            runs |= dict.fromkeys(going_on, (count + 1) * self._block_size)
        return runs

    def _apply_event(self, source: SourceId, event: Event) -> None:
        if isinstance(event, CacheLayout):
            assert event.hash_algorithm is not None
            assert event.none_hash is not None
            self._chain = HashChain(event.hash_algorithm, event.none_hash)
            self._block_size = event.hash_block_size
        elif isinstance(event, BlockStored):
            for name in event.block_hashes:
                self._holders.setdefault(name, set()).add(source)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self._holders.get(name, set()).discard(source)
