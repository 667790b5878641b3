"""The data plane under ThreadSanitizer: its threads, and the one that decides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.router.core.index.test_threads import ROOT, built, runtime_of_the_sanitizer
from tests.support.native import what_the_compiled_index_lacks


@pytest.mark.timeout(900)
def test_threads_of_the_plane_do_not_race(tmp_path: Path) -> None:
    """Events and commands pass between them and the event loop; connections die at any point."""
    if missing := what_the_compiled_index_lacks():
        pytest.skip(missing)
    runtime = runtime_of_the_sanitizer()
    if not runtime:
        pytest.skip("the compiler has no ThreadSanitizer")
    done = subprocess.run(
        [sys.executable, "-m", "tests.router.core.plane.traffic", str(built(tmp_path))],
        env={**os.environ, "LD_PRELOAD": runtime, "TSAN_OPTIONS": "halt_on_error=1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run here: the kernel spreads memory too far")
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.endswith("done\n")
