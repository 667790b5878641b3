"""Records a live event stream to a file that `kvroute replay` reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvevents.delivery import Effect
from kvevents.errors import KVEventsError
from kvevents.messages import Batch
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber
from router.recordings.format import Header, RecordingWriter


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to record, and when to stop."""

    endpoint: str
    """The publisher's PUB address."""
    replay_endpoint: str | None = None
    """Its ROUTER address; with it the recording starts with every batch the engine can replay."""
    topic: str | None = None
    """The topic to subscribe to; None takes every topic."""
    max_batches: int | None = None
    """Stop after this many; None: no limit."""
    seconds: float | None = None
    """Stop after this long; None: no limit."""


class _Recorder:
    """The consumer of the subscriber: writes every batch to the file, unchanged."""

    def __init__(
        self,
        writer: RecordingWriter,
        options: CaptureOptions,
        progress: Callable[[str], None],
        done: asyncio.Event,
    ) -> None:
        self.batches = 0
        self.done = done
        self._writer = writer
        self._options = options
        self._progress = progress

    def apply(self, batch: Batch) -> Effect:
        self._writer.frame(batch.payload)
        self.batches += 1
        if self._options.max_batches is not None and self.batches >= self._options.max_batches:
            self.done.set()
        if self.batches % 100 == 0:
            self._progress(f"{self.batches} batches")
        return Effect.KEPT

    def clear(self, reason: str) -> None:
        # A recording is the stream of one process. What follows a restart would be another one.
        if self.batches:
            self._progress(f"the publisher started again ({reason}): the recording ends here")
            self.done.set()

    def change(self, state: SourceState) -> None:
        self._progress(state.value)

    def report(self, problem: KVEventsError) -> None:
        self._progress(f"refused: {problem}")


async def capture(
    options: CaptureOptions,
    output: Path,
    progress: Callable[[str], None],
    done: asyncio.Event | None = None,
) -> int:
    """Record until a limit is reached or *done* is set; returns the number of batches.

    Args:
        options: What to record, and the limits.
        output: The file to write; compressed where it ends in `.gz`.
        progress: Takes a line for people now and then.
        done: Ends the recording; None leaves that to the limits.
    Raises:
        EndpointError: A socket cannot connect to such an address.
        RecordingError: The file cannot be written.
    """
    with RecordingWriter(
        output, Header(name=output.name.split(".")[0], source="captured by kvroute")
    ) as writer:
        recorder = _Recorder(writer, options, progress, done or asyncio.Event())
        subscriber = Subscriber(
            options.endpoint, recorder, replay_endpoint=options.replay_endpoint, topic=options.topic
        )
        following = asyncio.create_task(subscriber.run(), name="capture")
        limit = asyncio.create_task(recorder.done.wait(), name="capture limit")
        try:
            await asyncio.wait(
                (following, limit), timeout=options.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            limit.cancel()
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        return recorder.batches
