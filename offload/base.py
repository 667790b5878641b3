"""What every lower tier of the KV cache shares: names of blocks, places of blocks, the manager's
and the worker's protocol.

A tier is a *manager* in the scheduler, which knows what the tier holds and decides what it evicts,
and a *worker* beside the model, which moves bytes. The manager hands out specs (where a block is),
the connector pairs them into jobs, and the worker runs the jobs. Nothing here does I/O or imports
torch.

An offloaded block covers a whole number of GPU blocks of its group, in the order of the prompt; its
name is the hash at its end. Blocks of all groups share a tier, whatever their sizes, so neither
keys nor events carry a block size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from kvevents.events import GroupIdx
from offload.errors import TransferError

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by its KV cache group index, 4 bytes big endian."""

_GROUP_IDX = struct.Struct(">I")


def pack_offload_key(block_hash: bytes, group_idx: GroupIdx) -> OffloadKey:
    """The name of a group's block in every tier."""
    return OffloadKey(block_hash + _GROUP_IDX.pack(group_idx))


def unpack_offload_key(key: OffloadKey) -> tuple[bytes, GroupIdx]:
    """The block hash and the group index behind a key."""
    (group_idx,) = _GROUP_IDX.unpack_from(key, len(key) - _GROUP_IDX.size)
    return bytes(key[: -_GROUP_IDX.size]), GroupIdx(group_idx)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Which request a tier is asked for."""

    request_id: str


# --- where blocks are -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GPULoadStoreSpec:
    """GPU blocks of several groups, as one side of a copy."""

    block_ids: Sequence[int]
    """All groups' blocks, group behind group, each group's in the order of the prompt."""
    group_sizes: Sequence[int]
    """How many of `block_ids` belong to each group; 0 for a group that takes no part. Sums up to
    `len(block_ids)`."""
    block_indices: Sequence[int]
    """Per group, where in the prompt its first block lies, counted in GPU blocks. It says how many
    GPU blocks of the first offloaded block are left alone: `block_indices[g] %
    blocks_per_offloaded_block`. Any value for a group of size 0."""

    def __post_init__(self) -> None:
        if len(self.group_sizes) != len(self.block_indices):
            raise TransferError(
                f"GPU spec: {len(self.group_sizes)} group_sizes and {len(self.block_indices)} block_indices must be as many"
            )
        if min((*self.group_sizes, *self.block_indices), default=0) < 0:
            raise TransferError("GPU spec: group_sizes and block_indices must not be negative")
        if sum(self.group_sizes) != len(self.block_ids):
            raise TransferError(
                f"GPU spec: group_sizes add up to {sum(self.group_sizes)}, there are {len(self.block_ids)} block_ids"
            )


@dataclass(frozen=True, slots=True)
class CPULoadStoreSpec:
    """Blocks of the CPU tier, as the other side of a copy: group behind group, each group's in the
    order of the prompt."""

    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class FileLoadStoreSpec:
    """Blocks of the disk tier, in the same order; each key names its file."""

    keys: Sequence[OffloadKey]


LowerTierSpec = CPULoadStoreSpec | FileLoadStoreSpec


# --- the manager ----------------------------------------------------------------------------------


class LookupResult(Enum):
    """What a tier knows of a block."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """Its store has not completed: not a hit yet, and no reason to store it again."""


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What a tier agreed to take."""

    keys_to_store: Sequence[OffloadKey]
    """The keys asked for, in their order, without those the tier holds already, leaves out by its
    policy, or has forgotten while a copy of them is still on its way."""
    store_spec: LowerTierSpec
    """Where they go, one place per key."""
    evicted_keys: Sequence[OffloadKey]
    """What had to go for them, already gone."""


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A tier stored or removed blocks. Without a block size: blocks of different sizes share an
    event."""

    keys: Sequence[OffloadKey]
    medium: str
    """As on the wire: `kvevents.events.CPU` or `STORAGE`."""
    removed: bool


class OffloadingManager(Protocol):
    """The scheduler's side of a tier: what it holds, what is in flight, what goes next. Called from
    one thread.

    A block is stored by `prepare_store`, the copy, `complete_store`, and is a hit only after that.
    A block is read by `prepare_load`, the copy, `complete_load`, and is not evicted in between.
    Keys come in the order of the prompt, and a tier evicts its tail before its head.
    """

    @property
    def medium(self) -> str:
        """The tier's name on the wire."""
        ...

    def lookup(self, key: OffloadKey, context: RequestContext) -> LookupResult:
        """Is the block there? Does not count as use."""
        ...

    def touch(self, keys: Iterable[OffloadKey], context: RequestContext) -> None:
        """These blocks were used, the last key most recently; keys the tier does not hold are no
        error. Once a request."""
        ...

    def prepare_load(self, keys: Sequence[OffloadKey], context: RequestContext) -> LowerTierSpec:
        """Protect blocks from eviction and say where they are, one place per key.

        Raises:
            TierStateError: A key is no hit. Nothing was protected.
        """
        ...

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """The copy is over: end the protection. Without *success* the blocks are bad and are
        dropped.

        Raises:
            TierStateError: A key has no load in flight.
        """
        ...

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Make room for blocks and say where they go. None: they do not fit beside what is in
        flight, and nothing changed."""
        ...

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """The copy is over: the blocks are hits from now on; without *success* nothing is left of
        them.

        Raises:
            TierStateError: A key has no store in flight.
        """
        ...

    def reset(self) -> None:
        """Forget every block; what is in flight is forgotten when its copy is over and is no hit
        until then."""
        ...

    def take_events(self) -> list[OffloadingEvent]:
        """What was stored and removed since the last call, in order."""
        ...


# --- the worker -----------------------------------------------------------------------------------


class Direction(Enum):
    """Which way a job copies."""

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
    """How a job ended."""

    job_id: int
    direction: Direction
    success: bool
    transferred_bytes: int
    """What was copied; 0 if the job failed."""
    time_s: float
    """From the start of the copy to its end, without the wait in the queue."""


class OffloadingWorker(Protocol):
    """Moves a tier's blocks. Jobs run in the order of their submission, beside the model's
    computation."""

    def submit(self, job: TransferJob) -> None:
        """Queue a job.

        Raises:
            TransferError: Shapes, sizes or ids do not fit, or the worker was shut down. Nothing was
                queued.
        """
        ...

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, in the order of their submission. Never waits."""
        ...

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when these jobs have ended; `get_finished` still reports them."""
        ...

    def shutdown(self) -> None:
        """Finish what was queued and stop."""
        ...
