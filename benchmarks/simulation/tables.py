"""The figures of many runs as tables: policies by situation, and ratios with their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.simulation.comparison import Ratio, pooled, ratio
from benchmarks.simulation.opponents import OPPONENTS
from benchmarks.simulation.results import Line
from benchmarks.simulation.situations import SITUATIONS, TRAFFIC, Situation
from kvroute_engine.core.serving_order import SchedulingPolicy

OURS, BEFORE = "least_delay", "prefix"
BLIND = ("group_blind", "group_blind_any_copy", "group_0")
PUBLISHED = tuple(OPPONENTS)
TOLD = (f"{OURS}, learned", f"{OURS}, told")
MEAN, P99, AVOIDABLE = "ttft_mean_ms", "ttft_p99_ms", "avoidable_mean_ms"


def tables(lines: Sequence[Line]) -> str:
    """Return everything, for a terminal."""
    parts = [
        f"### {situation}\n\n{situation_table(within(lines, situation))}"
        for situation in situations(lines)
    ]
    return "\n\n".join([told_table(lines), pooled_table(lines), *parts])


def situations(lines: Iterable[Line]) -> list[str]:
    """Return those with figures, in order of appearance."""
    return list(dict.fromkeys(line["situation"] for line in lines))


def policies(lines: Iterable[Line]) -> list[str]:
    """Return those with figures, in order of appearance."""
    return list(dict.fromkeys(line["policy"] for line in lines))


def within(lines: Iterable[Line], situation: str) -> list[Line]:
    """Return the figures of one situation."""
    return [line for line in lines if line["situation"] == situation]


def pairs(lines: Sequence[Line], first: str, second: str, figure: str) -> list[tuple[float, float]]:
    """Return a figure of two policies in runs with the same seed of one situation.

    Args:
        lines: Of the situation.
        first: A policy.
        second: The one it is compared with.
        figure: Its name.
    """
    by_seed = {
        name: {line["seed"]: line[figure] for line in lines if line["policy"] == name}
        for name in (first, second)
    }
    seeds = by_seed[first].keys() & by_seed[second].keys()
    return [(by_seed[first][seed], by_seed[second][seed]) for seed in sorted(seeds)]


def compared(lines: Sequence[Line], first: str, second: str, figure: str) -> Ratio | None:
    """Return how many times the figure of *second* that of *first* is, over all situations that
    have both; None if none has.

    Args:
        lines: Of any situations.
        first: A policy.
        second: The one it is compared with.
        figure: Its name.
    """
    groups = [
        pairs(within(lines, situation), first, second, figure) for situation in situations(lines)
    ]
    found = [group for group in groups if group]
    return pooled(found) if found else None


def pooled_table(lines: Sequence[Line], ours: str = OURS, others: Sequence[str] = ()) -> str:
    """Return one policy relative to others, over all situations.

    Args:
        lines: Of all situations.
        ours: The policy.
        others: Those it is compared with; empty: all.
    """
    rows = []
    for policy in others or policies(lines):
        if policy != ours:
            found = [compared(lines, ours, policy, each) for each in (MEAN, AVOIDABLE, P99)]
            if found[0]:
                here = {line["situation"] for line in lines if line["policy"] == policy}
                cells = [shown(each) for each in found if each]
                rows.append([policy, str(len(here)), str(found[0].pairs), *cells])
    heads = [
        f"`{ours}` relative to",
        "Situations",
        "Pairs",
        "Mean TTFT",
        "Avoidable TTFT",
        "TTFT p99",
    ]
    return markdown(heads, rows)


def situation_table(lines: Sequence[Line]) -> str:
    """Return all policies in one situation, with the ratio of their mean TTFT to our policy's."""
    columns: list[tuple[str, Callable[[Line], str]]] = [
        ("Counted", lambda line: f"{line['requests']:,.0f}"),
        ("Reused", lambda line: f"{line['hit_rate']:.1%}"),
        ("TTFT mean", lambda line: f"{line[MEAN]:,.0f}"),
        ("p50", lambda line: f"{line['ttft_p50_ms']:,.0f}"),
        ("p90", lambda line: f"{line['ttft_p90_ms']:,.0f}"),
        ("p99", lambda line: f"{line[P99]:,.0f}"),
        ("Later turns", lambda line: f"{line['later_ttft_mean_ms']:,.0f}"),
        ("Avoidable", lambda line: f"{line['avoidable_mean_ms']:,.0f}"),
        ("Inter-token p50", lambda line: f"{line['inter_token_p50_ms']:.1f}"),
        ("p99", lambda line: f"{line['inter_token_p99_ms']:,.0f}"),
        ("Too much", lambda line: f"{line['promised_too_much']:.1%}"),
        ("Too little", lambda line: f"{line['promised_too_little']:.1%}"),
        ("Imbalance", lambda line: f"{line['load_imbalance']:.2f}"),
    ]
    rows = []
    means = {policy: _mean(lines, policy) for policy in policies(lines)}
    for policy in sorted(means, key=lambda name: float(means[name][MEAN])):
        both = pairs(lines, policy, OURS, MEAN) if policy != OURS else []
        rows.append(
            [
                f"{policy} ({means[policy]['seeds']})",
                shown(ratio(both)) if both else "",
                *(show(means[policy]) for _, show in columns),
            ]
        )
    heads = ["Policy (seeds)", f"x `{OURS}`", *(head for head, _ in columns)]
    return markdown(heads, rows)


