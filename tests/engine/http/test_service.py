"""The engine on its thread: outputs, clients that leave, shutdown, and injected faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, FinishReason, SamplingParams, StepOutput
from kvroute_engine.http.errors import EngineBusyError, EngineDeadError
from kvroute_engine.http.service import EngineService, Generation
from offload.errors import EngineRequestError
from offload.tiers import PeerTierSpec, TierConfig
from tests.engine.http.served import ScriptedRunner, scripted_engine
from tests.support.waiting import DEADLINE_S, eventually


class Times:
    """A `LatencyObserver` that keeps what it gets."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.ends: list[FinishReason] = []

    def on_first_token(self, since_arrival_s: float) -> None:
        self.first.append(since_arrival_s)

    def on_next_tokens(self, gap_s: float, count: int) -> None:
        self.gaps += [gap_s] * count

    def on_end(self, since_arrival_s: float, reason: FinishReason) -> None:
        self.ends.append(reason)


class Running:
    def __init__(
        self, service: EngineService, engine: Engine, runner: ScriptedRunner, times: Times
    ) -> None:
        self.service, self.engine, self.runner, self.times = service, engine, runner, times

    async def until_free(self) -> None:
        await eventually(
            lambda: not self.engine.has_work and self.engine.cache.usage == 0, "every block is free"
        )


@contextlib.asynccontextmanager
async def running(says: str = "hello", **settings: Any) -> AsyncIterator[Running]:
    engine, runner = scripted_engine(says)
    times = Times()
    service = EngineService(engine, times, **settings)
    try:
        yield Running(service, engine, runner, times)
    finally:
        runner.may_go.set()
        assert await service.close()


def request(name: str, tokens: int = 20, max_tokens: int = 50) -> EngineRequest:
    return EngineRequest(name, list(range(tokens)), SamplingParams(max_tokens=max_tokens))


async def collect(generation: Generation) -> list[StepOutput]:
    async with generation:
        return [output async for output in generation]


async def test_a_request_s_tokens_arrive_in_order_and_end() -> None:
    """From one thread to the other and back, none lost."""
    async with running("hello") as now:
        outputs = await collect(await now.service.generate(request("a")))
        assert [token_id for output in outputs for token_id in output.new_token_ids] == [
            *b"hello",
            257,
        ]
        assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.STOP]
        assert (len(now.times.first), len(now.times.gaps), now.times.ends) == (
            1,
            5,
            [FinishReason.STOP],
        )
        assert all(gap >= 0 for gap in now.times.first + now.times.gaps)
        await now.until_free()
        assert now.service.statistics().admitted == 1
        assert now.service.engine_statistics().scheduler.generation_tokens == 6


async def test_many_requests_at_once_get_their_own_tokens() -> None:
    """Batches mix requests; responses must not."""
    async with running("hello") as now:
        names = [f"r{index}" for index in range(40)]
        generations = [
            await now.service.generate(request(name, 10 + index))
            for index, name in enumerate(names)
        ]
        for index, outputs in enumerate(await asyncio.gather(*map(collect, generations))):
            assert {output.request_id for output in outputs} == {names[index]}
            assert outputs[0].num_prompt_tokens == 10 + index
            assert sum(len(output.new_token_ids) for output in outputs) == 6


