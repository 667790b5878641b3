"""How often is it known how much of a prompt will be cached when its engine admits it?

Small engines of `offload`, or vLLM's own scheduler and cache manager (`--engine vllm`, in the
environment of `make interop`), in virtual time, with the router's own index, mirror and policy in
front of them. A number of clients keep a request each in flight: turns of conversations that share
system prompts, and questions about documents. An engine admits a request behind those that were
sent there before, which store their prompts and evict others, so what is cached at the decision is
not what the engine finds. For each layout and cache size one line tells how often either was exact,
with the same requests.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.figures import report
from benchmarks.simulation.contract import Account
from benchmarks.simulation.layouts import TIME_MODEL, ReplicaConfig
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import LEAST_DELAY, SimulatedRouter
from benchmarks.simulation.timeline import Timeline
from kvevents.events import EventBatch
from kvevents.hashing import HashChain
from kvevents.publisher import announce
from kvroute_engine.core.model_config import LayerKind, TransformerConfig
from kvroute_engine.core.requests import EngineRequest, SamplingParams, StepOutput
from router.routing.steering import Hints
from tests.interop import layouts as interop

try:
    from benchmarks.simulation.vllm_engine import Stepped, VllmEngine, VllmReplica, VllmRequest
    from kvroute_vllm.layout import describe
    from kvroute_vllm.plugin import register
    from tests.interop.offloading_engine import Steps

    HAS_VLLM = True
except ImportError:  # only the environment of `make interop` has vLLM
    HAS_VLLM = False

VOCABULARY = 50_000
SYSTEM_PROMPTS, TURNS, QUESTIONS = 3, 4, 4
TOGETHER = 0.03
"""Questions about a document are within this share of all requests, on average."""
BLOCK_SIZE, STEP_TOKENS, MOST_RUNNING = 16, 2048, 64
RELEASE = (0, 33)
EVENT_DELAY_S = 0.001
SCRAPE_INTERVAL_S = 2.0


@dataclass(frozen=True)
class PatternConfig(ReplicaConfig):
    """An engine of any pattern of layers."""

    pattern: tuple[LayerKind, ...] = ()

    def model(self) -> TransformerConfig:
        """See `EngineConfig`."""
        return replace(super().model(), layers=self.pattern or super().model().layers)


_W, _F, _S = LayerKind.SLIDING_WINDOW, LayerKind.FULL, LayerKind.STATE
LAYOUTS = {
    "swa, swa, full": PatternConfig(sliding_window=64, pattern=(_W, _W, _F)),
    "full": PatternConfig(pattern=(_F,)),
    "mamba hybrid": PatternConfig(pattern=(_S, _S, _S, _F)),
    "gptoss": PatternConfig(sliding_window=128, pattern=(_W, _F)),
    "gemma": PatternConfig(sliding_window=512, pattern=(_W, _W, _W, _W, _W, _F)),
}
VLLM_LAYOUTS = {
    "swa, swa, full": (interop.window(64), interop.window(64), interop.full()),
    "full": (interop.full(),),
    "mamba hybrid": (*[interop.mamba()] * 3, interop.full()),
    "gptoss": (interop.window(128), interop.full()),
    "gemma": (*[interop.window(512)] * 5, interop.full()),
}
"""The same in vLLM's words."""
BLOCKS = {"swa, swa, full": 700, "full": 420, "mamba hybrid": 600, "gptoss": 560, "gemma": 2000}
"""The blocks of a starved cache, which evicts all the time."""
AMPLE = 8
"""An ample one has so many times as many."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="offload", choices=["offload", "vllm"])
    parser.add_argument(
        "--announced", action="store_true", help="vLLM's layout, as by the plug-in's publisher"
    )
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--cache", nargs="+", default=["starved", "ample"])
    parser.add_argument("--policy", default=LEAST_DELAY, help="told: with retention hints")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=16, help="requests, over all replicas")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--documents", type=int, default=52)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    if options.engine == "vllm" and not HAS_VLLM:
        print("vLLM is not installed here: `make interop`, then .venv-interop/bin/python")
        return
    for layout in options.layout:
        for cache in options.cache:
            blocks = BLOCKS[layout] * (AMPLE if cache == "ample" else 1)
            found = [one for seed in options.seeds for one in _play(layout, blocks, options, seed)]
            _report(layout, cache, options, found)


@dataclass(slots=True)
class Predicted:
    """One request, in tokens of its prompt."""

    at_decision: int
    at_admission: int
    found: int = 0
    """The prompt tokens that the engine found cached."""


def _play(layout: str, blocks: int, options: argparse.Namespace, seed: int) -> list[Predicted]:
    prompts = conversations_and_questions(options.conversations, options.documents, seed)
    if options.engine == "vllm" and ", " in options.policy:
        register()
    if options.engine == "vllm":
        make = _vllm(layout, blocks, options.announced)
    else:
        make = _offload(layout, blocks)
    clients = Clients(make, blocks, options.policy, options.replicas, prompts)
    return clients.play(options.in_flight)


def conversations_and_questions(conversations: int, documents: int, seed: int) -> list[list[int]]:
    """Return turns that extend the last ones, in rounds, and questions about documents, close
    together."""
    chance = random.Random(seed)
    systems = [_tokens(chance, 150, 400) for _ in range(SYSTEM_PROMPTS)]
    planned = []
    for number in range(conversations):
        at = chance.random() / TURNS
        for turn, prompt in enumerate(_turns(chance, systems[number % SYSTEM_PROMPTS], TURNS)):
            planned.append((at + turn / TURNS, prompt))
    for _ in range(documents):
        at, document = chance.random(), _tokens(chance, 300, 1500)
        for _ in range(QUESTIONS):
            question = _tokens(chance, 20, 60)
            planned.append((at + chance.expovariate(1 / TOGETHER), [*document, *question]))
    return [prompt for _, prompt in sorted(planned)]


def _turns(chance: random.Random, head: list[int], turns: int) -> list[list[int]]:
    prompts = []
    for _ in range(turns):
        head = [*head, *_tokens(chance, 40, 160)]
        prompts.append(head)
    return prompts


def _tokens(chance: random.Random, least: int, most: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(chance.randint(least, most))]


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """A request at a replica."""

    name: str
    tokens: list[int]
    output_tokens: int
    hints: Hints


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of a step for a request that got a token."""

    name: str
    cached_tokens: int | None
    """The cached tokens of its prompt; None where they are not reported again."""
    is_over: bool


