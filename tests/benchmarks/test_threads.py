"""The benchmark of threads measures what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

MODES = ("core", "estimates", "python")


@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler: no peer benchmarks"
)
def test_a_figure_for_each_number_of_threads_and_whoever_decides() -> None:
    """Where the core does not decide, it would measure the control loop twice."""
    command = [sys.executable, "-m", "benchmarks.threads", "--rounds", "1", "--replicas", "2"]
    done = subprocess.run([*command, "--seconds", "0.5"], check=True, capture_output=True)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    rounds = {(each["of"], each["threads"]): each for each in figures if "round" in each}
    assert set(rounds) == {(of, threads) for of in MODES for threads in (1, 2)}
    assert all(each["errors"] == 0 < each["requests_per_second"] for each in rounds.values())
    for threads in (1, 2):
        core, python = rounds["core", threads], rounds["python", threads]
        assert core["router_cpu_us"] * 2 < python["router_cpu_us"]
    assert len(figures) == 2 * len(rounds)
