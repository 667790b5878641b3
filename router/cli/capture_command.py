"""`kvroute capture`: record a live event stream to a file, or what a running router sees of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.cli.running_router import OPERATOR_KEY_VARIABLE, QueryFailed, RunningRouter
from router.http.views import ReplicaList
from router.recordings.capture import (
    Captured,
    CaptureLimits,
    StreamAddress,
    capture,
    capture_lines,
)
from router.upstream import Timeouts

_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=60, idle_s=30)
"""A router sends a line every second, however quiet its engine is."""


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
        "--replay-endpoint", help="of --endpoint: start with every batch it can still replay"
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
    progress = (lambda _text: None) if arguments.json else _say
    limits = CaptureLimits(arguments.batches, arguments.queries, arguments.seconds)
    if arguments.url is not None:
        return await _capture_router(arguments, limits, progress, done)
    address = StreamAddress(arguments.endpoint, arguments.replay_endpoint, arguments.topic)
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


def _say(text: str) -> None:
    print(f"capture: {text}", file=sys.stderr)
