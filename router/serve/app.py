"""The ASGI application of one router, and the requests served beside it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from router.config.extras import import_extra
from router.doors.desk import Desk, DeskParts
from router.doors.http.access import Guard
from router.doors.http.access_log import logged
from router.doors.http.api import (
    ApiParts,
    add_description,
    add_operation,
    add_probes,
    add_route,
    new_api,
)
from router.doors.http.dialects import DialectEndpoints, add_dialects
from router.doors.http.error_handlers import add_error_handlers
from router.doors.http.gateway import Gateway
from router.doors.http.live_page import add_page
from router.doors.http.models import add_models
from router.doors.http.openapi import Access
from router.doors.http.proxied_paths import ProxiedPaths
from router.doors.http.questions import RouteQuestions
from router.doors.http.selection import add_selection
from router.doors.reservations import ReservationStatistics
from router.fleet.engine_order import EngineOrder
from router.serve.service import RouterService
from router.telemetry.collector import collect, fields_as_metrics

_Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]


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
        render = functools.partial(render_metrics, service)
        parts = ApiParts(service, guard, paths, service.reservations, render, traces)
        self._api = _api(parts, self.desk, _with_picker(service.lifespan, self, service))
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


def _api(parts: ApiParts, desk: Desk, lifespan: _Lifespan) -> FastAPI:
    """Make the application for all paths that are not proxied."""
    app, router, guard = new_api(lifespan), parts.router, parts.guard
    client, operator = Access("client", guard), Access("operator", guard)
    add_error_handlers(app, parts.proxied_paths, router.metrics, router.shortages)
    add_probes(app, parts, operator)
    sees_hits = client if guard.clients_see_hits else Access("operator", guard, False)
    add_route(app, parts, sees_hits)
    add_selection(app, desk, router.config, sees_hits)
    dialects = DialectEndpoints(
        router.config.server, router.admission, router.registry, router.models
    )
    add_dialects(app, dialects, sees_hits, operator)
    add_models(app, router.models, router.registry, client)
    add_operation(app, parts, operator)
    add_page(app)
    add_description(app, client)
    return app


async def render_metrics(service: RouterService, has_exemplars: bool = False) -> bytes:
    """Return all metrics in Prometheus' text format, or with exemplars in OpenMetrics'."""
    reservations = [((), service.reservations.statistics())]
    made = itertools.chain(
        collect(service), fields_as_metrics(ReservationStatistics, (), reservations)
    )
    return await service.metrics.render(made, has_exemplars)


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
