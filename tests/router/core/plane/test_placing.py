"""Decisions by estimates on threads of the plane, under sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.core.sanitized_programs import said
from tests.support.native import CORE

DRIVER = Path(__file__).parent / "placing.cpp"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_that_decide_by_estimates_do_not_race(tmp_path: Path, sanitizer: str) -> None:
    """Whatever becomes of a request, an estimate does not take its prompt for being in use for
    ever."""
    rooms = ("decide", "index", "mirror")
    of_core = [path for room in rooms for path in sorted((CORE / room).glob("*.cpp"))]
    names = ("placing.cpp", "answer.cpp", "reservations.cpp", "report.cpp", "ask.cpp")
    own = [CORE / "plane" / name for name in names]
    assert said(tmp_path, sanitizer, DRIVER, [*own, *of_core]) == "done\n"
