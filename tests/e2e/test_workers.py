"""Several processes that are one router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

from kvevents.codec import encode
from kvevents.events import EventBatch
from tests.support.blocks import FULL, Prefix
from tests.support.engine_stub import EngineStub, Exchange, after, unique
from tests.support.http_client import Answer, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import Reply, VllmPublisher
from tests.support.waiting import DEADLINE_S, eventually

WORKERS = 2
CONFIG = {"server": {"workers": WORKERS}, "health": QUICK_HEALTH}


def worker_processes(router: RouterProcess) -> list[int]:
    task = Path(f"/proc/{router.process.pid}/task/{router.process.pid}")
    return [int(pid) for pid in (task / "children").read_text().split()]


async def everywhere(router: RouterProcess, replica_id: str, **expected: Any) -> None:
    """Wait until so many answers in a row are as expected that no worker is left out."""
    in_a_row, deadline = 0, asyncio.get_running_loop().time() + DEADLINE_S
    while in_a_row < 20:
        answer = await router.get(f"/replicas/{replica_id}")
        found = answer.json if answer.status == 200 else {}
        in_a_row = in_a_row + 1 if expected.items() <= found.items() else 0
        assert asyncio.get_running_loop().time() < deadline, (expected, found)


async def complete(router: RouterProcess, stub: EngineStub) -> Answer:
    body = {"model": stub.model, "prompt": list(range(700)), "max_tokens": 1}
    return await router.post("/v1/completions", body)


async def test_several_workers_are_one_router() -> None:
    """An operator must not have to know which of them responds."""
    release = asyncio.Event()
    with router_process(CONFIG) as router:
        async with EngineStub(unique("worker")) as stub:
            added = await router.post("/replicas", {"url": stub.url, "id": stub.name})
            assert added.status == 201
            await everywhere(router, stub.name, state="healthy", models=[stub.model])
            await _see_each_others_load(router, stub, release)
            await _count_apart(router, stub)
            assert (await router.post(f"/replicas/{stub.name}/drain")).json["state"] == "draining"
            await everywhere(router, stub.name, state="draining")
            await _come_back(router, stub)
            await _stop_together(router)


async def _see_each_others_load(
    router: RouterProcess, stub: EngineStub, release: asyncio.Event
) -> None:
    stub.behaviour = after(release)
    request = asyncio.create_task(complete(router, stub))
    seen: set[tuple[int, int]] = set()
    while seen != {(1, 0), (0, 1)}:
        found = await router.replica(stub.name)
        own, others = found["load"]["prefilling_requests"], found["others"]["prefilling_requests"]
        seen |= {(own, others)} - {(0, 0)}
        assert not request.done()
    release.set()
    assert (await request).status == 200


async def _count_apart(router: RouterProcess, stub: EngineStub) -> None:
    answers = await asyncio.gather(*(complete(router, stub) for _ in range(40)))
    assert {answer.status for answer in answers} == {200}
    metrics = await router.metrics()
    requests = metrics.by("worker", "kvroute_requests_total")
    assert requests.keys() >= {"0", "1"}
    assert sum(requests.values()) == 41
    assert all(requests[str(number)] for number in range(WORKERS)), "the kernel deals them out"
    assert metrics.sum("kvroute_board_writers", worker="0") == WORKERS - 1
    await _shown_as_one(router, stub)


async def _shown_as_one(router: RouterProcess, stub: EngineStub) -> None:
    """Whichever worker responds, it shows the requests of all."""
    change, started = 0, set()
    for _ in range(8):  # connections are dealt to both
        found = (await router.get("/requests")).json
        assert len({request["request_id"] for request in found["requests"]}) == 41
        assert len({request["number"] for request in found["requests"]}) == 41
        changes = [request["change"] for request in found["requests"]]
        assert changes == sorted(changes, reverse=True)
        arrivals = {request["number"]: request["arrived_at"] for request in found["requests"]}
        assert list(dict(sorted(arrivals.items())).values()) == sorted(arrivals.values())
        assert len((await router.get("/requests?limit=7")).json["requests"]) == 7
        change = found["change"]
        overview = (await router.get("/overview")).json
        assert overview["minute"]["requests"] == 41
        started |= {found["started_at"], overview["started_at"]}
        hours = (await router.get(f"/history?replica={stub.name}")).json
        for hour in (hours["router"], hours["replicas"][stub.name]):
            rates = [rate for rate in hour["requests_per_s"] if rate]
            assert rates, "what both workers served"
    assert len(started) == 1, "the page would begin anew with every response of another worker"
    assert (await complete(router, stub)).status == 200
    for _ in range(8):
        found = (await router.get(f"/requests?after={change}")).json
        assert len(found["requests"]) == 1, "what changed since, wherever it was"


async def _come_back(router: RouterProcess, stub: EngineStub) -> None:
    """A worker that was killed is replaced, and its successor knows what an operator did."""
    killed, other = worker_processes(router)
    os.kill(killed, signal.SIGKILL)
    # Until it is gone, the kernel may deal it connections.
    await eventually(lambda: killed not in worker_processes(router), "it is gone")
    await router.until(
        lambda now: now.sum("kvroute_worker_restarts_total") == 1, "it was started again"
    )
    assert other in worker_processes(router)
    await everywhere(router, stub.name, state="draining")


class SlowToTell(EngineStub):
    """Says what it serves only when it may."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        self.is_asked = asyncio.Event()

    async def serve(self, exchange: Exchange) -> None:
        if exchange.request.path == "/v1/models" and not self.may_tell.is_set():
            self.is_asked.set()
            await exchange.wait(self.may_tell)
        await super().serve(exchange)


