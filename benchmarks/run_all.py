"""Runs every benchmark with sizes that take a few minutes together; each prints its own JSON
lines."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS: tuple[tuple[str, ...], ...] = (
    ("benchmarks.index_apply",),
    ("benchmarks.index_match", "--repeats", "3", "--max-blocks", "600000"),
    ("benchmarks.index_memory",),
    ("benchmarks.start",),
    ("benchmarks.publish", "--batches", "2000"),
    ("benchmarks.peer_cache_manager", "--tokens", "1024", "32768", "--seconds", "0.1"),
    ("benchmarks.retention", "--conversations", "30"),
    ("benchmarks.eviction_policies", "--accesses", "20000"),
    ("benchmarks.transfers", "--megabytes", "64", "--repeats", "3", "--k", "1"),
    ("benchmarks.scale", "--replicas", "64", "--seconds", "5"),
    ("benchmarks.order", "--requests", "200", "--seeds", "1", "--document-tokens", "3000"),
    ("benchmarks.routing_quality", "--requests", "200", "--seeds", "10-11"),
    (
        "benchmarks.predictions",
        "--preset",
        "gptoss",
        "--at-a-time",
        "1",
        "4",
        "--conversations",
        "12",
        "--documents",
        "6",
    ),
    ("benchmarks.admission", "--seeds", "0"),
    ("benchmarks.real_engine_quality", "--repetitions", "2", "--rounds", "1"),
    ("benchmarks.growth", "--requests", "50000"),
    ("benchmarks.soak", "--minutes", "3", "--replicas", "8", "--rate", "30"),
    ("benchmarks.overload", "--seconds", "60", "--calm-seconds", "30"),
    ("benchmarks.stalls", "--megabytes", "4", "--repeats", "3"),
    ("benchmarks.text_path", "--requests", "6000", "--slices", "3"),
    ("benchmarks.text_cache",),
    ("benchmarks.threads", "--rounds", "2"),
    ("benchmarks.board_delay",),
    ("benchmarks.fleet_routers", "--routers", "1", "4", "--requests", "400"),
    ("benchmarks.two_prompts", "--plays", "2"),
    ("benchmarks.picker_attack", "--streams", "1000"),
    ("benchmarks.clears",),
    ("benchmarks.proxy", "--seconds", "5", "--streams", "64", "256"),
)


def main() -> int:
    codes = [
        subprocess.run([sys.executable, "-m", *command], check=False).returncode
        for command in BENCHMARKS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
