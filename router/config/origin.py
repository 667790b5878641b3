"""The address of an upstream server, and its timeouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

Header: TypeAlias = tuple[bytes, bytes]
"""Name and value, as on the wire."""
Allows: TypeAlias = Callable[[str], bool]
"""Returns whether an address may be connected to; None in its place allows every address."""
KEPT_S = 4.0
"""How long an unused connection is kept. Less than common servers do (uvicorn, and with it vLLM:
5 s), so that the router closes first and a request rarely meets a connection being closed."""
DEFAULT_PORTS = {"http": 80, "https": 443}
# Names are ASCII (punycode). RFC 952 allows no underscore, but container names have it.
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._~-]{1,16})?\Z")
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*\Z")


class OriginError(ValueError):
    """A base URL that no request can be sent to."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds an exchange may spend in each phase.

    Raises:
        ValueError: A time that is not above 0.
    """

    connect_s: float
    first_byte_s: float
    """From the request to the first byte of the body, or to the end of an empty response. Not
    merely to the headers: engines send those before the prefill."""
    idle_s: float
    """The longest silence between two parts of a body while the reader waits for it."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "idle_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"timeouts: {name} {getattr(self, name)!r} must be a number of seconds above 0"
                )


@dataclass(frozen=True, slots=True)
class Origin:
    """A server's base URL, taken apart. Use `Origin.parse`, which validates."""

    scheme: str
    host: str
    """Without brackets, in lower case."""
    port: int
    base_path: str = ""
    """Without a slash at its end."""
    allows: Allows | None = field(default=None, repr=False, compare=False)
    """Returns whether an address of the host may be connected to; called for each connection, as a
    name may lead elsewhere by then. None: every address."""
    key: str = field(init=False, repr=False, compare=False)
    """The key of the connection pool: two origins that differ only in their base path share
    connections."""
    host_header: bytes = field(init=False, repr=False, compare=False)
    target_prefix: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shown = in_url(self.host)
        default = self.port == DEFAULT_PORTS.get(self.scheme)
        object.__setattr__(self, "key", f"{self.scheme}://{shown}:{self.port}")
        object.__setattr__(
            self, "host_header", (shown if default else f"{shown}:{self.port}").encode("ascii")
        )
        object.__setattr__(self, "target_prefix", self.base_path.encode("ascii"))

    def __str__(self) -> str:
        return self.key + self.base_path

    @property
    def tls(self) -> bool:
        """Return whether connections are encrypted."""
        return self.scheme == "https"

    def allowed(self, addresses: Sequence[str]) -> list[str]:
        """Return those of *addresses* that may be connected to."""
        return [each for each in addresses if self.allows is None or self.allows(each)]

    @classmethod
    def parse(cls, url: str, place: str = "url") -> Origin:
        """Take `http[s]://host[:port][/base/path]` apart.

        Args:
            place: Its place in the input, for the message: `replicas[2].url`.
        Raises:
            OriginError: Names place, value and rule. The value is left out where it may hold a
                password.
        """
        if "@" in url:
            raise OriginError(
                f"{place}: must hold no user and no password; configure the API key instead"
            )
        if any(character <= " " or character == "\x7f" for character in url):
            raise OriginError(
                f"{place}: {url!r} must hold no white space and no control characters"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise OriginError(f"{place}: {url!r} is not a URL: {error}") from None
        _check_parts(url, parts, port, place)
        host = (parts.hostname or "").lower()
        _check_host(url, host, place)
        return cls(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def _check_parts(url: str, parts: SplitResult, port: int | None, place: str) -> None:
    if parts.scheme not in DEFAULT_PORTS:
        raise OriginError(f"{place}: {url!r} must begin with http:// or https://")
    if port == 0:
        raise OriginError(f"{place}: {url!r} must have a port from 1 to 65535")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise OriginError(f"{place}: {url!r} must have neither a query nor a fragment")
    if not _PATH.match(parts.path):
        raise OriginError(
            f"{place}: {url!r} must have a path of URL characters only (RFC 3986), or none"
        )


def _check_host(url: str, host: str, place: str) -> None:
    if not host:
        raise OriginError(f"{place}: {url!r} must name a host")
    if not (_IPV6 if ":" in host else _NAME).match(host):
        raise OriginError(
            f"{place}: {url!r} must have an ASCII host name or an IP address as its host"
        )


def in_url(host: str) -> str:
    """Return an address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
