"""The threads of the compiled core, under ThreadSanitizer: of its index and of its data plane."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native import CORE, needed_compiler

ROOT = Path(__file__).parents[3]
OPTIONS = f"halt_on_error=1 suppressions={Path(__file__).with_name('tsan.supp')}"


@pytest.fixture(scope="module")
def runtime() -> str:
    """ThreadSanitizer's library, which must be in the process before everything else."""
    compiler = needed_compiler("-fsanitize=thread")
    found = subprocess.check_output((compiler, "-print-file-name=libtsan.so"), text=True).strip()
    if not Path(found).is_file():
        pytest.skip("the compiler has no shared ThreadSanitizer")
    return found


@pytest.fixture(scope="module")
def module(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension module, built for ThreadSanitizer."""
    folder = tmp_path_factory.mktemp("core")
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
    (found,) = folder.glob("_core*.so")
    return found


@pytest.mark.parametrize("program", ["index.threads", "plane.traffic", "plane.traffic by TLS"])
def test_threads_do_not_race(program: str, runtime: str, module: Path, tmp_path: Path) -> None:
    """Long prompts are hashed in a thread while the event loop applies batches. Events and commands
    pass between the plane's threads and that loop, and connections die at any point."""
    name, _, by_tls = program.partition(" ")
    folder = [str(tmp_path)] if by_tls else []
    done = subprocess.run(
        [sys.executable, "-m", f"tests.router.core.{name}", str(module), *folder],
        env={**os.environ, "LD_PRELOAD": runtime, "TSAN_OPTIONS": OPTIONS},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run here: the kernel spreads memory too far")
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.endswith("done\n")
