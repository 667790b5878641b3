"""`kvroute capture`: record a live event stream to a file, or what a running router sees of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from kvevents.delivery import Effect
from kvevents.errors import UNREADABLE, KVEventsError
from kvevents.messages import Batch
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber
from router.cli.recordings import Header, RecordingError, RecordingWriter
from router.cli.running_router import OPERATOR_KEY_VARIABLE, QueryFailed, RunningRouter
from router.cli.signals import EndedBySignal, run_until_signal
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
    captured = Captured(arguments.batches, arguments.queries, arguments.json)
    record = _record_stream if arguments.url is None else _record_router
    with contextlib.suppress(EndedBySignal):
        run_until_signal(record(arguments, captured))
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


async def _record_router(arguments: argparse.Namespace, captured: Captured) -> None:
    async with RunningRouter(arguments.url, OPERATOR_KEY_VARIABLE, _TIMEOUTS) as router:
        replica = arguments.replica or await _only_replica(router)
        path = f"/replicas/{quote(replica, safe='', errors='surrogateescape')}/recording"
        lines = router.lines(f"{path}?dp_rank={arguments.rank}")
        captured.show(f"recording {replica}")
        with RecordingWriter(arguments.output) as file:
            await _first_of(arguments.seconds, _write_lines(lines, file, captured))


async def _only_replica(router: RunningRouter) -> str:
    replicas = (await router.ask("GET", "/replicas", ReplicaList)).replicas
    if len(replicas) != 1:
        names = ", ".join(replica.id for replica in replicas) or "none"
        raise QueryFailed(f"--replica: name one of the router's replicas: {names}")
    return replicas[0].id


async def _record_stream(arguments: argparse.Namespace, captured: Captured) -> None:
    header = Header(name=arguments.output.name.split(".")[0], source="captured by kvroute")
    with RecordingWriter(arguments.output, header) as file:
        recorder = _Recorder(file, captured)
        subscriber = Subscriber(
            arguments.endpoint,
            recorder,
            replay_endpoint=arguments.replay_endpoint,
            snapshot_endpoint=arguments.snapshot_endpoint,
            topic=arguments.topic,
        )
        silence = asyncio.create_task(_report_silence(subscriber, captured), name="silence")
        try:
            await _first_of(arguments.seconds, subscriber.run(), recorder.is_over.wait())
        finally:
            silence.cancel()
            if not captured.batches:
                captured.problem = _why_nothing(subscriber)


async def _report_silence(subscriber: Subscriber, captured: Captured) -> None:
    await asyncio.sleep(_PATIENCE_S)
    if not subscriber.statistics().batches:
        captured.show(f"{_why_nothing(subscriber)}; still waiting")


def _why_nothing(subscriber: Subscriber) -> str:
    statistics = subscriber.statistics()
    if statistics.connections:
        return f"{statistics.endpoint} has published nothing"
    return f"no process listens at {statistics.endpoint}"


async def _first_of(seconds: float | None, *works: Coroutine[Any, Any, object]) -> None:
    """Run *works* until the first has ended, for *seconds* at most; its error goes through."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the recording itself -------------------------------------------------------------------------


@dataclass(slots=True)
class Captured:
    """The counts of a recording, and when it ends."""

    most_batches: int | None
    """Recorded at most; None: any number."""
    most_queries: int | None
    is_quiet: bool
    """True: no progress is shown."""
    batches: int = 0
    queries: int = 0
    """Queries that the engine has reported on."""
    problem: str | None = None
    """Why nothing was recorded, where that is known."""

    @property
    def is_enough(self) -> bool:
        """Return whether a limit is reached."""
        return (self.most_batches is not None and self.batches >= self.most_batches) or (
            self.most_queries is not None and self.queries >= self.most_queries
        )

    def show(self, progress: str) -> None:
        """Print a line for people."""
        if not self.is_quiet:
            print(f"capture: {progress}", file=sys.stderr)


class _Recorder:
    """The consumer of the subscriber: writes every batch to the file, unchanged."""

    def __init__(self, output: RecordingWriter, captured: Captured) -> None:
        self.is_over = asyncio.Event()
        self._output = output
        self._captured = captured

    def apply(self, batch: Batch) -> Effect:
        captured = self._captured
        self._output.frame(batch.payload)
        captured.batches += 1
        if captured.is_enough:
            self.is_over.set()
        if captured.batches % 100 == 0:
            captured.show(f"{captured.batches} batches")
        return Effect.KEPT

    def clear(self, reason: str) -> None:
        # A recording is the stream of one process. What follows a restart would be another one.
        if self._captured.batches:
            self._captured.show(f"the publisher started again ({reason}): the recording ends here")
            self.is_over.set()

    def change(self, state: SourceState) -> None:
        self._captured.show(state.value)

    def report(self, problem: KVEventsError) -> None:
        self._captured.show(f"refused: {problem}")


class _SeenLine(msgspec.Struct):
    """The counted parts of a router's line."""

    frame: str | None = None
    hit: int | None = None
    end: str | None = None


_line_decoder = msgspec.json.Decoder(_SeenLine)


async def _write_lines(
    lines: AsyncIterator[bytes], output: RecordingWriter, captured: Captured
) -> None:
    """Write the lines that a router records of one cache, until they end or a limit is reached.

    Args:
        lines: From the router; empty ones only show that it is there.
    Raises:
        RecordingError: The file cannot be written, or a line is not a recording's.
    """
    async for line in lines:
        if not line.strip():
            continue
        try:
            seen = _line_decoder.decode(line)
        except UNREADABLE as error:
            raise RecordingError(f"the router's lines are not a recording: {error}") from None
        if seen.end is not None:
            captured.show(f"the recording ends here: {seen.end}")
            break
        output.line(line)
        captured.batches += seen.frame is not None
        captured.queries += seen.hit is not None
        if seen.hit is not None and captured.queries % 100 == 0:
            captured.show(f"{captured.queries} queries")
        if captured.is_enough:
            break
