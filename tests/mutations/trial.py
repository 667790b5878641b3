"""One mutation in a copy of the tree: killed, survived, timed out, or not to be compiled."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from tests.mutations.mutate import Mutation

MEMORY_BYTES = 6 * 1024**3
"""A mutation that makes a loop endless must not fill the machine."""

_WITHOUT_THE_INSTALLED = """
import sys
finders = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
sys.meta_path[:] = finders
"""
"""Run by Python at each start in a copy: an editable installation finds its packages before any
path is looked at, and the tests would try the tree itself."""


class Outcome(str, Enum):
    """What became of a mutation."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"
    """As good as killed: a test ran into an endless loop."""
    INVALID = "does not compile"


class Copy:
    """A copy of the tree in which one mutation at a time is tried.

    Args:
        root: The tree.
        directory: Where the copy is made.
    """

    def __init__(self, root: Path, directory: Path) -> None:
        self.directory = directory
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in listed.splitlines():
            if (root / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, directory / name)
        self._modules = {
            module.relative_to(root): module.read_bytes()
            for module in (root / "router").glob("_core*.so")
        }
        """The compiled index, without a mutation; git does not know of it."""
        self._put_modules()
        (directory / "sitecustomize.py").write_text(_WITHOUT_THE_INSTALLED)

    def run(self, tests: Sequence[str], timeout_s: float) -> Outcome:
        """Run tests as the copy is now.

        Args:
            tests: Files and folders.
            timeout_s: For all of them.
        """
        process = subprocess.Popen(
            [sys.executable, "-B", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(self.directory)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome.TIMED_OUT
        finally:
            _end(process)
        return Outcome.SURVIVED if status == 0 else Outcome.KILLED

    def try_out(self, mutation: Mutation, tests: Sequence[str], timeout_s: float) -> Outcome:
        """Run tests with *mutation*, which is undone afterwards.

        Args:
            mutation: Of a file of this tree.
            tests: That should notice it.
            timeout_s: For all of them.
        """
        path = self.directory / mutation.path
        original = path.read_text(encoding="utf-8")
        path.write_text(mutation.apply(original), encoding="utf-8")
        is_compiled = path.suffix != ".py"
        try:
            if is_compiled and not self._compile():
                return Outcome.INVALID
            return self.run(tests, timeout_s)
        finally:
            path.write_text(original, encoding="utf-8")
            if is_compiled:
                self._put_modules()

    def _compile(self) -> bool:
        """Build the index from the copy's sources; without optimisation, which takes longer than
        the tests."""
        cmake, build = Path(sys.executable).with_name("cmake"), self.directory / "build" / "mutants"
        source = self.directory / "router" / "core"
        definitions = {
            "CMAKE_BUILD_TYPE": "None",
            "KVROUTE_INPLACE": "ON",
            "Python_EXECUTABLE": sys.executable,
        }
        configure = [f"-D{name}={value}" for name, value in definitions.items()]
        commands = ([cmake, "-S", source, "-B", build, *configure], [cmake, "--build", build])
        return all(
            subprocess.run(command, capture_output=True, check=False).returncode == 0
            for command in commands
        )

    def _put_modules(self) -> None:
        for name, module in self._modules.items():
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_bytes(module)

    def time(self, tests: Sequence[str], timeout_s: float) -> float:
        """How long tests take without any mutation.

        Args:
            tests: Files and folders.
            timeout_s: For all of them.
        Raises:
            RuntimeError: They do not pass.
        """
        began = time.monotonic()
        outcome = self.run(tests, timeout_s)
        if outcome is not Outcome.SURVIVED:
            raise RuntimeError(f"{' '.join(tests)}: {outcome.value} without any mutation")
        return time.monotonic() - began


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and whatever its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
