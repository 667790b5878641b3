"""What does routing by exact, group-aware hits gain, and at which request rates?

Simulated replicas in virtual time behind the router's own decision code: the same engine,
scheduler, cache and events as `kvroute engine --simulate`, with a time model instead of a language
model. The peers in the same run are an index that ignores groups with the same policy, sessions,
least loaded, round robin and random. Prints one JSON line per workload, layout, cache, rate and
policy; `plot_routing_quality` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import report
from benchmarks.simulation.capacity import cold_requests_per_s
from benchmarks.simulation.conversations import ConversationOptions, Conversations
from benchmarks.simulation.layouts import TIME_MODEL, layout_names, replica_config
from benchmarks.simulation.routing import POLICIES
from benchmarks.simulation.run import Setting, Simulation
from benchmarks.simulation.trace import RecordedTrace, TraceOptions, read_trace
from benchmarks.simulation.workload import Workload

MakeWorkload = Callable[[float], Workload]
"""Makes a workload for a number of requests per second."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, layout, cache and rate; the policies are compared within it."""

    workload: str
    make: MakeWorkload
    seed: int
    replicas: int
    layout: str
    cache: float
    rate: float


def main() -> None:
    options = parse()
    for case in cases(options):
        for policy in options.policy:
            measure(case, policy, options)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults take a few minutes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8])
    parser.add_argument("--layout", nargs="+", choices=layout_names(), default=["full", "gemma"])
    parser.add_argument(
        "--cache",
        type=float,
        nargs="+",
        default=[0.25, 1.0],
        help="of all distinct tokens, in all together",
    )
    parser.add_argument(
        "--rate",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 2.0],
        help="of what cold replicas can serve",
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--conversations", type=int, default=100, help="0: none")
    parser.add_argument("--documents", type=int, default=24, help="that conversations share")
    parser.add_argument(
        "--trace", type=Path, help="recorded requests: JSON lines as Mooncake's, plain or .gz"
    )
    parser.add_argument("--trace-requests", type=int, default=300)
    parser.add_argument(
        "--longest-prompt",
        type=int,
        default=16_384,
        help="longer ones of the trace are left out, tokens",
    )
    parser.add_argument(
        "--answer-share", type=float, default=0.1, help="of the answers' lengths in the trace"
    )
    parser.add_argument(
        "--event-delay", type=float, default=0.001, help="from a step's end to the index, seconds"
    )
    parser.add_argument(
        "--scrape-interval", type=float, default=2.0, help="of the engines' gauges, seconds"
    )
    parser.add_argument(
        "--warm-up", type=float, default=0.25, help="share of the time that is not counted"
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one run for each")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every combination that was asked for."""
    for name, seed, make in workloads(options):
        for replicas, layout, cache, rate in itertools.product(
            options.replicas, options.layout, options.cache, options.rate
        ):
            yield Case(name, make, seed, replicas, layout, cache, rate)


def workloads(options: argparse.Namespace) -> Iterator[tuple[str, int, MakeWorkload]]:
    """Name, seed and factory of each workload; the recorded one is the same for every seed."""
    if options.conversations:
        for seed in options.seed:
            chosen = ConversationOptions(
                options.conversations, documents=options.documents, seed=seed
            )
            yield "conversations", seed, partial(Conversations, chosen)
    if options.trace:
        part = TraceOptions(options.trace_requests, options.longest_prompt, options.answer_share)
        yield (
            "trace",
            options.seed[0],
            partial(RecordedTrace, read_trace(options.trace, part), part),
        )


def measure(case: Case, policy: str, options: argparse.Namespace) -> None:
    """Run one simulation and print one line."""
    size = case.make(1.0).size
    requests_per_s = case.rate * cold_requests_per_s(size, case.replicas, TIME_MODEL)
    config = replica_config(case.layout, size, case.replicas, case.cache)
    setting = Setting(
        policy, case.replicas, config, options.event_delay, options.scrape_interval, seed=case.seed
    )
    outcome = Simulation(setting, case.make(requests_per_s)).run()
    report(
        "routing_quality",
        workload=case.workload,
        seed=case.seed,
        layout=case.layout,
        replicas=case.replicas,
        cache=case.cache,
        cache_blocks=config.num_blocks,
        rate=case.rate,
        offered_requests_per_s=round(requests_per_s, 3),
        policy=policy,
        **outcome.figures(options.warm_up),
    )


if __name__ == "__main__":
    main()
