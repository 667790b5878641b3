"""What does it cost if a weight of the default policy is off by a factor of two or four, or left
out?

The simulation of `routing_quality`, with one weight changed at a time. The peer in the same run is
the policy with its defaults. One JSON line per situation, weight and value; the ratios are relative
to the times of the defaults; above 1 is worse.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import report
from benchmarks.simulation.capacity import cold_requests_per_s
from benchmarks.simulation.conversations import ConversationOptions, Conversations
from benchmarks.simulation.layouts import TIME_MODEL, replica_config, with_memory_tier
from benchmarks.simulation.run import Setting, Simulation
from router.scoring import Weights

FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)
FIGURES = (
    "hit_rate",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "inter_token_p99_ms",
    "load_imbalance",
)


@dataclass(frozen=True, slots=True)
class Situation:
    """A workload in which some weight matters."""

    layout: str
    cache: float
    rate: float
    """Relative to what cold replicas can serve."""
    options: ConversationOptions
    memory_tier: float = 0.0
    """The size of the memory tier, as a multiple of the GPU's."""


_SHORT = ConversationOptions(
    conversations=300,
    document_share=0.0,
    system_tokens=(200, 600),
    message_tokens=(20, 300),
    answer_tokens=(100, 300),
    turns=(1, 4),
)
_BURSTS = ConversationOptions(
    conversations=300, documents=8, document_share=1.0, systems=1, turns=(1, 1)
)
_USUAL = ConversationOptions(conversations=200)

SITUATIONS = {
    "small caches": Situation("gptoss", 0.25, 1.0, _USUAL),
    "large caches, busy": Situation("gptoss", 1.0, 2.0, _USUAL),
    "full attention, busy": Situation("full", 0.5, 1.5, _USUAL),
    "long answers": Situation("full", 1.0, 2.0, _SHORT),
    "equal documents at once": Situation("full", 1.0, 6.0, _BURSTS),
    "memory tier": Situation("gptoss", 0.25, 1.0, _USUAL, memory_tier=3.0),
}
TUNED: dict[str, tuple[float, ...]] = {
    "queued_prefill_token": (),
    "decode_request": (),
    "decode_context_token": (),
    "waiting_request": (),
    "foreign_request": (),
    "recent_trust": (1.0,),
    "lower_tier_token": (1.0,),
}
"""Weights, with values to try in addition to multiples of their defaults."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--situation",
        nargs="+",
        choices=list(SITUATIONS),
        default=["small caches", "large caches, busy"],
    )
    parser.add_argument(
        "--weight", nargs="+", choices=list(TUNED), default=["queued_prefill_token", "recent_trust"]
    )
    parser.add_argument(
        "--value", type=float, nargs="+", help="in place of multiples of the default"
    )
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0, 1], help="the figures are means over these"
    )
    options = parser.parse_args()
    for name in options.situation:
        compare(name, SITUATIONS[name], options)


def compare(name: str, situation: Situation, options: argparse.Namespace) -> None:
    """Every weight and value in one situation."""
    default = mean_figures(situation, Weights(), options)
    report("policy_weights", situation=name, weight="defaults", **default)
    for weight in options.weight:
        for value in options.value or values(weight):
            figures = mean_figures(situation, replace(Weights(), **{weight: value}), options)
            ratios = {
                f"{key}_ratio": round(figures[key] / default[key], 3)
                for key in ("ttft_mean_ms", "ttft_p99_ms")
            }
            report(
                "policy_weights", situation=name, weight=weight, value=value, **ratios, **figures
            )


def values(weight: str) -> Iterator[float]:
    """The values to try; a share cannot exceed 1."""
    default = getattr(Weights(), weight)
    multiples = [default * factor for factor in FACTORS]
    yield from (
        value
        for value in [*multiples, *TUNED[weight]]
        if value <= 1 or not weight.endswith("_trust")
    )


def mean_figures(
    situation: Situation, weights: Weights, options: argparse.Namespace
) -> dict[str, float]:
    """Means over all seeds."""
    runs = [run(situation, weights, options.replicas, seed) for seed in options.seed]
    return {name: round(_mean(runs, name), 4) for name in FIGURES}


def run(situation: Situation, weights: Weights, replicas: int, seed: int) -> dict[str, float | int]:
    """One simulation."""
    options = replace(situation.options, seed=seed)
    size = Conversations(options, 1.0).size
    config = replica_config(situation.layout, size, replicas, situation.cache)
    if situation.memory_tier:
        config = with_memory_tier(config, situation.memory_tier)
    requests_per_s = situation.rate * cold_requests_per_s(size, replicas, TIME_MODEL)
    setting = Setting("prefix", replicas, config, weights=weights, seed=seed)
    return Simulation(setting, Conversations(options, requests_per_s)).run().figures(warm_up=0.25)


def _mean(runs: Sequence[dict[str, float | int]], name: str) -> float:
    return statistics.fmean(figures[name] for figures in runs)


if __name__ == "__main__":
    main()
