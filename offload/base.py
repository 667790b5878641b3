"""Defines what all lower tiers of the KV cache share: keys, specs, protocols of manager and worker.

A tier is a *manager* in the scheduler, which knows what the tier holds and decides what it evicts,
and a *worker* next to the model, which moves bytes. The manager hands out specs (where a block is),
the connector pairs them into jobs, and the worker runs the jobs. This file does no I/O and imports
no torch.

An offloaded block covers a whole number of GPU blocks of its group, in the order of the prompt, and
is identified by the hash at its end:

    GPU blocks of a group      | 0  1  2  3 | 4  5  6  7 | 8 ...     one hash each
    offloaded blocks of four   |      A     |      B     |           A's key: the hash of block 3

Blocks of all groups share a tier, whatever their sizes, so neither keys nor events carry a block
size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType, Protocol

from kvevents.events import GroupIdx
from offload.errors import TransferError
from offload.request import PeerBlocks, PeerSource

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by its KV cache group index, 4 bytes big endian."""

_GROUP_IDX = struct.Struct(">I")


def pack_offload_key(block_hash: bytes, group_idx: GroupIdx) -> OffloadKey:
    """The key of a group's block in every tier."""
    return OffloadKey(block_hash + _GROUP_IDX.pack(group_idx))


def unpack_offload_key(key: OffloadKey) -> tuple[bytes, GroupIdx]:
    """The block hash and the group index of a key."""
    (group_idx,) = _GROUP_IDX.unpack_from(key, len(key) - _GROUP_IDX.size)
    return bytes(key[: -_GROUP_IDX.size]), GroupIdx(group_idx)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request that a tier is asked about."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, hash=False)
    """The client's parameters for the tiers, as they came, unchecked."""
    at_peer: PeerBlocks | None = field(default=None, hash=False)
    """The blocks that another engine holds."""


# --- where blocks are -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GPULoadStoreSpec:
    """GPU blocks of several groups, as one side of a copy.

    Raises:
        TransferError: Lengths or sums contradict each other, or a number is negative.
    """

    block_ids: Sequence[int]
    """All groups' blocks, group by group, each group's in the order of the prompt."""
    group_sizes: Sequence[int]
    """How many of `block_ids` belong to each group; 0 for a group that takes no part. The sum is
    `len(block_ids)`."""
    block_indices: Sequence[int]
    """Per group, the index of its first block in the prompt, counted in GPU blocks. It implies how
    many GPU blocks of the first offloaded block are left alone: `block_indices[g] %
    blocks_per_offloaded_block`. Any value for a group of size 0."""

    def __post_init__(self) -> None:
        if len(self.group_sizes) != len(self.block_indices):
            raise TransferError(
                f"GPU spec: {len(self.group_sizes)} group_sizes and {len(self.block_indices)} "
                "block_indices must be equally many"
            )
        if min((*self.group_sizes, *self.block_indices), default=0) < 0:
            raise TransferError("GPU spec: group_sizes and block_indices must not be negative")
        if sum(self.group_sizes) != len(self.block_ids):
            raise TransferError(
                f"GPU spec: group_sizes add up to {sum(self.group_sizes)}, "
                f"there are {len(self.block_ids)} block_ids"
            )


@dataclass(frozen=True, slots=True)
class CPULoadStoreSpec:
    """Blocks of the CPU tier, as the other side of a copy.

    They are listed group by group, each group's in the order of the prompt.
    """

    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class FileLoadStoreSpec:
    """Blocks of the disk tier, in the same order; each key names its file."""

    keys: Sequence[OffloadKey]
    block_hashes: Sequence[Sequence[bytes]] = ()
    """For a store of blocks that cover several GPU blocks: per key the hashes of these, its own
    last. They are kept in the file for the next process."""


@dataclass(frozen=True, slots=True)
class PeerLoadSpec:
    """Blocks in a peer's memory, in the same order."""

    source: PeerSource
    keys: Sequence[OffloadKey]


LowerTierSpec = CPULoadStoreSpec | FileLoadStoreSpec | PeerLoadSpec


# --- the manager ----------------------------------------------------------------------------------