async def test_a_request_is_asked_about_at_the_peer_that_it_names() -> None:
    """Before the engine has it, so that no step waits for an answer; and what is no address is
    refused like any other mistake."""
    tiers = (TierConfig("p2p", {"port": 0}),)
    holder, _ = scripted_engine(cpu_blocks=100, tiers=tiers)
    spec = holder.tiers[-1].spec
    assert isinstance(spec, PeerTierSpec)
    assert spec.server is not None
    named = {"remote_host": "127.0.0.1", "remote_port": spec.server.port}
    holder.add_request(request("a", 100, 1))
    while holder.has_work:
        holder.step()
    engine, runner = scripted_engine(cpu_blocks=100, tiers=(TierConfig("p2p", {"answer_s": 60}),))
    service = EngineService(engine)
    try:
        asked = {"remote_kv_source": {"kv_request_id": "a", **named}}
        pulling = dataclasses.replace(request("a", 100), kv_transfer_params=asked)
        outputs = await collect(await service.generate(pulling))
        assert outputs[0].num_cached_tokens == 96
        wrong = dataclasses.replace(pulling, kv_transfer_params={"remote_kv_source": "a"})
        with pytest.raises(EngineRequestError, match="must be an object"):
            await service.generate(wrong)
        assert service.statistics().refused == 1
    finally:
        runner.may_go.set()
        assert await service.close()
        holder.close()


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    """Tokens that are not read would cost those that are."""
    async with running("x" * 3000) as now:
        now.runner.may_go.clear()
        async with await now.service.generate(request("a", max_tokens=3000)):
            await eventually(lambda: now.runner.steps, "it is being computed")
            assert now.service.statistics().in_flight == 1
        now.runner.may_go.set()
        await now.until_free()
        assert now.engine.statistics().scheduler.generation_tokens == 1
        assert (now.service.statistics().aborted, now.times.ends) == (1, [FinishReason.ABORT])


async def test_a_client_that_leaves_while_it_is_admitted_leaves_nothing() -> None:
    """The engine may have the request already when its client stops waiting."""
    async with running() as now:
        now.runner.may_go.clear()
        other = await now.service.generate(request("other"))
        await eventually(lambda: now.runner.steps, "the engine is in a step")
        admission = asyncio.ensure_future(now.service.generate(request("a")))
        await asyncio.sleep(0)
        admission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admission
        now.runner.may_go.set()
        assert len(await collect(other)) == 6
        await now.until_free()
        assert now.service.statistics().in_flight == 0


async def test_requests_are_admitted_all_or_none() -> None:
    """If one prompt of a batch is refused, the others must not run either."""
    async with running() as now:
        good, bad = request("good"), request("bad", tokens=100_000)
        with pytest.raises(EngineRequestError, match="prompt"):
            await now.service.generate(good, bad)
        await now.until_free()
        found = now.service.statistics()
        assert (found.in_flight, found.refused) == (0, 1)
        assert (found.aborted, now.times.ends) == (0, []), "no client has left"
        assert len(await collect(await now.service.generate(good))) == 6


@pytest.mark.parametrize("names", [("a",), ("b", "b")])
async def test_an_id_in_use_is_refused(names: tuple[str, ...]) -> None:
    """Two requests with one id would get each other's tokens."""
    async with running() as now:
        now.runner.may_go.clear()
        first = await now.service.generate(request("a"))
        with pytest.raises(EngineRequestError, match="in use"):
            await now.service.generate(*map(request, names))
        now.runner.may_go.set()
        assert len(await collect(first)) == 6


async def test_requests_over_the_limit_are_refused() -> None:
    """An unbounded queue is unbounded memory."""
    async with running(max_in_flight=2) as now:
        now.runner.may_go.clear()
        two = await now.service.generate(request("a"), request("b"))
        with pytest.raises(EngineBusyError, match="limit of 2"):
            await now.service.generate(request("c"))
        now.runner.may_go.set()
        assert len(await collect(two)) == 12
        assert len(await collect(await now.service.generate(request("c")))) == 6


async def test_draining_finishes_requests_in_flight_and_refuses_new_ones() -> None:
    """So a replica shuts down without a failed request."""
    async with running() as now:
        now.runner.may_go.clear()
        generation = await now.service.generate(request("a"))
        assert not await now.service.drain(0.05)
        with pytest.raises(EngineBusyError, match="shutting down"):
            await now.service.generate(request("b"))
        now.runner.may_go.set()
        outputs, drained = await asyncio.gather(collect(generation), now.service.drain(20))
        assert drained
        assert outputs[-1].finish_reason is FinishReason.STOP


