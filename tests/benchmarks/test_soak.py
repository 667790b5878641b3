"""The soak, in half a minute: a few faults of each kind of process, and every response checked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest


def test_nothing_is_lost_but_what_was_on_a_killed_process() -> None:
    """Growth and times are for the long run: `python -m benchmarks.soak`."""
    if not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("neither valkey-server nor redis-server is installed")
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0", "--replicas", "3"]
    command += ["--models", "1", "--rate", "8", "--load-s", "1.5", "--hold-s", "0.5", "1"]
    # Health checks that wait for long: other load on the machine is no fault of an engine.
    command += ["--check-s", "8", "--serial", "3"]
    command += ["--faults", "engine_killed", "events_lost", "worker_killed", "board_killed"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    figures = json.loads(done.stdout)
    assert figures["unexcused"] == figures["wrong"] == figures["quiet_inexact"] == 0
    assert figures["quiet_exact"] == 12
    assert figures["fates"]["served"] > 0
