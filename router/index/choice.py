"""Which implementation of the index serves."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple, TypeAlias

from router.errors import RouterError
from router.index.base import PrefixIndex
from router.index.reference.index import ReferenceIndex

CORE_VERSION = 18
"""Of the compiled module, as core/binding/module.cpp names it: what it takes and returns."""

IndexChoice: TypeAlias = Literal["auto", "native", "reference"]
"""`auto`: native where it can be loaded, else the reference."""


class IndexUnavailable(RouterError):
    """The compiled index is asked for and cannot be loaded."""


class IndexImplementation(NamedTuple):
    """One way to index, by the name that logs and metrics give it."""

    name: str
    create: Callable[..., PrefixIndex]
    """Makes a new, empty index for one model; `limits=` bounds each of its sources, `secret=` makes
    its keys equal to those of every other that has it."""
    pack_token_ids: Callable[[bytes | memoryview], array[int] | None] | None = None
    """Reads token ids from JSON without a Python list, where it can."""


REFERENCE = IndexImplementation("reference", ReferenceIndex)


def choose_index(wanted: IndexChoice = "auto") -> IndexImplementation:
    """The implementation that *wanted* stands for on this machine.

    Raises:
        IndexUnavailable: It is `native`, and there is none.
    """
    if wanted == "reference":
        return REFERENCE
    try:
        return _native()
    except ImportError as error:
        if wanted == "auto":
            return REFERENCE
        raise IndexUnavailable(
            f"the compiled index cannot be loaded ({error}); install kvroute where a C++20 "
            "compiler and Python's headers are, or use auto"
        ) from error


def why_not_native() -> str | None:
    """Why `auto` stands for the reference on this machine, and what changes that; None where the
    compiled index can be loaded."""
    try:
        _native()
    except ModuleNotFoundError:
        # pip shows nothing of a build that succeeds, so that this is where a user hears of it.
        return (
            "kvroute was built without its compiled index: install a C++20 compiler and Python's "
            "headers (Debian: g++ python3-dev), and kvroute again"
        )
    except ImportError as error:
        return str(error)
    return None


def _native() -> IndexImplementation:
    """Raises ImportError where it was not built, or for another Python or an older kvroute."""
    core = import_module("router._core")
    if core.core_version != CORE_VERSION:
        raise ImportError(
            f"{core.__file__} is a compiled index of version {core.core_version}: it must be "
            f"{CORE_VERSION}; build it again (make native, or pip install)"
        )
    module = import_module("router.index.native")
    return IndexImplementation("native", module.NativeIndex, module.pack_token_ids)
