"""Authorises requests by key, and where no key is set, by the peer, the host name and the page of a
browser.

    endpoints    with their key set    without
    clients'     who has a key         everyone, under a name of this router
    operator's   who has a key         this machine only, under a name of this router
    peers'       who has a key         no one

A page that a browser shows can send requests to any address that browser reaches. Two checks stop
it: `Host` must name this router (a page whose own name was rebound to this address sends its own),
and a request that changes something must come from this router's page, as JSON. A page knows no
key, so a request with one needs no check of `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import SecretStr
from starlette.types import Scope

from router.config.origin import Header, in_url
from router.config.replica import key_bytes
from router.config.server import ClientKeyConfig, ServerConfig
from router.doors.asks import ANONYMOUS, Key
from router.errors import (
    BadRequest,
    ForeignHost,
    ForeignOrigin,
    LoopbackOnly,
    NotJson,
    RequestError,
    Unauthorized,
    UnknownPath,
)
from router.fleet.limits import KeyUsage
from router.routing.key_holders import ResponseOwner

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["client", "operator", "peer"]
Headers: TypeAlias = Mapping[bytes, bytes]
"""A request's, names in lower case."""

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Where OpenAI's SDKs and Anthropic's put the client's key."""

_ANY_HOST = "*"
_MAX_SEEN_HOSTS = 64
_FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip")
"""Headers that a reverse proxy adds: then the peer is the proxy, not the client."""
_OWN_PAGE = (b"same-origin", b"none")
_READING = ("GET", "HEAD", "OPTIONS")

_FREE_ATTEMPTS = 5
_FORGOTTEN_AFTER_S = 300.0
_MAX_ADDRESSES = 1024
_MAX_HELD = 256
"""Responses held back at a time; beyond them, wrong keys are refused at once."""


