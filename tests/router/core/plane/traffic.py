"""Clients that come, leave and read slowly, and replicas that fail, before two threads of the data
plane, as they are or by TLS: a program for ThreadSanitizer, run by `test_sanitized_threads.py`."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

from tests.router.core.index.threads import load

if __name__ == "__main__":
    load(Path(sys.argv[1]))  # before anything imports the one that is not sanitized

from router import _core as core
from router.plane.secured import Secured
from tests.router.core.plane.harness import NAME, OPTIONS, Authority, secured
from tests.support.waiting import DEADLINE_S

CLIENTS, REQUESTS = 6, 25
BODY = b'{"model": "m", "prompt": [1, 2, 3]}'
STREAM = b"".join(b"data: {%d}\n\n" % number for number in range(50)) + b"data: [DONE]\n\n"


def replica(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Serves one request a connection and more, in one of several ways."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(connection, tls), daemon=True).start()


def serve(connection: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Serve the requests of a connection, until one of the two leaves."""
    draw = random.Random(connection.fileno())
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection, server_side=True))
        while respond(connection, draw.randrange(6)):
            pass


def respond(connection: socket.socket, kind: int) -> bool:
    """Serve a request; returns whether the connection stays."""
    head = b""
    while b"\r\n\r\n" not in head or len(head.partition(b"\r\n\r\n")[2]) < len(BODY):
        if not (piece := connection.recv(65536)):
            return False
        head += piece
    if kind == 1:
        connection.sendall(b"HTTP/1.1 503 X\r\ncontent-length: 1\r\n\r\nx")
    elif kind == 2:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"y" * 100_000)
    elif kind == 3:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
    elif kind > 3:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for at in range(0, len(STREAM), 7):
            piece = STREAM[at : at + 7]
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
    return kind not in (0, 3)


def client(port: int, seed: int, tls: ssl.SSLContext | None) -> None:
    """Send requests; leave in the middle of some."""
    draw = random.Random(seed)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    for _ in range(REQUESTS):
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((NAME, port)))
                connection.settimeout(DEADLINE_S)
                if tls is not None:
                    connection = tls.wrap_socket(connection, server_hostname=NAME)
                    stack.enter_context(connection)
                request = head + BODY
                if draw.randrange(5) == 0:
                    connection.sendall(request[: draw.randrange(len(request))])
                    continue
                if draw.randrange(3) == 0:
                    connection.sendall(request * 2)
                else:
                    for at in range(0, len(request), 20):
                        connection.sendall(request[at : at + 20])
                if draw.randrange(4) == 0:
                    connection.recv(10)
                    continue
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        except OSError:
            continue


def answer(plane: Any, event: tuple[Any, ...], port: int, secure_host: str) -> None:
    """What Python does about an event."""
    kind, number, *what = event
    if kind == "opened" and not what[-3]:
        plane.read_body(number)
    elif kind == "opened" or (kind == "body" and what[1]) or kind == "failed":
        plane.forward(
            *(
                number,
                "r",
                (NAME,),
                port,
                secure_host,
                b"replica",
                b"",
                (),
                ((b"x-a", b"b"),),
            ),
            *(((b"x-kv-replica", b"r"),), None, (5.0, 20.0, 20.0), 1, 0),
        )
    elif kind == "body":
        plane.read_body(number)
    elif kind == "not_now":
        if number % 2:
            plane.pass_on(number)
        else:
            plane.respond(number, 503, [(b"content-length", b"0")], b"")


def main(folder: Path | None) -> None:
    """Run until all clients have been served.

    Args:
        folder: For certificates; None: nothing is encrypted.
    """
    authority = Authority(folder) if folder else None
    by_tls = secured(authority) if authority else Secured()
    theirs, ours = (
        (authority.server_context(), authority.client_context()) if authority else (None, None)
    )
    listeners = [socket.create_server((NAME, 0)) for _ in range(2)]
    threading.Thread(target=replica, args=(listeners[0], theirs), daemon=True).start()
    port, listeners_port = (each.getsockname()[1] for each in listeners)
    listeners[1].setblocking(False)
    options = {
        **OPTIONS,
        **{"max_body_bytes": 1 << 20, "max_held_bytes": 1 << 20, "idle_s": 1.0},
        "dropped": [b"x-b"],
    }
    plane = core.Plane(options, [listeners[1].dup().detach() for _ in range(2)], *by_tls)
    threads = [
        threading.Thread(target=client, args=(listeners_port, seed, ours))
        for seed in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    with selectors.DefaultSelector() as selector:
        selector.register(plane.fileno(), selectors.EVENT_READ)
        while any(thread.is_alive() for thread in threads):
            if selector.select(0.1):
                for event in plane.take():
                    answer(plane, event, port, NAME if authority else "")
            plane.give_up("r", 30.0)
            plane.secure(*by_tls)
    plane.cut_all()
    plane.stop()
    assert plane.counts()["opened"] > 0
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[2]) if sys.argv[2:] else None)
