"""`kvroute capture`: record a live event stream to a file."""

from __future__ import annotations

import argparse
import asyncio
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
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    progress = (lambda _text: None) if arguments.json else _say
    return await capture(options, arguments.output, progress, done)


def _say(text: str) -> None:
    print(f"capture: {text}", file=sys.stderr)
