"""The benchmark of stalls measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_figure_for_each_kind_of_large_body() -> None:
    """A body that the router refuses early, or reads otherwise, would measure something else."""
    command = [sys.executable, "-m", "benchmarks.stalls", "--megabytes", "1", "--repeats", "1"]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    figures = {found["of"]: found for found in map(json.loads, output.splitlines())}
    assert {found["status"] for found in figures.values()} == {None, 200, 400}
    assert figures["unknown field"]["status"] == figures["text"]["status"] == 200
    assert all(found["loop_ms"] > 0 < found["stream_ms"] for found in figures.values())
    assert all(found["errors"] == 0 for found in figures.values())
