"""The names of reservations, which threads of the plane and Python share, under sanitizers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.router.core.sanitized_programs import said
from tests.support.native import CORE

DRIVER = Path(__file__).parent / "reservations.cpp"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_that_reserve_and_report_do_not_race(tmp_path: Path, sanitizer: str) -> None:
    """A name is one reservation's, there are never too many, each is told of at most once, and
    nothing is left of any."""
    names = "plane/reservations", "plane/report", "plane/ask", "index/json_tokens"
    own = [CORE / f"{name}.cpp" for name in names]
    assert said(tmp_path, sanitizer, DRIVER, own) == "done\n"


def test_a_name_is_free_again_with_its_place() -> None:
    """One that is given up by an error must not be lost."""
    held: Any = import_module("router._core").Reservations(2)
    first = held.take("a")
    assert held.take("a") is None
    assert held.has("a")
    second = held.take("b")
    assert held.take("c") is None
    assert not held.has("c")
    first.give_back()
    assert held.held() == 1
    del second
    assert held.held() == 0
    assert held.take("a") is not None
