"""The ASGI application of one router, and the requests served beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from router.config.extras import import_extra
from router.doors.desk import Desk, DeskParts
from router.doors.http.access import Guard
from router.doors.http.access_log import logged
from router.doors.http.api import create_api
from router.doors.http.gateway import Gateway
from router.doors.http.parts import ApiParts
from router.doors.http.proxied_paths import ProxiedPaths
from router.doors.http.questions import RouteQuestions
from router.fleet.engine_order import EngineOrder
from router.serve.service import RouterService


class RouterApp:
    """The ASGI application of one router: all but what `direct` serves.

    FastAPI and its middleware cost some 200 µs a request, and ASGI itself a task and its messages.
    """

    def __init__(self, service: RouterService) -> None:
        self._logs_access = service.config.observability.access_log
        paths = ProxiedPaths(service.config.server.extra_paths)
        guard = _guard(service)
        self.gateway = Gateway(service, guard, paths)
        self.paths = paths
        self.desk = _desk(service)
        """Answers gateways that send requests themselves."""
        traces = service.tracing is not None
        parts = ApiParts(service, guard, paths, self.desk, service.render_metrics, traces)
        self._api = create_api(parts, _with_picker(service.lifespan, self, service))
        self.direct = RouteQuestions(self.gateway)
        """Serves the requests that do not go through ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
        elif self._logs_access:
            await logged(self._respond, scope, receive, send)
        else:
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out
        await self._api(scope, receive, send)


def _guard(service: RouterService) -> Guard:
    return Guard(
        service.config.server,
        lambda endpoint: service.metrics.wrong_keys.labels(endpoint).inc(),
        service.key_limits.usages,
        service.peer_key,
    )


def _desk(service: RouterService) -> Desk:
    parts = DeskParts(
        service.dispatcher,
        service.observers,
        service.admission,
        service.entrance,
        EngineOrder(service.config.overload),
        service.reservations,
    )
    return Desk(parts)


_Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def _with_picker(lifespan: _Lifespan, router: RouterApp, service: RouterService) -> _Lifespan:
    """A lifespan in which gateways can ask by external processing, if they are to."""
    config = service.config.doors.ext_proc
    if config.listen is None:
        return lifespan
    picking = import_extra(
        "router.doors.external_processing", "gateway", "doors.ext_proc.listen", config.listen
    )
    server = picking.make_picker(
        service.config,
        router.desk,
        router.gateway.guard,
        router.paths,
        service.readiness.why_not_ready,
    )

    @contextlib.asynccontextmanager
    async def with_picker(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            await server.start()
            try:
                yield
            finally:
                await server.stop()

    return with_picker