def _mean(lines: Sequence[Line], policy: str) -> Line:
    own = [line for line in lines if line["policy"] == policy]
    numbers = [name for name, value in own[0].items() if isinstance(value, int | float)]
    means = {name: statistics.fmean(line[name] for line in own) for name in numbers}
    return {**means, "seeds": len(own)}


def told_table(lines: Sequence[Line]) -> str:
    """Return what telling engines what to keep gains over the best index without groups, by layout.

    Besides: how many seeds there are of the three columns at the end, and what computing took of
    prompts that no replica had ever computed, which no router can save.
    """
    rows = []
    for layout, shown_layout in _LAYOUTS.items():
        for name, situation in SITUATIONS.items():
            here = within(lines, name)
            blind = _most_run(here, BLIND)
            if not blind or not _is_told(here, situation, layout):
                continue
            ratios = [_both(here, policy, blind) for policy in (OURS, *TOLD)]
            own = next(policy for policy in (TOLD[1], OURS) if pairs(here, policy, blind, MEAN))
            unknown = [
                (line[MEAN] - line[AVOIDABLE], line["seed"])
                for line in here
                if line["policy"] == own
            ]
            blinds = {line["seed"]: line[MEAN] for line in here if line["policy"] == blind}
            floor = ratio([(new, blinds[seed]) for new, seed in unknown if seed in blinds])
            rows.append(
                [
                    f"{shown_layout}, {name.removesuffix(f', {layout}')}",
                    ", ".join(str(each.pairs) if each else "-" for each, _ in ratios),
                    f"{_mean(here, blind)[MEAN]:,.0f}",
                    f"{floor.mean:.2f}",
                    *("; ".join(_marked(each) for each in both if each) for both in ratios),
                ]
            )
    heads = [
        "Layout, situation",
        "seeds",
        "best index without groups, ms",
        "of it, never computed before",
        "exact, told nothing",
        "told what the fleet showed",
        "told the ends of messages as well",
    ]
    return markdown(heads, rows)


_LAYOUTS = {
    "gptoss": "gpt-oss",
    "gemma": "Gemma 3",
    "mamba-hybrid": "Mamba hybrid",
    "full": "full attention",
}


def _is_told(lines: Sequence[Line], situation: Situation, layout: str) -> bool:
    """Return whether there is something to show: engines with full attention alone are told
    nothing, and what the engines' own order gains is another question."""
    policy = OURS if layout == "full" else TOLD[1]
    in_order = situation.scheduling_policy is SchedulingPolicy.FCFS
    is_run = any(line["policy"] == policy for line in lines)
    return situation.layout == layout and in_order and is_run


