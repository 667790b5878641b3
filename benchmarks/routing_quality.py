"""What does routing by exact hits gain, over which routers, and is it more than chance?

Simulated replicas in virtual time behind the router's own decision code: the engine, scheduler,
cache and events of `kvroute engine --simulate`, with a time model instead of a language model. The
peers in the same run are `simulation.opponents`: the rules and indexes that others have published.

    python -m benchmarks.routing_quality --set short --results short.jsonl
    python -m benchmarks.routing_quality --set full --results full.jsonl --trace TRACE.jsonl.gz
    python -m benchmarks.routing_quality --situation agents --policy least_delay prefix \\
        --seeds 0-4 --results tuning.jsonl

What is published comes from the seeds 50 to 59, on which nothing was developed. Each run is
appended to the results when it ends, by situation, policy, seed and version of the code, and is not
repeated: an interrupted sweep goes on where it was. Several processes may share a file; give each
its `--shard`. At the end, and with `--tables` alone, the tables are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import processor_seconds
from benchmarks.simulation.misjudging import misjudged_names
from benchmarks.simulation.opponents import OPPONENTS
from benchmarks.simulation.results import Line, Results, code_version, latest
from benchmarks.simulation.routing import LEAST_DELAY, POLICIES
from benchmarks.simulation.run import Simulation
from benchmarks.simulation.situations import SITUATIONS, TRACE, WARM_UP, Situation
from benchmarks.simulation.tables import tables

HELD_OUT = "50-59"
ALL = (*POLICIES, *OPPONENTS, *misjudged_names(LEAST_DELAY))


@dataclass(frozen=True, slots=True)
class RunSet:
    """Runs that belong together."""

    situations: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: str
    requests: int | None = None
    """The number of requests in place of the situations' own."""


SETS = {
    "short": RunSet(
        ("chats", "documents", "agents"),
        ("least_delay", "prefix", "group_blind", "lmetric", "round_robin"),
        "50-52",
        requests=400,
    ),
    "sensitivity": RunSet(
        ("chats", "documents, busy", "agents, small caches", "mixed"),
        (LEAST_DELAY, *misjudged_names(LEAST_DELAY)),
        HELD_OUT,
    ),
    "full": RunSet(tuple(SITUATIONS), (*POLICIES, *OPPONENTS), HELD_OUT),
}
"""Some minutes on one core, some hours, and a day."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with TemporaryDirectory() as folder:
        results = Results(options.results or Path(folder, "results.jsonl"))
        if not options.tables:
            for situation, policy, seed in mine(planned(options), options.shard):
                if not results.has(situation, policy, seed, code_version(policy)):
                    results.add(measure(situation, policy, seed, options))
        print(tables(latest(results)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), default="short")
    parser.add_argument(
        "--situation", nargs="+", choices=list(SITUATIONS), help="in place of the set's"
    )
    parser.add_argument("--policy", nargs="+", choices=ALL, help="in place of the set's")
    parser.add_argument("--seeds", help="in place of the set's, such as 0-4")
    parser.add_argument("--requests", type=int, help="to count in each run, roughly")
    parser.add_argument("--results", type=Path, help="JSON lines; without it nothing is kept")
    parser.add_argument(
        "--trace", type=Path, help="recorded requests: JSON lines as Mooncake's, plain or .gz"
    )
    parser.add_argument("--shard", default="0/1", help="run 0 of every 2 with 0/2")
    parser.add_argument("--tables", action="store_true", help="of what is there; run nothing")
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield the situation, policy and seed of every run; all of a seed come before the next."""
    chosen = SETS[options.set]
    for seed in seeds(options.seeds or chosen.seeds):
        for situation in options.situation or chosen.situations:
            if SITUATIONS[situation].workload == TRACE and options.trace is None:
                continue
            for policy in options.policy or chosen.policies:
                yield situation, policy, seed


def seeds(spelled: str) -> range:
    """Return the seeds of `10-19`, or one."""
    first, _, last = spelled.partition("-")
    return range(int(first), int(last or first) + 1)


def mine(runs: Iterator[tuple[str, str, int]], shard: str) -> Iterator[tuple[str, str, int]]:
    """Yield the runs of one of several processes."""
    number, _, count = shard.partition("/")
    for place, run in enumerate(runs):
        if place % int(count) == int(number):
            yield run


def measure(name: str, policy: str, seed: int, options: argparse.Namespace) -> Line:
    """Run one simulation."""
    requests = options.requests or (None if options.situation else SETS[options.set].requests)
    situation: Situation = SITUATIONS[name]
    if requests:
        situation = replace(situation, requests=requests)
    workload = situation.make_workload(seed, options.trace)
    simulation = Simulation(situation.setting(policy, seed), workload)
    figures: Line = {}
    seconds = processor_seconds(lambda: figures.update(simulation.run().figures(WARM_UP)))
    return {
        "benchmark": "routing_quality",
        "situation": name,
        "policy": policy,
        "seed": seed,
        "version": code_version(policy),
        "at": int(time.time()),
        "processor_s": round(seconds, 1),
        **figures,
    }


if __name__ == "__main__":
    main()
