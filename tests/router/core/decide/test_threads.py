"""The rules of `decide.hpp` for threads, under sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.core.sanitized_programs import said
from tests.support.native import CORE

DRIVER = Path(__file__).parent / "threads.cpp"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_that_decide_while_the_fleet_changes_do_not_race(
    tmp_path: Path, sanitizer: str
) -> None:
    """Every thread of the plane decides and books by itself; what it reads, others write."""
    rooms = "decide", "index", "mirror"
    of_core = [path for room in rooms for path in sorted((CORE / room).glob("*.cpp"))]
    assert said(tmp_path, sanitizer, DRIVER, of_core) == "done\n"
