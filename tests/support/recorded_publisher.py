"""Plays recorded payloads as vLLM would: verbatim, without layout, heartbeats or snapshots, with a
replay ring."""

from __future__ import annotations

from types import TracebackType

from kvevents.endpoints import Context
from kvevents.publisher import PublisherStatistics
from kvevents.publisher_config import PublisherConfig
from kvevents.stream import OfferResult, Stream


class RecordedStreamPublisher:
    """A stream of payloads that are already written."""

    def __init__(
        self, config: PublisherConfig, data_parallel_rank: int = 0, context: Context | None = None
    ) -> None:
        """Open the sockets and start the thread; raises `EndpointError`."""
        self._stream: Stream[bytes] = Stream(config, _RecordedSource(), data_parallel_rank, context)

    @property
    def endpoint(self) -> str:
        """Where payloads are published, with the port the system picked."""
        return self._stream.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where replays are requested; a request for a snapshot gets only the end marker."""
        return self._stream.replay_endpoint

    def publish_raw(self, payload: bytes) -> bool:
        """Publish one payload as the next batch; False if a full queue drops it. Raises
        `PublisherClosed` after `shutdown`."""
        return self._stream.offer(payload) is OfferResult.SENT

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, for at most *timeout_s*, and end."""
        self._stream.close(timeout_s)

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(stream=self._stream.statistics(), state_is_complete=False)

    def __enter__(self) -> RecordedStreamPublisher:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class _RecordedSource:
    """Payloads are items as they are; there is no state."""

    def opening(self) -> None:
        return None

    def heartbeat(self) -> None:
        return None

    def payload(self, item: bytes) -> bytes:
        return item

    def note(self, item: bytes) -> None:
        pass

    def note_loss(self) -> None:
        pass

    def snapshot(self, seq: int) -> None:
        return None
