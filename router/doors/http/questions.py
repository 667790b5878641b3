"""`POST /route` outside ASGI: where a request would go, in short.

Gateways ask it for every request that they route, so it takes the short way. With a query string it
is the API's, which explains it all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from typing_extensions import override

from router.config.origin import Header
from router.doors.http.access import Key, terms_of
from router.doors.http.decision_views import route_view
from router.doors.http.gateway import Gateway, Passage
from router.doors.http.openapi import JSON, MSGPACK
from router.doors.http.proxied_paths import ProxiedPath, RoutedBy
from router.doors.http.route_views import RouteView
from router.errors import RequestError
from router.plane.exchanges import PlaneExchange
from router.prompt.endpoints import Endpoint
from router.routing.decision import Decision

Encoding: TypeAlias = Literal["json", "msgpack"]

_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack")
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
    def _enter(self) -> Key | None:
        # It is over at once, and asks nothing of a replica: it takes no place among the requests.
        guard = self._gateway.guard
        return guard.check(guard.asks_for_hits, self._exchange.scope, self._headers)

    @override
    def _dispatch(self, body: bytes) -> Decision | Coroutine[Any, Any, Decision]:
        terms = terms_of(self._key, self._headers, self._gateway.session_header, self._salt)
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


def encoding_of(headers: Mapping[bytes, bytes]) -> Encoding:
    """Return the encoding of a question's body."""
    named = headers.get(b"content-type", b"").split(b";")[0].strip()
    return "msgpack" if named.decode("latin-1") in _MSGPACK_NAMES else "json"


def encoded(view: RouteView, headers: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    """Return the type and the body of an answer: msgpack where the client accepts it, or sent it
    and accepts anything."""
    accepted = headers.get(b"accept", b"*/*").decode("latin-1")
    if any(name in accepted for name in _MSGPACK_NAMES) or (
        "json" not in accepted and encoding_of(headers) == "msgpack"
    ):
        return MSGPACK, msgspec.msgpack.encode(view)
    return JSON, msgspec.json.encode(view)
