"""A run that tested less than it could says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_one(number):
    pytest.skip("promtool is not installed")

@pytest.mark.skipif(True, reason="needs a browser")
def test_another():
    pass

def test_what_runs():
    pass
"""


def test_a_run_says_in_its_last_lines_what_it_skipped_and_why(tmp_path: Path) -> None:
    """CI was green for weeks without ever having started a browser."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_skipping.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, first, second, count = done.stdout.rstrip().splitlines()
    assert first.split() == ["3", "skipped:", "promtool", "is", "not", "installed"]
    assert second.split() == ["1", "skipped:", "needs", "a", "browser"]
    assert count.startswith("1 passed, 4 skipped")
