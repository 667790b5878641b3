"""Who may ask what: keys, and where no key is set, the peer; the name a browser used, and the page
it was on.

    endpoints    with their key set    without
    clients'     who has a key         everyone, under a name of this router
    operator's   who has a key         this machine only, under a name of this router

A page that a browser shows can send requests to any address that browser reaches. Two checks stop
it: `Host` must name this router (a page whose own name was rebound to this address sends its own),
and what changes something must come from this router's page, as JSON. A page knows no key, so who
sends one needs no check of `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, TypeAlias

from router.config import ServerConfig, key_bytes
from router.errors import ForeignHost, ForeignOrigin, LoopbackOnly, NotJson, Unauthorized

Role: TypeAlias = Literal["client", "operator"]
Scope: TypeAlias = MutableMapping[str, Any]
Headers: TypeAlias = Mapping[bytes, bytes]

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Where OpenAI's SDKs and Anthropic's put the client's key."""

_ANY_HOST = "*"
_MAX_SEEN_HOSTS = 64
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip")
"""What a reverse proxy adds: then the peer is the proxy, and says nothing of who asks."""
_OWN_PAGE = (b"same-origin", b"none")
_READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Checks who sends a request.

    Args:
        server: The keys, and the names that the router goes by.
    """

    def __init__(self, server: ServerConfig) -> None:
        keys = {"client": server.client_api_key, "operator": server.operator_api_key}
        self._keys = {role: key_bytes(key) for role, key in keys.items()}
        self._named = frozenset(name.lower() for name in server.host_names)
        self._own = self._named | {server.host.lower(), socket.gethostname().lower()}
        self._seen: set[bytes] = set()

    def needs_key(self, role: Role) -> bool:
        """Whether the endpoints of *role* want a key."""
        return self._keys[role] is not None

    def check(self, role: Role, scope: Scope, headers: Headers) -> None:
        """Check that a request may go to an endpoint.

        Args:
            role: Whose endpoint it is.
            scope: The request's, for its peer.
            headers: The request's, names in lower case.
        Raises:
            Unauthorized: The key is missing or wrong.
            ForeignHost: `Host` names another machine.
            LoopbackOnly: No operator key is set, and another machine asks.
        """
        expected = self._keys[role]
        if expected is not None:
            if not hmac.compare_digest(_given_key(headers), expected):
                raise Unauthorized
            return
        self.check_host(headers)
        if role == "operator" and not _is_local(scope, headers):
            raise LoopbackOnly

    def check_host(self, headers: Headers) -> None:
        """Check that the client means this router. Raises `ForeignHost`."""
        host = headers.get(b"host", b"")
        if host in self._seen:
            return
        name = _host_name(host)
        if not self._is_own(name):
            raise ForeignHost(name)
        if len(self._seen) < _MAX_SEEN_HOSTS:
            self._seen.add(host)

    def check_change(self, method: str, headers: Headers) -> None:
        """Check that a request to change something is not a foreign page's.

        Args:
            method: Of the request; one that only reads passes.
            headers: The request's, names in lower case.
        Raises:
            ForeignOrigin: A page on another origin sends it.
            NotJson: It is of a type that pages may send anywhere without being asked.
        """
        if method in _READING:
            return
        site, origin = headers.get(b"sec-fetch-site", b"none"), headers.get(b"origin")
        if site not in _OWN_PAGE or (origin is not None and not self._is_own_page(origin, headers)):
            raise ForeignOrigin
        content_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if method != "DELETE" and content_type != b"application/json":
            raise NotJson

    def _is_own(self, name: str) -> bool:
        # No one can make an address, or localhost, resolve to something else.
        return (
            name in self._own
            or _ANY_HOST in self._named
            or not name
            or name == "localhost"
            or name.endswith(".localhost")
            or _address(name) is not None
        )

    def _is_own_page(self, origin: bytes, headers: Headers) -> bool:
        _, separator, place = origin.partition(b"://")
        if not separator:
            return False  # `null`: a sandboxed frame, a file
        return place == headers.get(b"host") or _host_name(place) in self._named


def _given_key(headers: Headers) -> bytes:
    given = headers.get(b"authorization", b"")
    return given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")


def _host_name(host: bytes) -> str:
    """The name in a `Host` header, without the port, in lower case."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether this machine itself asks, and not for another through a reverse proxy."""
    peer = _address((scope.get("client") or ("",))[0])
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None:
        peer = peer.ipv4_mapped
    return peer is not None and peer.is_loopback and not any(name in headers for name in _FORWARDED)
