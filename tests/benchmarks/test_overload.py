"""The benchmark of overload, in a few seconds: whatever the machine does meanwhile, nobody is lost,
nobody is refused without a time, and who is urgent is not refused at all."""

from __future__ import annotations

import json
import subprocess
import sys


def test_three_times_the_capacity_is_served_or_told_when_to_come_back() -> None:
    """Shares and times are for the long run: `python -m benchmarks.overload`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.overload",
        "--seconds",
        "3",
        "--calm-seconds",
        "0.5",
    ]
    command += ["--replicas", "2", "--slots", "4", "--service-ms", "200"]
    command += ["--max-wait", "2", "--max-waiting", "30"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    figures = json.loads(done.stdout)
    refused = sum(figures["refused"].values())
    assert figures["lost"] == figures["without_retry_after"] == figures["urgent_refused"] == 0
    assert figures["served"] + refused == figures["requests"]
    assert refused > 0, "it was no overload"
    assert min(figures["share"].values()) > 0, "someone starved"
