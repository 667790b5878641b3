"""A router that starts takes what is known of all caches from one that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvevents.codec import encode
from kvevents.events import EventBatch
from router.feed.snapshot_peers import peer_key
from tests.support.blocks import FULL, Prefix
from tests.support.engine_stub import EngineStub, engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import VllmPublisher, free_port

PROMPT = list(range(1, 130))
NAME = "127.0.0.1"


def stored(start: int, end: int) -> bytes:
    return encode(EventBatch(1.0, [Prefix(PROMPT).stored(0, FULL, start, end)], 0))


class Fleet:
    """One engine, whose ring is too short for a router that comes late, and routers that know of
    each other."""

    def __init__(self, stub: EngineStub, publisher: VllmPublisher) -> None:
        self._stub = stub
        self._publisher = publisher

    def config(
        self,
        peers: list[str],
    ) -> dict[str, Any]:
        source = {
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "topic": "kv-events",
        }
        replica = {"url": self._stub.url, "id": self._stub.name, "kv_events": [source]}
        return {
            "health": QUICK_HEALTH,
            "replicas": [replica],
            "board": {"secret": "shared"},
            "state": {"peers": peers, "peer_timeout_s": 5.0},
        }

    async def hit(self, router: RouterProcess) -> tuple[int, bool]:
        body = {"model": self._stub.model, "token_ids": PROMPT}
        found = (await router.post("/route", body)).json["hit"]
        return found["cached_tokens"], found["suspect"]

    async def until_settled(self, router: RouterProcess) -> str:
        """Wait until it knows all that it can; return the state of its stream."""
        while True:
            (source,) = (await router.replica(self._stub.name))["sources"] or (None,)
            feed = source and source["feed"]
            if feed and feed["state"] in ("live", "suspect"):
                return str(feed["state"])

    async def until_all_is_known(self, router: RouterProcess) -> None:
        """Publish what a router that comes later will find nowhere else."""
        await self.until_settled(router)
        for start in range(0, 128, 16):
            self._publisher.publish(stored(start, start + 16))
        await self.until_all_is_hit(router)

    async def until_all_is_hit(self, router: RouterProcess) -> None:
        while await self.hit(router) != (128, False):
            pass


@contextmanager
def short_memory() -> Iterator[VllmPublisher]:
    with VllmPublisher(ring=2) as publisher:
        publisher.publish(encode(EventBatch(1.0, [], 0)))
        yield publisher


async def test_a_router_that_starts_knows_what_its_peer_knows() -> None:
    """Its engine no longer has what came first: without the peer it would not be known again
    before the engine restarts. A peer that is not there costs nothing."""
    nobody = f"http://{NAME}:{free_port()}"
    async with engines(1) as (stub,):
        with short_memory() as publisher, ExitStack() as stack:
            fleet = Fleet(stub, publisher)
            first = stack.enter_context(router_process(fleet.config([nobody])))
            await fleet.until_all_is_known(first)
            assert (await first.get("/snapshot")).status == 401
            stolen = {"authorization": f"Bearer {peer_key(b'another secret')}"}
            assert (await first.get("/snapshot", stolen)).status == 401
            second = stack.enter_context(router_process(fleet.config([nobody, first.url])))
            assert await fleet.until_settled(second) == "live"
            # What the data plane knows of the stream's state follows a moment later.
            await fleet.until_all_is_hit(second)
            metrics = await second.metrics()
            assert metrics.sum("kvroute_snapshots_taken_total") == 1
            assert metrics.sum("kvroute_snapshots_resumed_sources_total") == 1
            assert (await first.metrics()).sum("kvroute_snapshots_sent_total") == 1
