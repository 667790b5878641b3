"""`kvroute capture`: record a live event stream to a file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from router.recordings.capture import CaptureOptions, capture


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "capture",
        description="Records every batch unchanged, until a limit or Ctrl-C. The recording holds "
        "the token ids of prompts: protect it as you would protect the prompts.",
    )
    parser.add_argument(
        "--endpoint", required=True, help="the publisher's address, as tcp://host:5557"
    )
    parser.add_argument(
        "--replay-endpoint", help="start with every batch the engine can still replay"
    )
    parser.add_argument("--topic", help="default: every topic")
    parser.add_argument(
        "--output", "-o", required=True, type=Path, help="file to write, .jsonl or .jsonl.gz"
    )
    parser.add_argument("--batches", type=int, help="stop after this many")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and no progress"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record, and print how many batches; the exit code is 1 if there were none."""
    batches = asyncio.run(_capture(arguments))
    if arguments.json:
        print(json.dumps({"batches": batches, "output": str(arguments.output)}))
    else:
        print(f"{batches} batches in {arguments.output}")
    return 0 if batches else 1


async def _capture(arguments: argparse.Namespace) -> int:
    options = CaptureOptions(
        arguments.endpoint,
        arguments.replay_endpoint,
        arguments.topic,
        arguments.batches,
        arguments.seconds,
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    progress = (lambda _text: None) if arguments.json else _say
    recording = asyncio.create_task(capture(options, arguments.output, progress))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((recording, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return await _finish(recording)


async def _finish(recording: asyncio.Task[int]) -> int:
    """The number of batches; 1 where Ctrl-C ended it, whose recording is whole up to its last
    line."""
    if not recording.done():
        recording.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await recording
        return 1
    return recording.result()


def _say(text: str) -> None:
    print(f"capture: {text}", file=sys.stderr)
