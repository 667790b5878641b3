"""`POST /route` outside ASGI: where a request would go, in short.

Gateways ask it for every request that they route, so it takes the short way. With a query string it
is the API's, which explains it all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from router.config.origin import Header
from router.doors.asks import Key
from router.doors.http.decision_views import encoded, encoding_of, route_view
from router.doors.http.gateway import Gateway, Passage
from router.doors.proxied_paths import ProxiedPath, RoutedBy
from router.errors import RequestError
from router.plane.exchanges import PlaneExchange
from router.prompt.endpoints import Endpoint
from router.routing.decision import Decision

_PATH = Endpoint.ROUTE.value
_ROUTE = ProxiedPath(RoutedBy.CACHE, endpoint=Endpoint.ROUTE)


@dataclass(frozen=True, slots=True)
class RouteQuestions:
    """Serves the questions, and leaves everything else to the gateway: a `Handler`."""

    gateway: Gateway

    def opens(
        self, method: str, path: str, query: bytes
    ) -> Callable[[PlaneExchange], Passage] | None:
        """Return the server of a request; None if it is for the API."""
        if path == _PATH:
            is_short = method == "POST" and not query
            return functools.partial(RouteQuestion, self.gateway, _ROUTE) if is_short else None
        return self.gateway.opens(method, path)


class RouteQuestion(Passage):
    """One request to `/route`."""

    __slots__ = ()

    @override
    def _enter(self) -> Key:
        # It is over at once, and asks nothing of a replica: it takes no place among the requests.
        guard = self._gateway.guard
        return guard.check(guard.asks_for_hits, self._exchange.scope, self._headers)

    @override
    def _dispatch(self, body: bytes) -> Decision | Coroutine[Any, Any, Decision]:
        terms = self._gateway.terms.read(self._begun.key, self._headers, _PATH)
        dispatch = self._gateway.router.dispatcher.dispatch_now
        return dispatch(Endpoint.ROUTE, body, terms, encoding_of(self._headers))

    @override
    def _send(self, decision: Decision) -> None:
        self._gateway.router.metrics.decided(
            decision.model_name, decision.tokenization_s, decision.routing_s
        )
        decision.require_replica()
        content_type, body = encoded(route_view(decision), self._headers)
        headers: list[Header] = [
            (b"content-type", content_type.encode()),
            (b"content-length", b"%d" % len(body)),
        ]
        self._exchange.respond(200, headers, body)
        self._close()

    @override
    def _count_refused(self, error: RequestError) -> None:
        self._gateway.router.metrics.bad_requests.labels(error.code).inc()
