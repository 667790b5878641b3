"""What engines computed, whatever else the machine did meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.real_engine_quality import EngineTime
from kvroute_engine.demo.comparison import Play
from kvroute_engine.demo.play import DemoSettings, Scene

BUSY = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until: pass
    print("done", flush=True)
"""


def test_the_time_of_engines_is_counted_by_play() -> None:
    """Waiting for a busy machine is no computing, and one play's is not the next one's."""
    scene, time = Scene(DemoSettings()), EngineTime()
    engine = subprocess.Popen(
        [sys.executable, "-c", BUSY, "engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        for seconds in (0.4, 0.1):
            scene.plays.append(Play("kvroute", []))
            time.look(scene)
            engine.stdin.write(f"{seconds}\n")
            engine.stdin.flush()
            engine.stdout.readline()
            time.look(scene)
        engine.stdin.close()
    # The clock of processes ticks every 10 ms; the first play has the interpreter's start in it.
    assert time.of_play(0) >= 0.38
    assert time.of_play(1) == pytest.approx(0.1, abs=0.03)
