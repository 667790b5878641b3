"""The lock of the compiled index, under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native import CORE, compiler, what_the_compiled_index_lacks

ROOT = Path(__file__).parents[4]


def runtime_of_the_sanitizer() -> str:
    """The library that must be in the process before everything else; empty where there is none."""
    found = subprocess.check_output((compiler() or "c++", "-print-file-name=libtsan.so"), text=True)
    return found.strip() if Path(found.strip()).is_file() else ""


def built(folder: Path) -> Path:
    """The extension module, built for ThreadSanitizer."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("CMake is not installed")
    options = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -g1 -fsanitize=thread")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    for command in (
        (cmake, "-S", str(CORE), "-B", str(folder), *options, python),
        (cmake, "--build", str(folder)),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (module,) = folder.glob("_core*.so")
    return module


@pytest.mark.timeout(600)
def test_threads_that_apply_and_match_at_once_do_not_race(tmp_path: Path) -> None:
    """Long prompts are hashed in a thread while the event loop applies batches."""
    if missing := what_the_compiled_index_lacks():
        pytest.skip(missing)
    runtime = runtime_of_the_sanitizer()
    if not runtime:
        pytest.skip("the compiler has no ThreadSanitizer")
    done = subprocess.run(
        [sys.executable, "-m", "tests.router.core.index.threads", str(built(tmp_path))],
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
