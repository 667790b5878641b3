"""The events an engine publishes about its KV cache.

Field names and meanings are those of vLLM >= 0.24 (`vllm/distributed/kv_events.py`), with
`CacheLayout` added. Every field takes part in equality and hash: an event of group 0 is never equal
to one that names no group.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Any, NewType, TypeAlias

import msgspec
from msgspec.structs import astuple

BlockHash: TypeAlias = int | bytes
"""An engine's hash of a block and the whole prefix before it: a digest, or its low 64 bits."""

GroupIdx = NewType("GroupIdx", int)

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"

LOCAL = "LOCAL"
REMOTE = "REMOTE"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as big-endian 32-bit integers.

    Raises:
        OverflowError: An id lies outside `[0, 2**32)`.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The token ids that `pack_tokens` wrote."""
    token_ids = array("I", packed)
    if sys.byteorder == "little":
        token_ids.byteswap()
    return token_ids.tolist()


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=True):
    """Written as a msgpack map with a `type` key, defaults left out."""

    def __hash__(self) -> int:
        return hash((type(self).__name__, _hashable(astuple(self))))


class _InOneTier:
    """Says where the blocks of an event are."""

    __slots__ = ()
    medium: str | None

    @property
    def tier(self) -> str:
        """The tier in upper case; an engine that names no medium means the GPU."""
        return (self.medium or GPU).upper()


# msgspec generates a hash for every frozen struct, which fails on lists: each event assigns ours.


class BlockStored(_InOneTier, _Event, frozen=True):
    """One contiguous run of blocks of one group was stored in one tier.

    `token_ids` covers the run and `parent_block_hash` is the hash right before it. In a dense event
    `len(token_ids)` is a multiple of `len(block_hashes)` and the quotient is the block size. An
    event of an offload tier has no tokens. One of a sliding-window or Mamba group may have holes,
    that is fewer hashes than blocks, without saying which are missing.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    medium: str | None
    group_idx: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """One entry per hash: None, or LoRA name, `(multimodal id, offset)` pairs, salt and embedding
    digests, untagged."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    block_size: int | None = None
    """Read if an engine sends it; our own events leave it out."""
    lora_id: int | None = None
    """The engine's own number of the adapter. Read if an engine sends it; superseded by
    `lora_name`, which vLLM has from 0.14 on."""
    lookahead_token_ids: list[list[int]] | None = None
    """With speculative decoding, tokens after each block that its hash also covers: in vLLM from
    0.33 on, and in SGLang."""
    cache_salt: str | None = None
    """SGLang's name for the salt of the request; ours stands in `extra_keys`, as vLLM's does."""
    locality: str | None = None
    """The place of the tier, seen from the publisher: `LOCAL`, `REMOTE`, or unknown (vLLM >=
    0.26)."""
    ownership: str | None = None
    """The secondary tier of the publisher, by an id of its configuration (vLLM >= 0.29)."""

    __hash__ = _Event.__hash__

    @property
    def adapter(self) -> str | int | None:
        """The LoRA adapter of its blocks: the name, else the engine's own number; None: no
        adapter."""
        return self.lora_name or (self.lora_id if (self.lora_id or 0) > 0 else None)

    @property
    def tokens_per_block(self) -> int:
        """The block size, stated or implied, where every hash has its tokens; else 0.

        Two hashes over 32 tokens give 16. An event with holes or without tokens gives 0, and so
        does one whose stated `block_size` contradicts the quotient.
        """
        blocks, tokens = len(self.block_hashes), len(self.token_ids)
        if not blocks or not tokens or tokens % blocks:
            return 0
        return 0 if self.block_size and self.block_size * blocks != tokens else tokens // blocks


class BlockRemoved(_InOneTier, _Event, frozen=True):
    """Copies of blocks were removed from one tier of one group."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    remaining_copy_counts: list[int] | None = None
    """How many copies are left there, by hash. Read if an engine sends it."""
    locality: str | None = None
    """See `BlockStored`, as for *ownership*."""
    ownership: str | None = None

    __hash__ = _Event.__hash__


class AllBlocksCleared(_InOneTier, _Event, frozen=True):
    """One tier of the source is empty, the GPU where none is named; other tiers keep their
    blocks."""

    medium: str | None = None

    __hash__ = _Event.__hash__


