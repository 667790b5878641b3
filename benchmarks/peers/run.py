"""All rows, or those named; one JSON line per figure, and at the end the table as ratios.

A peer that is not installed is skipped with a line that says so. Everything else on the machine
counts: compare within a run, and CPU time rather than latency.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.peers import indexing, proxying
from benchmarks.peers.programs import Missing, Settings, build

ROWS: dict[str, Callable[[Settings], None]] = {
    "events_to_index": indexing.events_to_index,
    "apply": indexing.apply_in_process,
    "match": indexing.match_in_process,
    "route": indexing.route_over_http,
    "reserve": indexing.reserve_over_http,
    "event_to_answer": indexing.event_to_answer,
    "memory": indexing.memory,
    "ids_and_events": proxying.requests_of_ids,
    "text": proxying.requests_of_text,
    "streams": proxying.streams,
}

_COMPARED = (
    "cpu_us_per_block",
    "million_blocks_per_cpu_second",
    "cpu_us",
    "p50_ms",
    "bytes_per_block",
    "cpu_us_per_request",
    "cpu_us_per_token",
    "ttft_p99_ms",
    "gap_p99_ms",
)
_WHERE = (
    "blocks_per_event",
    "replicas",
    "sources",
    "tokens",
    "blocks",
    "kilobytes",
    "streams",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    kept: list[dict[str, Any]] = []
    figures.listen(kept.append)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        try:
            build(Path(directory))
        except Missing as missing:
            print(f"bench-peers needs {missing}", file=sys.stderr)
            return 1
        settings = _settings(options, Path(directory))
        for name in options.rows:
            ROWS[name](settings)
    print_table(kept)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    add("--alone", action="store_true", help="without peers")
    add("--pin", action="store_true", help="the router on core 0, all else on core 1")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=5.0)
    add("--blocks", type=int, default=131_072)
    add("--blocks-per-event", type=int, nargs="+", default=[1, 8, 64])
    add("--memory-blocks", type=int, default=1_048_576)
    add("--tokens", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    add("--match-replicas", type=int, nargs="+", default=[64])
    add("--sources", type=int, default=64, help="of the rows route and memory")
    add("--events", type=int, default=300)
    add("--kilobytes", type=int, nargs="+", default=[1, 64])
    add("--streams", type=int, nargs="+", default=[64, 1024])
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace, programs: Path) -> Settings:
    if options.pin:
        os.sched_setaffinity(0, {1})
    return Settings(
        programs,
        with_peers=not options.alone,
        core=0 if options.pin else None,
        other_core=1 if options.pin else None,
        rounds=options.rounds,
        seconds=options.seconds,
        blocks=options.blocks,
        blocks_per_event=options.blocks_per_event,
        memory_blocks=options.memory_blocks,
        prompt_tokens=options.tokens,
        match_replicas=options.match_replicas,
        route_sources=options.sources,
        events=options.events,
        kilobytes=options.kilobytes,
        streams=options.streams,
    )


def print_table(kept: Sequence[dict[str, Any]]) -> None:
    """Print what was measured in a run as Markdown: medians, and ours by theirs.

    Args:
        kept: The figures.
    """
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for figure in kept:
        where = ", ".join(f"{figure[name]} {name}" for name in _WHERE if name in figure)
        for unit in _COMPARED:
            if unit in figure:
                row = found.setdefault((figure["benchmark"], where, unit), {})
                row.setdefault(figure["of"], []).append(figure[unit])
    print("\n| row | where | figure | ours | peer | theirs | ours / theirs |")
    print("|---|---|---|---|---|---|---|")
    for (row, where, unit), values in found.items():
        medians = {name: statistics.median(each) for name, each in values.items()}
        ours = next((name for name in medians if name.startswith("kvroute")), None)
        for peer, theirs in medians.items():
            if peer == ours and len(medians) > 1:
                continue
            mine = medians[ours] if ours is not None else None
            ratio = f"{mine / theirs:.2f}" if mine is not None and theirs and peer != ours else ""
            shown = "" if mine is None else f"{mine:g}"
            print(f"| {row} | {where} | {unit} | {shown} | {peer} | {theirs:g} | {ratio} |")


if __name__ == "__main__":
    sys.exit(main())
