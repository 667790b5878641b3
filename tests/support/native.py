"""Building C++ in tests: what it needs, and which of it is missing here."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "router" / "core"
OBJECTS = Path(__file__).parents[2] / "build" / "objects"


def compiler() -> str | None:
    """The C++ compiler, as CMake would choose it."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)


def what_the_compiled_index_lacks() -> str:
    """Why it cannot be built here; empty where it can."""
    if compiler() is None:
        return "no C++ compiler: the compiled index is not built"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h: the compiled index is not built"
    return ""


@functools.cache
def _can_link(sanitizer: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="kvroute-test-") as directory:
        source, program = Path(directory, "empty.cpp"), Path(directory, "empty")
        source.write_text("int main() {}\n")
        command = compiler() or "c++", sanitizer, str(source), "-o", str(program)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def skip_without(sanitizer: str) -> None:
    """Skip the test where the compiler lacks what programs with this option are linked with.

    Args:
        sanitizer: The option, such as `-fsanitize=thread`.
    """
    if not _can_link(sanitizer):
        name = Path(compiler() or "c++").resolve().name
        pytest.skip(f"{name} links nothing with {sanitizer} (Debian's clang: libclang-rt-dev)")


def compiled(output: Path, *arguments: str) -> Path:
    """Compile C++20 that includes the compiled index's headers; return *output*. Skips the test
    where a sanitizer among *arguments* is not there.

    Args:
        output: The file to make.
        arguments: Of the compiler: sources and options. A warning is an error.
    """
    for argument in arguments:
        if argument.startswith("-fsanitize="):
            skip_without(argument)
    command = (
        *(compiler() or "c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CORE}"),
        *arguments,
        *("-o", str(output)),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def compiled_once(sources: Sequence[Path], *options: str) -> Path:
    """Compile files of the core as one unit, unless a test did so before; return the object.

    Most of the work is what their headers include: a room is compiled in a third of the time that
    its files take, and for all tests.

    Args:
        sources: Of one room.
        options: Of the compiler.
    """
    unit = "".join(f'#include "{source}"\n' for source in sources)
    asked = repr((compiler(), options, unit)).encode()
    made = OBJECTS / f"{sources[0].parent.name}-{sha256(asked).hexdigest()[:12]}.o"
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = sha256(asked)
        for path in sorted(CORE.rglob("*.[ch]pp")):
            digest.update(path.read_bytes())
        of_made = made.with_suffix(".digest")
        if not made.exists() or not of_made.exists() or of_made.read_text() != digest.hexdigest():
            source = made.with_suffix(".cpp")
            source.write_text(unit, encoding="ascii")
            of_made.unlink(missing_ok=True)
            compiled(made, *options, "-c", str(source))
            of_made.write_text(digest.hexdigest())
    return made
