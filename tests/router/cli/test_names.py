"""Names that differ only at their ends stay apart in a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from router.cli.running_router import Name


def drawn(width: int, *names: str) -> list[str]:
    table = Table("replica", "why", box=None, padding=(0, 1))
    for name in names:
        table.add_row(Name(name), "word " * 30)
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    first_words = [line.split()[0] for line in console.file.getvalue().splitlines()]
    return [word for word in first_words if word not in ("replica", "word", "why")]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_equal_beginnings_and_different_ends_stay_apart(width: int) -> None:
    """`127.0.0.1:8...` in every row says nothing."""
    names = [f"gpu-node-with-a-long-name.cluster.local:{8000 + number}" for number in range(3)]
    shown = drawn(width, *names)
    assert [name[-4:] for name in shown] == ["8000", "8001", "8002"]
    assert all(name.startswith("gpu") and "…" in name for name in shown)


def test_a_name_with_room_is_whole_and_cannot_command_the_terminal() -> None:
    """Names come from outside."""
    assert drawn(80, "a\x1b[31mb") == ["a?[31mb"]