async def test_a_worker_that_is_started_again_gets_no_clients_before_it_knows_the_replicas() -> (
    None
):
    """The kernel deals it half of all connections as soon as it listens: they got 503, although the
    other worker could have served them."""
    config = {**CONFIG, "health": {**QUICK_HEALTH, "timeout_s": 0.25, "discovery_interval_s": 60.0}}
    with router_process(config) as router:
        async with SlowToTell(unique("worker")) as stub:
            added = await router.post("/replicas", {"url": stub.url, "id": stub.name})
            assert added.status == 201
            await everywhere(router, stub.name, state="healthy", models=[stub.model])
            stub.may_tell.clear()
            os.kill(worker_processes(router)[0], signal.SIGKILL)
            await stub.is_asked.wait()
            answers = [await complete(router, stub) for _ in range(20)]
            assert {answer.status for answer in answers} == {200}
            stub.may_tell.set()
            await router.until(
                lambda now: now.sum("kvroute_worker_restarts_total") == 1, "it is back"
            )


async def _stop_together(router: RouterProcess) -> None:
    workers = worker_processes(router)
    router.tell_to_stop()
    assert await router.ended() == 0
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError(f"worker {pid} is left behind")


PROMPT = list(range(1, 130))


async def routes(router: RouterProcess, stub: EngineStub, count: int) -> list[tuple[int, bool]]:
    """What is predicted for a prompt, each time over a connection of its own."""
    body = {"model": stub.model, "token_ids": PROMPT}
    answers = [(await router.post("/route", body)).json for _ in range(count)]
    hits = [answer.get("hit", {"cached_tokens": 0, "suspect": True}) for answer in answers]
    return [(hit["cached_tokens"], hit["suspect"]) for hit in hits]


async def until_all_know(router: RouterProcess, stub: EngineStub) -> None:
    while set(await routes(router, stub, 20)) != {(128, False)}:
        pass


async def until_all_are_live(router: RouterProcess, stub: EngineStub) -> None:
    in_a_row = 0
    while in_a_row < 20:
        sources = (await router.replica(stub.name))["sources"]
        is_live = sources and sources[0]["feed"] and sources[0]["feed"]["state"] == "live"
        in_a_row = in_a_row + 1 if is_live else 0


async def test_a_worker_that_is_started_again_takes_the_caches_from_another() -> None:
    """Its engines may have forgotten what they said first: it would stay in doubt for good."""
    async with EngineStub(unique("forgetful")) as stub:
        with VllmPublisher(ring=2) as publisher:
            source = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            replica = {"url": stub.url, "id": stub.name, "kv_events": [source]}
            publisher.publish(encode(EventBatch(1.0, [], 0)))
            with router_process({**CONFIG, "replicas": [replica]}) as router:
                await everywhere(router, stub.name, state="healthy", models=[stub.model])
                await until_all_are_live(router, stub)
                for start in range(0, 128, 16):
                    events = [Prefix(PROMPT).stored(0, FULL, start, start + 16)]
                    publisher.publish(encode(EventBatch(1.0, events, 0)))
                await until_all_know(router, stub)
                killed, _ = worker_processes(router)
                os.kill(killed, signal.SIGKILL)
                await eventually(lambda: killed not in worker_processes(router), "it is gone")
                await router.until(
                    lambda now: now.sum("kvroute_worker_restarts_total") == 1, "it listens"
                )
                await until_all_know(router, stub)
                assert (await router.metrics()).sum("kvroute_snapshots_taken_total") == 1


async def until_listening(router: RouterProcess) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        with contextlib.suppress(ConnectionError):
            await router.get("/healthz")
            return
        assert asyncio.get_running_loop().time() < deadline, "nobody listens"
        await asyncio.sleep(0.01)


