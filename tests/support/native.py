"""Building C++ in tests: what it needs, and which of it is missing here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

CORE = Path(__file__).parents[2] / "router" / "core"


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


def compiled(output: Path, *arguments: str) -> Path:
    """Compile C++20 that includes the compiled index's headers; return *output*.

    Args:
        output: The file to make.
        arguments: Of the compiler: sources and options. A warning is an error.
    """
    command = (
        *(compiler() or "c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CORE}"),
        *arguments,
        *("-o", str(output)),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return output
