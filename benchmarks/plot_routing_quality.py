"""Tables and plots of the output of `routing_quality` and `policy_weights`, written into a
document.

    python -m benchmarks.plot_routing_quality figures.jsonl --document docs/routing-quality.md

Tables go between `<!-- NAME -->` and `<!-- end -->` in the document; plots that it shows go into
`images/` next to it. This is the only script that needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib import pyplot

Figures = dict[str, Any]
"""One line of a benchmark."""

UNCHANGED = 1.1
"""A time counts as unchanged up to this multiple of the time at the lowest rate; a throughput
counts as the best if this multiple of it reaches the best."""
COLOURS = {
    "prefix": "#1b6ca8",
    "group_blind": "#d1495b",
    "group_blind_no_recent": "#e8a0a8",
    "session": "#edae49",
    "least_loaded": "#66a182",
    "round_robin": "#8d96a3",
    "random": "#5c4d7d",
}
POLICIES = tuple(COLOURS)
HEADLINE = ("prefix", "group_blind", "group_blind_no_recent", "round_robin")


class Place(NamedTuple):
    """What the compared runs have in common, apart from the rate."""

    workload: str
    layout: str
    replicas: int
    cache: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, nargs="+", help="JSON lines")
    parser.add_argument("--document", type=Path, required=True)
    options = parser.parse_args()
    lines = [
        json.loads(line)
        for path in options.figures
        for line in path.read_text().splitlines()
        if line.startswith("{")
    ]
    quality = means([line for line in lines if line["benchmark"] == "routing_quality"])
    weights = [line for line in lines if line["benchmark"] == "policy_weights"]
    tables = {
        "headline": headline(quality),
        "unchanged": unchanged(quality),
        "all": "\n".join(table_of(place, quality) for place in places(quality)),
        "weights": weights_table(weights),
    }
    fill(options.document, tables)
    images = options.document.parent / "images"
    images.mkdir(exist_ok=True)
    for place in places(quality):
        image = f"{image_name(place)}.svg"
        if f"({images.name}/{image})" in options.document.read_text(encoding="utf-8"):
            plot(place, within(quality, place), images / image)


def means(lines: Iterable[Figures]) -> list[Figures]:
    """One line for each place, rate and policy: the means over its seeds."""
    seeds: dict[tuple[Any, ...], list[Figures]] = {}
    for line in lines:
        seeds.setdefault((*place_of(line), line["rate"], line["policy"]), []).append(line)
    return [_mean(group) for group in seeds.values()]


def _mean(group: Sequence[Figures]) -> Figures:
    numbers = {
        name: [line[name] for line in group]
        for name, value in group[0].items()
        if not isinstance(value, str)
    }
    return {
        **group[0],
        **{name: statistics.fmean(values) for name, values in numbers.items()},
        "seeds": len(group),
    }


def places(lines: Iterable[Figures]) -> list[Place]:
    """Every place with figures, in order of appearance."""
    return list(dict.fromkeys(place_of(line) for line in lines))


def place_of(line: Figures) -> Place:
    return Place(line["workload"], line["layout"], int(line["replicas"]), line["cache"])


def within(lines: Iterable[Figures], place: Place) -> list[Figures]:
    """The figures of one place."""
    return [line for line in lines if place_of(line) == place]


def image_name(place: Place) -> str:
    """The file name of its plot, without the suffix."""
    return f"{place.workload}-{place.layout}-{place.replicas}-{place.cache:g}"


# --- tables ---------------------------------------------------------------------------------------


def fill(document: Path, tables: dict[str, str]) -> None:
    """Put every table between its markers; tables without markers are left out."""
    text = document.read_text(encoding="utf-8")
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(partial(_filled, table), text)
    document.write_text(text, encoding="utf-8")


def _filled(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}\n{marks[2]}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline(lines: Sequence[Figures]) -> str:
    """Hybrid layouts with the smallest caches, the policies of `HEADLINE` next to each other."""
    heads = [
        "Workload, layout",
        "Rate",
        "Reused tokens",
        "Mispredicted",
        "TTFT mean, ms",
        "TTFT p50, ms",
        "TTFT p99, ms",
    ]
    return markdown(heads, _headline_rows([line for line in lines if line["layout"] != "full"]))


def _headline_rows(hybrid: Sequence[Figures]) -> Iterator[list[str]]:
    for place in places(hybrid):
        others = [
            other.cache for other in places(hybrid) if other._replace(cache=place.cache) == place
        ]
        here = within(hybrid, place) if place.cache == min(others) else []
        for rate in sorted({line["rate"] for line in here}):
            found = {line["policy"]: line for line in here if line["rate"] == rate}
            chosen = [found[policy] for policy in HEADLINE if policy in found]
            if len(chosen) == len(HEADLINE):
                yield [
                    f"{place.workload}, {place.layout}, {place.replicas} replicas",
                    f"{rate:g}",
                    *_headline_cells(chosen),
                ]


def _headline_cells(chosen: Sequence[Figures]) -> list[str]:
    def cell(show: Callable[[Figures], str]) -> str:
        return " / ".join(map(show, chosen))

    return [
        cell(lambda line: f"{line['hit_rate']:.0%}"),
        cell(lambda line: f"{line['mispredicted']:.0%}"),
        cell(lambda line: f"{line['ttft_mean_ms']:,.0f}"),
        cell(lambda line: f"{line['ttft_p50_ms']:,.0f}"),
        cell(lambda line: f"{line['ttft_p99_ms']:,.0f}"),
    ]


def unchanged(lines: Sequence[Figures]) -> str:
    """Per place and policy: the highest rate at which the mean TTFT is that of the lowest rate, and
    the highest at which the throughput is the best."""
    policies = [policy for policy in POLICIES if any(line["policy"] == policy for line in lines)]
    rows = []
    for place in places(lines):
        here = within(lines, place)
        if len({line["rate"] for line in here}) > 1:
            curves = [
                sorted((line for line in here if line["policy"] == policy), key=_rate)
                for policy in policies
            ]
            rows.append(
                [
                    _title(place),
                    *(
                        f"{_unchanged(curve)} / {_kept_up(curve, here)}" if curve else ""
                        for curve in curves
                    ),
                ]
            )
    return markdown(["Workload, layout, replicas, cache", *policies], rows)


def _rate(line: Figures) -> float:
    return float(line["rate"])


def _unchanged(curve: Sequence[Figures]) -> str:
    return _last(curve, lambda line: line["ttft_mean_ms"] <= UNCHANGED * curve[0]["ttft_mean_ms"])


def _kept_up(curve: Sequence[Figures], everybody: Sequence[Figures]) -> str:
    best: dict[float, float] = {}
    for line in everybody:
        best[line["rate"]] = max(best.get(line["rate"], 0.0), _served(line))
    return _last(curve, lambda line: _served(line) * UNCHANGED >= best[line["rate"]])


def _served(line: Figures) -> float:
    """The share of the offered load that was served: seeds differ in what they offer."""
    return float(line["requests_per_s"] / line["offered_requests_per_s"])


def _last(curve: Sequence[Figures], holds: Callable[[Figures], bool]) -> str:
    """The rate of the last line before the first one for which the condition fails."""
    rates = [f"{line['rate']:g}" for line in takewhile(holds, curve)]
    return rates[-1] if rates else "-"


def table_of(place: Place, lines: Sequence[Figures]) -> str:
    """Every figure of one place."""
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("Rate, policy", lambda line: f"{line['rate']:g} {line['policy']}"),
        ("Hit rate", lambda line: f"{line['hit_rate']:.3f}"),
        ("TTFT mean", lambda line: f"{line['ttft_mean_ms']:,.0f}"),
        ("p50", lambda line: f"{line['ttft_p50_ms']:,.0f}"),
        ("p90", lambda line: f"{line['ttft_p90_ms']:,.0f}"),
        ("p99", lambda line: f"{line['ttft_p99_ms']:,.0f}"),
        ("Inter-token p50", lambda line: f"{line['inter_token_p50_ms']:.1f}"),
        ("p99", lambda line: f"{line['inter_token_p99_ms']:,.0f}"),
        ("Requests/s", lambda line: f"{line['requests_per_s']:.2f}"),
        ("Imbalance", lambda line: f"{line['load_imbalance']:.2f}"),
        ("Mispredicted", lambda line: f"{line['mispredicted']:.1%}"),
        ("by tokens", lambda line: f"{line['mean_error_tokens']:,.0f}"),
    ]
    ordered = sorted(
        within(lines, place), key=lambda line: (line["rate"], POLICIES.index(line["policy"]))
    )
    rows = [[show(line) for _, show in columns] for line in ordered]
    seeds = max(line["seeds"] for line in ordered)
    heading = f"\n### {_title(place)}\n\n" + (
        f"Means over up to {seeds} seeds.\n\n" if seeds > 1 else ""
    )
    return heading + markdown([head for head, _ in columns], rows)


def weights_table(lines: Sequence[Figures]) -> str:
    """Mean TTFT relative to the defaults: a row for each weight and value, a column for each
    situation."""
    situations = list(dict.fromkeys(line["situation"] for line in lines))
    found = {(line["situation"], line["weight"], line.get("value")): line for line in lines}
    rows = []
    for weight, value in dict.fromkeys(
        (line["weight"], line["value"]) for line in lines if "value" in line
    ):
        cells = [_ratio(found.get((situation, weight, value))) for situation in situations]
        rows.append([f"`{weight}` {value:g}", *cells])
    return markdown(["Weight", *situations], rows)


def _ratio(line: Figures | None) -> str:
    return f"{line['ttft_mean_ms_ratio']:.2f} ({line['ttft_p99_ms_ratio']:.2f})" if line else ""


def _title(place: Place) -> str:
    return f"{place.workload}, {place.layout}, {place.replicas} replicas, caches {place.cache:g}"


# --- plots ----------------------------------------------------------------------------------------


def plot(place: Place, lines: Sequence[Figures], path: Path) -> None:
    """Hit rate, mean and p99 TTFT over the request rate."""
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.1))
    panels = (
        ("hit_rate", "reused share of prompts"),
        ("ttft_mean_ms", "mean TTFT, ms"),
        ("ttft_p99_ms", "TTFT p99, ms"),
    )
    for axis, (name, label) in zip(axes, panels, strict=True):
        for policy in POLICIES:
            curve = sorted((line["rate"], line[name]) for line in lines if line["policy"] == policy)
            if curve:
                rates, values = zip(*curve, strict=True)
                axis.plot(
                    rates,
                    values,
                    label=policy,
                    color=COLOURS[policy],
                    marker="o",
                    markersize=3,
                    linewidth=1.2,
                )
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("rate, of cold capacity", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    figure.suptitle(_title(place), fontsize=10)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="lower center",
        ncols=len(POLICIES),
        fontsize=7,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    # Text kept as text is small; without a date and with fixed ids, equal figures give equal files.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.stem})
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
