"""TensorRT-LLM's cache and its events, by what its two managers do; and the server that is asked.

A model to test against: which blocks are stored, what a prompt would reuse, and the events in the
form that trtllm-serve returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.engine_stub import Exchange

BLOCK = 32
PATH = "/kv_cache_events"


@dataclass
class TrtllmCache:
    """One rank.

    Args:
        windows: Of each pool. The largest is that of full attention.
        names_groups: As the newer manager does, whose windows need their last blocks alone.
        rank: Its data-parallel rank; None: it has none.
    """

    windows: tuple[int, ...] = (4096,)
    names_groups: bool = False
    rank: int | None = None
    block_size: int = BLOCK
    next_id: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    """That nobody has asked for yet."""
    held: list[dict[Any, int]] = field(init=False)
    """By pool: hash -> level."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A process of which nothing was heard yet."""
        self.next_id = 0
        self.events.clear()
        self.held = [{} for _ in self.windows]
        for pool in range(len(self.windows)):
            self.emit(pool, {"type": "created", "num_blocks_per_cache_level": [1000, 100]})

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call: each is returned once."""
        taken, self.events = self.events, []
        return taken

    def emit(self, pool: int, data: dict[str, Any]) -> None:
        event = {"event_id": self.next_id, "data": data, "window_size": self.windows[pool]}
        if self.names_groups:
            event |= {"layer_group_id": pool, "hash_algo": "v2_sha256"}
        if self.rank is not None:
            event["attention_dp_rank"] = self.rank
        self.next_id += 1
        self.events.append(event)

    # --- what an engine does ----------------------------------------------------------------------

    def hash_of(self, tokens: Sequence[int]) -> int | str:
        """Of a block, by all tokens up to its end: a number, or a digest of the newer manager."""
        number = hash(tuple(tokens)) & 2**64 - 1
        return f"{number:064x}" if self.names_groups else number

    def hashes(self, tokens: Sequence[int]) -> list[int | str]:
        """Of all blocks, also of one that is not full."""
        size = self.block_size
        return [self.hash_of(tokens[: start + size]) for start in range(0, len(tokens), size)]

    def store(
        self, tokens: Sequence[int], pools: Sequence[int] | None = None, level: int = 0
    ) -> None:
        """The blocks of a prompt that are not there, the last one even if it is not full."""
        for pool in range(len(self.windows)) if pools is None else pools:
            self._store(pool, tokens, level)

    def _store(self, pool: int, tokens: Sequence[int], level: int) -> None:
        size, held = self.block_size, self.held[pool]
        parent: int | str | None = None
        run: list[dict[str, Any]] = []
        before: int | str | None = None
        for at, block_hash in enumerate(self.hashes(tokens)):
            if block_hash in held:
                self._stored(pool, parent, run)
                run = []
            else:
                if not run:
                    parent = before
                block = tokens[at * size : (at + 1) * size]
                run.append(self.block(block_hash, block, level))
                held[block_hash] = level
            before = block_hash
        self._stored(pool, parent, run)

    def _stored(self, pool: int, parent: int | str | None, run: list[dict[str, Any]]) -> None:
        if run:
            self.emit(pool, {"type": "stored", "parent_hash": parent, "blocks": run})

    @staticmethod
    def block(block_hash: int | str, tokens: Sequence[Any], level: int = 0) -> dict[str, Any]:
        """As the serializer writes it."""
        return {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": [
                {"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in tokens
            ],
            "cache_level": level,
            "priority": 35,
        }

    def remove(self, pool: int, *block_hashes: int | str) -> None:
        """Evict blocks of one pool."""
        for each in block_hashes:
            del self.held[pool][each]
        self.emit(pool, {"type": "removed", "block_hashes": list(block_hashes)})

    def move(self, pool: int, block_hash: int | str, level: int) -> None:
        """Offload a block, or bring it back."""
        old, self.held[pool][block_hash] = self.held[pool][block_hash], level
        diff = {"type": "event_diff", "new_value": level, "old_value": old}
        data = {"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None}
        self.emit(pool, data)

    def reprioritise(self, pool: int, block_hash: int | str) -> None:
        diff = {"type": "event_diff", "new_value": 80, "old_value": 35}
        self.emit(
            pool,
            {"type": "updated", "block_hash": block_hash, "cache_level": None, "priority": diff},
        )

    # --- what a prompt reuses ---------------------------------------------------------------------

    def reused(self, tokens: Sequence[int], levels: int = 2) -> int:
        """Whole blocks that a prompt would reuse, in tokens; the last token is always computed.

        Args:
            tokens: The prompt.
            levels: 1: of the GPU alone.
        """
        blocks = self.hashes(tokens)[: (len(tokens) - 1) // self.block_size]
        for count in range(len(blocks), 0, -1):
            if all(self._serves(pool, blocks[:count], levels) for pool in range(len(self.windows))):
                return count * self.block_size
        return 0

    def _serves(self, pool: int, blocks: Sequence[int | str], levels: int) -> bool:
        window = self.windows[pool]
        if self.names_groups and window < max(self.windows):
            needed = max(1, -(-(window - 1) // self.block_size))
            blocks = blocks[-needed:]
        return all(self.held[pool].get(each, 99) < levels for each in blocks)


@dataclass
class TrtllmEvents:
    """What an `EngineStub` does with requests at `PATH`."""

    caches: list[TrtllmCache]
    polls: list[str] = field(default_factory=list)
    """The methods of all requests."""
    keys: list[str | None] = field(default_factory=list)
    """And their keys."""
    bodies: list[bytes] = field(default_factory=list)
    """Sent first, in place of events."""
    status: str = "200 OK"

    async def __call__(self, exchange: Exchange) -> None:
        self.polls.append(exchange.request.method)
        self.keys.append(exchange.request.headers.get("authorization"))
        if self.status != "200 OK":
            await exchange.whole(b"{}", self.status)
        elif self.bodies:
            await exchange.whole(self.bodies.pop(0))
        else:
            events = [event for cache in self.caches for event in cache.take()]
            await exchange.whole(json.dumps(events).encode())