class Replica(Protocol):
    """An engine on the timeline."""

    def add(self, sent: Sent) -> None:
        """Queue a request now."""

    def gauges(self) -> tuple[int, int, float]:
        """Return requests running, requests waiting, and the share of the blocks that they hold."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings that a replica is put into."""

    name: str
    timeline: Timeline
    router: SimulatedRouter
    take: Callable[[Sequence[Progress]], None]


MakeReplica = Callable[[Surroundings], Replica]


def _offload(layout: str, blocks: int) -> MakeReplica:
    config = replace(
        LAYOUTS[layout],
        num_blocks=blocks,
        simulate=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=STEP_TOKENS,
        time_model=TIME_MODEL,
    )
    return lambda around: OffloadReplica(config, around)


class OffloadReplica:
    """A replica with `offload`."""

    def __init__(self, config: ReplicaConfig, around: Surroundings) -> None:
        self._take = around.take
        self._replica = SimulatedReplica(
            around.name,
            config,
            around.timeline,
            EVENT_DELAY_S,
            around.router.take_batch,
            self._take_outputs,
        )

    def add(self, sent: Sent) -> None:
        """See `Replica`."""
        keep, keep_end = sent.hints
        self._replica.add(
            EngineRequest(
                sent.name,
                sent.tokens,
                SamplingParams(max_tokens=sent.output_tokens, ignore_eos=True),
                kv_transfer_params={"kvroute": {"keep": list(keep), "keep_end": keep_end}},
            )
        )

    def gauges(self) -> tuple[int, int, float]:
        """See `Replica`."""
        counts = self._replica.engine.scheduler.statistics()
        return counts.num_running, counts.num_waiting, self._replica.engine.cache.usage

    def _take_outputs(self, outputs: Sequence[StepOutput], _step_s: float) -> None:
        self._take(
            [
                Progress(each.request_id, each.num_cached_tokens, bool(each.finish_reason))
                for each in outputs
            ]
        )


def _vllm(layout: str, blocks: int, is_announced: bool) -> MakeReplica:
    groups = interop.layout(*VLLM_LAYOUTS[layout], retention_interval=0)

    def make(around: Surroundings) -> Replica:
        replica = VllmsReplica(groups, blocks, around)
        if is_announced:
            replica.announce(around)
        return replica

    return make