class LookupResult(Enum):
    """The state of a block in a tier."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """Its store has not completed: not a hit yet, and not to be stored again."""


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The blocks that a tier agreed to take."""

    keys_to_store: Sequence[OffloadKey]
    """The keys offered, in their order, without those the tier holds already, leaves out by its
    policy, or has dropped while a copy of them is still in flight."""
    store_spec: LowerTierSpec
    """Their places, one block per key."""
    evicted_keys: Sequence[OffloadKey]
    """The blocks evicted for them; already gone."""


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A tier stored or removed blocks, possibly of different sizes."""

    keys: Sequence[OffloadKey]
    medium: str
    """The wire's name: `kvevents.events.CPU` or `STORAGE`."""
    removed: bool


class OffloadingManager(Protocol):
    """The scheduler's side of a tier: its blocks, its copies in flight, its evictions. It is called
    from one thread. A block is stored by `prepare_store`, the copy, `complete_store`, and is a hit
    only after that. A block is read by `prepare_load`, the copy, `complete_load`, and is not
    evicted in between. Keys are passed in the order of the prompt, and a tier evicts a prompt's
    tail before its head."""

    enable_events: bool = False
    """True if `take_events` reports what is stored and removed, and must be called. A tier whose
    offloaded blocks cover several GPU blocks is searched with the help of these events."""

    @property
    def medium(self) -> str:
        """The tier's name on the wire."""

    def on_new_request(self, context: RequestContext) -> None:  # noqa: ARG002
        """A request is about to be looked up for the first time; a preempted one begins anew."""
        return

    def on_request_finished(self, context: RequestContext) -> None:  # noqa: ARG002
        """A request gave up its blocks, for any reason; copies for it may still be in flight.

        Called once for each `on_new_request`.
        """
        return

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """Look a block up. This does not count as use."""

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """Mark blocks as used; called once per request.

        Args:
            keys: The last one is the most recently used; keys the tier does not hold are ignored.
        """

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LowerTierSpec:
        """Protect blocks from eviction and return their places, one block per key.

        Args:
            keys: Hits; a key named several times is protected as many times.

        Raises:
            TierStateError: A key is not a hit. Nothing was protected.
        """

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """End the protection: the copy is over.

        Args:
            success: False if the blocks are bad; they are dropped.

        Raises:
            TierStateError: A key has no load in flight.
        """

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Make room for blocks and return their places. None, with nothing changed: they do not fit
        next to what is in flight.

        Args:
            keys: Blocks offered to the tier; repeated keys count once.
        """

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """Make stored blocks hits: the copy is over.

        Args:
            keys: The `keys_to_store` of `prepare_store`.
            success: False drops the blocks.

        Raises:
            TierStateError: A key has no store in flight.
        """

    def restored_block_hashes(self) -> Mapping[OffloadKey, Sequence[bytes]]:
        """Per block that an earlier process left, the hashes of the GPU blocks it covers.

        Only for blocks that cover several GPU blocks, and as far as they are known.
        """
        return {}

    def reset(self) -> None:
        """Drop every block; one that is in flight is not a hit and goes when its copy is over."""

    def take_events(self) -> list[OffloadingEvent]:
        """Take the stores and removals since the last call, in order."""


# --- the worker -----------------------------------------------------------------------------------


class Direction(Enum):
    """The direction of a copy."""

    STORE = "store"
    """From the GPU to the tier."""
    LOAD = "load"
    """From the tier to the GPU."""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One copy of blocks of several groups."""

    job_id: int
    direction: Direction
    gpu: GPULoadStoreSpec
    lower: LowerTierSpec


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a job."""

    job_id: int
    direction: Direction
    success: bool
    transferred_bytes: int
    """Bytes copied; 0 if the job failed."""
    time_s: float
    """From the start of the copy to its end, without the wait in the queue."""


class OffloadingWorker(Protocol):
    """Moves a tier's blocks, in the order of submission, while the model computes."""

    def submit(self, job: TransferJob) -> None:
        """Queue a job.

        Raises:
            TransferError: Shapes, sizes or ids do not fit, or the worker was shut down. Nothing was
                queued.
        """

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, in the order of their submission. Never waits."""

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when these jobs have ended; `get_finished` still reports them."""

    def shutdown(self) -> None:
        """Finish the queued jobs and stop."""
