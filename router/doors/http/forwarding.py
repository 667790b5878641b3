"""Makes the request to a replica from a client's, with the router's own headers."""

from __future__ import annotations

from collections.abc import Sequence

from router.config.origin import Header, Timeouts
from router.config.server import ServerConfig
from router.doors.http.access import KEY_HEADERS
from router.doors.http.networks import Networks
from router.doors.names import SIDECAR_HEADERS
from router.doors.proxied_paths import dialect_of
from router.plane.attempts import RANK_HEADER
from router.plane.exchanges import PlaneExchange
from router.plane.proxy_types import ProxyRequest
from router.prompt.body.owned_fields import PRIORITY_HEADER
from router.routing.decision import Decision
from router.telemetry.trace_context import TRACEPARENT, TRACESTATE

_FORWARDING = (
    *(b"forwarded", b"x-real-ip", b"x-forwarded-for", b"x-forwarded-proto"),
    *(b"x-forwarded-host", b"x-forwarded-port"),
)


class Forwarding:
    """Makes the requests that replicas get."""

    def __init__(
        self, server: ServerConfig, key_headers: Sequence[bytes], owns_priority: bool
    ) -> None:
        """
        Args:
            server: Timeouts, and the proxies whose `x-forwarded-*` are forwarded.
            key_headers: The headers with the router's own key, which replicas must not see.
            owns_priority: True if the router decides the order of requests at engines.
        """
        self.trusted_proxies = Networks(server.trusted_proxies)
        self._trusts_proxies = bool(server.trusted_proxies)
        self._scheme = b"http" if server.tls.certificate is None else b"https"
        self._scheme_header = (b"x-forwarded-proto", self._scheme)
        self.dropped = _dropped_headers(server, key_headers, owns_priority)
        """The client's headers that are not for replicas, by name; the core drops them."""
        self._client_keys = frozenset(name for name in KEY_HEADERS if name not in key_headers)
        times = server.timeouts
        self._patient = Timeouts(times.connect_s, times.whole_response_s, times.idle_s)

    def request(
        self,
        exchange: PlaneExchange,
        decision: Decision,
        request_id: bytes,
        trace: Sequence[Header] = (),
    ) -> ProxyRequest:
        own, spec = (b"x-request-id", request_id), decision.asked.spec
        # The first byte of a response that is not streamed comes with the last.
        is_whole = spec is not None and not spec.stream
        return ProxyRequest(
            decision.asked.body,
            (own,),
            dialect_of(exchange.path),
            (*self._forwarded(exchange), own, *trace),
            self._patient if is_whole else None,
            tuple(each for each in exchange.headers if each[0] in self._client_keys),
        )

    def _forwarded(self, exchange: PlaneExchange) -> tuple[Header, Header]:
        """The client's address; a client's own `x-forwarded-*` are forwarded only from a trusted
        proxy."""
        peer = exchange.client
        last_hop = peer.encode("ascii", "replace")
        if not self._trusts_proxies or peer not in self.trusted_proxies:
            return (b"x-forwarded-for", last_hop), self._scheme_header
        given = exchange.headers
        # Lines of one name are the same as commas in one (RFC 9110, 5.3).
        hops = [value for name, value in given if name == b"x-forwarded-for" and value]
        proto = dict(given).get(b"x-forwarded-proto", self._scheme)
        chain = b", ".join([*hops, last_hop])
        return (b"x-forwarded-for", chain), (b"x-forwarded-proto", proto)


def _dropped_headers(
    server: ServerConfig, key_headers: Sequence[bytes], owns_priority: bool
) -> frozenset[bytes]:
    """Return the client's headers that are not for replicas: the router writes its own, or none."""
    return frozenset(
        (
            *(b"x-request-id", TRACEPARENT, TRACESTATE),
            *_FORWARDING,
            *key_headers,
            *(() if server.trust_client_rank else (RANK_HEADER,)),
            *((PRIORITY_HEADER,) if owns_priority else ()),
            *SIDECAR_HEADERS,
        )
    )
