"""What building C++ needs, and which of it is missing here."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


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
