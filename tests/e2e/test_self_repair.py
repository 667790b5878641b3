"""A router whose picture of a cache is wrong without its knowing finds that out from what the
engine reports, and gets a new picture by itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest

from kvevents.events import BlockRemoved, BlockStored, CacheLayout, Event, EventBatch
from tests.support.actual_hits import hits, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.relay import TamperingRelay
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

EVENTS = {"self_repair_after_s": 0.5, "self_repair_quiet_s": 1e-6, "rebuild_cool_down_s": 3600}
LOGGED = "its hits were predicted wrongly for long"
PROMPTS = [[number] * 200 for number in range(1, 9)]
"""Three of them fill the cache."""


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH, "events": EVENTS}) as process:
        yield process


def without_removals(batch: EventBatch) -> EventBatch:
    kept = [event for event in batch.events if not isinstance(event, BlockRemoved)]
    return msgspec.structs.replace(batch, events=kept)


def without_salts(batch: EventBatch) -> EventBatch:
    """As of an engine that hashes salts in a way of its own and does not show them."""
    return msgspec.structs.replace(batch, events=[_without_salt(event) for event in batch.events])


def _without_salt(event: Event) -> Event:
    if isinstance(event, CacheLayout):
        return msgspec.structs.replace(event, hash_algorithm="its own")
    if isinstance(event, BlockStored):
        return msgspec.structs.replace(event, extra_keys=None)
    return event


class Followed:
    """An engine that a router follows through a relay, asked one request after another."""

    def __init__(
        self, router: RouterProcess, engine: EngineProcess, relay: TamperingRelay, model: str
    ) -> None:
        self.router, self.engine, self.relay = router, engine, relay
        self._model = model
        self._logged = len(router.log())

    async def ask(self, prompt: list[int], **options: object) -> tuple[int, int]:
        """The cached tokens that were predicted, and those that there were."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, **options}
        answer = await self.router.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        await until_told(self.router, self.engine)
        return hits(answer)

    async def ask_all(self) -> list[tuple[int, int]]:
        """Every prompt twice: the second time it is cached."""
        return [await self.ask(prompt) for prompt in PROMPTS for _ in range(2)]

    async def ask_until(
        self, condition: Callable[[dict[str, Any]], bool], times: int = 1
    ) -> dict[str, Any]:
        """Go through the prompts, each some *times* in a row, until *condition* holds of the
        predictions."""
        deadline = time.monotonic() + DEADLINE_S
        for prompt in itertools.cycle(PROMPTS):
            for _ in range(times):
                await self.ask(prompt)
            found = await self.predictions()
            if condition(found):
                return found
            assert time.monotonic() < deadline, found
        raise AssertionError

    async def predictions(self) -> dict[str, Any]:
        """How far they are believed."""
        (source,) = (await self.router.replica(self.engine.name))["sources"]
        return source["predictions"] or {"state": None, "rebuilds": 0, "cause": None}

    async def counted(self) -> tuple[float, float]:
        """Rebuilds, and whether it is mispredicted, as in the metrics."""
        names = "kvroute_source_rebuilds_total", "kvroute_source_mispredicted"
        metrics = await self.router.metrics()
        rebuilds, is_mispredicted = (metrics.sum(name, replica=self.engine.name) for name in names)
        return rebuilds, is_mispredicted

    def times_logged(self) -> int:
        return self.router.log()[self._logged :].count(LOGGED)


@asynccontextmanager
async def followed(
    router: RouterProcess, model: str, lie: Callable[[EventBatch], EventBatch] | None = None
) -> AsyncIterator[Followed]:
    """With a *lie* that the stream and every snapshot tell from the beginning."""
    options = {"served_model_name": model, "num_blocks": 40, "max_model_len": 1024}
    async with engine_processes(1, *simulated("full", **options)) as (engine,):
        told = (await engine.get("/kv_event_sources")).json["0"]
        with closing(TamperingRelay(told["endpoint"], told["replay_endpoint"])) as relay:
            relay.change, relay.tampers_with_snapshots = lie, lie is not None
            source = {"endpoint": relay.endpoint, "replay_endpoint": relay.replay_endpoint}
            source["topic"] = told["topic"]
            async with router.serving(engine, kv_events=[{"dp_rank": 0, **source}]):
                yield Followed(router, engine, relay, model)


async def test_a_source_that_is_wrong_without_being_suspect_is_rebuilt_by_itself(
    router: RouterProcess,
) -> None:
    """Removals that never were on the wire leave no gap: nothing else would ever notice."""
    async with followed(router, "m1") as source:
        assert all(predicted == actual for predicted, actual in await source.ask_all())
        source.relay.change = without_removals
        while not any(predicted > actual for predicted, actual in await source.ask_all()):
            pass  # on a busy machine the events of before may still be on their way
        await source.ask_until(lambda told: told["rebuilds"] > 0)
        await until_told(router, source.engine)
        found = await source.ask_all()
        assert all(predicted == actual for predicted, actual in found), found
        assert sum(actual for _, actual in found) > 0
        assert await source.counted() == (1, 0)
        assert source.times_logged() == 1
        await source.ask_until(lambda told: told["state"] == "trusted", times=2)

        source.relay.change = without_removals
        predictions = await source.ask_until(lambda told: told["cause"] is not None)
        assert (predictions["state"], predictions["rebuilds"]) == ("trusted", 1)
        assert predictions["cause"].startswith("too many: "), predictions
        assert (await source.counted(), source.times_logged()) == ((1, 1), 1), "the cool-down"


async def test_what_a_rebuild_does_not_repair_is_shown_with_its_cause(
    router: RouterProcess,
) -> None:
    """Another rebuild would not help either, and an operator is told what may be the matter."""
    async with followed(router, "m2", without_salts) as source:
        deadline = time.monotonic() + DEADLINE_S
        for number in itertools.count(1):
            plain, salted = [[number, kind] * 50 for kind in (1, 2)]
            for _ in range(2):
                predicted, actual = await source.ask(plain)
                assert predicted == actual
                await source.ask(salted, cache_salt="a-tenant")
            predictions = await source.predictions()
            if predictions["state"] == "lasting":
                break
            assert time.monotonic() < deadline, predictions
        assert (predictions["cause"] or "").startswith("only prompts with a cache_salt"), (
            predictions
        )
        assert (await source.counted(), source.times_logged()) == ((1, 1), 1)
        overview = (await router.get("/overview")).json
        (shown,) = overview["replicas"]
        assert any("only prompts with a cache_salt" in each["text"] for each in shown["problems"])
