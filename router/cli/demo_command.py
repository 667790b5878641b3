"""`kvroute demo`: three recorded engines, a router, a live table, and the score."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from router.demo.run import play
from router.demo.score import Score
from router.recording import RecordingError

DEFAULT_STREAMS = ("real_full_offload", "sparse_gptoss.1", "mamba_hybrid.1")
"""A CPU tier; a sliding window that keeps only what a later prompt can use; Mamba states. They share no prompt, so what one
engine had cached says nothing of another."""
DEFAULT_DIRECTORY = Path("tests/conformance/streams")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="recorded engines behind a real router",
        description="Plays recordings of real engines through real sockets and holds every prediction against the truth.",
    )
    parser.add_argument("--streams", nargs="+", type=Path, help="recordings, one a replica; default: three of this repository")
    parser.add_argument("--queries", type=int, help="stop after this many prompts")
    parser.add_argument("--json", action="store_true", help="print only the score, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    recordings = arguments.streams or [DEFAULT_DIRECTORY / f"{name}.jsonl.gz" for name in DEFAULT_STREAMS]
    for path in recordings:
        if not path.is_file():
            raise RecordingError(f"{path}: no such recording; run in the repository, or name some with --streams")
    score = _play_quietly(recordings, arguments) if arguments.json else _play_live(recordings, arguments)
    return 0 if score.is_perfect else 1


def _play_quietly(recordings: list[Path], arguments: argparse.Namespace) -> Score:
    score = asyncio.run(play(recordings, lambda _score: None, arguments.queries))
    print(json.dumps(_summary(score)))
    return score


def _play_live(recordings: list[Path], arguments: argparse.Namespace) -> Score:
    console = Console()
    with Live(console=console, refresh_per_second=8) as live:
        score = asyncio.run(play(recordings, lambda now: live.update(_table(now)), arguments.queries))
        live.update(_table(score))
    console.print(_verdict(score))
    return score


def _table(score: Score) -> Table:
    table = Table(title="each replica plays a real engine's recording; the router knows only its URL", show_lines=True)
    table.add_column("replica", no_wrap=True)
    table.add_column("blocks by group/tier", no_wrap=True)
    for heading in ("sent here", "predicted", "true hit", "exact"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in score.replicas.items():
        blocks = "\n".join(f"{place} {count}" for place, count in found.blocks.items())
        tokens = (str(found.predicted_tokens), str(found.hit_tokens))
        exact = f"{found.exact} of {found.queries}"
        table.add_row(f"{name}\n{found.stream}", blocks, str(found.sent_here), *tokens, exact)
    return table


def _verdict(score: Score) -> str:
    return (
        f"{score.exact} of {score.queries} predictions are exact to the token; "
        f"{score.answers_exact} of {score.answers_compared} answers reported the cached tokens that the router had announced; "
        f"{score.to_holder} of {score.with_hit} requests with a hit went to the replica that had it."
    )


def _summary(score: Score) -> dict[str, Any]:
    return {
        "queries": score.queries,
        "exact": score.exact,
        "answers_compared": score.answers_compared,
        "answers_exact": score.answers_exact,
        "with_hit": score.with_hit,
        "to_holder": score.to_holder,
        "replicas": {
            name: {"stream": found.stream, "queries": found.queries, "exact": found.exact, "sent_here": found.sent_here}
            for name, found in score.replicas.items()
        },
    }
