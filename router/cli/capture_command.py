"""`kvroute capture`: record a live event stream to a file, or what a running router sees of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvevents.delivery import Effect
from kvevents.errors import UNREADABLE, KVEventsError
from kvevents.messages import Batch
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber
from router.cli.recordings import Header, RecordingError, RecordingWriter
from router.cli.running_router import OPERATOR_KEY_VARIABLE, QueryFailed, RunningRouter
from router.config.origin import Timeouts
from router.doors.http.replica_views import ReplicaList

_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=60, idle_s=30)
"""A router sends a line every second, however quiet its engine is."""
_PATIENCE_S = 2.0
"""After this long without a batch, progress shows it."""


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "capture",
        description="Records every batch unchanged, until a limit or Ctrl-C; from a router also "
        "the prompts it sends, with the cached tokens that the engine reports, so that kvroute "
        "replay has something to compare. The recording holds the token ids of prompts: protect "
        "it as you would protect the prompts. A router's operator key is read from the "
        f"environment variable {OPERATOR_KEY_VARIABLE}.",
    )
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--endpoint", help="a publisher's address, as tcp://host:5557")
    origin.add_argument("--url", help="a running router that allows it: serve --allow-capture")
    parser.add_argument(
        "--replay-endpoint",
        help="of --endpoint: start with a snapshot, where the engine makes them "
        "there, or else with every batch it can still replay",
    )
    parser.add_argument(
        "--snapshot-endpoint",
        help="of --endpoint, where the engine has an address for snapshots alone: start with the "
        "whole cache as it is now",
    )
    parser.add_argument("--topic", help="of --endpoint; default: every topic")
    parser.add_argument("--replica", help="of --url; needed where the router has several")
    parser.add_argument(
        "--rank", type=int, default=0, help="of --url: the data-parallel rank (default: 0)"
    )
    parser.add_argument(
        "--output", "-o", required=True, type=Path, help="file to write, .jsonl or .jsonl.gz"
    )
    parser.add_argument("--batches", type=int, help="stop after this many")
    parser.add_argument("--queries", type=int, help="of --url: stop after this many")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and no progress"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record, and print how much; the exit code is 1 if it was nothing."""
    captured = asyncio.run(_capture(arguments))
    is_empty = not captured.batches and not captured.queries
    if arguments.json:
        found = {"batches": captured.batches, "queries": captured.queries}
        output = None if is_empty else str(arguments.output)
        print(json.dumps({**found, "output": output, "problem": captured.problem}))
    else:
        print(_summary(captured, arguments))
    return 1 if is_empty else 0


def _summary(captured: Captured, arguments: argparse.Namespace) -> str:
    counts = f"{captured.batches} batches"
    if arguments.url is not None:
        counts += f" and {captured.queries} queries"
    if captured.problem is not None:
        return f"{counts}: {captured.problem}"
    return f"{counts} in {arguments.output}"


async def _capture(arguments: argparse.Namespace) -> Captured:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    progress = (lambda _text: None) if arguments.json else _print_progress
    limits = CaptureLimits(arguments.batches, arguments.queries, arguments.seconds)
    if arguments.url is not None:
        return await _capture_router(arguments, limits, progress, done)
    address = StreamAddress(
        arguments.endpoint,
        arguments.replay_endpoint,
        arguments.topic,
        arguments.snapshot_endpoint,
    )
    return await capture(address, limits, arguments.output, progress, done)


