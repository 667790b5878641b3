"""Is the demo ahead every time, and how long does it take?

Runs `make demo` several times in a row and reads what it prints: whether it was ahead of both blind
ways in tokens reused and in time, and whether there was a table without hints. On a machine that
does other things as well, processor time and load say what a duration is worth.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import time
from dataclasses import dataclass

from benchmarks.figures import report

_GAIN = re.compile(
    r"(?P<tokens>[\d.]+) times(?: \(within chance\))? the tokens of '(?P<way>[^']+)', "
    r"(?P<ttft>[\d.]+) times(?P<by_chance> \(within chance\))?"
)
_WITHOUT_HINTS = "without hints: what the engines reused"


@dataclass(frozen=True, slots=True)
class Run:
    """One demo."""

    wall_s: float
    cpu_s: float
    load: float
    """Average of the last minute, at its end."""
    gains: dict[str, tuple[float, float]]
    """Tokens reused and mean TTFT of kvroute, relative to those of each other way."""
    slower_beyond_chance: list[str]
    """Ways whose mean TTFT was shorter than kvroute's by more than the demo takes for chance."""
    has_both_tables: bool

    @property
    def is_ahead(self) -> bool:
        """Return whether exact routing is ahead of both blind ways."""
        blind = [gain for way, gain in self.gains.items() if way.startswith("blind")]
        return len(blind) == 2 and all(tokens > 1 > ttft for tokens, ttft in blind)


def run_once() -> Run:
    """Run one demo, with everything set up before."""
    cpu_before, started = _cpu_of_children_s(), time.monotonic()
    printed = subprocess.run(["make", "--silent", "demo"], stdout=subprocess.PIPE, check=True)
    wall_s = time.monotonic() - started
    text = printed.stdout.decode()
    found = list(_GAIN.finditer(text))
    gains = {each["way"]: (float(each["tokens"]), float(each["ttft"])) for each in found}
    slower = [each["way"] for each in found if gains[each["way"]][1] > 1 and not each["by_chance"]]
    cpu_s = _cpu_of_children_s() - cpu_before
    return Run(wall_s, cpu_s, os.getloadavg()[0], gains, slower, _WITHOUT_HINTS in text)


def _cpu_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs):
        runs.append(run := run_once())
        _report("demo_run", [run])
    _report("demo_runs", runs)


def _report(name: str, runs: list[Run]) -> None:
    ways = runs[0].gains
    report(
        name,
        runs=len(runs),
        ahead=sum(run.is_ahead for run in runs),
        slower_beyond_chance=sum(bool(run.slower_beyond_chance) for run in runs),
        both_tables=sum(run.has_both_tables for run in runs),
        wall_s=_range([run.wall_s for run in runs], 1),
        cpu_s=_range([run.cpu_s for run in runs], 1),
        load=_range([run.load for run in runs], 1),
        tokens={way: _range([run.gains[way][0] for run in runs], 2) for way in ways},
        ttft={way: _range([run.gains[way][1] for run in runs], 2) for way in ways},
    )


def _range(values: list[float], digits: int) -> list[float]:
    """Return the least and the most."""
    return [round(min(values), digits), round(max(values), digits)]


if __name__ == "__main__":
    main()