class TierBlocksCleared(_Event, frozen=True):
    """One tier of the source is empty. Read if an engine sends it; ours send `AllBlocksCleared`."""

    medium: str

    __hash__ = _Event.__hash__

    @property
    def tier(self) -> str:
        """The tier in upper case; a name that is empty is not the GPU's here."""
        return self.medium.upper()


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV cache group, as `CacheLayout` carries it. Sizes in tokens."""

    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


class CacheLayout(_Event, frozen=True):
    """How the publisher's cache is laid out: sent first, with every snapshot, and when a replay
    starts at 0.

    A publisher that sends it announces every block that a lower tier can bring back, also where the
    tier keeps several as one.
    """

    publisher_id: str
    """New in every process, so that a restart is noticed."""
    groups: list[GroupSpec]
    hash_block_size: int
    scheduler_block_size: int
    hash_algorithm: str | None = None
    none_hash: bytes | None = None
    """Root of the hash chain."""
    eagle: bool = False
    """True if any group holds layers of an EAGLE or MTP drafter."""
    hash_key_id: str | None = None
    """Blocks are announced without token ids, under the key of this id (`kvevents.sealing`); None:
    under the engine's own hashes."""
    retention_hints: int = 0
    """Version of the retention hints that the engine takes with a request; 0: none."""
    eagle_groups: list[int] | None = None
    """The groups that do; None: all of them or none, by *eagle*. A reader that does not know this
    field takes *eagle* for all, and predicts a block too little rather than too much."""

    __hash__ = _Event.__hash__


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | TierBlocksCleared | CacheLayout


class EventBatch(msgspec.Struct, frozen=True):
    """All changes of the cache in one engine step, in order. Without events: a heartbeat."""

    ts: float
    """Seconds since the epoch, on the engine's clock."""
    events: Sequence[Event]
    data_parallel_rank: int | None = None
    skipped: int = 0
    """Events of unknown type, left out on reading."""
    unreadable: int = 0
    """Events that break the format, left out on reading."""
    hides_removals: bool = False
    """One of those left out took blocks away, or may have: some blocks that seem to be held are
    not."""
    problem: str | None = None
    """Place and rule of the first event left out that matters."""


@dataclass(slots=True)
class _Report:
    """The n-th time that an event was reported."""

    order: int
    workers: set[int]


class KVEventAggregator:
    """Collects the events that all workers of one engine reported.

    Tensor-parallel workers each report their own transfers, and a block is usable once every worker
    has it. With two workers:

        aggregator.add_events(0, [stored_a, stored_b])
        aggregator.add_events(1, [stored_a])
        aggregator.pop_common_events()                  # [stored_a]; stored_b waits for worker 1

    A worker that reports an event twice is still one worker: the second report waits until every
    other worker has reported the event twice as well.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}: at least one worker reports events")
        self._num_workers = num_workers
        self._reports: dict[Event, list[_Report]] = {}
        """By event, its first report, its second, ..., each with the workers that have made it."""
        self._order = count()

    def add_events(self, worker: int, events: Iterable[Event]) -> None:
        """Add the events of one worker, in the order in which they happened.

        Args:
            worker: Its rank, or any other number that no other worker has.
        """
        for event in events:
            reports = self._reports.setdefault(event, [])
            missing = next((each for each in reports if worker not in each.workers), None)
            if missing is None:
                missing = _Report(next(self._order), set())
                reports.append(missing)
            missing.workers.add(worker)

    def withdraw_event(self, worker: int, event: Event) -> bool:
        """Take back a worker's last report of an event that was not popped; return whether there
        was one."""
        reports = self._reports.get(event, [])
        last = next((each for each in reversed(reports) if worker in each.workers), None)
        if last is None:
            return False
        last.workers.discard(worker)
        if not last.workers:
            reports.remove(last)
        if not reports:
            del self._reports[event]
        return True

    def get_workers(self, event: Event) -> set[int]:
        """The workers that reported an event, and whose reports were not popped."""
        return set[int]().union(*(each.workers for each in self._reports.get(event, [])))

    def get_common_events(self) -> list[Event]:
        """The events that every worker reported, in the order of their first report."""
        return [event for _, event in sorted(self._common(), key=itemgetter(0))]

    def get_all_events(self) -> list[Event]:
        """Every event, as often as it was reported."""
        return [
            event
            for event, reports in self._reports.items()
            for report in reports
            for _ in report.workers
        ]

    def pop_common_events(self) -> list[Event]:
        """Return the common events and remove them; the others wait for workers that are behind."""
        common = self.get_common_events()
        waiting = {
            event: [each for each in reports if not self._is_common(each)]
            for event, reports in self._reports.items()
        }
        self._reports = {event: reports for event, reports in waiting.items() if reports}
        return common

    def clear_events(self) -> None:
        """Remove all events."""
        self._reports.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect events of *count* more workers."""
        if count < 1:
            raise ValueError(f"count is {count}: only a positive number of workers can join")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect events of one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """How many workers are expected to report."""
        return self._num_workers

    def _common(self) -> Iterator[tuple[int, Event]]:
        """`(order, event)` of each report that every worker has made."""
        for event, reports in self._reports.items():
            for report in reports:
                if self._is_common(report):
                    yield report.order, event

    def _is_common(self, report: _Report) -> bool:
        return len(report.workers) >= self._num_workers