async def _capture_router(
    arguments: argparse.Namespace,
    limits: CaptureLimits,
    progress: Callable[[str], None],
    done: asyncio.Event,
) -> Captured:
    router = RunningRouter(arguments.url, OPERATOR_KEY_VARIABLE, _TIMEOUTS)
    captured = Captured()
    try:
        replica = arguments.replica or await _only_replica(router)
        lines = router.lines(f"/replicas/{replica}/recording?dp_rank={arguments.rank}")
        work = asyncio.create_task(
            capture_lines(lines, limits, arguments.output, progress, captured)
        )
        end = asyncio.create_task(done.wait())
        progress(f"recording {replica}")
        await asyncio.wait((work, end), timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if work.done():
            work.result()
        else:
            work.cancel()
            await asyncio.wait((work,))
    finally:
        await router.close()
    return captured


async def _only_replica(router: RunningRouter) -> str:
    replicas = (await router.ask("GET", "/replicas", ReplicaList)).replicas
    if len(replicas) != 1:
        names = ", ".join(replica.id for replica in replicas) or "none"
        raise QueryFailed(f"--replica: name one of the router's replicas: {names}")
    return replicas[0].id


def _print_progress(text: str) -> None:
    print(f"capture: {text}", file=sys.stderr)


# --- the recording itself -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """When to stop; None: no limit."""

    batches: int | None = None
    queries: int | None = None
    """Queries that the engine has reported on."""
    seconds: float | None = None

    def are_reached(self, captured: Captured) -> bool:
        """Return whether a limit is reached."""
        return (self.batches is not None and captured.batches >= self.batches) or (
            self.queries is not None and captured.queries >= self.queries
        )


@dataclass(slots=True)
class Captured:
    """The counts of a recording."""

    batches: int = 0
    queries: int = 0
    """Queries that the engine has reported on."""
    problem: str | None = None
    """Why nothing was recorded, where that is known."""


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """The addresses of an engine's stream."""

    endpoint: str
    """Its PUB address."""
    replay_endpoint: str | None = None
    """Its ROUTER address; with it the recording starts with every batch the engine can replay."""
    topic: str | None = None
    """The topic to subscribe to; None takes every topic."""
    snapshot_endpoint: str | None = None
    """Its address for snapshots alone; with it the recording starts with the whole cache."""


@dataclass(eq=False, repr=False)
class _Recorder:
    """The consumer of the subscriber: writes every batch to the file, unchanged."""

    output: RecordingWriter
    limits: CaptureLimits
    progress: Callable[[str], None]
    done: asyncio.Event

    def __post_init__(self) -> None:
        self.captured = Captured()

    def apply(self, batch: Batch) -> Effect:
        self.output.frame(batch.payload)
        self.captured.batches += 1
        if self.limits.are_reached(self.captured):
            self.done.set()
        if self.captured.batches % 100 == 0:
            self.progress(f"{self.captured.batches} batches")
        return Effect.KEPT

    def clear(self, reason: str) -> None:
        # A recording is the stream of one process. What follows a restart would be another one.
        if self.captured.batches:
            self.progress(f"the publisher started again ({reason}): the recording ends here")
            self.done.set()

    def change(self, state: SourceState) -> None:
        self.progress(state.value)

    def report(self, problem: KVEventsError) -> None:
        self.progress(f"refused: {problem}")


async def capture(
    address: StreamAddress,
    limits: CaptureLimits,
    output: Path,
    progress: Callable[[str], None],
    done: asyncio.Event | None = None,
) -> Captured:
    """Record an engine's stream until a limit is reached or *done* is set.

    Args:
        output: The file to write, once there is a batch; compressed where it ends in `.gz`.
        progress: Takes a line for people now and then.
        done: Ends the recording; None leaves that to the limits.
    Raises:
        EndpointError: A socket cannot connect to such an address.
        RecordingError: The file cannot be written.
    """
    header = Header(name=output.name.split(".")[0], source="captured by kvroute")
    with RecordingWriter(output, header) as file:
        recorder = _Recorder(file, limits, progress, done or asyncio.Event())
        subscriber = Subscriber(
            address.endpoint,
            recorder,
            replay_endpoint=address.replay_endpoint,
            snapshot_endpoint=address.snapshot_endpoint,
            topic=address.topic,
        )
        following = asyncio.create_task(subscriber.run(), name="capture")
        limit = asyncio.create_task(recorder.done.wait(), name="capture limit")
        silence = asyncio.create_task(_report_silence(subscriber, progress), name="capture silence")
        try:
            await asyncio.wait(
                (following, limit), timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if following.done():
                following.result()
        finally:
            for task in (limit, silence, following):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KVEventsError):
                await following
        if not recorder.captured.batches:
            recorder.captured.problem = _why_nothing(subscriber)
        return recorder.captured


async def _report_silence(subscriber: Subscriber, progress: Callable[[str], None]) -> None:
    await asyncio.sleep(_PATIENCE_S)
    if not subscriber.statistics().batches:
        progress(f"{_why_nothing(subscriber)}; still waiting")


def _why_nothing(subscriber: Subscriber) -> str:
    statistics = subscriber.statistics()
    if statistics.connections:
        return f"{statistics.endpoint} has published nothing"
    return f"no process listens at {statistics.endpoint}"


class _SeenLine(msgspec.Struct):
    """The counted parts of a router's line."""

    frame: str | None = None
    hit: int | None = None
    end: str | None = None


_line_decoder = msgspec.json.Decoder(_SeenLine)


async def capture_lines(
    lines: AsyncIterator[bytes],
    limits: CaptureLimits,
    output: Path,
    progress: Callable[[str], None],
    captured: Captured,
) -> None:
    """Write the lines that a router records of one cache, until they end or a limit is reached.

    Args:
        lines: From the router; empty ones only show that it is there.
        limits: When to stop; the seconds are the caller's.
        output: The file to write; compressed where it ends in `.gz`.
    Raises:
        RecordingError: The file cannot be written, or a line is not a recording's.
    """
    with RecordingWriter(output) as file:
        async for line in lines:
            if not line.strip():
                continue
            try:
                seen = _line_decoder.decode(line)
            except UNREADABLE as error:
                raise RecordingError(f"the router's lines are not a recording: {error}") from None
            if seen.end is not None:
                progress(f"the recording ends here: {seen.end}")
                break
            file.line(line)
            captured.batches += seen.frame is not None
            captured.queries += seen.hit is not None
            if seen.hit is not None and captured.queries % 100 == 0:
                progress(f"{captured.queries} queries")
            if limits.are_reached(captured):
                break
