"""Publishes the content of an engine's KV cache.

`publish` costs the engine's thread microseconds and never waits: everything else happens on the
publisher's own thread (`kvevents/stream.py`).
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from kvevents.cache_source import CacheSource, EngineStep
from kvevents.endpoints import Context
from kvevents.errors import PublisherClosed
from kvevents.events import CacheLayout, Event, GroupSpec
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.plugins import PlugIns
from kvevents.publisher_config import PublisherConfig
from kvevents.sealing import HashKey
from kvevents.stream import OfferResult, Stream, StreamStatistics

Self = TypeVar("Self", bound="EventPublisher")
PresentState: TypeAlias = Callable[[], Sequence[Event]]
"""Returns everything an engine's cache holds, as `BlockStored` events. Called from `publish`, on
the engine's thread: it must include the batch that is being published, and nothing later."""


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counts since the start, and the state now."""

    stream: StreamStatistics = field(default_factory=StreamStatistics)
    rejected_events: int = 0
    """Events left out because they cannot be encoded or applied to the kept state."""
    state_blocks: int = 0
    """Distinct (group, tier, hash) that a snapshot would announce."""
    state_is_complete: bool = True
    """False: snapshots are refused, see `ZmqEventPublisher`."""


class EventPublisher(ABC):
    """Takes an engine's events, one batch per step. Also a context manager that shuts down at its
    end."""

    @abstractmethod
    def publish(self, events: Sequence[Event]) -> bool:
        """Publish one step's events, in order; neither they nor their lists may change afterwards.

        Returns:
            False if the batch will not reach the wire.

        Raises:
            PublisherClosed: After `shutdown`.
        """

    @abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, for at most *timeout_s*, and end. A second call does nothing."""

    @abstractmethod
    def statistics(self) -> PublisherStatistics:
        """Counts and state. May be called from any thread, also after `shutdown`."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class NullEventPublisher(EventPublisher):
    """Accepts every batch and sends nothing."""

    def __init__(self) -> None:
        self._is_closed = False

    def publish(self, events: Sequence[Event]) -> bool:  # noqa: ARG002 (the interface's)
        if self._is_closed:
            raise PublisherClosed("publish: the publisher was shut down")
        return True

    def shutdown(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 (the interface's)
        self._is_closed = True

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics()


# --- over ZMQ -------------------------------------------------------------------------------------


class ZmqEventPublisher(EventPublisher):
    """Publishes over ZMQ, with replay, snapshots and heartbeats.

    With `max_queue_size` batches waiting, further ones are dropped: they use up a sequence number
    and still update the cache's state here, so consumers see the gap and a snapshot repairs it.
    With twice as many waiting (the publisher's thread gets no time at all), batches do not reach
    that state either. Snapshots are then refused until *present_state* has given the whole state
    again, at the first `publish` that finds room; without *present_state* they stay refused.
    """

    def __init__(
        self,
        config: PublisherConfig,
        layout: KVCacheLayout,
        chain: HashChain | None = None,
        data_parallel_rank: int = 0,
        present_state: PresentState | None = None,
        context: Context | None = None,
    ) -> None:
        """Open the sockets and start the thread.

        Args:
            config: Addresses and bounds. Ports move along by *data_parallel_rank*.
            layout: Announced first, under a new publisher id.
            chain: The engine's hash function, announced so that consumers can compute its hashes.
            data_parallel_rank: This engine's rank, written into every batch.
            context: Has the sockets; None: its own, or `zmq.Context.instance()` for `inproc`.

        Raises:
            EndpointError: An address can be neither bound nor connected to.
            ValueError: The rank is out of range, or blocks are to be announced under a key and
                *chain* is not SHA-256.
        """
        if config.hash_key is not None:
            _check_sealable(chain)
        announcement = announce(layout, chain, config.hash_key, config.retention_hints)
        self.publisher_id = announcement.publisher_id
        self._present_state = present_state
        self._made_up_losses = 0
        """Losses repaired by presenting the whole state."""
        self._source = CacheSource(
            announcement, data_parallel_rank, config.with_block_size, config.hash_key
        )
        self._stream: Stream[EngineStep] = Stream(config, self._source, data_parallel_rank, context)
        self.endpoint = self._stream.endpoint
        """The address of batches, with the port the system picked."""
        self.replay_endpoint = self._stream.replay_endpoint
        """The address for replays and snapshots; None: neither."""

    def publish(self, events: Sequence[Event]) -> bool:
        """See `EventPublisher`. A step without events costs no sequence number."""
        if not events:
            self._stream.check_open()
            return True
        is_due = self._present_state is not None and self._source.losses > self._made_up_losses
        if is_due and self._stream.has_room:
            return self._publish_with_state(events)
        return self._stream.offer(EngineStep(time.time(), tuple(events), None)) is OfferResult.SENT

    def leave_out(self, batches: int) -> None:
        """Number the next *batches* without sending them, to test a loss."""
        self._stream.leave_out(batches)

    def _publish_with_state(self, events: Sequence[Event]) -> bool:
        assert self._present_state is not None
        losses = self._source.losses
        step = EngineStep(time.time(), tuple(events), tuple(self._present_state()), losses)
        is_sent = self._stream.offer(step) is OfferResult.SENT
        if is_sent:
            self._made_up_losses = losses
        return is_sent

    def shutdown(self, timeout_s: float = 5.0) -> None:
        self._stream.close(timeout_s)

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(
            stream=self._stream.statistics(),
            rejected_events=self._source.rejected_events,
            state_blocks=self._source.state.blocks,
            state_is_complete=self._source.state.is_complete,
        )


def _check_sealable(chain: HashChain | None) -> None:
    if chain is None or not chain.algorithm.startswith("sha256"):
        found = "unknown" if chain is None else chain.algorithm
        raise ValueError(
            f"hash_key: the engine's hash function is {found}; it must be sha256 or sha256_cbor, "
            "so that consumers can compute it and no one can make collisions"
        )


def announce(
    layout: KVCacheLayout,
    chain: HashChain | None = None,
    key: HashKey | None = None,
    retention_hints: int = 0,
) -> CacheLayout:
    """The event that announces a layout, under a publisher id that no other process has.

    Args:
        chain: The engine's hash function; None: consumers learn only from tokens.
        key: Blocks are announced under it; None: under the engine's hashes.
    """
    groups = [
        GroupSpec(
            group.kind.value, group.block_size, group.sliding_window, group.attention_chunk_size
        )
        for group in layout.groups
    ]
    return CacheLayout(
        publisher_id=uuid.uuid4().hex,
        groups=groups,
        hash_block_size=layout.hash_block_size,
        scheduler_block_size=layout.scheduler_block_size,
        hash_algorithm=chain.algorithm if chain else None,
        none_hash=chain.none_hash if chain else None,
        eagle=bool(layout.eagle),
        hash_key_id=key.key_id if key else None,
        retention_hints=retention_hints,
        eagle_groups=sorted(layout.eagle) if 0 < len(layout.eagle) < len(groups) else None,
    )


# --- by configuration -----------------------------------------------------------------------------

PublisherBuilder: TypeAlias = Callable[
    [PublisherConfig, KVCacheLayout, HashChain | None, int], EventPublisher
]
_BUILT_IN: dict[str, PublisherBuilder] = {
    "null": lambda *_: NullEventPublisher(),
    "zmq": ZmqEventPublisher,
}
_METHODS = ("publish", "shutdown", "statistics")
_publishers = PlugIns("kvroute.publishers", "kind", _BUILT_IN, _METHODS)


def register_publisher(kind: str, builder: PublisherBuilder) -> None:
    """Register the builder of `PublisherConfig(kind=kind)` in this process.

    A package that is to be found without being imported offers an entry point in the group
    `kvroute.publishers` instead.

    Args:
        builder: Called with configuration, layout, hash chain or None, and data-parallel rank.

    Raises:
        ValueError: The kind is taken.
    """
    _publishers.register(kind, builder)


def create_publisher(
    config: PublisherConfig | None,
    layout: KVCacheLayout,
    chain: HashChain | None = None,
    data_parallel_rank: int = 0,
) -> EventPublisher:
    """Make the publisher that a configuration names; without one, a publisher that sends nothing.

    Args:
        config: Its `kind` is a built-in one, a registered one, or a plug-in of the entry-point
            group `kvroute.publishers`.
        chain: The engine's hash function, if it is one of `kvevents.hash_algorithms()`.
        data_parallel_rank: This engine's rank. Ports move along by it.

    Raises:
        EndpointError: An address can be neither bound nor connected to.
        PlugInError: The kind is unknown, or its plug-in cannot be used.
    """
    if config is None:
        return NullEventPublisher()
    return _publishers.make(config.kind, config, layout, chain, data_parallel_rank)
