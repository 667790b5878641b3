"""A host with several addresses: one after the other, until one takes the connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from router.plane.secured import Secured
from tests.router.core.plane.harness import (
    LAST,
    NAME,
    Authority,
    Served,
    Way,
    read_all,
    read_request,
    replica,
    secured,
    serving,
)
from tests.support.waiting import DEADLINE_S

OTHER = "127.0.0.2"


def respond(connection: socket.socket) -> None:
    while read_request(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfound")


def answered(served: Served) -> bytes:
    with socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as client:
        client.sendall(LAST)
        return read_all(client)


@contextlib.contextmanager
def silent(host: str, port: int) -> Iterator[None]:
    """Nobody takes a connection there, or refuses it."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(8):  # the queue is full, and stays so
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


def test_an_address_where_nobody_listens_is_passed_over() -> None:
    """The first one costs the request nothing, nor the next ones."""
    with replica(respond, host=OTHER) as port:
        way = Way(port, [NAME, "::1", OTHER])
        with serving(Secured(), way) as served:
            for _ in range(3):
                assert answered(served).endswith(b"found")
        assert served.plane.counts()["connect_failures"] == 0


def test_an_address_that_is_silent_leaves_time_for_the_next() -> None:
    """Each gets its share: where the first took all of it, the second would not be tried."""
    with replica(respond, host=OTHER) as port, silent(NAME, port):
        way = Way(port, [NAME, OTHER], timeouts=(1.0, 10.0, 10.0))
        with serving(Secured(), way) as served:
            assert answered(served).endswith(b"found")


def test_an_address_with_another_certificate_is_passed_over(tmp_path: Path) -> None:
    """A name may lead to somebody else as well, by mistake or not."""
    authority = Authority(tmp_path)
    with replica(respond, authority.server_context("localhost"), OTHER) as port:
        other = authority.server_context("other.example")
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((NAME, port)))
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            way = Way(port, [NAME, OTHER], "localhost")
            served = stack.enter_context(serving(secured(authority, is_server=False), way))
            client = stack.enter_context(
                socket.create_connection((NAME, served.port), timeout=DEADLINE_S)
            )
            client.sendall(LAST)
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                other.wrap_socket(connection, server_side=True).close()
            assert read_all(client).endswith(b"found")


@contextlib.contextmanager
def _unserved() -> Iterator[int]:
    """Reserve a port at which no one listens, at either address."""
    with contextlib.ExitStack() as held:
        while True:
            at_other, at_name = (held.enter_context(socket.socket()) for _ in range(2))
            at_other.bind((OTHER, 0))
            port: int = at_other.getsockname()[1]
            with contextlib.suppress(OSError):  # another test has it there
                at_name.bind((NAME, port))
                break
        yield port


def test_where_no_address_takes_a_connection_the_last_reason_is_told() -> None:
    """Once, with what the system said."""
    with _unserved() as port, serving(Secured(), Way(port, [NAME, OTHER])) as served:
        assert b"502" in answered(served)
        assert served.failed == [("connect", "Connection refused")]
        served.until(lambda: served.plane.counts()["connect_failures"] == 1)
        assert served.plane.counts()["connections"] == 0
