"""The highest rate at which an objective is met: what is run for it, and what is made of that."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import served_rate
from benchmarks.served_rate import RUNGS, climb, served


@given(st.floats(0.1, 10.0))
def test_the_two_rungs_around_the_objective_are_run_and_few_others(most: float) -> None:
    """A run takes seconds, and an overloaded one longer."""
    asked: dict[float, float] = {}

    def p99_ms(rate: float) -> float:
        asked[rate] = 1000 * rate / most
        return asked[rate]

    climb(p99_ms, 1000)
    low, high, rate = served(asked, 1000)
    assert low == max((each for each in RUNGS if each <= most), default=0.0)
    assert high == min((each for each in RUNGS if each > most), default=math.inf)
    if low and high < math.inf:
        assert rate == pytest.approx(most)
    assert len(asked) <= len(RUNGS) // 2 + 1


def test_a_rate_that_was_not_bracketed_is_the_one_that_was_measured() -> None:
    """Beyond what was run nothing is known."""
    assert served({0.5: 3000, 0.63: 4000}, 2000) == (0.0, 0.5, 0.5)
    assert served({5.0: 900, 6.3: 1000}, 2000) == (6.3, math.inf, 6.3)


def test_the_table_says_how_many_requests_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the unit of whoever buys replicas; a second run repeats nothing."""
    path = tmp_path / "rates.jsonl"
    arguments = ["--situation", "one prompt", "--policy", "least_delay", "--requests", "30"]
    for _ in range(2):
        served_rate.main([*arguments, "--results", str(path)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["rate"] for line in lines}) == len(lines)
    assert "| p99 at most 2 s | one prompt, requests/s |" in capsys.readouterr().out
