"""`kvroute replay`: feed recorded streams to the index and compare its predictions with the
engine's hits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from router.cli.recordings import Prediction, ReplaySummary, replay


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "replay",
        description="Prints one JSON line per query, then a summary line per file. The exit code "
        "is 1 if any prediction differs from the engine's hit.",
    )
    parser.add_argument("file", nargs="+", type=Path, help="a recording, plain or .gz")
    parser.add_argument(
        "--learn-layout",
        action="store_true",
        help="ignore the header's groups; learn kinds, windows and block sizes from the events",
    )
    parser.add_argument("--summary-only", action="store_true", help="print only the summary lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay every file; the exit code is 1 if any prediction differs."""
    summaries = [_replay_file(path, arguments) for path in arguments.file]
    return 0 if all(summary.is_exact for summary in summaries) else 1


def _replay_file(path: Path, arguments: argparse.Namespace) -> ReplaySummary:
    summary = ReplaySummary(stream=path.name, learn_layout=arguments.learn_layout)
    for prediction in replay(path, arguments.learn_layout, summary):
        if not arguments.summary_only:
            _print(_query_line(prediction))
    _print(
        {"summary": True, **dataclasses.asdict(summary), "differ": summary.queries - summary.exact}
    )
    return summary


def _query_line(prediction: Prediction) -> dict[str, Any]:
    return {**dataclasses.asdict(prediction), "exact": prediction.predicted == prediction.hit}


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
