"""A client's request that the core holds, as the code that serves it sees one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from starlette.types import Scope

from router._core import Plane
from router.config.origin import Header


def announced_bytes(headers: Iterable[Header]) -> int:
    """The length of a request's body by its head; 0 if unknown."""
    # `int` refuses thousands of digits, also where all but the last are zeros.
    lengths = (value for name, value in headers if name == b"content-length")
    digits = next(lengths, b"").lstrip(b"0")
    return int(digits) if digits.isdigit() else 0


class FailedFirst(NamedTuple):
    """A replica that the core chose by itself, and that did not serve the request."""

    replica: str
    failure: str | None
    """None: it responded that it is unavailable or busy."""
    status: int
    retry_after_s: int | None
    seconds: float
    """Since the core sent the request first."""
    beside: FailedFirst | None = None
    """The attempt beside it, where that one was late."""

    @staticmethod
    def of_core(what: Sequence[Any]) -> FailedFirst:
        """Read what the core reports of it."""
        replica, failure, status, retry_after_s, seconds, beside = what
        other = None if beside is None else FailedFirst.of_core(beside)
        return FailedFirst(replica, failure, status, retry_after_s, seconds, other)


class Server(Protocol):
    """Serves one exchange. No call may raise."""

    def proceed(self) -> None:
        """More of the request has arrived."""

    def client_left(self) -> None:
        """The client's connection is closed, and the response is not complete."""


class Handler(Protocol):
    """Takes requests, and serves them."""

    def opens(self, method: str, path: str, query: bytes) -> Callable[[Any], Server] | None:
        """Return the server of a request; None leaves it to the application."""


@dataclass(slots=True, eq=False, repr=False)
class PlaneExchange:
    """One request of a client's connection, and its response."""

    _plane: Plane
    number: int
    method: str
    target: bytes
    """Path and query, as on the wire."""
    is_of_reserve: bool
    """True if it came on one of the last file descriptors."""
    was_prepared: bool
    """True if its prompt was read before it was left to its server."""
    headers: list[Header]
    """The headers as received, names in lower case."""
    address: tuple[str, int]
    """The client's host and port."""
    path: str = field(init=False)
    query: bytes = field(init=False)
    scope: Scope = field(init=False)
    """The part of ASGI's scope that keys and the access log read."""
    more_body: bool = True
    is_gone: bool = False
    response_started: bool = False
    status: int | None = None
    body_bytes: int = 0
    body: bytes | None = None
    """The whole body, where it came in one piece or its server has joined the pieces."""
    _pieces: list[bytes] = field(default_factory=list)
    _is_split: bool = False
    failed_first: FailedFirst | None = None
    """The core's failed attempt, if there was one."""
    begun: Any = None
    """The state made while its prompt was read, for the server."""
    server: Server | None = None
    on_over: Callable[[int], object] = lambda _number: None

    def __post_init__(self) -> None:
        path, _, self.query = self.target.partition(b"?")
        text = path.decode("latin-1")
        self.path = unquote(text) if "%" in text else text
        self.scope = {"client": self.address, "method": self.method, "path": self.path}

    @property
    def client(self) -> str:
        """The client's host."""
        return self.address[0]

    # --- the request ------------------------------------------------------------------------------

    def receive(self, piece: bytes, is_whole: bool) -> None:
        """Take a piece of the body.

        Args:
            is_whole: True for the last one.
        """
        self._pieces.append(piece)
        if not is_whole:
            self._is_split = True
            return
        self.more_body = False
        if not self._is_split:
            self.body = piece

    def take_body(self) -> bytes:
        """Take the part of the body received since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def ask_for_body(self) -> None:
        self._plane.read_body(self.number)

    # --- the response -----------------------------------------------------------------------------

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send the whole response.

        Args:
            headers: All but those of the framing, names in lower case.
        """
        if self.is_gone or self.response_started:
            return
        self.response_started = True
        self.status, self.body_bytes = status, len(body)
        self._plane.respond(self.number, status, headers, body)
        self.over()

    def abort(self) -> None:
        """Close the client's connection at once."""
        self._plane.cut(self.number)
        self.over()

    def over(self) -> None:
        """End it: nothing more is reported of it.

        It and its server let go of each other: what refers to each other in a circle is left for
        the garbage collector, with the body.
        """
        self.server = None
        self.on_over(self.number)
        self.on_over = lambda _number: None
