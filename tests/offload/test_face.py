"""`from offload import ...`: what an engine's author finds there, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import offload


def test_the_list_of_names_is_sorted_and_without_doubles() -> None:
    """It is read by people, as a table of contents."""
    assert offload.__all__ == sorted(set(offload.__all__))


@pytest.mark.parametrize("name", offload.__all__)
def test_every_name_can_be_imported_and_is_documented(name: str) -> None:
    """A name that is listed and missing breaks `import *` for everyone."""
    assert inspect.getdoc(getattr(offload, name))


def test_everything_imported_is_listed() -> None:
    """What the package imports for its users is what it promises to keep."""
    source = Path(offload.__file__ or "").read_text()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in nodes for alias in node.names} == set(offload.__all__)


def test_a_scheduler_needs_no_torch() -> None:
    """It runs in a process of its own, where torch would cost seconds and gigabytes."""
    heavy = {"torch", "numpy", "fastapi", "router"}
    code = "import sys, offload; print(*sorted(name.split('.')[0] for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(found.stdout.split())
