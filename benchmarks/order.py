"""What does it bring to serve waiting requests by what is left to compute, instead of as they come?

vLLM's own scheduler and cache manager, one engine in virtual time, with `--scheduling-policy
priority`. Requests bring the number that a router with exact knowledge gives them: the tokens that
the engine lacks when it admits them, by the router's own index and mirror over the engine's own
events, at most 4,096 of them, plus what their arrival is worth: `aged`. Beside it, in the same run
and on the same arrivals:

    fcfs        as they come: the peer; figures of the others are relative to it
    uncached    without ageing
    length      by prompt length, all that a router without exact knowledge has
    aged_length the same with ageing

No order wins for everyone. An engine with work to do computes as many tokens a second in any order,
so the sum of computed tokens times time to the first token stays about what it is
(`token_seconds_ratio`): what short requests wait less, long ones wait more.
`--ageing-tokens-per-s` with several values shows how much of either.

A fifth of the prompts are long and new, a quarter short and new, the rest questions about a dozen
documents that change now and then. Run it in the environment of `make interop`, which has vLLM.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.figures import report
from benchmarks.simulation.contract import Account
from benchmarks.simulation.outcome import percentile
from benchmarks.simulation.routing import LEAST_DELAY, SimulatedRouter
from benchmarks.simulation.time_model import AcceleratorTime
from router.config.routing import OverloadConfig
from router.fleet.line import place_of
from tests.interop.layouts import full, layout

try:
    from benchmarks.simulation.vllm_engine import Stepped, VllmEngine, VllmRequest
    from tests.interop.offloading_engine import Steps

    HAS_VLLM = True
except ImportError:  # only the environment of `make interop` has vLLM
    HAS_VLLM = False

TIME = AcceleratorTime()
STEP_TOKENS, RUNNING = 2048, 64
LAYOUT = layout(full(16), retention_interval=0)
DOCUMENTS_AT_A_TIME = 12
QUESTIONS_EACH = 25
"""After that many a document is replaced, on average."""
WARM_UP = 0.2
ENGINE = "engine"


@dataclass(slots=True)
class Arrival:
    """One request and its outcome."""

    at_s: float
    tokens: list[int]
    output_tokens: int
    uncached: int = 0
    """The tokens that the router expected to be computed."""
    computed: int = 0
    """The tokens that were computed."""
    first_s: float = 0.0
    account: Account | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s


# --- workload -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests that are sent."""

    document_tokens: int
    load: float
    """Tokens to compute that arrive, by those that the engine can compute in full steps."""
    requests: int
    seed: int

    def arrivals(self) -> list[Arrival]:
        random = Random(self.seed)
        prompts = list(self._prompts(random))
        seen = set[int]()
        work = 0
        for kept, tokens in prompts:
            known = kept and tokens[0] in seen
            work += len(tokens) - (self.document_tokens if known else 0)
            seen.add(tokens[0])
        full_step_s = TIME.step_overhead_s + TIME.prefill_s(0, STEP_TOKENS)
        gap_s = work / self.requests * full_step_s / STEP_TOKENS / self.load
        found, now_s = [], 0.0
        for _, tokens in prompts:
            now_s += random.expovariate(1 / gap_s)
            found.append(Arrival(now_s, tokens, random.randrange(32, 129)))
        return found

    def _prompts(self, random: Random) -> Iterator[tuple[bool, list[int]]]:
        """Yield prompts, and whether they begin with a document."""
        documents = [_text(random, self.document_tokens) for _ in range(DOCUMENTS_AT_A_TIME)]
        for _ in range(self.requests):
            kind = random.random()
            if kind < 0.2:
                yield False, _text(random, 4000)
            elif kind < 0.45:
                yield False, _text(random, random.randrange(100, 401))
            else:
                number = random.randrange(DOCUMENTS_AT_A_TIME)
                yield True, documents[number] + _text(random, random.randrange(30, 121))
                if random.random() < 1 / QUESTIONS_EACH:
                    documents[number] = _text(random, self.document_tokens)


def _text(random: Random, tokens: int) -> list[int]:
    return [random.randrange(100_000) for _ in range(tokens)]


