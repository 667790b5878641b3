"""How often is it known how much of a prompt will be cached when its engine admits it?

Small engines of `offload` in virtual time, with the router's own index, mirror and policy in front
of them. A number of clients keep a request each in flight: turns of conversations that share system
prompts, and questions about documents. An engine admits a request behind those that were sent there
before, which store their prompts and evict others, so what is cached at the decision is not what
the engine finds. For each layout and cache size one line tells how often either was exact, with the
same requests.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import report
from benchmarks.simulation.contract import Account
from benchmarks.simulation.layouts import TIME_MODEL, ReplicaConfig
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import LEAST_DELAY, SimulatedRouter
from benchmarks.simulation.timeline import Timeline
from offload.engine.core.model_config import LayerKind, TransformerConfig
from offload.engine.core.requests import EngineRequest, SamplingParams, StepOutput

VOCABULARY = 50_000
SYSTEM_PROMPTS, TURNS, QUESTIONS = 3, 4, 4
TOGETHER = 0.03
"""Questions about a document are within this share of all requests, on average."""
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
BLOCKS = {"swa, swa, full": 700, "full": 420, "mamba hybrid": 600, "gptoss": 560, "gemma": 2000}
"""Of a starved cache, which evicts all the time."""
AMPLE = 8
"""An ample one has so many times as many."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    for layout in options.layout:
        for cache in options.cache:
            blocks = BLOCKS[layout] * (AMPLE if cache == "ample" else 1)
            config = replace(LAYOUTS[layout], num_blocks=blocks)
            found = [one for seed in options.seeds for one in _play(config, options, seed)]
            _report(layout, cache, options, found)


@dataclass(slots=True)
class Predicted:
    """One request, in tokens of its prompt."""

    at_decision: int
    at_admission: int
    found: int = 0
    """By the engine."""


def _play(config: ReplicaConfig, options: argparse.Namespace, seed: int) -> list[Predicted]:
    prompts = conversations_and_questions(options.conversations, options.documents, seed)
    return Clients(config, options.policy, options.replicas, prompts).play(options.in_flight)


def conversations_and_questions(conversations: int, documents: int, seed: int) -> list[list[int]]:
    """Turns that extend the last ones, in rounds, and questions about documents, close together."""
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


class Clients:
    """Requests in the order of *prompts*, the next one sent when one has ended."""

    def __init__(
        self, config: ReplicaConfig, policy: str, replicas: int, prompts: Sequence[list[int]]
    ) -> None:
        self._timeline = Timeline()
        names = [f"replica-{number}" for number in range(replicas)]
        self._router = SimulatedRouter(
            policy, names, self._timeline.now, cache_blocks=config.num_blocks
        )
        config = replace(
            config, simulate=True, block_size=16, max_num_batched_tokens=2048, time_model=TIME_MODEL
        )
        self._replicas = {
            name: SimulatedReplica(
                name,
                config,
                self._timeline,
                EVENT_DELAY_S,
                self._router.take_batch,
                self._take_outputs,
            )
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
        keep, keep_end = routed.hints
        self._replicas[routed.replica_id].add(
            EngineRequest(
                name,
                tokens,
                SamplingParams(max_tokens=4 + number % 9, ignore_eos=True),
                kv_transfer_params={"kvroute": {"keep": list(keep), "keep_end": keep_end}},
            )
        )

    def _take_outputs(self, outputs: Sequence[StepOutput], _step_s: float) -> None:
        for output in outputs:
            name = output.request_id
            if name in self._waiting:
                self._waiting.remove(name)
                self._predicted[name].found = output.num_cached_tokens
                self._accounts[name].first_token()
            if output.finish_reason:
                self._accounts.pop(name).ended()
                self._timeline.at(self._timeline.now_s + EVENT_DELAY_S, self._send)

    def _scrape(self) -> None:
        for name, replica in self._replicas.items():
            counts = replica.engine.scheduler.statistics()
            usage = replica.engine.cache.usage
            self._router.take_engine_load(name, counts.num_running, counts.num_waiting, usage)
        if self._prompts or self._accounts:
            self._timeline.at(self._timeline.now_s + SCRAPE_INTERVAL_S, self._scrape)


def _report(
    layout: str, cache: str, options: argparse.Namespace, predicted: Sequence[Predicted]
) -> None:
    count = len(predicted)
    report(
        "admission",
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