@dataclass(eq=False, repr=False)
class WrongKeys:
    """Counts and logs wrong keys, and slows down addresses that try many. An address gets some free
    attempts; after those, each of its refusals is held back, at first for a tenth of the bound,
    then for twice as long each time. A right key never waits. Memory is bounded: addresses are
    forgotten after a while, the oldest first."""

    max_delay_s: float
    """The bound on each delay."""
    count: Callable[[str], None]
    """Called with the endpoint of each."""
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self._attempts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._held = 0

    def add(self, endpoint: str, address: str) -> float:
        """Count a wrong key.

        Returns:
            For how many seconds to hold the refusal back.
        """
        now = self.clock()
        attempts, last = self._attempts.pop(address, (0, now))
        attempts = 1 if now - last > _FORGOTTEN_AFTER_S else attempts + 1
        self._attempts[address] = attempts, now
        if len(self._attempts) > _MAX_ADDRESSES:
            self._attempts.popitem(last=False)
        self.count(endpoint)
        if attempts & (attempts - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood makes few lines
            logger.warning("wrong key for %s from %s, %d so far", endpoint, address, attempts)
        if attempts <= _FREE_ATTEMPTS:
            return 0.0
        doublings = min(attempts - _FREE_ATTEMPTS - 1, 10)
        return float(min(self.max_delay_s, self.max_delay_s / 10 * 2**doublings))

    def hold(self, error: RequestError, endpoint: str, address: str) -> float:
        """Count a refusal, if that of a wrong key.

        Returns:
            For how many seconds to hold it back; where that is more than 0, call `let_go`
            afterwards.
        """
        if not isinstance(error, Unauthorized) or not error.was_given:
            return 0.0
        delay_s = self.add(endpoint, address)
        if not delay_s or self._held >= _MAX_HELD:
            return 0.0
        self._held += 1
        return delay_s

    def let_go(self) -> None:
        """Note that a refusal that was held back is sent."""
        self._held -= 1


class Guard:
    """Authorises requests.

    Args:
        server: The keys, and the names that the router goes by.
        count_wrong_key: Called with the endpoint of each wrong key.
        usages: The usage of limited keys, by name.
        peer_key: The other routers' key; None: there are no others.
    """

    def __init__(
        self,
        server: ServerConfig,
        count_wrong_key: Callable[[str], None],
        usages: Mapping[str, KeyUsage],
        peer_key: str | None,
    ) -> None:
        self._keys: dict[Role, tuple[Key, ...]] = {
            "client": tuple(
                _client_key(each, usages.get(each.name), len(server.client_keys) > 1)
                for each in server.client_keys
            ),
            "operator": tuple(Key(each.name, _bytes(each.key)) for each in server.operator_keys),
            "peer": () if peer_key is None else (Key("peer", peer_key.encode()),),
        }
        seen = server.clients_see_hits
        self.clients_see_hits = not server.client_keys if seen is None else seen
        """True if clients see how much of a prompt is cached."""
        self.asks_for_hits: Role = "client" if self.clients_see_hits else "operator"
        """The role that may ask: the answer reveals what is cached."""
        self.wrong_keys = WrongKeys(server.wrong_key_delay_s, count_wrong_key)
        self._named = frozenset(name.lower() for name in server.host_names)
        self._own = self._named | {server.host.lower(), socket.gethostname().lower()}
        self._seen: set[bytes] = set()
        self.on_host: Callable[[bytes], object] = lambda _host: None
        """Called with a `Host` by which the router may be called, when it is seen first."""

    def needs_key(self, role: Role) -> bool:
        """Return whether the endpoints of *role* require a key."""
        return bool(self._keys[role])

    def check(self, role: Role, scope: Scope, headers: Headers) -> Key:
        """Check that a request may go to an endpoint; return its key, or `ANONYMOUS`.

        Raises:
            Unauthorized: The key is missing or wrong.
            ForeignHost: `Host` names another machine.
            LoopbackOnly: No operator key is set, and another machine asks.
            UnknownPath: No peers are configured.
        """
        if self._keys[role]:
            return self._key(role, headers)
        if role == "peer":
            raise UnknownPath
        self.check_host(headers)
        if role == "operator" and not _is_local(scope, headers):
            raise LoopbackOnly
        return ANONYMOUS

    def _key(self, role: Role, headers: Headers) -> Key:
        given = _given_key(headers)
        # All of them, whichever fits: the time must not leak which one does.
        fitting = [key for key in self._keys[role] if hmac.compare_digest(given, key.secret)]
        if not fitting:
            raise Unauthorized(was_given=bool(given))
        return fitting[0]

    def known_hosts(self, port: int) -> Iterator[bytes]:
        """Yield the values of `Host` that stand for this router, as far as they are known by
        configuration."""
        for name in {"localhost", "127.0.0.1", "::1", *self._own} - {_ANY_HOST}:
            yield in_url(name).encode("latin-1")
            yield f"{in_url(name)}:{port}".encode("latin-1")

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
            self.on_host(host)

    def check_change(self, method: str, headers: Headers) -> None:
        """Check that a request to change something is not a foreign page's.

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


def _client_key(config: ClientKeyConfig, usage: KeyUsage | None, is_one_of_several: bool) -> Key:
    salt, secret = key_bytes(config.cache_salt), _bytes(config.key)
    owner = ResponseOwner(secret) if is_one_of_several else None
    return Key(config.name, secret, salt, config.priority, config.share, usage, owner)


def _bytes(key: SecretStr) -> bytes:
    return key.get_secret_value().encode("ascii")


def check_one_content_type(headers: Iterable[Header]) -> None:
    """Check the headers of a request whose key has restrictions: an engine may go by the first of
    two content types, and the router goes by the last.

    Raises:
        BadRequest: There are several.
    """
    count = sum(name == b"content-type" for name, _ in headers)
    if count > 1:
        raise BadRequest("content-type", f"{count} times", "must appear once")


def _given_key(headers: Headers) -> bytes:
    given = headers.get(b"authorization", b"")
    return given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")


def _host_name(host: bytes) -> str:
    """Return the name in a `Host` header, without the port, in lower case."""
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
    """Return whether the request comes from this machine, and not through a reverse proxy."""
    peer = _address((scope.get("client") or ("",))[0])
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None:
        peer = peer.ipv4_mapped
    return peer is not None and peer.is_loopback and not any(name in headers for name in _FORWARDED)
