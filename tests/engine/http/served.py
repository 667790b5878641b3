"""An engine with a scripted output behind its real HTTP side: real scheduler, cache and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.http.api import ApiConfig, create_app
from kvroute_engine.http.metrics import EngineCollector, RequestMetrics
from kvroute_engine.http.responses import KVEventEndpoint, ServedModel
from kvroute_engine.http.service import EngineService
from kvroute_engine.http.tokenizer import EOS_TOKEN_ID, ByteTokenizer, Tokenizer
from tests.support.http_client import Answer, ask
from tests.support.router_process import Metrics
from tests.support.waiting import DEADLINE_S, eventually

MODEL = "a-model"
ADAPTER = "an-adapter"
SOURCE = KVEventEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557", "kv-events")


class ScriptedRunner:
    """Generates a text byte by byte, then ends the sequence; a test can hold it or make it fail."""

    def __init__(self, says: str) -> None:
        self.token_ids = [*says.encode(), EOS_TOKEN_ID]
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails_with: Exception | None = None
        self.steps = 0

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        self.steps += 1
        assert self.may_go.wait(DEADLINE_S), "the test never let the engine go on"
        if self.fails_with is not None:
            raise self.fails_with
        return [self._next(chunk.num_output_tokens) if chunk.is_last else None for chunk in chunks]

    def _next(self, said: int) -> int:
        return self.token_ids[said % len(self.token_ids)]


def scripted_engine(says: str = "hello", **settings: Any) -> tuple[Engine, ScriptedRunner]:
    """A real engine with a scripted runner."""
    engine = build_engine(EngineConfig(simulate=True, **settings))
    runner = ScriptedRunner(says)
    engine.runner = runner
    return engine, runner


@dataclass
class Served:
    """One engine over HTTP."""

    port: int
    service: EngineService
    runner: ScriptedRunner
    registry: CollectorRegistry
    engine: Engine

    async def get(self, path: str) -> Answer:
        return await ask(self.port, "GET", path)

    async def post(
        self, path: str, body: object = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        return await ask(self.port, "POST", path, body, headers)

    async def metrics(self) -> Metrics:
        return Metrics((await self.get("/metrics")).body.decode())

    async def until_idle(self) -> None:
        """Wait until no request is left in the service, the scheduler or the cache."""
        await eventually(lambda: not self.service.statistics().in_flight, "no request is in flight")
        await eventually(lambda: not self.engine.has_work, "the engine has nothing to do")
        await eventually(lambda: self.engine.cache.usage == 0, "all blocks are free")


@contextlib.asynccontextmanager
async def serving(
    says: str = "hello",
    tokenizer: Tokenizer | None = None,
    settings: dict[str, Any] | None = None,
    **api: Any,
) -> AsyncIterator[Served]:
    """Serve an engine that generates *says*, on a free port, until the block ends."""
    engine, runner = scripted_engine(says, **(settings or {}))
    registry = CollectorRegistry()
    model = served_model(engine)
    service = EngineService(engine, RequestMetrics(registry, model.name, "0"))
    registry.register(EngineCollector(model, "0", service.engine_statistics))
    config = replace(ApiConfig(model, "1.2.3", {0: SOURCE}), **api)
    app = create_app(service, tokenizer or ByteTokenizer(), config, registry)
    async with _listening(app) as port:
        try:
            yield Served(port, service, runner, registry, engine)
        finally:
            runner.may_go.set()
            assert await service.close()


def served_model(engine: Engine) -> ServedModel:
    return ServedModel(
        name=MODEL,
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.model.max_model_len,
        block_size=engine.model.block_size,
        num_blocks=engine.cache.config.num_blocks,
        enable_prefix_caching=True,
        created=1_700_000_000,
        adapters=(ADAPTER,),
        group_kinds=tuple(group.kind.value for group in engine.cache.config.layout.groups),
    )


@contextlib.asynccontextmanager
async def _listening(app: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none", access_log=False
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or task.done(), "the server listens")
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
