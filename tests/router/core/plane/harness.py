"""A data plane by itself: its events are served here, its clients and replicas are sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import trustme

from router.plane.data_plane import PlaneOptions
from router.plane.secured import PemFiles, Secured, load_openssl
from tests.support.waiting import DEADLINE_S

NAME = "127.0.0.1"
OPTIONS: dict[str, Any] = {
    **asdict(
        PlaneOptions(
            **{"head_bytes": 65536, "max_body_bytes": 8 << 20, "max_held_bytes": 8 << 20},
            **{"request_s": 10.0, "client_stall_s": 10.0, "keep_alive_s": 10.0, "idle_s": 5.0},
            **{"max_idle": 8, "max_connections": 0, "reserved_from": 1 << 30},
            second_share=0.0,
            dropped=frozenset(),
        )
    ),
    "broken_events": [b"data: broken\n\n", b""],
}
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
"""A request behind which the connection is closed."""
Handler = Callable[[socket.socket], None]


class Authority:
    """Issues certificates, as files."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.folder = folder
        self.file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.file)

    def issued(self, name: str = NAME) -> PemFiles:
        """A certificate for *name*."""
        issued = self.ca.issue_cert(name)
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(paths[1])
        return PemFiles(str(paths[0]), str(paths[1]))

    def server_context(self, name: str = NAME) -> ssl.SSLContext:
        """Of a server with a certificate for *name*."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(name).configure_cert(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Of a client that trusts it."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


def secured(authority: Authority, is_server: bool = True) -> Secured:
    """What a plane shows and trusts."""
    load_openssl()
    clients = authority.issued() if is_server else None
    return Secured.made(clients, PemFiles(authorities=str(authority.file)))


@dataclass
class Way:
    """Where the plane is told to send everything; without hosts it responds itself, if at all."""

    port: int = 0
    hosts: Sequence[str] = ()
    secure_host: str = ""
    timeouts: tuple[float, float, float] = (5.0, 10.0, 10.0)
    flags: int = 1
    responds: bool = True


@dataclass
class Served:
    """A plane that runs, and what it has told."""

    plane: Any
    port: int
    way: Way
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until what was told is so."""
        with self.changed:
            assert self.changed.wait_for(holds, DEADLINE_S), (self.refused, self.failed)

    def take(self, kind: str, number: int, what: Sequence[Any]) -> None:
        """An event."""
        if kind == "opened":
            self.opened.append(number)
        if kind == "refused":
            self.refused[what[0]] += 1
        elif kind == "left":
            self.left.append(number)
        elif kind == "ended":
            self.ended.append(what[0])
        elif kind == "failed":
            self.failed.append((what[0], what[1]))
            body = f"{what[0]}: {what[1]}".encode()
            self.plane.respond(number, 502, [(b"content-length", b"%d" % len(body))], body)
        elif (kind == "opened" and not what[-3]) or (kind == "body" and not what[-1]):
            self.plane.read_body(number)
        elif kind == "opened" or kind == "body":
            self._serve(number)

    def _serve(self, number: int) -> None:
        way = self.way
        if not way.hosts and not way.responds:
            return
        if not way.hosts:
            self.plane.respond(number, 200, [(b"content-length", b"2")], b"ok")
            return
        self.plane.forward(
            *(number, f"{way.secure_host}:{way.port}", list(way.hosts), way.port, way.secure_host),
            *(b"replica", b"", (), (), (), None, way.timeouts, way.flags, 0),
        )

    def run(self, stop: threading.Event) -> None:
        """Serve the plane's events."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.plane.fileno(), selectors.EVENT_READ)
            while not stop.is_set():
                selector.select(0.05)
                with self.changed:
                    for kind, number, *what in self.plane.take():
                        self.take(kind, number, what)
                    self.changed.notify_all()


@contextlib.contextmanager
def serving(by_tls: Secured, way: Way | None = None, **options: Any) -> Iterator[Served]:
    """A plane with one thread.

    Args:
        by_tls: What it shows and trusts.
        way: Where it sends everything.
        options: In place of the usual ones.
    """
    listener = socket.create_server((NAME, 0))
    port = listener.getsockname()[1]
    listener.setblocking(False)
    core = import_module("router._core")
    plane = core.Plane({**OPTIONS, **options}, [listener.detach()], *by_tls)
    served, stop = Served(plane, port, way or Way()), threading.Event()
    thread = threading.Thread(target=served.run, args=(stop,))
    thread.start()
    try:
        yield served
    finally:
        plane.cut_all()
        plane.stop()
        stop.set()
        thread.join()


def _listener(host: str) -> socket.socket:
    """At a port that is free at `NAME`, too: a connection of another test may have it there."""
    while True:
        listener = socket.create_server((host, 0))
        if host == NAME:
            return listener
        with contextlib.suppress(OSError), socket.socket() as beside:
            beside.bind((NAME, listener.getsockname()[1]))
            return listener
        listener.close()


@contextlib.contextmanager
def replica(handle: Handler, tls: ssl.SSLContext | None = None, host: str = NAME) -> Iterator[int]:
    """A server that gives each connection to *handle*; its port, which is free at `NAME` as well.

    Args:
        handle: Serves one connection.
        tls: Its certificate; None: it speaks plain HTTP.
        host: Where it listens.
    """
    listener = _listener(host)

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(DEADLINE_S)
            if tls is not None:
                connection = stack.enter_context(tls.wrap_socket(connection, server_side=True))
            handle(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def read_request(connection: socket.socket) -> bytes:
    """The next request of a connection; empty where there is none."""
    said = b""
    while b"\r\n\r\n" not in said:
        if not (piece := connection.recv(65536)):
            return b""
        said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 20)
    return head + b"\r\n\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other side says that nothing more does."""
    said = bytearray()  # a row of bytes would be copied with each piece, for half a minute in all
    while piece := connection.recv(1 << 16):
        said += piece
    return bytes(said)
