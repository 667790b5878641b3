"""Runs the application under uvicorn until a signal: refuses what is new, finishes what runs, and ends with 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from router.app import RouterApp
from router.config import RouterConfig
from router.proxy import AbortableHttpProtocol
from router.service import RouterService

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_BACKLOG = 4096


class _Server(uvicorn.Server):
    """uvicorn, without its way with signals: it raises them again when it is done, and so never ends with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends at once.

    Raises:
        OSError: The address cannot be bound.
    """
    service = RouterService(config)
    server = _Server(_uvicorn_config(RouterApp(service), config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, server, service)
    with contextlib.closing(_listen(config.server.host, config.server.port)) as listener:
        host, port = listener.getsockname()[:2]
        print(f"kvroute listens on http://{_in_url(host)}:{port}", file=sys.stderr, flush=True)
        await server.serve(sockets=[listener])


def run(config: RouterConfig) -> int:
    """`serve` on uvloop; the exit code of the process."""
    logging.basicConfig(level=config.observability.log_level.upper(), format=_log_format(config))
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    else:
        uvloop.install()
        asyncio.run(serve(config))
    return 0


def _stop(server: uvicorn.Server, service: RouterService) -> None:
    if server.should_exit:
        server.force_exit = True
    logger.info("shutting down: %d requests under way", service.gateway.under_way)
    service.gateway.is_shutting_down = True
    server.should_exit = True


def _uvicorn_config(app: RouterApp, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=AbortableHttpProtocol,
        interface="asgi3",
        ws="none",
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        access_log=config.observability.access_log,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.server.timeouts.shutdown_grace_s),
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _log_format(config: RouterConfig) -> str:
    if config.observability.log_format == "json":
        return '{"time": "%(asctime)s", "level": "%(levelname)s", "logger": "%(name)s", "message": "%(message)s"}'
    return "%(asctime)s %(levelname)s %(name)s: %(message)s"
