"""What becomes of three times as many requests as the replicas can serve?

    python -m benchmarks.overload --seconds 300

A real router before replicas with a capacity: each serves so many requests at a time, for as long
as their tokens take, and lets the rest wait. Requests come at random, whatever becomes of the
others (an open loop): urgent ones, and those of three tenants, of which one asks for less than its
share, one for more, and one for several times as much. First without overload, for comparison.

`goodput` is in tokens, of the capacity. `share` is what a tenant got, of what it would get if all
of the time were divided fairly (max-min). Waiting times of this process and of a busy machine count
as the replicas'.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from benchmarks.figures import report
from tests.support.engine_stub import EngineStub, Exchange, unique
from tests.support.http_client import Answer, connect
from tests.support.router_process import RouterProcess, router_process

MIB = 1024 * 1024
PROMPT_TOKENS, RESPONSE_TOKENS = 150, 50
"""These are averages; both are spread widely."""
_PATIENCE_S = 600


class Flow(NamedTuple):
    """Requests of one kind."""

    tenant: str
    priority: str
    load: float
    """The load as a multiple of the capacity."""


OVERLOAD = (
    Flow("urgent", "high", 0.15),
    Flow("light", "normal", 0.25),
    Flow("steady", "normal", 0.8),
    Flow("flood", "normal", 1.8),
)
CALM = (Flow("urgent", "high", 0.15), Flow("light", "normal", 0.25))


@dataclass
class Fleet:
    """Replicas that serve *slots* requests at a time each, for *per_token_s* each token."""

    replicas: int
    slots: int
    per_token_s: float
    model: str = field(default_factory=lambda: unique("overload"))
    stubs: list[EngineStub] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(2))

    @property
    def tokens_per_s(self) -> float:
        return self.replicas * self.slots / self.per_token_s

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        for _ in range(self.replicas):
            room = asyncio.Semaphore(self.slots)

            async def serve(exchange: Exchange, room: asyncio.Semaphore = room) -> None:
                await self._serve(exchange, room)

            stub = EngineStub(self.model, serve)
            self.stubs.append(await stack.enter_async_context(stub))

    async def _serve(self, exchange: Exchange, room: asyncio.Semaphore) -> None:
        prompt = len(exchange.request.prompt_ids)
        exchange.stub.requests.clear()
        response = min(1 + int(self.random.expovariate(1 / RESPONSE_TOKENS)), 5 * RESPONSE_TOKENS)
        async with room:
            await asyncio.sleep((prompt + response) * self.per_token_s)
        usage = {"prompt_tokens": prompt, "completion_tokens": response}
        body = {"id": "x", "choices": [{"index": 0, "text": "."}], "usage": usage}
        await exchange.whole(json.dumps(body).encode())


@dataclass
class Outcome:
    """The outcome of the requests of one phase."""

    sent: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    """The tokens of those that were served within the measured time."""
    refused: Counter[tuple[str, int]] = field(default_factory=Counter)
    untold: int = 0
    """Refused without a time to come back."""
    lost: int = 0
    """Neither served nor refused."""
    latencies: dict[str, list[float]] = field(default_factory=dict)

    def quantile(self, tenant: str, share: float) -> float:
        ordered = sorted(self.latencies.get(tenant, [])) or [0.0]
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class Clients:
    """Send requests at random times for *seconds*; what comes in the first tenth only fills the
    line."""

    def __init__(self, router: RouterProcess, fleet: Fleet, seed: int = 1) -> None:
        self._router = router
        self._fleet = fleet
        self._random = Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, flows: Sequence[Flow], seconds: float) -> tuple[Outcome, list[float]]:
        """Return what became of them, and the router's memory meanwhile, in MiB."""
        outcome, memory = Outcome(), []
        per_s = self._fleet.tokens_per_s / (PROMPT_TOKENS + RESPONSE_TOKENS)
        weights = [flow.load for flow in flows]
        started = time.monotonic()
        window = started + seconds / 10, started + seconds
        at = started
        while at < window[1]:
            at += self._random.expovariate(per_s * sum(weights))
            await asyncio.sleep(at - time.monotonic())
            (flow,) = self._random.choices(flows, weights)
            task = asyncio.create_task(self._ask(flow, outcome, window))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if time.monotonic() - started > len(memory) * seconds / 20:
                memory.append(self._router.rss_bytes / MIB)
        await asyncio.gather(*self._tasks)
        return outcome, memory

    async def _ask(self, flow: Flow, outcome: Outcome, window: tuple[float, float]) -> None:
        count = min(16 + int(self._random.expovariate(1 / (PROMPT_TOKENS - 16))), 3000)
        prompt = [self._random.randrange(100_000) for _ in range(count)]
        body = {"model": self._fleet.model, "prompt": prompt}
        headers = {"x-tenant": flow.tenant, "x-priority": flow.priority}
        started, tenant = time.monotonic(), flow.tenant
        outcome.sent[tenant] += 1
        try:
            async with connect(self._router.port) as client:
                await client.send("POST", "/v1/completions", body, headers)
                await client.read_head(_PATIENCE_S)
                found = Answer(client.status, client.headers, await client.read_body())
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            outcome.lost += 1
            return
        now = time.monotonic()
        if found.status != 200:
            outcome.refused[tenant, found.status] += 1
            outcome.untold += int(found.headers.get("retry-after", "0")) < 1
            return
        outcome.served[tenant] += 1
        if window[0] <= now < window[1]:
            usage = found.json["usage"]
            outcome.tokens[tenant] += usage["prompt_tokens"] + usage["completion_tokens"]
        if started >= window[0]:
            outcome.latencies.setdefault(tenant, []).append(now - started)


