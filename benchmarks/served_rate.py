"""How many requests per second do the replicas serve before their slowest get too slow?

The peers in the same run are the routers of `simulation.opponents` and indexes without groups. For
each, the rate of a situation is raised or lowered rung by rung until the p99 of the time to first
token crosses the objective; between the last two rungs it is interpolated, the logarithm of the p99
over the logarithm of the rate.

    python -m benchmarks.served_rate --seeds 70-71 --requests 1000 --results rates.jsonl

Each run is appended to the results and is not repeated. At the end, and with `--tables` alone, the
table is printed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.routing_quality import ALL, seeds
from benchmarks.simulation.layouts import cold_requests_per_s
from benchmarks.simulation.results import Line, Results, code_version, latest
from benchmarks.simulation.run import Simulation
from benchmarks.simulation.sessions import profile
from benchmarks.simulation.situations import PLANS, SITUATIONS, WARM_UP, Situation
from benchmarks.simulation.tables import P99, markdown

RUNGS = (0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3)
"""Rates in multiples of what the replicas could serve without any reuse."""
FIRST_RUNG = 5
POLICIES = (
    *("least_delay, told", "least_delay, learned", "least_delay"),
    *("group_blind_any_copy", "group_blind"),
    *("mooncake", "preble", "dynamo", "llm_d", "sglang"),
)


class Served(NamedTuple):
    """The highest rate at which the objective is met, in multiples as `RUNGS`."""

    low: float
    """The rate is at least so high; 0: less than the lowest rung."""
    high: float
    """The rate is at most so high; infinite: more than the highest rung."""
    rate: float
    """Interpolated; where there is nothing to interpolate, the one of both that was measured."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with TemporaryDirectory() as folder:
        results = Results(options.results or Path(folder, "results.jsonl"))
        for situation in options.situation if not options.tables else ():
            for policy in options.policy:
                for seed in seeds(options.seeds):
                    ladder(results, situation, policy, seed, options)
        print(table(latest(results), options.p99_s * 1000))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--situation", nargs="+", choices=list(SITUATIONS), default=["chats", "documents, busy"]
    )
    parser.add_argument("--policy", nargs="+", choices=ALL, default=POLICIES)
    parser.add_argument("--seeds", default="70", help="such as 70-71")
    parser.add_argument("--requests", type=int, default=1000, help="to count in each run, roughly")
    parser.add_argument("--p99-s", type=float, default=2.0, help="the objective")
    parser.add_argument("--results", type=Path, help="JSON lines; without it nothing is kept")
    parser.add_argument("--tables", action="store_true", help="of what is there; run nothing")
    return parser.parse_args(arguments)


def ladder(
    results: Results, situation: str, policy: str, seed: int, options: argparse.Namespace
) -> None:
    """Run the rungs around the objective that were not run yet."""
    version = code_version(policy)

    def p99_ms(rate: float) -> float:
        name = at_rate(situation, rate)
        if not results.has(name, policy, seed, version):
            results.add(measure(situation, policy, seed, rate, options.requests))
        lines = [each for each in latest(results) if each["situation"] == name]
        return next(
            float(each[P99]) for each in lines if (each["policy"], each["seed"]) == (policy, seed)
        )

    climb(p99_ms, options.p99_s * 1000)


def climb(p99_ms: Callable[[float], float], objective_ms: float) -> None:
    """Ask for rungs until the last one that meets the objective and the next were both asked for.

    Args:
        p99_ms: At a rate.
        objective_ms: That it must not exceed.
    """
    rung = FIRST_RUNG
    if p99_ms(RUNGS[rung]) <= objective_ms:
        while rung + 1 < len(RUNGS) and p99_ms(RUNGS[rung + 1]) <= objective_ms:
            rung += 1
    else:
        while rung and p99_ms(RUNGS[rung - 1]) > objective_ms:
            rung -= 1


def at_rate(situation: str, rate: float) -> str:
    """Return the name of a situation at another rate than its own."""
    return f"{situation} at {rate:g}"


def measure(name: str, policy: str, seed: int, rate: float, requests: int) -> Line:
    """Run one simulation."""
    situation = replace(SITUATIONS[name], rate=rate, requests=requests)
    simulation = Simulation(situation.setting(policy, seed), situation.make_workload(seed))
    return {
        "benchmark": "served_rate",
        "situation": at_rate(name, rate),
        "of": name,
        "rate": rate,
        "offered_per_s": round(rate * per_s(situation), 2),
        "policy": policy,
        "seed": seed,
        "version": code_version(policy),
        "at": int(time.time()),
        **simulation.run().figures(WARM_UP),
    }


def per_s(situation: Situation) -> float:
    """Return requests per second that its replicas could serve without any reuse."""
    prompt_tokens = profile(PLANS[situation.workload]()).size.prompt_tokens
    return cold_requests_per_s(prompt_tokens, situation.replicas)


def served(p99s_ms: dict[float, float], objective_ms: float) -> Served:
    """Return the highest rate at which the objective is met.

    Args:
        p99s_ms: By rate.
        objective_ms: That they must not exceed.
    """
    met = [rate for rate in sorted(p99s_ms) if p99s_ms[rate] <= objective_ms]
    missed = [rate for rate in sorted(p99s_ms) if rate > max(met, default=0.0)]
    if not met:
        return Served(0.0, missed[0], missed[0])
    if not missed:
        return Served(met[-1], math.inf, met[-1])
    low, high = met[-1], missed[0]
    share = math.log(objective_ms / p99s_ms[low]) / math.log(p99s_ms[high] / p99s_ms[low])
    return Served(low, high, low * (high / low) ** share)


def table(lines: Sequence[Line], objective_ms: float) -> str:
    """Return requests per second by router and situation: the mean over the seeds."""
    names = list(dict.fromkeys(str(line["of"]) for line in lines))
    rows = [
        [policy, *(_cell(lines, name, policy, objective_ms) for name in names)]
        for policy in dict.fromkeys(str(line["policy"]) for line in lines)
    ]
    heads = [f"{name}, requests/s" for name in names]
    return markdown([f"p99 at most {objective_ms / 1000:g} s", *heads], rows)


def _cell(lines: Sequence[Line], name: str, policy: str, objective_ms: float) -> str:
    own = [line for line in lines if (line["of"], line["policy"]) == (name, policy)]
    if not own:
        return ""
    by_seed: dict[int, dict[float, float]] = {}
    for line in own:
        by_seed.setdefault(line["seed"], {})[line["rate"]] = line[P99]
    found = [served(p99s_ms, objective_ms) for p99s_ms in by_seed.values()]
    unit = own[0]["offered_per_s"] / own[0]["rate"]
    mean = sum(each.rate for each in found) / len(found) * unit
    if any(not each.low for each in found):
        return f"< {mean:.1f}"
    return f"> {mean:.1f}" if any(each.high == math.inf for each in found) else f"{mean:.1f}"


if __name__ == "__main__":
    main()
