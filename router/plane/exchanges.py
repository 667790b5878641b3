"""A client's request that the core holds, as the code that serves it sees one."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

from router.config.origin import Header

if TYPE_CHECKING:
    from router._core import Plane


class FailedFirst(NamedTuple):
    """A replica that the core chose by itself, and that did not serve the request."""

    replica: str
    failure: str | None
    """None: it responded that it is unavailable or busy."""
    status: int
    retry_after_s: int | None


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


class PlaneExchange:
    """One request of a client's connection, and its response.

    Args:
        target: Path and query, as on the wire.
        minor: The minor version, of HTTP/1.0 or HTTP/1.1.
        keep_alive: True if its connection stays open after it.
        is_of_reserve: True if it came on one of the last file descriptors.
        headers: As received, names in lower case.
        client: Address and port.
    """

    __slots__ = (
        "_is_split",
        "_pieces",
        "_plane",
        "begun",
        "body",
        "body_bytes",
        "client",
        "failed_first",
        "headers",
        "is_gone",
        "is_of_reserve",
        "keep_alive",
        "method",
        "more_body",
        "number",
        "on_over",
        "path",
        "query",
        "response_started",
        "scope",
        "server",
        "status",
        "target",
    )

    def __init__(
        self,
        plane: Plane,
        number: int,
        method: str,
        target: bytes,
        minor: int,
        keep_alive: bool,
        is_of_reserve: bool,
        headers: list[Header],
        client: tuple[str, int],
    ) -> None:
        self._plane = plane
        self.number = number
        self.method = method
        self.target = target
        path, _, self.query = target.partition(b"?")
        text = path.decode("latin-1")
        self.path = unquote(text) if "%" in text else text
        self.keep_alive = keep_alive
        self.is_of_reserve = is_of_reserve
        self.headers = headers
        self.client = client[0]
        self.scope: MutableMapping[str, Any] = {
            "type": "http",
            "client": client,
            "headers": headers,
            "http_version": f"1.{minor}",
            "method": method,
            "path": self.path,
        }
        self.more_body = True
        self.is_gone = False
        self.response_started = False
        self.status: int | None = None
        self.body_bytes = 0
        self.body: bytes | None = None
        """The body, where it came in one piece."""
        self._pieces: list[bytes] = []
        self._is_split = False
        self.failed_first: FailedFirst | None = None
        """The core's failed attempt, if there was one."""
        self.begun: Any = None
        """The state made while its prompt was read, for the server."""
        self.server: Server | None = None
        self.on_over: Callable[[int], object] = _ignore

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
        """Ask the core for the next piece of the body."""
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
        self.on_over = _ignore


def _ignore(_number: int) -> None:
    """The callback of an exchange that is over already."""
