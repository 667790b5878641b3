"""Engines and a router as processes, over real sockets: the router predicts what the engine then
reports."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.actual_hits import hits, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.http_client import connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

LAYOUTS = ("full", "gemma", "gptoss", "llama4", "mamba-hybrid")
REQUESTS = 60


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


# --- a workload -----------------------------------------------------------------------------------


class Workload:
    """Conversations that share a system prompt and grow turn by turn, and questions about
    documents, from a seed."""

    def __init__(self, seed: int, model: str) -> None:
        self._random = Random(seed)
        self._model = model
        self._system = self._words(200)
        self._documents = [self._words(self._random.choice((100, 400, 700))) for _ in range(4)]
        self._chats: list[list[dict[str, Any]]] = []

    def next(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the next request."""
        sampling = {
            "max_tokens": self._random.choice((1, 3, 40)),
            "ignore_eos": True,
            "temperature": 0,
        }
        if self._random.random() < 0.3:
            sampling |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._random.random() < 0.2:
            sampling["cache_salt"] = "a-tenant"
        if self._random.random() < 0.4:
            return "/v1/completions", {"model": self._model, "prompt": self._question(), **sampling}
        return "/v1/chat/completions", {"model": self._model, "messages": self._turn(), **sampling}

    def _question(self) -> str | list[int]:
        text = self._random.choice(self._documents) + self._words(self._random.randint(1, 40))
        return list(text.encode()) if self._random.random() < 0.3 else text

    def _turn(self) -> list[dict[str, Any]]:
        if not self._chats or self._random.random() < 0.3:
            self._chats.append([{"role": "system", "content": self._system}])
        chat = self._random.choice(self._chats)
        if len(chat) > 5:
            self._chats.remove(chat)
        if len(chat) > 1:
            chat.append({"role": "assistant", "content": self._words(30)})
        chat.append(
            {
                "role": "user",
                "content": [{"type": "text", "text": self._words(self._random.randint(10, 90))}],
            }
        )
        return list(chat)

    def _words(self, chars: int) -> str:
        return "".join(self._random.choices("abcdefgh é", k=chars))


# --- predictions ----------------------------------------------------------------------------------


@pytest.fixture(params=LAYOUTS)
async def engines(
    request: pytest.FixtureRequest, router: RouterProcess
) -> AsyncIterator[list[EngineProcess]]:
    """Two replicas with caches too small for the workload, in rotation."""
    options = {
        "served_model_name": f"model-{request.param}",
        "num_blocks": BLOCKS[request.param],
        "max_model_len": 1024,
    }
    async with (
        engine_processes(2, *simulated(request.param, **options)) as started,
        router.serving(*started),
    ):
        yield started


BLOCKS = {"full": 120, "gemma": 340, "gptoss": 160, "llama4": 260, "mamba-hybrid": 200}


TIERS = {
    "simulated, memory": [*simulated("gemma", num_blocks=340, cpu_blocks=2000)],
    "simulated states, memory": [*simulated("mamba-hybrid", num_blocks=120, cpu_blocks=1000)],
    "simulated, memory and disk": [*simulated("gptoss", num_blocks=200, cpu_blocks=60)],
    "torch, memory and disk": ["--preset", "gemma", "--num-blocks", "340", "--cpu-blocks", "150"],
}


@pytest.mark.parametrize("tiers", TIERS)
async def test_what_lower_tiers_bring_back_is_predicted_too(
    router: RouterProcess, tiers: str, tmp_path: Path
) -> None:
    """An engine reports GPU and offloaded tokens alike; so must the router, right after a copy as
    well as long after it."""
    name = tiers.replace(" ", "-").replace(",", "")
    options = [*TIERS[tiers], "--served-model-name", name, "--max-model-len", "1024"]
    if "disk" in tiers:
        options += ["--disk-directory", str(tmp_path / "blocks")]
    async with engine_processes(1, *options) as (engine,), router.serving(engine):
        workload, found = Workload(5, name), []
        for _ in range(REQUESTS):
            path, body = workload.next()
            answer = await router.post(path, body)
            assert answer.status == 200, answer.body
            found.append(hits(answer))
            await until_copied(engine)
            await until_told(router, engine)
        assert [predicted for predicted, _ in found] == [cached for _, cached in found]
        assert (await engine.metrics()).sum("vllm:external_prefix_cache_hits_total") > 0


