"""What the comparison needs of a prefix cache: one protocol, implemented with ours and with
vLLM's."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CachedBlock(NamedTuple):
    """One entry of the prefix cache."""

    group: int
    block_hash: bytes


class Hit(NamedTuple):
    """What a lookup found, in tokens."""

    num_tokens: int
    shared_prefix_boundary: int
    """The end of a prefix that only some groups hold, where a checkpoint would pay off; 0 if there
    is none."""


class FirstStep(NamedTuple):
    """What a waiting request is to get, in tokens after its hit."""

    num_new_tokens: int
    num_lookahead_tokens: int = 0
    num_external_tokens: int = 0
    """Tokens loaded from a lower tier, between the hit and the new ones."""
    full_sequence_must_fit: bool = False


class PrefixCache(Protocol):
    """Requests are known by name from `add` to `forget`; a request that was freed may be admitted
    again."""

    def add(self, name: str, token_ids: list[int], salt: str | None) -> None: ...

    def hit(self, name: str) -> Hit: ...

    def admit(self, name: str, step: FirstStep) -> bool:
        """Look the request up and allocate its first step; False if it does not fit."""
        ...

    def extend(self, name: str, num_new_tokens: int, num_lookahead_tokens: int) -> bool:
        """Allocate a further step of an admitted request; False if it does not fit."""
        ...

    def set_computed(self, name: str, num_tokens: int) -> None: ...

    def append(self, name: str, token_ids: list[int]) -> None: ...

    def free(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def evict(self, blocks: frozenset[CachedBlock]) -> None:
        """Remove every copy of these from the cache, as an engine does when loading them failed."""
        ...

    def reset(self) -> bool: ...

    def cached(self) -> set[CachedBlock]: ...

    def num_free_blocks(self) -> int: ...