# --- one engine -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Engine:
    """vLLM's scheduler in virtual time, behind the router's decision code."""

    priority_of: Callable[[Arrival], float] | None
    """None means in the order of their arrival."""
    blocks: int
    long_prefill_tokens: int = 0
    now_s: float = 0.0
    _open: dict[str, Arrival] = field(default_factory=dict)

    def serve(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of them."""
        policy = "fcfs" if self.priority_of is None else "priority"
        steps = Steps(RUNNING, STEP_TOKENS, policy, self.long_prefill_tokens)
        router = SimulatedRouter(LEAST_DELAY, [ENGINE], lambda: self.now_s)
        engine = VllmEngine(
            LAYOUT, self.blocks, steps, lambda batch: router.take_batch(ENGINE, batch)
        )
        to_come = list(reversed(arrivals))
        while to_come or engine.has_work:
            if not engine.has_work:
                self.now_s = max(self.now_s, to_come[-1].at_s)
            while to_come and to_come[-1].at_s <= self.now_s:
                engine.add(self._admit(to_come.pop(), router))
            stepped, seconds = engine.step()
            self.now_s += seconds
            for each in stepped:
                self._take(each)

    def _admit(self, arrival: Arrival, router: SimulatedRouter) -> VllmRequest:
        routed = router.route("", arrival.tokens)
        arrival.account = routed.account
        arrival.uncached = len(arrival.tokens) - routed.expected_tokens
        name = f"r{id(arrival)}"
        self._open[name] = arrival
        priority = 0 if self.priority_of is None else round(self.priority_of(arrival))
        return VllmRequest(name, arrival.tokens, arrival.output_tokens, arrival.at_s, priority)

    def _take(self, stepped: Stepped) -> None:
        arrival = self._open[stepped.name]
        arrival.computed += stepped.computed
        if not stepped.has_token:
            return
        account = arrival.account
        assert account is not None
        if not arrival.first_s:
            arrival.first_s = self.now_s
            account.first_token()
        else:
            account.generated(1)
        if stepped.is_over:
            account.ended()
            arrival.account = None
            del self._open[stepped.name]


# --- figures --------------------------------------------------------------------------------------


ORDERS = ("fcfs", "uncached", "aged", "length", "aged_length")


def order_of(name: str, ageing_tokens_per_s: float) -> Callable[[Arrival], float] | None:
    """Return the function by which an order gives a request its priority; None: as they come."""

    def aged(tokens: int, arrival: Arrival) -> float:
        return place_of(tokens, arrival.at_s, ageing_tokens_per_s)

    return {
        "fcfs": None,
        "uncached": lambda arrival: arrival.uncached,
        "aged": lambda arrival: aged(arrival.uncached, arrival),
        "length": lambda arrival: len(arrival.tokens),
        "aged_length": lambda arrival: aged(len(arrival.tokens), arrival),
    }[name]


@dataclass(frozen=True, slots=True)
class Times:
    """Times to the first token, in seconds."""

    mean: float
    p99: float
    longest: float
    """Mean of the tenth with the longest prompts."""
    heaviest: float
    """Mean of the tenth with the most to compute."""
    token_seconds: float
    """Over all requests: computed tokens, times seconds."""

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> Times:
        counted = arrivals[round(WARM_UP * len(arrivals)) :]
        times = sorted(arrival.ttft_s for arrival in counted)
        return cls(
            statistics.fmean(times),
            percentile(times, 99),
            _of_tenth(counted, lambda arrival: len(arrival.tokens)),
            _of_tenth(counted, lambda arrival: arrival.computed),
            sum(arrival.computed * arrival.ttft_s for arrival in counted),
        )


def _of_tenth(arrivals: Sequence[Arrival], key: Callable[[Arrival], int]) -> float:
    """Return the mean of the tenth with the highest keys, and of those that equal the last one of
    it."""
    least = sorted(map(key, arrivals))[-max(1, len(arrivals) // 10)]
    return statistics.fmean(arrival.ttft_s for arrival in arrivals if key(arrival) >= least)


def measure(
    mix: Mix, order: Callable[[Arrival], float] | None, options: argparse.Namespace
) -> Times:
    arrivals = mix.arrivals()
    Engine(order, options.blocks, options.long_prefill_tokens).serve(arrivals)
    return Times.of(arrivals)


def main() -> None:
    options = parse()
    if not HAS_VLLM:
        print("vLLM is not installed here: `make interop`, then .venv-interop/bin/python")
        return
    for document_tokens in options.document_tokens:
        for load in options.load:
            mixes = [
                Mix(document_tokens, load, options.requests, seed)
                for seed in range(options.first_seed, options.first_seed + options.seeds)
            ]
            peers = [measure(mix, None, options) for mix in mixes]
            for name in options.order:
                for rate in options.ageing_tokens_per_s if name.startswith("aged") else [0.0]:
                    order = order_of(name, rate)
                    found = [measure(mix, order, options) for mix in mixes] if order else peers
                    label = f"{name} {rate:g}" if rate else name
                    _report(label, document_tokens, load, found, peers)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--document-tokens", type=int, nargs="+", default=[3000, 6000])
    parser.add_argument("--load", type=float, nargs="+", default=[0.85, 0.95])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--ageing-tokens-per-s",
        type=float,
        nargs="+",
        default=[OverloadConfig().ageing_tokens_per_s],
        help="the engine computes 8,000",
    )
    parser.add_argument("--blocks", type=int, default=40_000, help="of 16 tokens")
    parser.add_argument("--long-prefill-tokens", type=int, default=0, help="vLLM's threshold")
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=list(ORDERS))
    return parser.parse_args()


def _report(
    order: str, document_tokens: int, load: float, found: Sequence[Times], peers: Sequence[Times]
) -> None:
    ratios = {
        name: [
            getattr(each, name) / getattr(peer, name)
            for each, peer in zip(found, peers, strict=True)
        ]
        for name in ("mean", "p99", "longest", "heaviest", "token_seconds")
    }
    report(
        "order",
        order=order,
        document_tokens=document_tokens,
        load=load,
        seeds=len(found),
        mean_ms=round(statistics.fmean(each.mean for each in found) * 1000, 1),
        p99_ms=round(statistics.fmean(each.p99 for each in found) * 1000, 1),
        **{
            f"{name}_ratio": round(statistics.geometric_mean(ratio), 3)
            for name, ratio in ratios.items()
        },
        mean_ratios=[round(ratio, 2) for ratio in ratios["mean"]],
        p99_ratios=[round(ratio, 2) for ratio in ratios["p99"]],
    )


if __name__ == "__main__":
    main()
