"""The compiled core, built from `core/`; see `core/binding/`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from kvevents.events import BlockHash
from router.index.base import ApplyResult, Hit, SourceId
from router.scoring import Candidate, Weights

core_version: int

_Load: TypeAlias = tuple[int, int, int, int, int]
"""The fields of a `ReplicaLoad`."""
_ComputedHashes: TypeAlias = tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]

class StateError(ValueError):
    """The state of a source that contradicts itself."""

class Prompt:
    """A prompt, packed, with the keys that were asked for so far."""

    def __init__(
        self,
        token_ids: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
        extra_keys: bytes,
    ) -> None: ...
    def __len__(self) -> int: ...
    def tokens(self) -> bytes: ...

class EngineHashes:
    """A prompt's hashes as its engine computes them."""

class HitMap(Mapping[SourceId, Hit]):
    """The hit of every source of one match; each is made when it is asked for."""

    def __getitem__(self, source: SourceId) -> Hit: ...
    def __iter__(self) -> Iterator[SourceId]: ...
    def __len__(self) -> int: ...
    def columns(self, sources: list[SourceId]) -> tuple[list[int], list[int]]: ...

class SharedIndex:
    """One model's index as the rest of the core reads it."""

class Core:
    """All sources of one model, by slot."""

    def __init__(
        self,
        point: int,
        fold: int,
        limits: Sequence[int],
        no_hit: Hit,
        result: type[ApplyResult],
    ) -> None: ...
    def shared(self) -> SharedIndex: ...
    def number(self, slot: int) -> int: ...
    def add(self, tier_units: Sequence[tuple[str, int, int]]) -> int: ...
    def drop(self, slot: int) -> bool: ...
    def tidy(self) -> bool: ...
    def set_layout(
        self,
        slot: int,
        groups: Sequence[tuple[int, int, int | None, int | None, bool]],
        hash_block_size: int,
        scheduler_block_size: int,
        eagle_sees_last_token: bool,
        prefix_replay_tokens: int,
        is_announced: bool,
        lookahead: int,
    ) -> None: ...
    def unset_layout(self, slot: int, is_announced: bool, lookahead: int) -> None: ...
    def apply(
        self, slot: int, payload: bytes
    ) -> ApplyResult | tuple[Any, ...] | list[tuple[Any, ...]] | None: ...
    def apply_told(
        self, slot: int, payload: bytes, is_canonical: bool, opaque: Sequence[int]
    ) -> tuple[Any, ...] | None: ...
    def apply_run(
        self,
        slot: int,
        data: bytes,
        at: int,
        head: bytes,
        most_bytes: int,
        seq: int,
        most: int,
        seed: int,
    ) -> tuple[int, int, int, int, bool, bytes, Any, bytes] | None: ...
    def note(
        self, slot: int, has_chain: bool, shows_extra_keys: bool, has_lost_removals: bool
    ) -> None: ...
    def holds_hash(self, slot: int, block_hash: object) -> bool: ...
    def hides_extra_keys(self, slot: int) -> bool: ...
    def uses_int_hashes(self, slot: int) -> bool: ...
    def engine_hashes(
        self,
        prompt: Prompt,
        algorithm: str,
        none_hash: bytes,
        block_size: int,
        lookahead: int,
        as_int: bool,
        extra_keys: Sequence[bytes],
    ) -> EngineHashes | None: ...
    def unplaced(self, slot: int) -> int: ...
    def blocks_held(self, slot: int) -> int: ...
    def removals(self, slot: int) -> int: ...
    def statistics(self, slot: int) -> dict[str, Any]: ...
    def hash(self, prompt: Prompt) -> None: ...
    def prefix_keys(self, prompt: Prompt, step: int) -> list[int]: ...
    def match(
        self,
        prompt: Prompt,
        slots: dict[SourceId, int],
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> HitMap: ...
    def match_source(
        self,
        prompt: Prompt,
        slot: int,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> Hit: ...
    def match_tier(
        self,
        prompt: Prompt,
        slot: int,
        tier: str,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> int: ...
    def group_hits(
        self,
        prompt: Prompt,
        slot: int,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> list[int]: ...
    def export_source(self, slot: int) -> bytes: ...
    def restore_source(self, slot: int, state: bytes) -> None: ...
    def sizes(self) -> tuple[int, int]: ...
    def contradictions(self) -> list[str]: ...

def block_hashes(
    prompt: Prompt,
    algorithm: str,
    none_hash: bytes,
    block_size: int,
    lookahead: int,
    extra_keys: Sequence[bytes],
) -> bytes | None: ...
def pack_token_ids(json_array: bytes | memoryview) -> bytes | None: ...

class Books:
    """What all decisions of a process read, and all requests write."""

    def __init__(self) -> None: ...
    def cache_id(self, replica: str, dp_rank: int) -> int: ...
    def load_of(self, replica: str) -> _Load: ...
    def look_at(self, replica: str) -> _Load: ...
    def others_at(self, replica: str) -> _Load: ...
    def loads_of_ranks(self, replica: str, dp_ranks: Sequence[int]) -> list[_Load]: ...
    def places(self) -> list[tuple[str, int | None, _Load]]: ...
    def take_others(self, loads: Sequence[tuple[str, int | None, _Load]]) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...

class Flight:
    """One request's share of the load. Steps say whether they had an effect."""

    def __init__(
        self,
        books: Books,
        replica: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None,
    ) -> None: ...
    def first_token(self) -> bool: ...
    def generated(self, tokens: int) -> bool: ...
    def retried(self, replica: str, uncached_tokens: int, dp_rank: int | None) -> bool: ...
    def ended(self) -> bool: ...

class TokenIdsRequest:
    """One request for token ids, until it ends."""

    def __init__(self, books: Books, replica: str) -> None: ...
    def ended(self) -> None: ...

class Policy:
    """A built-in policy alone."""

    def __init__(self, name: str, weights: Weights) -> None: ...
    def order(
        self,
        model: str,
        session: bytes,
        prompt_tokens: int,
        prefill_tokens_per_s: float,
        keys: Sequence[int],
        candidates: list[Candidate],
        draws: Sequence[float],
    ) -> tuple[list[float], list[int], int, float]:
        """Costs, numbers from the best on, the best, and the mean congestion.

        Args:
            model: Of the request, as the next four.
            session: Empty: it has none.
            prompt_tokens: Its length.
            prefill_tokens_per_s: At speed 1.
            keys: Of its prefixes.
            candidates: One at least.
            draws: In place of random numbers, by candidate.
        """

class RecentPrefixes:
    """Which prefixes were just sent to which cache."""

    def __init__(self, ttl_s: float, max_entries: int) -> None: ...
    def remember(self, cache: int, keys: Sequence[int], now: float) -> None: ...
    def match(self, keys: Sequence[int], step: int, now: float) -> list[tuple[int, int]]: ...
    def forget(self, cache: int) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...

class Conditions:
    """How a replica is; all versions of a fleet share it."""

    def __init__(self, books: Books) -> None: ...
    def set(self, is_healthy: bool, is_draining: bool, is_removed: bool) -> None: ...
    def set_gate(
        self,
        most_requests: int | None,
        most_prefill_tokens: int | None,
        open_until: float | None,
        probe_until: float,
        backs_off_until: float,
        tenants_back_off_until: Sequence[tuple[str, float]],
        started_at: float | None,
        slow_start_s: float,
    ) -> None: ...
    def set_engine(
        self,
        at: float,
        foreign: int,
        waiting: int,
        ranks: Sequence[tuple[int, int, int]],
        cache_blocks: int | None,
        cache_tokens: int | None,
    ) -> None: ...
    def set_suspects(self, dp_ranks: Sequence[int]) -> None: ...

class Fleet:
    """Which replicas exist; never changes.

    Each is its id, speed, limit of requests, address for peers, models, adapters, caches - with the
    rank, the id, and the source's number in *index* of each - and `Conditions`.
    """

    def __init__(
        self,
        books: Books,
        version: int,
        index: SharedIndex | None,
        replicas: Sequence[
            tuple[
                str,
                float,
                int | None,
                tuple[str, int] | None,
                Sequence[str],
                Sequence[tuple[str, str]],
                Sequence[tuple[int, int, int | None]],
                Conditions,
            ]
        ],
    ) -> None: ...

class DecidedRanking:
    """What a decision found. Numbers are those of candidates that can take the request."""

    def __len__(self) -> int: ...
    def first(self) -> int: ...
    def has_failed(self) -> bool: ...
    def prefill_tokens_per_s(self) -> float: ...
    def mean_congestion(self) -> float: ...
    def numbers(self) -> list[int]: ...
    def cost(self, number: int) -> float: ...
    def candidate(self, number: int) -> tuple[Any, ...]: ...
    def excluded(self) -> list[tuple[tuple[Any, ...], int]]: ...

class Decider:
    """Decides by one policy."""

    def __init__(
        self,
        books: Books,
        policy: str,
        weights: Weights,
        engine_load_stale_after_s: float,
        seed: int,
    ) -> None: ...
    def share_lots(self) -> None: ...
    def give_lots(self, ties: Sequence[float], lots: Sequence[float]) -> None: ...
    def rank(
        self,
        fleet: Fleet,
        model: str,
        session: bytes,
        tenant: str,
        prompt_tokens: int,
        index: SharedIndex | None,
        prompts: list[Prompt],
        computed: Sequence[Sequence[_ComputedHashes]],
        given: tuple[
            float | None,
            list[float] | None,
            list[tuple[float | None, float, float, float, float]] | None,
            Sequence[tuple[int, int, int]],
            Callable[[int, str], float | None] | None,
            Sequence[tuple[int, int, float, float | None, float]],
        ]
        | None,
        choice: tuple[bool, int | None, bool],
        now: float,
    ) -> DecidedRanking: ...
