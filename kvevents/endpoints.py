"""Addresses of sockets: checked, shifted by data-parallel rank, and opened.

An address of this machine (a wildcard, loopback, one of its interfaces, any `ipc` or `inproc` name)
is bound. One of another machine is connected to: there a collector binds and the engines connect,
as with vLLM. The operating system decides which case it is, so a mistyped address of this machine
is connected to as well; the log shows which it was.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import zmq

from kvevents.curve import ZAP_DOMAIN
from kvevents.errors import EndpointError

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Any]"

SCHEMES = ("tcp", "ipc", "inproc")
_MAX_PORT_DIGITS = 5
ANY_PORT = 0
"""The operating system picks a free port."""

_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.ENODEV)
"""Errors of binding to an address or a name of another machine."""


@dataclass(frozen=True, slots=True)
class ZmqEndpoint:
    """One checked address."""

    scheme: str
    address: str
    """Host, path or name; an IPv6 host in brackets."""
    port: int | None = None
    """Only with tcp."""

    @classmethod
    def parse(cls, place: str, text: str) -> ZmqEndpoint:
        """Read `tcp://host:port`, `ipc://path` or `inproc://name`.

        Args:
            place: The setting's name; error messages begin with it.

        Raises:
            EndpointError: The text is not an address of these forms.
        """
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in SCHEMES:
            schemes = " or ".join(f"{name}://" for name in SCHEMES)
            raise EndpointError(f"{place}: {text[:200]!r} must begin with {schemes}")
        if not rest:
            raise EndpointError(f"{place}: {text[:200]!r} lacks an address after {scheme}://")
        return _parse_tcp(place, text, rest) if scheme == "tcp" else cls(scheme, rest)

    def for_rank(self, data_parallel_rank: int) -> ZmqEndpoint:
        """The address of one rank: the port plus the rank, or the name with a suffix.

        A port that the system picks stays as it is.

        Raises:
            EndpointError: The port of that rank would be above 65535.
        """
        if self.port == ANY_PORT or data_parallel_rank == 0:
            return self
        if self.port is None:
            if self.address == "*":
                return self  # `ipc://*` is a new path for every socket anyway
            return replace(self, address=f"{self.address}_dp{data_parallel_rank}")
        port = self.port + data_parallel_rank
        if port > 65535:
            raise EndpointError(
                f"{self}: the data-parallel rank's port {port} must not lie above 65535"
            )
        return replace(self, port=port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}" + ("" if self.port is None else f":{self.port}")


def _parse_tcp(place: str, text: str, rest: str) -> ZmqEndpoint:
    host, separator, port = rest.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or (":" in host and not is_bracketed):
        raise EndpointError(
            f"{place}: {text[:200]!r} must be tcp://host:port, with an IPv6 host in brackets"
        )
    if port == "*":
        return ZmqEndpoint("tcp", host, ANY_PORT)
    is_number = port.isascii() and port.isdecimal() and len(port) <= _MAX_PORT_DIGITS
    if not (is_number and int(port) <= 65535):
        raise EndpointError(
            f"{place}: port {port[:20]!r} of {text[:200]!r} must be a number in [0, 65535], "
            "0 for any free one"
        )
    return ZmqEndpoint("tcp", host, int(port))


@dataclass(frozen=True, slots=True)
class Opened:
    """The address of an open socket."""

    address: str
    """The address with the port that the system picked."""
    is_bound: bool


def open_socket(socket: Socket, place: str, endpoint: ZmqEndpoint, may_connect: bool) -> Opened:
    """Bind *socket*, or connect it if the address is another machine's.

    Args:
        socket: Not yet bound or connected.
        place: The setting's name; error messages begin with it.

    Raises:
        EndpointError: Neither is possible.
    """
    if endpoint.address.startswith("["):
        socket.setsockopt(zmq.IPV6, 1)
    # With a ZAP domain libzmq refuses peers that speak ZMTP 1 or 2 (before 2012), and everything
    # else that does not begin with a greeting. Without one it mistakes an HTTP error for such a
    # peer, and aborts the process if the socket is closed meanwhile.
    socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    try:
        socket.bind(str(endpoint))
    except zmq.ZMQError as error:
        if error.errno not in _ELSEWHERE or endpoint.scheme != "tcp":
            raise EndpointError(f"{place}: cannot bind {endpoint}: {error.strerror}") from None
        _connect(socket, place, endpoint, may_connect)
        return Opened(str(endpoint), is_bound=False)
    return Opened(socket.getsockopt_string(zmq.LAST_ENDPOINT), is_bound=True)


def _connect(socket: Socket, place: str, endpoint: ZmqEndpoint, may_connect: bool) -> None:
    if not may_connect:
        raise EndpointError(
            f"{place}: {endpoint} is not an address of this machine, and only such an address "
            "can be bound here"
        )
    if endpoint.port == ANY_PORT:
        raise EndpointError(
            f"{place}: {endpoint} is another machine's, and connecting needs a port other than 0"
        )
    try:
        socket.connect(str(endpoint))
    except zmq.ZMQError as error:
        raise EndpointError(f"{place}: cannot connect to {endpoint}: {error.strerror}") from None
