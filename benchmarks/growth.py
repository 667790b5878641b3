"""Do memory and requests/s stay flat? Many requests with unique prompts pass through a real router,
whose replicas store and evict.

    python -m benchmarks.growth --requests 200000

The replicas and clients run in this process, the router in another. This exercises everything that
a router keeps per prompt: the index, recently sent prefixes, and with --text-share the cache of
token ids, which fills up to its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from benchmarks.figures import report, slope
from tests.support.engine_stub import EngineStub, Exchange, always, unique
from tests.support.http_client import HttpClient, connect
from tests.support.router_process import RouterProcess, router_process

MIB = 1024 * 1024
ANSWER = json.dumps(
    {"id": "x", "choices": [{"index": 0, "text": "."}], "usage": {"prompt_tokens": 1}}
).encode()
EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'e\r\ndata: {"a":1}\n\r\n1\r\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)
CONFIG = {
    "server": {"max_concurrent_requests": 10_000},
    "health": {"interval_s": 10, "timeout_s": 10, "engine_load_stale_after_s": 20},
    "observability": {"log_level": "warning"},
}


class Slice(NamedTuple):
    """What one slice of the requests cost."""

    requests: int
    requests_per_s: float
    rss_mib: float


class Replica:
    """Holds the last *held* prompts that it was sent, and publishes that."""

    def __init__(self, model: str, held: int) -> None:
        self.stub = EngineStub(
            model,
            self.serve,
            has_events=True,
            tokenizing=always(b'{"tokens": [1, 2, 3], "count": 3}'),
        )
        self._held = held
        self._prompts: deque[list[int]] = deque()

    async def serve(self, exchange: Exchange) -> None:
        """Respond, and store the prompt."""
        body = exchange.request.json
        self.stub.requests.clear()
        if isinstance(body["prompt"], list):
            self._take(body["prompt"])
        if body["stream"]:
            await exchange.send(EVENTS)
        else:
            await exchange.whole(ANSWER)

    def _take(self, ids: list[int]) -> None:
        self._prompts.append(ids)
        self.stub.store(ids)
        if len(self._prompts) > self._held:
            self.stub.evict(self._prompts.popleft())


@dataclass
class Requests:
    """Request bodies, all different."""

    model: str
    tokens: int
    stream_share: float
    text_share: float

    def __post_init__(self) -> None:
        self._random = Random(0)
        self._made = 0

    def take(self, count: int) -> Iterator[dict[str, Any]]:
        """Return the next *count* of them."""
        for _ in range(count):
            self._made += 1
            yield {
                "model": self.model,
                "prompt": self._prompt(),
                "stream": self._random.random() < self.stream_share,
            }

    def _prompt(self) -> Any:
        if self._random.random() < self.text_share:
            return f"{self._made} " * (self.tokens // 2)
        first = self._made * 7919
        return [(first + index * 104_729) % 2**31 for index in range(self.tokens)]


async def work(client: HttpClient, bodies: Iterator[dict[str, Any]]) -> None:
    """Act as one client: one request at a time, as long as there are any."""
    for body in bodies:
        answer = await client.ask("POST", "/v1/completions", body)
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")


async def run_slice(
    router: RouterProcess, requests: Requests, count: int, concurrency: int
) -> Slice:
    """Send *count* of the requests, then measure the router."""
    began = time.perf_counter()
    bodies = requests.take(count)
    await asyncio.gather(*(run_client(router, bodies) for _ in range(concurrency)))
    rate = count / (time.perf_counter() - began)
    return Slice(count, round(rate, 1), round(router.rss_bytes / MIB, 2))


async def run_client(router: RouterProcess, bodies: Iterator[dict[str, Any]]) -> None:
    async with connect(router.port) as client:
        await work(client, bodies)


def summary(slices: list[Slice]) -> dict[str, float]:
    """How memory and speed change over time, without the first fifth, in which caches fill."""
    counted = slices[len(slices) // 5 :]
    thousands = [
        sum(part.requests for part in slices[: slices.index(part) + 1]) / 1000 for part in counted
    ]
    rates = [part.requests_per_s for part in counted]
    return {
        "rss_kib_per_1000_requests": round(
            1024 * slope(list(zip(thousands, (part.rss_mib for part in counted), strict=True))), 3
        ),
        "requests_per_s_mean": round(sum(rates) / len(rates), 1),
        "requests_per_s_change_per_1000_requests": round(
            slope(list(zip(thousands, rates, strict=True))), 3
        ),
        "rss_mib_first": counted[0].rss_mib,
        "rss_mib_last": counted[-1].rss_mib,
    }


async def growth(arguments: argparse.Namespace) -> None:
    """Run the whole benchmark."""
    model = unique("model")
    replicas = [Replica(model, arguments.held_prompts) for _ in range(arguments.replicas)]
    stubs = [replica.stub for replica in replicas]
    slices: list[Slice] = []
    with router_process(CONFIG) as router:
        for stub in stubs:
            await stub.start()
        async with router.serving(*stubs):
            requests = Requests(
                model, arguments.prompt_tokens, arguments.stream_share, arguments.text_share
            )
            for number in range(arguments.slices):
                count = arguments.requests // arguments.slices
                slices.append(await run_slice(router, requests, count, arguments.concurrency))
                report("growth", slice=number + 1, **slices[-1]._asdict())
            await router.until_idle()
        for stub in stubs:
            await stub.stop()
    report("growth", requests=sum(part.requests for part in slices), **summary(slices))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--held-prompts",
        type=int,
        default=500,
        help="that each replica keeps before it evicts the oldest",
    )
    parser.add_argument("--stream-share", type=float, default=0.5)
    parser.add_argument(
        "--text-share", type=float, default=0.0, help="prompts that a replica has to tokenise"
    )
    asyncio.run(growth(parser.parse_args()))


if __name__ == "__main__":
    main()
