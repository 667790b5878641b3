"""Building C++ in tests: what it needs, and which of it is missing here."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "router" / "core"
OBJECTS = Path(__file__).parents[2] / "build" / "objects"
QUICK_BUILD = {
    "SKBUILD_CMAKE_DEFINE": "CMAKE_CXX_FLAGS_RELEASE=-O0",
    "CMAKE_GENERATOR": "Unix Makefiles",
}
"""Environment of an installation whose speed does not matter; it needs no Ninja, which is not among
the dependencies."""


def compiler() -> str | None:
    """The system's C++ compiler, as CMake would choose it."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)


@functools.cache
def _can_link(command: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory(prefix="kvroute-test-") as directory:
        source = Path(directory, "empty.cpp")
        source.write_text("int main() {}\n")
        program = ("-o", str(source.with_suffix("")))
        done = subprocess.run((*command, source, *program), capture_output=True, check=False)
        return done.returncode == 0


def needed_compiler(*options: str) -> str:
    """The system's C++ compiler. Skips the test where there is none, or where it lacks what
    programs with these options are linked with.

    Args:
        options: Such as `-fsanitize=thread`.
    """
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    if not _can_link((found, *options)):
        name = Path(found).resolve().name
        pytest.skip(f"{name} links nothing with {' '.join(options)} (clang: libclang-rt-dev)")
    return found


def compiled(output: Path, *arguments: str) -> Path:
    """Compile C++20 that includes the core's headers; return *output*. Skips the test where that
    cannot be done with a sanitizer among *arguments*.

    Args:
        output: The file to make.
        arguments: Of the compiler: sources and options. A warning is an error.
    """
    sanitizers = (option for option in arguments if option.startswith("-fsanitize="))
    command = (
        *(needed_compiler(*sanitizers), "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CORE}"),
        "-Wno-error=deprecated-declarations",  # as in CMakeLists.txt
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
