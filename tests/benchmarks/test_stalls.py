"""The benchmark of stalls measures what it says, and the router keeps its bound."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_large_body_in_an_unknown_field_holds_nobody_up() -> None:
    """8 MB used to stop every stream for 0.8 s; other processes on the machine cost some as well,
    so that the shortest of a few runs counts."""
    command = [sys.executable, "-m", "benchmarks.stalls", "--megabytes", "8", "--repeats", "4"]
    output = subprocess.run(command, check=True, capture_output=True, timeout=120).stdout
    figures = {found["of"]: found for found in map(json.loads, output.splitlines())}
    assert {found["status"] for found in figures.values()} == {None, 200, 400}
    assert figures["unknown field"]["status"] == figures["text"]["status"] == 200
    assert figures["unknown field"]["ms"] < 100
    assert figures["refused"]["ms"] < 100