async def test_an_engine_that_raises_fails_requests_in_flight_and_later_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No client waits for ever; the error's message, which may quote a client, is not logged."""
    async with running() as now:
        now.runner.may_go.clear()
        under_way = await now.service.generate(request("a"), request("b"))
        now.runner.fails_with = RuntimeError("a-client-s-prompt")
        now.runner.may_go.set()
        with caplog.at_level(logging.DEBUG), pytest.raises(EngineDeadError):
            await collect(under_way)
        assert now.service.is_dead
        for attempt in (now.service.generate(request("c")), now.service.reset_prefix_cache()):
            with pytest.raises(EngineDeadError):
                await attempt
        assert now.times.ends == [FinishReason.ABORT] * 2
        assert "RuntimeError" in caplog.text
        assert "a-client-s-prompt" not in caplog.text


async def test_closing_ends_requests_in_flight() -> None:
    """A shutdown waits for a step, not for responses."""
    async with running("x" * 3000) as now:
        now.runner.may_go.clear()
        generation = await now.service.generate(request("a", max_tokens=3000))
        await eventually(lambda: now.runner.steps, "it is being computed")
        closing = asyncio.ensure_future(now.service.close())
        await asyncio.sleep(0)
        now.runner.may_go.set()
        assert await closing
        with pytest.raises(EngineDeadError):
            await collect(generation)
        assert now.engine.statistics().scheduler.generation_tokens == 1
        assert await now.service.close()


async def test_a_step_that_never_ends_is_left_behind() -> None:
    """The process must end all the same."""
    async with running() as now:
        now.runner.may_go.clear()
        generation = await now.service.generate(request("a"))
        await eventually(lambda: now.runner.steps, "the engine is in its step")
        assert not await now.service.close(within_s=0.05)
        with pytest.raises(EngineDeadError):
            await collect(generation)


async def test_the_prefix_cache_is_reset_only_while_no_request_holds_it() -> None:
    """And the next request then finds nothing."""
    async with running() as now:
        first = await collect(await now.service.generate(request("a", tokens=100)))
        again = await collect(await now.service.generate(request("b", tokens=100)))
        assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 96)
        assert await now.service.reset_prefix_cache()
        assert (await collect(await now.service.generate(request("c", tokens=100))))[
            0
        ].num_cached_tokens == 0


async def test_only_the_engine_s_thread_touches_it() -> None:
    """It is not thread-safe."""
    async with running() as now:
        threads = {
            await now.service.run(threading.get_ident),
            await now.service.run(threading.get_ident),
        }
        assert threads != {threading.get_ident()}
        assert len(threads) == 1


# --- faults ---------------------------------------------------------------------------------------


async def test_an_engine_that_hangs_is_silent_until_the_hang_is_over() -> None:
    """And continues as if nothing had happened."""
    async with running() as now:
        now.service.faults.hang(0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        outputs = await collect(await now.service.generate(request("a")))
        assert loop.time() - began >= 0.29
        assert len(outputs) == 6
        assert now.service.faults.statistics().hang_left_s == 0


async def test_an_engine_that_hangs_can_still_be_closed() -> None:
    """A test with a hung engine must be able to end."""
    async with running() as now:
        now.service.faults.hang(3600)
        generation = await now.service.generate(request("a"))
        assert await now.service.close(within_s=DEADLINE_S)
        assert now.runner.steps == 0
        with pytest.raises(EngineDeadError):
            await collect(generation)


async def test_a_slow_engine_takes_its_factor_as_long() -> None:
    """As measured by its own clock, on which each step here takes 20 ms."""
    ticks = itertools.count()
    async with running(clock=lambda: next(ticks) * 0.02) as now:
        now.service.faults.slow(3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert len(await collect(await now.service.generate(request("a")))) == 6
        assert loop.time() - began >= 5 * 0.04
