"""A chat is looked up as the engine that serves it writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_stub import EngineStub
from tests.support.model_files import write_byte_tokenizer
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

CHAT = "/v1/chat/completions"
TEXT = "a" * 640


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    directories = [tmp_path_factory.mktemp(name) for name in ("spoken", "harmonic")]
    models = []
    for directory, name in zip(directories, ("spoken", "harmonic"), strict=True):
        write_byte_tokenizer(Path(directory))
        models.append({"name": name, "tokenizer": str(directory)})
    (directories[1] / "config.json").write_text('{"model_type": "gpt_oss"}')
    with router_process({"health": QUICK_HEALTH, "models": models}) as process:
        yield process


async def hit(router: RouterProcess, stub: EngineStub, content: object) -> str | None:
    body = {"model": stub.model, "messages": [{"role": "user", "content": content}]}
    found = await router.post(CHAT, body)
    assert found.status == 200, found.body
    return found.headers.get("x-kv-hit-tokens")


@pytest.mark.parametrize(("owner", "between"), [("vllm", "\n"), ("sglang", " ")])
async def test_parts_are_joined_as_their_engine_joins_them(
    router: RouterProcess, owner: str, between: str
) -> None:
    """By the owner that it reports; in the core as in Python."""
    async with (
        EngineStub("spoken", has_events=True, model_details={"owned_by": owner}) as stub,
        router.serving(stub),
    ):
        stub.store(list((TEXT + between + TEXT).encode()))
        await router.until_applied(stub)
        parts = [{"type": "text", "text": text} for text in (TEXT, TEXT + "!" * 16)]
        assert await hit(router, stub, parts) == "1280"


async def test_replicas_tell_what_they_make_of_a_chat_with_gpt_oss(router: RouterProcess) -> None:
    """As soon as all are known to be new enough."""
    async with EngineStub("harmonic", has_events=True) as stub, router.serving(stub):
        stub.store(list(TEXT.encode()))
        await router.until_applied(stub)

        while await hit(router, stub, TEXT + "!") != "640":
            pass
        assert json.loads(stub.requests[-1].body)["messages"][0]["content"] == TEXT + "!"