def fair_shares(flows: Sequence[Flow]) -> dict[str, float]:
    """Return each tenant's fair share of the capacity: those of high priority get what they ask
    for, the others share what is left, and none gets more than it asks for (max-min)."""
    shares = {flow.tenant: flow.load for flow in flows if flow.priority == "high"}
    left = 1.0 - sum(shares.values())
    waiting = sorted((flow for flow in flows if flow.priority != "high"), key=lambda f: f.load)
    for number, flow in enumerate(waiting):
        shares[flow.tenant] = min(flow.load, left / (len(waiting) - number))
        left -= shares[flow.tenant]
    return shares


def config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the router's configuration."""
    overload = {
        "priority_header": "x-priority",
        "tenant_header": "x-tenant",
        "max_in_flight": options.slots,
        "max_wait_s": options.max_wait,
        "max_waiting": options.max_waiting,
    }
    return {
        "health": {"interval_s": 10, "timeout_s": 10, "engine_load_stale_after_s": 20},
        "observability": {"log_level": "warning"},
        # What is remembered of prompts grows up to bounds of its own.
        "approximate": {"enabled": False},
        "overload": {} if options.without_queue else overload,
    }


async def measure(options: argparse.Namespace) -> None:
    fleet = Fleet(options.replicas, options.slots, options.service_ms / 1000 / _TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        await fleet.start(stack)
        router = stack.enter_context(router_process(config(options)))
        await stack.enter_async_context(router.serving(*fleet.stubs))
        calm, _ = await Clients(router, fleet, seed=3).send(CALM, options.calm_seconds)
        clients = Clients(router, fleet)
        outcome, memory = await clients.send(OVERLOAD, options.seconds)
        await router.until_idle()
        tell(options, fleet, calm, outcome, memory)


_TOKENS = PROMPT_TOKENS + RESPONSE_TOKENS


def tell(
    options: argparse.Namespace, fleet: Fleet, calm: Outcome, outcome: Outcome, memory: list[float]
) -> None:
    """Print the figures."""
    measured_s = options.seconds * 0.9
    tokens_per_s = fleet.tokens_per_s
    fair = fair_shares(OVERLOAD)
    settled = memory[len(memory) // 4 :] or [0.0]
    report(
        "overload",
        queue=not options.without_queue,
        seconds=options.seconds,
        replicas=options.replicas,
        slots=options.slots,
        requests=sum(outcome.sent.values()),
        served=sum(outcome.served.values()),
        refused={f"{status}": count for status, count in _by_status(outcome.refused).items()},
        without_retry_after=outcome.untold,
        lost=outcome.lost,
        goodput=round(sum(outcome.tokens.values()) / measured_s / tokens_per_s, 3),
        share={
            tenant: round(outcome.tokens[tenant] / measured_s / tokens_per_s / fair[tenant], 3)
            for tenant in fair
        },
        urgent_p50_s=round(outcome.quantile("urgent", 0.5), 3),
        urgent_p99_s=round(outcome.quantile("urgent", 0.99), 3),
        calm_urgent_p50_s=round(calm.quantile("urgent", 0.5), 3),
        calm_urgent_p99_s=round(calm.quantile("urgent", 0.99), 3),
        urgent_refused=sum(
            count for (tenant, _), count in outcome.refused.items() if tenant == "urgent"
        ),
        light_p99_s=round(outcome.quantile("light", 0.99), 3),
        router_mib=[round(settled[0], 1), round(max(settled), 1), round(settled[-1], 1)],
    )


def _by_status(refused: Mapping[tuple[str, int], int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for (_, status), count in refused.items():
        found[status] += count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of overload")
    parser.add_argument("--calm-seconds", type=float, default=60.0, help="before it, without")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8, help="requests at a time, of each replica")
    parser.add_argument("--service-ms", type=float, default=4000.0, help="of a mean request")
    parser.add_argument("--max-wait", type=float, default=30.0, help="seconds, in the router")
    parser.add_argument("--max-waiting", type=int, default=200, help="requests, in the router")
    parser.add_argument(
        "--without-queue", action="store_true", help="all of them wait at the replicas"
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