class VllmsReplica:
    """A replica with vLLM's scheduler."""

    def __init__(self, layout: interop.Layout, blocks: int, around: Surroundings) -> None:
        self._take, self._timeline = around.take, around.timeline
        steps = Steps(MOST_RUNNING, STEP_TOKENS)
        self._replica = VllmReplica(
            lambda publish: VllmEngine(layout, blocks, steps, publish),
            around.timeline,
            EVENT_DELAY_S,
            lambda batch: around.router.take_batch(around.name, batch),
            self._take_step,
        )

    def announce(self, around: Surroundings) -> None:
        """Tell the layout, which is learned from events otherwise."""
        layout = announce(describe(self._replica.engine.scheduler, RELEASE), HashChain.from_seed())
        around.router.take_batch(around.name, EventBatch(around.timeline.now_s, (layout,)))

    def add(self, sent: Sent) -> None:
        """See `Replica`."""
        keep, keep_end = sent.hints
        named = {"kvroute_keep": list(keep), "kvroute_keep_end": keep_end}
        self._replica.add(
            VllmRequest(
                sent.name,
                sent.tokens,
                sent.output_tokens,
                self._timeline.now_s,
                extra_args=named if keep or keep_end else None,
            )
        )

    def gauges(self) -> tuple[int, int, float]:
        """See `Replica`."""
        scheduler = self._replica.engine.scheduler
        return len(scheduler.running), len(scheduler.waiting), scheduler.kv_cache_manager.usage

    def _take_step(self, stepped: Sequence[Stepped]) -> None:
        self._take(
            [Progress(each.name, each.cached, each.is_over) for each in stepped if each.has_token]
        )


# --- clients --------------------------------------------------------------------------------------


class Clients:
    """Requests in the order of *prompts*, the next one sent when one has ended."""

    def __init__(
        self,
        make: MakeReplica,
        blocks: int,
        policy: str,
        replicas: int,
        prompts: Sequence[list[int]],
    ) -> None:
        self._timeline = Timeline()
        names = [f"replica-{number}" for number in range(replicas)]
        self._router = SimulatedRouter(policy, names, self._timeline.now, cache_blocks=blocks)
        self._replicas = {
            name: make(Surroundings(name, self._timeline, self._router, self._take))
            for name in names
        }
        self._prompts = list(enumerate(prompts))[::-1]
        self._accounts: dict[str, Account] = {}
        self._predicted: dict[str, Predicted] = {}
        self._waiting: set[str] = set()

    def play(self, in_flight: int) -> list[Predicted]:
        """Send all, *in_flight* at a time."""
        self._timeline.at(0.0, self._scrape)
        for number in range(in_flight):
            self._timeline.at(0.01 + number * 0.002, self._send)
        self._timeline.run()
        return list(self._predicted.values())

    def _send(self) -> None:
        if not self._prompts:
            return
        number, tokens = self._prompts.pop()
        name = f"request-{number}"
        routed = self._router.route("", tokens)
        self._predicted[name] = Predicted(routed.predicted_tokens, routed.expected_tokens)
        self._accounts[name] = routed.account
        self._waiting.add(name)
        self._replicas[routed.replica_id].add(Sent(name, tokens, 4 + number % 9, routed.hints))

    def _take(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            name = each.name
            if name in self._waiting:
                self._waiting.remove(name)
                assert each.cached_tokens is not None, "it comes with the first token"
                self._predicted[name].found = each.cached_tokens
                self._accounts[name].first_token()
            if each.is_over:
                self._accounts.pop(name).ended()
                self._timeline.at(self._timeline.now_s + EVENT_DELAY_S, self._send)

    def _scrape(self) -> None:
        for name, replica in self._replicas.items():
            self._router.take_engine_load(name, *replica.gauges())
        if self._prompts or self._accounts:
            self._timeline.at(self._timeline.now_s + SCRAPE_INTERVAL_S, self._scrape)


def _report(
    layout: str, cache: str, options: argparse.Namespace, predicted: Sequence[Predicted]
) -> None:
    count = len(predicted)
    report(
        "admission",
        engine=options.engine,
        announced=options.announced or options.engine == "offload",
        layout=layout,
        cache=cache,
        policy=options.policy,
        replicas=options.replicas,
        in_flight=options.in_flight,
        requests=count,
        hits=sum(one.found > 0 for one in predicted),
        exact_at_decision=round(sum(one.at_decision == one.found for one in predicted) / count, 4),
        exact_at_admission=round(
            sum(one.at_admission == one.found for one in predicted) / count, 4
        ),
        over=sum(one.at_admission > one.found for one in predicted),
        under=sum(one.at_admission < one.found for one in predicted),
        mean_error_tokens=round(
            sum(abs(one.at_admission - one.found) for one in predicted) / count, 1
        ),
    )


if __name__ == "__main__":
    main()
