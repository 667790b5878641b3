"""The implementations of the mirror and of the estimates. Tests of what the router uses of them run
on each; the others of this folder look inside the ones in Python."""

from __future__ import annotations

from typing import Any

import pytest

from router.index import REFERENCE, IndexImplementation, choose_index
from router.mirror import Mirror, create_mirror

IMPLEMENTATIONS = ("python", "native")


class Chosen:
    """The one that the tests of a module run on now."""

    indexes: IndexImplementation = REFERENCE


def choose(name: str) -> None:
    """Choose one of them, or skip the test where the core was not built."""
    Chosen.indexes = REFERENCE if name == "python" else choose_index()
    if name == "native" and Chosen.indexes is REFERENCE:
        pytest.skip("the compiled core is not built")


def new_mirror(**options: Any) -> Mirror:
    """A mirror of the one that was chosen. Where that is the one in Python, any index serves."""
    return create_mirror(Chosen.indexes, **options)
