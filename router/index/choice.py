"""Which implementation of the index serves."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple, TypeAlias

from router.errors import RouterError
from router.index.base import PrefixIndex
from router.index.reference.index import ReferenceIndex

IndexChoice: TypeAlias = Literal["auto", "native", "reference"]
"""`auto`: native where it can be loaded, else the reference."""


class IndexUnavailable(RouterError):
    """The compiled index is asked for and cannot be loaded."""


class IndexImplementation(NamedTuple):
    """One way to index, by the name that logs and metrics give it."""

    name: str
    create: Callable[..., PrefixIndex]
    """Makes a new, empty index for one model; `limits=` bounds each of its sources."""
    knows_stores: bool = True
    """Whether it can follow stores that several replicas share."""


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


def _native() -> IndexImplementation:
    """Raises ImportError where it was not built, or for another Python."""
    module = import_module("router.index.native")
    return IndexImplementation("native", module.NativeIndex, knows_stores=False)
