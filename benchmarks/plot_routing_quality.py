"""Tables and plots of the results of `routing_quality`, written into a document.

    python -m benchmarks.plot_routing_quality results.jsonl --document docs/routing-quality.md \\
        docs/routing-figures.md

Tables go between `<!-- NAME -->` and `<!-- end -->` in the documents; plots that they show go into
`images/` next to them. This is the only script that needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib import pyplot

from benchmarks.simulation.comparison import Ratio, pooled, ratio
from benchmarks.simulation.results import Line, Results, latest
from benchmarks.simulation.situations import TRAFFIC
from benchmarks.simulation.tables import (
    BEFORE,
    BLIND,
    MEAN,
    OURS,
    P99,
    best,
    compared,
    gain_table,
    markdown,
    opponents_table,
    pairs,
    policies,
    pooled_table,
    shown,
    situation_table,
    situations,
    told_table,
    within,
)

SHOWN = (BEFORE, "group_blind_any_copy", "preble", "sglang", "mooncake")
"""The policies that plots compare ours with: those that come nearest."""
COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#8d96a3")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines")
    parser.add_argument("--document", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    lines = latest([line for path in options.results for line in Results(path)])
    plain = [line for line in lines if ": " not in line["policy"]]
    main = {name for names in TRAFFIC.values() for name in names}
    main_situations = [line for line in plain if line["situation"] in main]
    found = {
        "told": told_table(plain),
        "gain": gain_table(plain),
        "gain p99": gain_table(plain, P99),
        "opponents": opponents_table(plain),
        "pooled": pooled_table(main_situations),
        "exact": pooled_table(main_situations, BEFORE, BLIND),
        "claims": claims_table(plain),
        "predictions": predictions_table(plain),
        "sensitivity": sensitivity_table(lines),
        "extent": extent(plain),
        "all": "\n\n".join(
            f"### {situation}\n\n{situation_table(within(plain, situation))}"
            for situation in situations(plain)
        ),
    }
    for document in options.document:
        fill(document, found)
        _draw(plain, document)


def _draw(lines: Sequence[Line], document: Path) -> None:
    """The plots that a document shows."""
    images = document.parent / "images"
    images.mkdir(exist_ok=True)
    for name, figure in (("ttft", MEAN), ("p99", P99)):
        if f"({images.name}/{name}.svg)" in document.read_text(encoding="utf-8"):
            plot(lines, figure, images / f"{name}.svg")


def fill(document: Path, tables: dict[str, str]) -> None:
    """Put every table between its markers; tables without markers are left out."""
    text = document.read_text(encoding="utf-8")
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(partial(_filled, table), text)
    document.write_text(text, encoding="utf-8")


def _filled(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}\n{marks[2]}"


def claims_table(lines: Sequence[Line]) -> str:
    """Return our figures relative to those of the policy before it, and to the best blind index, in
    each situation."""
    rows = []
    for situation in situations(lines):
        here = within(lines, situation)
        blind = best(here, BLIND)
        rows.append(
            [
                situation,
                str(len(pairs(here, OURS, BEFORE, MEAN))),
                *(_cell(here, BEFORE, figure) for figure in (MEAN, P99)),
                _floor(here),
                blind or "",
                *(_cell(here, blind, figure) for figure in (MEAN, P99)),
            ]
        )
    heads = [
        "Situation",
        "Seeds",
        f"mean TTFT x `{BEFORE}`",
        "p99",
        "floor",
        "best blind index",
        "mean TTFT x that",
        "p99",
    ]
    return markdown(heads, rows)


def _floor(lines: Sequence[Line]) -> str:
    """Return the floor relative to the policy before ours, in the same runs."""
    ours = {line["seed"]: line.get("floor_mean_ms") for line in lines if line["policy"] == OURS}
    before = {line["seed"]: line[MEAN] for line in lines if line["policy"] == BEFORE}
    found = [(ours[seed], mean) for seed, mean in before.items() if ours.get(seed)]
    return f"{ratio(found).mean:.2f}" if found else ""


def predictions_table(lines: Sequence[Line]) -> str:
    """Return how many of our predictions are exact: of what is cached now, and of what will be."""
    rows = []
    for situation in situations(lines):
        own = [line for line in within(lines, situation) if line["policy"] == OURS]
        known = [line for line in own if "misexpected" in line]
        if known:
            shares = [
                1 - fmean(line[figure] for line in known)
                for figure in ("mispredicted", "misexpected")
            ]
            rows.append([situation, *(f"{share:.2%}" for share in shares)])
    return markdown(["Situation", "cached now", "cached at admission"], rows)


def extent(lines: Sequence[Line]) -> str:
    """Return how much was run."""
    counts = sorted({line["requests"] for line in lines})
    ours = [line for line in lines if line["policy"] == OURS]
    seeds = sorted({len(within(ours, situation)) for situation in situations(ours)})
    spread = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    found = (
        f"On this page: {len(lines)} runs with {counts[0]:,} to {counts[-1]:,} counted requests "
        f"each; {spread} seeds a situation with `{OURS}`. The tables say how many "
        "the others have."
    )
    return "\n".join(textwrap.wrap(found, 100))


def _cell(lines: Sequence[Line], other: str | None, figure: str) -> str:
    found = pairs(lines, OURS, other, figure) if other else []
    return shown(ratio(found)) if found else ""


def sensitivity_table(lines: Sequence[Line]) -> str:
    """Return what it costs to misjudge something: times relative to the policy as it is."""
    rows = []
    for policy in policies(lines):
        if policy.startswith(f"{OURS}: "):
            mean, p99 = (compared(lines, policy, OURS, figure) for figure in (MEAN, P99))
            if mean and p99:
                rows.append([policy.partition(": ")[2], str(mean.pairs), shown(mean), shown(p99)])
    return markdown(["Misjudged", "Pairs", "Mean TTFT", "TTFT p99"], rows)


def plot(lines: Sequence[Line], figure: str, path: Path) -> None:
    """Ours relative to the others, with intervals; a row for each situation."""
    names = [*situations(lines), "all"]
    drawing, axis = pyplot.subplots(figsize=(8.0, 0.45 * len(names) + 1.2))
    others = [policy for policy in SHOWN if policy in policies(lines)]
    for place, (policy, colour) in enumerate(zip(others, COLOURS, strict=False)):
        offset = (place - (len(others) - 1) / 2) * 0.8 / max(len(others), 1)
        for row, found in _ratios(lines, policy, figure, names):
            low, high = max(found.low, 0.02), min(found.high, 20.0)
            axis.plot([low, high], [row + offset] * 2, color=colour, linewidth=1.2)
            axis.plot(
                [found.mean],
                [row + offset],
                marker="o",
                markersize=3,
                color=colour,
                label=policy if row == 0 else None,
                linestyle="none",
            )
    axis.axvline(1.0, color="black", linewidth=0.6)
    axis.set_xscale("log")
    ticks = [0.1, 0.2, 0.5, 0.75, 1.0, 1.5]
    axis.set_xlim(0.05, 2.0)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.grid(alpha=0.25)
    axis.set_title(
        f"{'mean TTFT' if figure == MEAN else 'TTFT p99'} of {OURS} relative to others, 95 %",
        fontsize=9,
    )
    axis.legend(fontsize=7, frameon=False, loc="lower left")
    drawing.tight_layout()
    # Text kept as text is small; without a date and with fixed ids, equal figures give equal files.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.stem})
    drawing.savefig(path, metadata={"Date": None})
    pyplot.close(drawing)


def _ratios(
    lines: Sequence[Line], policy: str, figure: str, names: Sequence[str]
) -> Iterator[tuple[int, Ratio]]:
    groups = [pairs(within(lines, name), OURS, policy, figure) for name in names[:-1]]
    for row, group in enumerate(groups):
        if group:
            yield row, ratio(group)
    if any(groups):
        yield len(names) - 1, pooled([group for group in groups if group])


if __name__ == "__main__":
    main()
