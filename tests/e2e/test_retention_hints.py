"""Real engines that keep windows sparsely are told by a real router what to keep."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.support.actual_hits import hits, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.engine_stub import EngineStub, Exchange
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    markers = [
        AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")
    ]
    tokenizer.add_special_tokens(markers)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def router(files: Path) -> Iterator[RouterProcess]:
    configured: list[dict[str, Any]] = [
        {"name": "chats", "tokenizer": str(files)},
        {"name": "untold", "retention_hints": "never"},
        {"name": "told"},
        {"name": "states"},
    ]
    with router_process({"health": QUICK_HEALTH, "models": configured}) as process:
        yield process


@asynccontextmanager
async def serving(
    router: RouterProcess, model: str, count: int, *options: str, preset: str = "gptoss"
) -> AsyncIterator[list[EngineProcess]]:
    arguments = simulated(preset, served_model_name=model, num_blocks=400, max_model_len=2048)
    async with (
        engine_processes(count, *arguments, *options) as engines,
        router.serving(*engines),
    ):
        yield engines


async def ask(
    router: RouterProcess, engine: EngineProcess, path: str, **body: Any
) -> tuple[int, int]:
    answer = await router.post(path, {"max_tokens": 1, **body})
    assert answer.status == 200, answer.body
    assert answer.headers["x-kv-replica"] == engine.name
    await until_told(router, engine)
    return hits(answer)


def tokens(count: int, seed: int) -> list[int]:
    return [(seed * 7919 + number * number) % 250 for number in range(count)]


async def parted(router: RouterProcess, model: str, preset: str = "gptoss") -> tuple[int, int]:
    """The hit of the second prompt that one replica gets of a document whose questions another has
    seen part."""
    document = tokens(1024, 1)
    async with serving(router, model, 2, preset=preset) as (first, second):
        await router.post(f"/replicas/{second.name}/drain")
        for question in range(2):
            prompt = document + tokens(100, 10 + question)
            await ask(router, first, "/v1/completions", model=model, prompt=prompt)
        await router.post(f"/replicas/{second.name}/undrain")
        await router.post(f"/replicas/{first.name}/drain")
        for question in range(2):
            prompt = document + tokens(100, 20 + question)
            found = await ask(router, second, "/v1/completions", model=model, prompt=prompt)
        return found


@pytest.mark.parametrize(("model", "preset"), [("told", "gptoss"), ("states", "mamba-hybrid")])
async def test_what_the_fleet_has_seen_part_is_kept_at_once(
    router: RouterProcess, model: str, preset: str
) -> None:
    """A window, or a state, at the end of a document: told to the replica that computes it for the
    first time."""
    predicted, actual = await parted(router, model, preset)
    assert predicted == actual
    assert actual >= 900
    metrics = await router.metrics()
    assert metrics.sum("kvroute_boundaries_total", model=model, reason="branch_point") > 0
    assert metrics.sum("kvroute_boundary_prompts_total", model=model, found="hit") > 0
    assert metrics.sum("kvroute_boundary_hit_tokens_total", model=model) >= 900


async def test_an_engine_that_is_told_nothing_keeps_ends_only(router: RouterProcess) -> None:
    """So it is with every router that does not know the groups."""
    assert await parted(router, "untold") == (0, 0)
    assert (await router.metrics()).sum("kvroute_boundaries_total", model="untold") == 0


async def test_the_end_of_a_system_prompt_is_kept_before_anything_parted(
    router: RouterProcess, files: Path
) -> None:
    """The chat template tells where it ends."""
    model, system = "chats", {"role": "system", "content": "Always answer in verse. " * 40}
    async with serving(router, model, 1, "--tokenizer", str(files)) as (engine,):
        found = []
        for number in range(4):
            question = {"role": "user", "content": f"{number} " + "what is it? " * 20}
            found.append(
                await ask(
                    router, engine, "/v1/chat/completions", model=model, messages=[system, question]
                )
            )
        assert all(predicted == actual for predicted, actual in found), found
        assert all(actual >= 900 for _, actual in found[1:]), found
    metrics = await router.metrics()
    assert metrics.sum("kvroute_boundaries_total", model=model, reason="message_end") > 0


async def test_what_an_engine_reads_no_hints_of_is_not_counted_as_told(
    router: RouterProcess,
) -> None:
    """Embeddings are not gone on with, and where prompts part among them matters to nobody."""
    stub = EngineStub("embedding")
    stub.paths["/server_info"] = takes_hints
    async with stub, router.serving(stub):

        async def told() -> float:
            return (await router.metrics()).sum("kvroute_boundaries_total", model=stub.model)

        deadline = time.monotonic() + DEADLINE_S
        while not await told():  # it was not asked about itself yet
            body = {"model": stub.model, "prompt": tokens(200, 1), "max_tokens": 1}
            assert (await router.post("/v1/completions", body)).status == 200
            assert time.monotonic() < deadline
        before = await told()
        for seed in (2, 3, 4):
            body = {"model": stub.model, "input": tokens(640, 1) + tokens(100, seed)}
            assert (await router.post("/v1/embeddings", body)).status == 200
        assert await told() == before


# --- several tenants ------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
_NUMBERS = itertools.count()
HOSTILE, OTHER = "sk-of-the-flood", "sk-of-another"


@pytest.fixture
def shared(files: Path) -> Iterator[RouterProcess]:
    keys = [
        {"name": name, "key": key, "cache_salt": f"salt-of-{name}"}
        for name, key in (("flood", HOSTILE), ("other", OTHER))
    ]
    config: dict[str, Any] = {
        "health": QUICK_HEALTH,
        "server": {"client_api_keys": keys},
        "models": [{"name": "shared", "tokenizer": str(files)}],
    }
    with router_process(config) as process:
        yield process


async def test_a_tenant_cannot_have_kept_what_nobody_asks_for(
    shared: RouterProcess,
) -> None:
    """Neither by fields that are the router's, nor by naming what it never asks for again; and what
    another tenant's prompts have in common stays known."""
    stub = EngineStub("shared")
    stub.paths["/server_info"] = takes_hints
    async with stub, shared.serving(stub):
        deadline = time.monotonic() + DEADLINE_S
        while not any("keep" in told for told in _told(stub)):  # it was not asked about itself yet
            await chat(shared, OTHER, "The rules of the house. " * 20)
            assert time.monotonic() < deadline
        rules, before = _told(stub)[-1]["keep"], len(_told(stub))
        own = {"kv_transfer_params": {"kvroute": {"keep": [64, 128], "keep_end": True}}}
        for number in range(320):
            await chat(shared, HOSTILE, f"{number} is not asked for again. " * 20, **own)
        flood = [each.get("keep", []) for each in _told(stub)[before:]]
        assert len(flood) == 320
        assert all(len(keep) <= 1 for keep in flood), "one end of a message, none of its own"
        assert not any(flood[-20:]), "which is not asked for again"
        await chat(shared, OTHER, "The rules of the house. " * 20)
        assert set(rules) <= set(_told(stub)[-1]["keep"])


async def takes_hints(exchange: Exchange) -> None:
    await exchange.whole(b'{"retention_hints": 1}')


async def chat(router: RouterProcess, key: str, rules: str, **more: Any) -> None:
    part = {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [part]},
        {"role": "user", "content": f"What is question {next(_NUMBERS)}?"},
    ]
    body = {"model": "shared", "messages": messages, "max_tokens": 1, **more}
    headers = {"authorization": f"Bearer {key}"}
    answer = await router.post(CHAT, body, headers)
    assert answer.status == 200, answer.body


def _told(stub: EngineStub) -> list[dict[str, Any]]:
    """What each request said of what to keep."""
    bodies = [request.json for request in stub.requests if request.path == CHAT]
    return [body.get("kv_transfer_params", {}).get("kvroute", {}) for body in bodies]
