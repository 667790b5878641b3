"""Engines that die, hang, slow down and lose events, and a router that restarts, all while clients
keep sending requests."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.actual_hits import hits, until_told
from tests.support.engine_process import EngineProcess, simulated
from tests.support.router_process import Metrics, RouterProcess, router_process
from tests.support.steady_load import ChaosWorkload, Fate, SteadyLoad
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, eventually

MODEL = "model-of-chaos"
HEALTH = {"interval_s": 1.0, "timeout_s": 1.0, "unhealthy_after": 2}
TIMEOUTS = {"first_byte_s": 3.0, "whole_response_s": 5.0, "idle_s": 60.0}
SPEED = {"step_overhead_s": 0.004, "prefill_tokens_per_s": 40_000, "decode_tokens_per_s": 10_000}


def note(what: str, figure: object) -> None:
    """Print a figure, which `pytest -rP` shows."""
    print(f"{what}: {figure}")


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": HEALTH, "server": {"timeouts": TIMEOUTS}}) as process:
        yield process


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[EngineProcess]]:
    """Engines whose addresses, including those for events, survive a restart; those that still run
    at the end must stop cleanly."""
    options = {
        "served_model_name": MODEL,
        "num_blocks": 3000,
        "max_model_len": 4096,
        "enable_faults": True,
        **SPEED,
    }
    arguments = [(*simulated("gemma", **options), *fixed_ports()) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        started = list(threads.map(lambda given: EngineProcess(*given), arguments))
    try:
        yield started
        running = [engine for engine in started if engine.process.poll() is None]
        for engine in running:
            engine.tell_to_stop()
        for engine in running:
            assert engine.process.wait(DEADLINE_S) == 0, engine.log()[-4000:]
            assert "Traceback" not in engine.log(), engine.log()[-4000:]
    finally:
        for engine in started:
            engine.forget()


@pytest.fixture
def engines(fleet: list[EngineProcess]) -> list[EngineProcess]:
    """All three engines; one that a test has killed is started again."""
    for engine in fleet:
        if engine.process.poll() is not None:
            engine.start()
    return fleet


def fixed_ports() -> tuple[str, ...]:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    return "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay


# --- what the router says -------------------------------------------------------------------------


def sent_to(metrics: Metrics, engine: EngineProcess) -> int:
    """The number of attempts to have a request served there, ended or not: only a new attempt
    increases it."""
    names = "kvroute_in_flight_requests", "kvroute_retries_total", "kvroute_requests_total"
    return int(sum(metrics.sum(name, replica=engine.name) for name in names))


async def busiest(router: RouterProcess, engines: Sequence[EngineProcess]) -> EngineProcess:
    """The engine that was sent the most requests."""
    metrics = await router.metrics()
    return max(engines, key=lambda engine: sent_to(metrics, engine))


async def until_noticed(router: RouterProcess, engine: EngineProcess) -> float:
    """Seconds until it counts as unhealthy."""
    began = time.monotonic()
    await router.until(
        lambda now: not now.sum("kvroute_replica_healthy", replica=engine.name),
        f"{engine.name} is noticed",
    )
    return time.monotonic() - began


def held_blocks(source: dict[str, Any]) -> int:
    return sum(held["blocks"] for held in source["cache"]["blocks"]) if source["cache"] else 0


def is_busy(now: Metrics, engine: EngineProcess) -> bool:
    """It has a response that has begun, and requests whose responses have not."""
    all_of_them = now.sum("kvroute_in_flight_requests", replica=engine.name)
    begun = now.sum("kvroute_in_flight_decodes", replica=engine.name)
    return begun >= 1 and all_of_them - begun >= 2


async def until_busy(router: RouterProcess, engine: EngineProcess) -> None:
    await router.until(lambda now: is_busy(now, engine), f"{engine.name} is busy")


async def kill_while_busy(router: RouterProcess, engine: EngineProcess) -> None:
    """It is paused while it is examined, so that what it was doing when it died is known."""
    while True:
        await until_busy(router, engine)
        engine.process.send_signal(signal.SIGSTOP)
        if is_busy(await router.metrics(), engine):
            engine.kill()
            return
        engine.process.send_signal(signal.SIGCONT)


# --- serial requests ------------------------------------------------------------------------------


@asynccontextmanager
async def alone(
    router: RouterProcess, engine: EngineProcess, engines: Sequence[EngineProcess]
) -> AsyncIterator[None]:
    """Drain the other engines."""
    others = [other for other in engines if other is not engine]
    for other in others:
        await router.post(f"/replicas/{other.name}/drain")
    yield
    for other in others:
        await router.post(f"/replicas/{other.name}/undrain")


async def assert_exact(
    router: RouterProcess, engine: EngineProcess, engines: Sequence[EngineProcess], count: int = 6
) -> None:
    """Send requests that only *engine* serves, one after another: each is predicted, and the last,
    a repetition, is cached."""
    await router.until_idle()
    await until_told(router, engine)
    workload, found = ChaosWorkload(1, MODEL), []
    async with alone(router, engine, engines):
        bodies = [workload.next() for _ in range(count)]
        for body in [*bodies, bodies[-1]]:
            answer = await router.post("/v1/completions", body)
            assert (answer.status, answer.headers["x-kv-replica"]) == (200, engine.name), answer
            found.append(hits(answer))
            await until_told(router, engine)
    assert [predicted for predicted, _ in found] == [cached for _, cached in found]
    assert await blocks_known(router, engine) == await blocks_held(engine)
    assert found[-1][1] > 0, found


async def blocks_known(router: RouterProcess, engine: EngineProcess) -> dict[int, int]:
    """The blocks of each group in the router's index."""
    (source,) = (await router.replica(engine.name))["sources"]
    return {held["group"]: held["blocks"] for held in source["cache"]["blocks"]}