def _most_run(lines: Sequence[Line], among: Sequence[str]) -> str | None:
    """Return the best of those with the most seeds."""
    seeds = {name: sum(line["policy"] == name for line in lines) for name in among}
    most = max(seeds.values())
    return best(lines, [name for name, count in seeds.items() if count == most > 0])


def _marked(found: Ratio) -> str:
    """Return a ratio that says where it is worse by more than chance."""
    return f"{shown(found)} **worse**" if found.is_worse else shown(found)


def _both(lines: Sequence[Line], policy: str, other: str) -> tuple[Ratio | None, Ratio | None]:
    """Return the mean and the p99 of one policy relative to another's."""
    return compared(lines, policy, other, MEAN), compared(lines, policy, other, P99)


def gain_table(lines: Sequence[Line], figure: str = MEAN) -> str:
    """Return our policy relative to what one would use else, by traffic.

    Args:
        lines: Of all situations.
        figure: What is compared.
    """
    others: list[tuple[str, Sequence[str]]] = [
        (f"`{BEFORE}`", [BEFORE]),
        ("the best index without groups", BLIND),
        ("the best rule of another router", PUBLISHED),
        ("sessions", ["session"]),
        ("round robin", ["round_robin"]),
    ]
    every = tuple(name for names in TRAFFIC.values() for name in names)
    rows = [
        [traffic, *(_cell(against_best(lines, names, among, figure)) for _, among in others)]
        for traffic, names in [*TRAFFIC.items(), ("All of these", every)]
    ]
    return markdown([f"`{OURS}` relative to", *(name for name, _ in others)], rows)


def opponents_table(lines: Sequence[Line], figure: str = MEAN) -> str:
    """Return our policy relative to each other, by traffic.

    Args:
        lines: Of all situations.
        figure: What is compared.
    """
    every = tuple(name for names in TRAFFIC.values() for name in names)
    found = {
        other: [against_best(lines, names, [other], figure) for names in (*TRAFFIC.values(), every)]
        for other in policies(lines)
        if other != OURS
    }
    rows = [
        [other, *(f"{each.mean:.2f}" if each else "" for each in cells[:-1]), _cell(cells[-1])]
        for other, cells in sorted(found.items(), key=lambda item: _order(item[1][-1]))
        if cells[-1]
    ]
    return markdown([f"`{OURS}` relative to", *TRAFFIC, "All of these"], rows)


def against_best(
    lines: Sequence[Line], names: Sequence[str], among: Sequence[str], figure: str
) -> Ratio | None:
    """Return our policy relative to the one that did best in each situation, over those that have
    both; None if none has.

    Args:
        lines: Of any situations.
        names: The situations.
        among: The policies, of which the best one is taken.
        figure: What is compared.
    """
    groups = []
    for name in names:
        here = within(lines, name)
        other = best(here, among)
        groups.append(pairs(here, OURS, other, figure) if other else [])
    found = [group for group in groups if group]
    return pooled(found) if found else None


def best(lines: Sequence[Line], among: Sequence[str]) -> str | None:
    """Return the policy with the lowest mean TTFT in a situation, over the seeds that all of these
    policies have; where they share none, the one with the most seeds.

    Args:
        lines: Of the situation.
        among: The policies.
    """
    seeds = {
        policy: {line["seed"] for line in lines if line["policy"] == policy}
        for policy in policies(lines)
        if policy in among
    }
    if not seeds:
        return None
    common = set.intersection(*seeds.values())
    if not common:
        return max(seeds, key=lambda policy: len(seeds[policy]))
    shared = [line for line in lines if line["seed"] in common]
    return min(seeds, key=lambda policy: float(_mean(shared, policy)[MEAN]))


def _cell(found: Ratio | None) -> str:
    return shown(found) if found else ""


def _order(found: Ratio | None) -> float:
    return -found.mean if found else 0.0


def shown(found: Ratio) -> str:
    """Return a ratio with its interval; one pair has none."""
    if found.low == 0:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ({found.low:.2f}-{found.high:.2f})"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
