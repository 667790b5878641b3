"""Other caches of vLLM: each kind of attention by itself or with another, hits inside blocks,
windows kept more densely."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.router_process import router_process
from tests.vllm.checking import Checker
from tests.vllm.conftest import Figures
from tests.vllm.model import CHUNK, GEMMA, LLAMA4, MISTRAL, QWEN2, QWEN3_NEXT, write_model
from tests.vllm.server import BLOCK_SIZE, VllmServer, running
from tests.vllm.workload import Material, Workload

pytestmark = pytest.mark.timeout(1800)

MATERIAL = Material("others")


CHUNKED_GROUPS = [
    {"kind": "chunked_local_attention", "block_size": BLOCK_SIZE, "attention_chunk_size": CHUNK}
    for _ in range(3)
]
LAYOUT = {"groups": [*CHUNKED_GROUPS, {"kind": "full_attention", "block_size": BLOCK_SIZE}]}
"""What the events do not say about `LLAMA4`."""


async def check_serially(
    servers: list[VllmServer],
    requests: int,
    figures: Figures,
    what: str,
    models: Sequence[dict[str, Any]] = (),
) -> None:
    """Check all models in turn, behind the same router: some requests hit, and each prediction is
    exact."""
    replicas = [{"url": server.url, "id": server.name} for server in servers]
    with router_process(
        {"models": [*models], "replicas": replicas, "policy": {"name": "random"}}
    ) as router:
        for server in servers:
            await router.until_in_rotation(server, 60)  # type: ignore[arg-type]
        for model in dict.fromkeys(server.model for server in servers):
            checker = Checker(router, servers)
            await Workload(checker.check, model, MATERIAL, model).run(requests)
            figures.add(f"{what}, {model}, serial", checker.ledger)
            assert not checker.ledger.wrong, "\n".join(map(str, checker.ledger.wrong))
            assert checker.ledger.hits >= requests // 10


def two_servers(
    directory: Path, blocks: int, models: dict[str, dict[str, Any]]
) -> list[VllmServer]:
    return [
        VllmServer(name, write_model(directory / name, config), directory, blocks)
        for name, config in models.items()
    ]


async def test_full_attention_only_and_linear_attention_behind_one_router(
    directory: Path, figures: Figures
) -> None:
    """A fleet serves several models, most of them without hybrid attention."""
    servers = two_servers(directory, 96, {"plain": QWEN2, "next": QWEN3_NEXT})
    with running(*servers):
        await check_serially(servers, 80, figures, "two models")


async def test_sliding_windows_only_and_chunked_attention_behind_one_router(
    directory: Path, figures: Figures
) -> None:
    """The events of the first do not give the place of any block, so the router computes the
    hashes; for the second, the chunk size is configured."""
    servers = two_servers(directory, 144, {"windows": MISTRAL, "chunks": LLAMA4})
    with running(*servers):
        await check_serially(
            servers, 80, figures, "two models", [{"name": "chunks", "layout": LAYOUT}]
        )


async def test_replicas_of_one_model_that_cache_differently(
    directory: Path, figures: Figures
) -> None:
    """This happens during a rollout: one hashes twice per block and hits inside blocks, the other
    keeps more of its windows."""
    model = write_model(directory / "gemma", GEMMA)
    servers = [
        VllmServer("finer", model, directory, 128, "--prefix-match-unit", "16"),
        VllmServer("denser", model, directory, 128, "--prefix-cache-retention-interval", "64"),
    ]
    with running(*servers):
        await check_serially(servers, 100, figures, "two ways of caching")
