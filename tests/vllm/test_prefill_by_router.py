"""A real pair of vLLM servers: one computes prompts, the other fetches their cache by NIXL and
responds. The router hands over between them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.http_client import ask
from tests.support.router_process import RouterProcess, router_process
from tests.support.vllm_publisher import free_port
from tests.vllm.model import FIRST_PLAIN_TOKEN, GEMMA, VOCABULARY, write_model
from tests.vllm.server import VllmServer, running

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl"),
]

BLOCKS = 144
LEAST = 64
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


def _server(directory: Path, model: Path, name: str, role: str) -> VllmServer:
    side_channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    connector = json.dumps({**CONNECTOR, "kv_role": role})
    arguments = "--kv-transfer-config", connector, "--seed", "0"
    return VllmServer(name, model, directory, BLOCKS, *arguments, environment=side_channel)


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    model = write_model(directory / "pair", GEMMA)
    computes = _server(directory, model, "computes", "kv_producer")
    responds = _server(directory, model, "responds", "kv_consumer")
    with running(computes, responds):
        yield computes, responds


@pytest.fixture(scope="module")
def router(pair: tuple[VllmServer, VllmServer]) -> Iterator[RouterProcess]:
    roles = ("prefill", "decode")
    config = {
        "replicas": [
            {"url": server.url, "id": server.name, "role": role}
            for server, role in zip(pair, roles, strict=True)
        ],
        "prefill": {"min_uncached_tokens": LEAST, "handed_over_by": "router"},
    }
    with router_process(config) as process:
        yield process


def _prompt(seed: int, tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(tokens)]


async def _served(router: RouterProcess, prompt: list[int]) -> tuple[Any, dict[str, Any]]:
    """The response to a prompt, and its line of the log."""
    body = {"model": "pair", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    response = await router.post("/v1/completions", body)
    assert response.status == 200, response.body
    (logged,) = (await router.get("/requests?limit=1")).json["requests"]
    return response.json, logged


async def test_a_cache_is_handed_over_and_predicted_at_both(
    router: RouterProcess, pair: tuple[VllmServer, VllmServer]
) -> None:
    """The response is what the prefiller itself would have generated; what it had cached was
    predicted to the token."""
    for server in pair:
        await router.until_in_rotation(server, 60)  # type: ignore[arg-type]
    shared = _prompt(1, 320)
    for number in range(6):
        prompt = [*shared, *_prompt(10 + number, 100 + 7 * number)]
        served, logged = await _served(router, prompt)
        assert (logged["prefiller"], logged["replica"]) == ("computes", "responds")
        assert logged["prefiller_cached_tokens"] == logged["prefiller_actual_tokens"], logged
        details = served["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= len(prompt) - 64, "it was fetched"
        assert logged["attempts"] == 1
        whole = await computed_alone(pair[0], prompt)
        assert served["choices"][0]["text"] == whole["choices"][0]["text"]
        await router.until_idle()
    _, logged = await _served(router, [*shared, *_prompt(10, 100)])
    assert logged["prefiller"] is None, "it holds the cache by now"
    assert logged["predicted"]["cached_tokens"] == logged["actual"]


async def computed_alone(server: VllmServer, prompt: list[int]) -> Any:
    """What one server generates by itself, from what it has cached."""
    body = {"model": "pair", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    answer = await ask(server.port, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json
