"""The whole application: proxied paths as raw ASGI, everything else through FastAPI."""

from __future__ import annotations

from router.http.access import Guard, Scope
from router.http.access_log import logged
from router.http.api import ApiParts, create_api
from router.http.gateway import Gateway, Receive, Send
from router.http.proxied_paths import ProxiedPaths
from router.service import RouterService


class RouterApp:
    """The ASGI application of one router.

    FastAPI and its middleware cost some 200 µs a request; the proxied paths need nothing of it.
    """

    def __init__(self, service: RouterService) -> None:
        self._logs_access = service.config.observability.access_log
        self._paths = ProxiedPaths(service.config.server.extra_paths)
        guard = Guard(
            service.config.server,
            lambda endpoint: service.metrics.wrong_keys.labels(endpoint).inc(),
        )
        self._gateway = Gateway(
            service.config.server,
            guard,
            service.config.policy.session_header,
            service.admission,
            service.dispatcher,
            service.proxy,
            service.observers,
        )
        parts = ApiParts(
            config=service.config,
            guard=guard,
            proxied_paths=self._paths,
            admission=service.admission,
            readiness=service.readiness,
            dispatcher=service.dispatcher,
            models=service.models,
            registry=service.registry,
            feed=service.feed,
            tokenizer_check=service.tokenizer_check,
            repair=service.repair,
            request_log=service.request_log,
            metrics=service.metrics,
            shortages=service.shortages,
            render_metrics=service.render_metrics,
        )
        self._api = create_api(parts, service.lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._api(scope, receive, send)
        elif self._logs_access:
            await logged(self._respond, scope, receive, send)
        else:
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out
        path = self._paths.find(scope["path"])
        if path is not None and scope["method"] in path.methods:
            await self._gateway(path, scope, receive, send)
        else:
            await self._api(scope, receive, send)
