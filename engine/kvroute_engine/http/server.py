"""Serves one engine with uvicorn until a signal, then finishes the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute_engine.core.engine import Engine
from kvroute_engine.http.api import ApiConfig, create_app
from kvroute_engine.http.errors import EngineServerError
from kvroute_engine.http.metrics import EngineCollector, RequestMetrics
from kvroute_engine.http.service import EngineService
from kvroute_engine.http.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
_BACKLOG = 4096
_KEEP_ALIVE_S = 75
_SWITCH_INTERVAL_S = 0.0005
"""The time after which the engine's thread hands Python's global lock to the event loop.

With the default of 5 ms every token reaches its client later.
"""
_CUT_S = 5
"""The time that requests have to end after their connections were cut."""
_EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class EngineServerConfig:
    """The address of one engine's server, and its shutdown."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose."""
    grace_s: float = 30.0
    """The time that requests in flight may run on after the first signal, in seconds."""
    log_level: str = "warning"


def run(engine: Engine, tokenizer: Tokenizer, api: ApiConfig, config: EngineServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second signal cuts the requests that still run.

    Args:
        engine: Closed at the end.

    Returns:
        The exit code of the process.

    Raises:
        EngineServerError: The address cannot be listened on. The engine is closed.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        listener = _listen(config)
    except EngineServerError:
        engine.close()
        raise
    with contextlib.closing(listener):
        has_ended = _on_uvloop(engine, tokenizer, api, config, listener)
    if not has_ended:
        log.error("the engine is stuck in a step; it is left behind")
        os._exit(_EXIT_FAILED)  # its thread would keep the process
    return 0


def _on_uvloop(
    engine: Engine,
    tokenizer: Tokenizer,
    api: ApiConfig,
    config: EngineServerConfig,
    listener: socket.socket,
) -> bool:
    work = _serve(engine, tokenizer, api, config, listener)
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    uvloop.install()
    return asyncio.run(work)


async def _serve(
    engine: Engine,
    tokenizer: Tokenizer,
    api: ApiConfig,
    config: EngineServerConfig,
    listener: socket.socket,
) -> bool:
    registry = CollectorRegistry()
    label = str(next(iter(api.event_endpoints), 0))
    service = EngineService(engine, RequestMetrics(registry, api.model.name, label))
    registry.register(EngineCollector(api.model, label, service.engine_statistics))
    try:
        server = _EngineServer(
            _uvicorn_config(create_app(service, tokenizer, api, registry), config)
        )
        await _until_signal(server, service, api, config, listener)
    finally:
        has_ended = await service.close()  # in any case: its thread would keep the process
    return has_ended


async def _until_signal(
    server: _EngineServer,
    service: EngineService,
    api: ApiConfig,
    config: EngineServerConfig,
    listener: socket.socket,
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, server, service, config.grace_s)
    host, port = listener.getsockname()[:2]
    print(
        f"kvroute engine {api.model.name} listens on http://{_in_url(host)}:{port}",
        file=sys.stderr,
        flush=True,
    )
    await server.serve(sockets=[listener])


class _EngineServer(uvicorn.Server):
    """uvicorn without its signal handling, which raises the signals again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """Abort every connection; uvicorn would cancel the requests and log each as an error."""
        for connection in cast(set[HttpToolsProtocol], self.server_state.connections):
            connection.transport.abort()


def _stop(server: _EngineServer, service: EngineService, grace_s: float) -> None:
    """Handle a signal: the first one gives requests their grace, the second cuts them."""
    if server.should_exit:
        server.cut_connections()
    server.should_exit = True
    service.start_draining()
    asyncio.get_running_loop().call_later(grace_s, server.cut_connections)


class _BoundedHeadProtocol(HttpToolsProtocol):
    """Bounds a request's head, chunk sizes and trailers, which uvicorn reads without a limit."""

    unframed_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.unframed_bytes += len(data)
        super().data_received(data)
        if self.unframed_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self.unframed_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.unframed_bytes = 0
        super().on_message_complete()


def _uvicorn_config(app: Any, config: EngineServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_BoundedHeadProtocol,
        interface="asgi3",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.grace_s) + _CUT_S,
    )


def _listen(config: EngineServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise EngineServerError(
            f"--host {config.host} --port {config.port}: cannot be listened on: {error}"
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