async def blocks_held(engine: EngineProcess) -> dict[int, int]:
    """The blocks of each group that the engine itself reports."""
    found = (await engine.metrics()).by("group", "kvroute_engine_cached_blocks")
    return {int(group): int(blocks) for group, blocks in found.items() if group}


# --- engines that die -----------------------------------------------------------------------------


async def test_a_killed_engine_costs_the_streams_it_had_begun_and_nothing_else(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """What a client has received cannot be taken back; requests whose responses had not begun are
    served elsewhere, and no more are sent there."""
    async with router.serving(*engines):
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            victim = await busiest(router, engines)
            await kill_while_busy(router, victim)
            killed_at = time.monotonic()
            noticed_s = await until_noticed(router, victim)
            attempts = sent_to(await router.metrics(), victim)
            await load.until_served(50)
            assert sent_to(await router.metrics(), victim) == attempts
        retried = (await router.metrics()).sum("kvroute_retries_total", replica=victim.name)
        for name, value in (("noticed_s", noticed_s), ("retried", retried), ("fates", load.fates)):
            note(name, value)
        assert noticed_s <= HEALTH["interval_s"]
        assert retried > 0
        for sent in load.failed:
            assert (sent.fate, sent.streams, sent.replica) == (Fate.BROKEN, True, victim.name), sent
            assert sent.events > 1, "it had begun"
            assert b'"replica_died"' in sent.body
            assert sent.began_at < killed_at < sent.ended_at


async def test_a_restarted_engine_is_known_to_be_empty_and_then_predicted_again(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """Its addresses are the old ones, so only its event stream shows that its cache is gone."""
    async with router.serving(*engines):
        victim = engines[0]
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            victim.kill()
            await until_noticed(router, victim)
            await router.post(f"/replicas/{victim.name}/drain")
            await asyncio.to_thread(victim.start)
            began = time.monotonic()
            source = await until_followed(router, victim)
            note("live_again_s", time.monotonic() - began)
            assert held_blocks(source) == 0
            assert source["feed"]["stream"]["restarts"] == 1
            await router.post(f"/replicas/{victim.name}/undrain")
            attempts = sent_to(await router.metrics(), victim)
            # The others have the prefixes, so by itself the load returns slowly.
            async with alone(router, victim, engines):
                await router.until(
                    lambda now: sent_to(now, victim) > attempts + 10, "it gets requests again", 60
                )
        (source,) = (await router.replica(victim.name))["sources"]
        assert held_blocks(source) > 0
        assert not load.fates.keys() - {Fate.SERVED, Fate.BROKEN}, load.fates
        note("fates", load.fates)
        await assert_exact(router, victim, engines)


async def until_followed(router: RouterProcess, engine: EngineProcess) -> dict[str, Any]:
    """Wait until it is healthy and its stream live, also while it drains; return what is known of
    the stream."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = await router.replica(engine.name)
        (source,) = found["sources"]
        if found["health"] == "healthy" and source["feed"]["state"] == "live":
            return dict(source)
        assert time.monotonic() < deadline, f"{engine.name} is not followed: {found}"


# --- engines that hang ----------------------------------------------------------------------------


async def test_requests_survive_an_engine_whose_steps_hang(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """Its health checks keep passing, as vLLM's do. Requests notice the hang and are sent
    elsewhere; begun streams continue later."""
    async with router.serving(*engines):
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            victim = await busiest(router, engines)
            await until_busy(router, victim)
            before, served = await router.metrics(), load.fates[Fate.SERVED]
            assert (await victim.post("/faults", {"kind": "hang", "seconds": 8})).status == 200
            ends_at = time.monotonic() + 8
            await eventually(lambda: time.monotonic() > ends_at - 1, "the hang is nearly over")
            now, served_meanwhile = await router.metrics(), load.fates[Fate.SERVED] - served
            attempts = sent_to(now, victim)
            await router.until(
                lambda now: sent_to(now, victim) > attempts, "it gets requests again", 60
            )
        retried = now.sum("kvroute_retries_total", replica=victim.name)
        note(
            "served meanwhile, sent to it, retried",
            (served_meanwhile, attempts - sent_to(before, victim), retried),
        )
        note("outages", now.sum("kvroute_replica_outages_total", replica=victim.name))
        note(
            "failed",
            [(sent.replica == victim.name, sent.events, sent.body[-300:]) for sent in load.failed],
        )
        note("slowest_s", max(sent.ended_at - sent.began_at for sent in load.sent))
        note("fates", load.fates)
        assert served_meanwhile >= 20
        assert attempts - sent_to(before, victim) <= served_meanwhile / 2
        assert retried > 0
        assert not load.failed
        await assert_exact(router, victim, engines)


async def test_a_frozen_process_fails_its_checks_and_returns(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """Its port still takes connections; once its checks have failed, begun streams end with an
    error event, and the others are served elsewhere."""
    async with router.serving(*engines):
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            victim = await busiest(router, engines)
            await until_busy(router, victim)
            failed_before = (await router.replica(victim.name))["failed_checks"]
            victim.process.send_signal(signal.SIGSTOP)
            noticed_s = await until_noticed(router, victim)
            noticed_at = time.monotonic()
            failed = (await router.replica(victim.name))["failed_checks"] - failed_before
            # One more may have failed until the router was asked.
            assert 0 <= failed - HEALTH["unhealthy_after"] <= 1
            await router.until(
                lambda now: not now.sum("kvroute_in_flight_requests", replica=victim.name),
                "nothing waits for it any more",
                HEALTH["interval_s"] + HEALTH["timeout_s"],
            )
            note("left_s", time.monotonic() - noticed_at)
            attempts = sent_to(await router.metrics(), victim)
            await load.until_served(50)
            assert sent_to(await router.metrics(), victim) == attempts
            victim.process.send_signal(signal.SIGCONT)
            began = time.monotonic()
            await router.until(
                lambda now: sent_to(now, victim) > attempts, "it gets requests again", 60
            )
            note("back_s", time.monotonic() - began)
        note("noticed_s", noticed_s)
        note("fates", load.fates)
        now = await router.metrics()
        note("retried", now.by("reason", "kvroute_retries_total"))
        assert now.sum("kvroute_retries_total", replica=victim.name, reason="unhealthy") > 0
        for sent in load.failed:
            assert (sent.fate, sent.streams, sent.replica) == (Fate.BROKEN, True, victim.name), sent
            assert b'"replica_died"' in sent.body
        await assert_exact(router, victim, engines)


# --- events that are lost -------------------------------------------------------------------------


async def test_lost_events_are_noticed_and_made_up_for_by_a_snapshot(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """The ring never had them, so only a snapshot can supply them; until it arrives, the source is
    not shown as live."""
    async with router.serving(*engines):
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            victim = await busiest(router, engines)
            said, before = len(router.log()), await router.metrics()
            assert (
                await victim.post("/faults", {"kind": "drop_events", "batches": 5})
            ).status == 200
            began = time.monotonic()
            await router.until(
                lambda now: (
                    gaps_and_snapshots(now, victim)[1] > gaps_and_snapshots(before, victim)[1]
                ),
                "one",
                60,
            )
            note("made up for after, s", time.monotonic() - began)
            # Each request makes a batch or more, so that all five are lost by then, and others
            # follow.
            await router.until(
                lambda now: sent_to(now, victim) > sent_to(before, victim) + 20, "many requests"
            )
        assert not load.failed
        await router.until_idle()
        await until_told(router, victim)
        gaps, snapshots = gaps_and_snapshots(await router.metrics(), victim)
        note("gaps, snapshots", (gaps, snapshots))
        assert 1 <= gaps <= 5
        assert snapshots - gaps_and_snapshots(before, victim)[1] == gaps
        assert states_said(router.log()[said:], victim) == ["recovering", "live"] * int(gaps)
        await assert_exact(router, victim, engines)
        await assert_silent_loss_is_noticed(router, victim, engines)
        await assert_exact(router, victim, engines)


def gaps_and_snapshots(metrics: Metrics, engine: EngineProcess) -> tuple[float, float]:
    names = "kvroute_events_gaps_total", "kvroute_events_snapshots_total"
    gaps, snapshots = (metrics.sum(name, replica=engine.name) for name in names)
    return gaps, snapshots


async def assert_silent_loss_is_noticed(
    router: RouterProcess, victim: EngineProcess, engines: Sequence[EngineProcess]
) -> None:
    """The last event is lost: only the publisher's heartbeat follows it."""
    gaps = (await router.metrics()).sum("kvroute_events_gaps_total", replica=victim.name)
    await victim.post("/faults", {"kind": "drop_events", "batches": 1})
    began = time.monotonic()
    async with alone(router, victim, engines):
        body = {"model": MODEL, "prompt": "lost " * 100, "max_tokens": 1}
        assert (await router.post("/v1/completions", body)).status == 200
    await router.until(
        lambda now: now.sum("kvroute_events_gaps_total", replica=victim.name) > gaps,
        "the gap is seen",
    )
    note("tail_noticed_s", time.monotonic() - began)
    await router.until(
        lambda now: now.sum("kvroute_source_state", replica=victim.name, state="live") == 1,
        "the source is live again",
    )


def states_said(log: str, engine: EngineProcess) -> list[str]:
    """The states of its event stream, in order."""
    mark = f"replica {engine.name} rank 0: "
    found = [line.partition(mark)[2].strip() for line in log.splitlines() if mark in line]
    return [
        state for state in found if state in {"connecting", "recovering", "live", "suspect", "dead"}
    ]


# --- a router that restarts -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
async def test_a_restarted_router_knows_all_caches_at_once(
    engines: list[EngineProcess], number: signal.Signals
) -> None:
    """It keeps nothing on disk: snapshots of the caches are enough, and clients notice only the
    time it is down."""
    config = {
        "health": HEALTH,
        "replicas": [{"url": engine.url, "id": engine.name} for engine in engines],
        "server": {"port": free_port()},
    }
    with router_process(config) as first:
        for engine in engines:
            await first.until_in_rotation(engine)
        async with SteadyLoad(first.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(40)
            down_at = time.monotonic()
            first.process.send_signal(number)
            await first.ended()
            second = await asyncio.to_thread(RouterProcess, config)
            try:
                up_at = time.monotonic()
                await until_ready(second, engines)
                ready_at = time.monotonic()
                await load.until_served(40)
            except BaseException:
                second.kill()
                raise
    try:
        note("down, not ready, s", (up_at - down_at, ready_at - up_at))
        note("fates", load.fates)
        note(
            "kinds", Counter((sent.fate.value, sent.status, sent.body[:60]) for sent in load.failed)
        )
        note(
            "unanswered",
            [
                round(sent.began_at - down_at, 3)
                for sent in load.failed
                if sent.fate is Fate.UNANSWERED
            ],
        )
        for sent in load.failed:
            assert sent.ended_at >= down_at, sent
            assert sent.began_at <= ready_at, sent
            assert sent.fate in AWAY[number], sent
            assert sent.status in {0, 200, 503}, sent
        for engine in engines:
            await assert_exact(second, engine, engines, 4)
        second.stop()
    finally:
        second.kill()


AWAY = {
    # Asked to stop, it finishes what it has; new requests are refused, or find the connection
    # closing or closed.
    signal.SIGTERM: {Fate.TURNED_AWAY, Fate.UNANSWERED, Fate.REFUSED},
    # No process is left to end a response that has begun.
    signal.SIGKILL: {Fate.TURNED_AWAY, Fate.UNANSWERED, Fate.REFUSED, Fate.CUT},
}


async def until_ready(router: RouterProcess, engines: Sequence[EngineProcess]) -> None:
    for engine in engines:
        await router.until_in_rotation(engine)


async def test_a_router_without_a_report_from_a_replica_does_not_deny_a_model() -> None:
    """Clients take a 404 as final, but right after a start the router does not know yet which
    models there are."""
    config = {"health": HEALTH, "replicas": [{"url": f"http://127.0.0.1:{free_port()}"}]}
    with router_process(config) as router:
        for path in ("/v1/completions", "/tokenize"):
            answer = await router.post(path, {"model": MODEL, "prompt": "x"})
            assert (answer.status, answer.error["code"]) == (503, "no_replica"), answer


# --- an engine that crawls ------------------------------------------------------------------------


async def test_load_moves_away_from_a_slow_engine(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """The router only sees that requests pile up there."""
    async with router.serving(*engines):
        async with SteadyLoad(router.port, ChaosWorkload(1, MODEL)) as load:
            await load.until_served(80)
            victim = await busiest(router, engines)
            before = await router.metrics()
            await victim.post("/faults", {"kind": "slow", "factor": 20})
            await load.until_served(100)
            after = await router.metrics()
            await victim.post("/faults", {"kind": "slow", "factor": 1})
        share_before = sent_to(before, victim) / sum(sent_to(before, engine) for engine in engines)
        gained = {
            engine.name: sent_to(after, engine) - sent_to(before, engine) for engine in engines
        }
        share_after = gained[victim.name] / sum(gained.values())
        note("shares", (share_before, share_after))
        assert share_after < share_before * 0.7
        assert not load.failed