async def test_a_worker_that_is_started_again_takes_no_request_before_it_knows_the_caches() -> None:
    """The others know them: a request there is routed rightly, and here it would be by load. But
    when the last of the others dies, it must listen at once."""
    released, subscribed = threading.Event(), threading.Event()

    def held(publisher: VllmPublisher, first: int) -> list[Reply]:
        while not released.wait(0.01):
            publisher.count_subscribers()
            if publisher.subscribers == WORKERS:
                subscribed.set()
        return publisher.replies(first)

    async with EngineStub(unique("held")) as stub:
        with VllmPublisher() as publisher:
            source = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            replica = {"url": stub.url, "id": stub.name, "kv_events": [source]}
            late = {"events": {"replay_timeout_s": 60.0}, "replicas": [replica]}
            try:
                publisher.publish(encode(EventBatch(1.0, [Prefix(PROMPT).stored(0, FULL)], 0)))
                with router_process({**CONFIG, **late}) as router:
                    await until_all_know(router, stub)
                    killed, other = worker_processes(router)
                    os.kill(killed, signal.SIGKILL)
                    await eventually(lambda: publisher.subscribers < WORKERS, "it is gone")
                    publisher.answer = held
                    await eventually(subscribed.is_set, "its successor waits for what it missed")
                    assert set(await routes(router, stub, 30)) == {(128, False)}
                    os.kill(other, signal.SIGKILL)
                    await until_listening(router)
                    assert (await router.replica(stub.name))["sources"][0]["feed"][
                        "state"
                    ] != "live"
                    released.set()
                    await until_all_know(router, stub)
            finally:
                released.set()


async def test_a_scrape_that_waits_for_a_frozen_worker_ends_with_the_router_and_no_traceback() -> (
    None
):
    """It looked like a crash, and what watches logs for tracebacks would have called someone."""
    brief = {"server": {"workers": WORKERS, "timeouts": {"shutdown_grace_s": 0.5}}}
    async with contextlib.AsyncExitStack() as stack:
        router = stack.enter_context(router_process(brief))
        clients = [await stack.enter_async_context(connect(router.port)) for _ in range(20)]
        for client in clients:
            assert (await client.ask("GET", "/healthz")).status == 200
        frozen, other = worker_processes(router)
        os.kill(frozen, signal.SIGSTOP)
        try:
            for client in clients:
                await client.send("GET", "/healthz")
            served = [asyncio.create_task(client.read_answer()) for client in clients]
            await eventually(lambda: any(task.done() for task in served), "one is not frozen")
            pairs = zip(clients, served, strict=True)
            alive = next(client for client, task in pairs if task.done())
            for client in clients:
                if client is not alive:
                    await client.send("GET", "/metrics")
            await alive.ask("GET", "/healthz")  # behind the scrapes
            router.tell_to_stop()
            await eventually(lambda: other not in worker_processes(router), "it has ended")
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert await router.ended() == 0
        router.check_log()
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)


async def test_requests_of_a_key_at_a_time_are_bounded_over_workers_in_a_burst() -> None:
    """Each worker admits as many as the limit until it has heard of the others', and no more: the
    documents say so, and operators size limits by it."""
    most = 4
    key = {"name": "tight", "key": "tight-key", "max_in_flight": most}
    config = {"server": {"workers": WORKERS, "client_api_keys": [key]}, "health": QUICK_HEALTH}
    async with EngineStub(unique("burst")) as stub:
        replica = {"url": stub.url, "id": stub.name}
        with router_process({**config, "replicas": [replica]}) as router:
            await everywhere(router, stub.name, state="healthy", models=[stub.model])
            release = asyncio.Event()
            stub.behaviour = after(release)
            body = {"model": stub.model, "prompt": [1], "max_tokens": 1}
            asked = {"authorization": "Bearer tight-key"}

            async def burst(count: int) -> list[asyncio.Task[Answer]]:
                tasks = [
                    asyncio.create_task(router.post("/v1/completions", body, asked))
                    for _ in range(count)
                ]
                await eventually(
                    lambda: sum(task.done() for task in tasks) + stub.active >= count, "all came in"
                )
                return tasks

            first = await burst(40)
            assert most <= stub.active <= most * WORKERS
            # Those that no worker had heard of in the burst are heard of now.
            admitted, refused = stub.active, 0
            while refused < 20:
                answer = await router.post("/v1/completions", body, asked)
                assert answer.status == 429
                refused += 1
            assert stub.active == admitted
            release.set()
            statuses = [(await task).status for task in first]
            assert statuses.count(200) == admitted
            assert statuses.count(429) == 40 - admitted