async def until_copied(engine: EngineProcess) -> None:
    """Wait until no copy between its tiers is in progress."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while (await engine.metrics()).sum("kvroute_engine_copies_in_flight"):
        assert asyncio.get_running_loop().time() < deadline, "copies do not end"


async def test_every_prediction_is_what_the_engine_reports(
    router: RouterProcess, engines: list[EngineProcess]
) -> None:
    """This is the central claim: chats and completions, texts and ids, streamed and not, with
    salts, while blocks are evicted."""
    model = (await engines[0].get("/v1/models")).json["data"][0]["id"]
    workload, by_name = Workload(11, model), {engine.name: engine for engine in engines}
    before = await router.metrics()
    found: list[tuple[int, int]] = []
    for _ in range(REQUESTS):
        path, body = workload.next()
        answer = await router.post(path, body)
        assert answer.status == 200, answer.body
        found.append(hits(answer))
        await until_told(router, by_name[answer.headers["x-kv-replica"]])
    assert [predicted for predicted, _ in found] == [cached for _, cached in found]
    assert sum(cached > 0 for _, cached in found) > REQUESTS // 4, "the workload reuses much"
    assert await evicted(router, engines), "and loses some of it: blocks were evicted"
    now = await router.metrics()
    names = [engine.name for engine in engines]
    exact = sum(
        now.sum("kvroute_predictions_total", replica=name, outcome="exact") for name in names
    )
    wrong = [
        now.sum("kvroute_predictions_total", replica=name, outcome=way)
        for name in names
        for way in ("over", "under")
    ]
    assert (exact, sum(wrong)) == (REQUESTS, 0)
    assert before.sum("kvroute_untokenized_prompts_total") == now.sum(
        "kvroute_untokenized_prompts_total"
    )


@pytest.mark.parametrize("preset", ["gptoss", "gemma"])
async def test_a_window_that_slid_keeps_one_hit_and_shortens_another(
    router: RouterProcess, preset: str
) -> None:
    """Full attention holds both prompts completely; the window still has the end of one, and an
    earlier part of the other."""
    name = f"{preset}-that-slides"
    blocks = {"gptoss": 170, "gemma": 480}[preset]
    options = {
        "served_model_name": name,
        "num_blocks": blocks,
        "max_num_batched_tokens": 128,
        "max_model_len": 2048,
        "retention_interval": "dense",
    }
    async with (
        engine_processes(1, *simulated(preset, **options)) as (engine,),
        router.serving(engine),
    ):
        asking = Asking(router, engine, name)
        prompt = tokens(512, 1)
        await asking.serve(prompt, max_tokens=300)  # the window moves on from the prompt's end
        await asking.serve(prompt[:257])  # what it holds at 256 is used last
        await asking.fill_until([*prompt, 7], below=512)
        assert await asking.groups([*prompt, 7]) == {"full_attention": 512, "sliding_window": 256}
        assert await asking.serve([*prompt, 7]) == (256, 256), (
            "shortened: full attention alone would allow 512"
        )
        prompt = tokens(512, 2)
        await asking.serve(prompt)
        await asking.fill_until([*prompt[:256], 7], below=1)
        assert await asking.groups([*prompt[:256], 7]) == {
            "full_attention": 256,
            "sliding_window": 0,
        }
        assert await asking.groups([*prompt, 7]) == {"full_attention": 512, "sliding_window": 512}
        assert await asking.serve([*prompt, 7]) == (512, 512), (
            "kept: of what the window has lost nothing is needed"
        )


def tokens(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(256), k=count)


class Asking:
    """One request after another; the next is sent when the router has the events of the previous
    one."""

    def __init__(self, router: RouterProcess, engine: EngineProcess, model: str) -> None:
        self._router = router
        self._engine = engine
        self._model = model

    async def serve(self, ids: list[int], max_tokens: int = 1) -> tuple[int, int]:
        """The cached tokens predicted and reported."""
        body = {"model": self._model, "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self._router.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        await until_told(self._router, self._engine)
        return hits(answer)

    async def route(self, ids: list[int]) -> dict[str, Any]:
        body = {"model": self._model, "token_ids": ids}
        (ranked,) = (await self._router.post("/route?explain=true", body)).json["ranking"]
        return dict(ranked)

    async def fill_until(self, ids: list[int], below: int) -> None:
        """Send other requests, which evict the least recently used blocks, until the hit is shorter
        than *below*."""
        for seed in range(1000, 1200):
            if (await self.route(ids))["hit"]["cached_tokens"] < below:
                return
            await self.serve(tokens(64, seed))
        raise AssertionError(f"{ids[:3]}...: still a hit of {below} tokens")

    async def groups(self, ids: list[int]) -> dict[str, int]:
        """By kind, what each group by itself allows; the least if there are several of a kind."""
        found: dict[str, int] = {}
        for group in (await self.route(ids))["groups"][0]:
            found[group["kind"]] = min(group["tokens"], found.get(group["kind"], group["tokens"]))
        return found


async def evicted(router: RouterProcess, engines: list[EngineProcess]) -> int:
    """Blocks whose removal was announced by any of the engines."""
    replicas = [await router.replica(engine.name) for engine in engines]
    return sum(source["feed"]["removed"] for replica in replicas for source in replica["sources"])


# --- engines that die, clients that leave ---------------------------------------------------------


async def test_predictions_are_exact_again_after_a_crash(router: RouterProcess) -> None:
    """The new process has an empty cache, another publisher and other ports for events; its address
    is the old one."""
    options = {"served_model_name": "model-of-a-crash", "num_blocks": 300, "enable_faults": True}
    async with (
        engine_processes(1, *simulated("gemma", **options)) as (engine,),
        router.serving(engine),
    ):
        workload = Workload(3, "model-of-a-crash")
        assert await all_exact(router, engine, workload, 10) > 0
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await engine.post("/faults", {"kind": "crash"})
        assert await engine.ended() == 1
        await router.until(
            lambda now: now.sum("kvroute_replica_healthy", replica=engine.name) == 0,
            "the router has noticed",
        )
        await asyncio.to_thread(engine.start)
        await router.until_in_rotation(engine)
        await until_told(router, engine)
        assert await all_exact(router, engine, workload, 10) > 0


async def all_exact(
    router: RouterProcess, engine: EngineProcess, workload: Workload, count: int
) -> int:
    """Send requests one after another and compare; returns the tokens that were cached."""
    total = 0
    for _ in range(count):
        answer = await router.post(*workload.next())
        assert answer.status == 200, answer.body
        predicted, cached = hits(answer)
        assert predicted == cached
        total += cached
        await until_told(router, engine)
    return total


async def test_a_client_that_leaves_the_router_frees_the_engine(router: RouterProcess) -> None:
    """The connection is closed all the way down."""
    options = {"served_model_name": "model-of-a-leaver", "step_overhead_s": 0.005}
    async with (
        engine_processes(1, *simulated("full", **options)) as (engine,),
        router.serving(engine),
    ):
        body = {
            "model": "model-of-a-leaver",
            "prompt": "x",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        async with connect(router.port) as client:
            await client.send("POST", "/v1/completions", body)
            await client.read_head()
            await client.read_piece()
            assert (await engine.metrics()).sum("vllm:num_requests_running") == 1
        while (now := await engine.metrics()).sum("vllm:num_requests_running"):
            await asyncio.sleep(0.01)
        assert now.sum("vllm:kv_cache_usage_perc") == 0
        assert now.sum("vllm:request_success_total", finished_reason="abort") == 1
        assert now.sum("vllm:generation_tokens_total") < 3000


CUTS: tuple[dict[str, Any], ...] = (
    {"truncate_prompt_tokens": 150},
    {"truncate_prompt_tokens": 150, "truncation_side": "left"},
    {"truncate_prompt_tokens": 150, "truncation_side": "right"},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 240, "truncation_side": "right"},
)


async def test_a_prompt_is_cut_before_it_is_looked_up(router: RouterProcess) -> None:
    """What is cut away shifts all blocks behind it; without a side the special tokens of a text
    stay, and only the replica knows which they are."""
    text = "".join(chr(97 + index * index % 23) for index in range(301))
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": list(text.encode())}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    )
    options = simulated("full", served_model_name="model-that-cuts", max_model_len=256)
    async with engine_processes(1, *options) as (engine,), router.serving(engine):
        for case, (form, cut) in enumerate(itertools.product(forms, CUTS)):
            path, prompt = form
            body: dict[str, Any] = {"model": "model-that-cuts", "max_tokens": 1, **prompt, **cut}
            body["cache_salt"] = f"case {case}"
            first = await router.post(path, body)
            assert (first.status, hits(first)) == (200, (0, 0)), (path, cut)
            await until_told(router, engine)
            predicted, reported = hits(await router.post(path, body))
            assert predicted == reported > 0, (path, cut)
            assert (reported < 150) == (cut["truncate_prompt_tokens"] == 150)
