"""The build backend: scikit-build-core's, with a C++ compiler from PyPI where the system has none.

What is built needs a C++20 compiler and Python's headers. The first PyPI carries (`ziglang`, which
`router/core/compiler.cmake` then uses); the second it does not.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit
from scikit_build_core.build import *  # noqa: F403 - the hooks that are not below

COMPILERS = ("c++", "g++", "clang++")
"""As compiler.cmake looks for them."""
PURE = "SKBUILD_WHEEL_CMAKE"
"""Set to `false`, the core is built by somebody else."""


def has_compiler() -> bool:
    """Whether the system has a C++ compiler, or the environment names one."""
    return bool(os.environ.get("CXX")) or any(map(shutil.which, COMPILERS))


def missing_headers() -> str | None:
    """What is wrong with Python's headers and what to do; None where they are there."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return None
    return (
        f"kvroute: {header} is missing; its core is compiled when it is installed, and no package "
        "of PyPI has Python's headers; install them (Debian: python3-dev)"
    )


def _more(requires: list[str]) -> list[str]:
    if os.environ.get(PURE) == "false":
        return requires
    problem = missing_headers()
    if problem is not None:
        raise SystemExit(problem)
    return requires if has_compiler() else [*requires, "ziglang>=0.13"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """See PEP 517."""
    return _more(_scikit.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """See PEP 660."""
    return _more(_scikit.get_requires_for_build_editable(config_settings))
