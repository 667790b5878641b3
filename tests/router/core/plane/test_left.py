"""Clients that leave, or are cut off, while Python is at work for them."""

from __future__ import annotations

import socket

from router.plane.secured import Secured
from tests.router.core.plane.harness import LAST, NAME, Way, read_all, serving
from tests.support.waiting import DEADLINE_S


def test_whoever_places_a_request_learns_that_its_client_has_left() -> None:
    """What is kept until the end of a request would stay for ever, and is bounded in number."""
    with serving(Secured()) as served:
        with socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as client:
            client.sendall(LAST)
            assert read_all(client).endswith(b"ok")
        (number,) = served.opened
        served.plane.place(number, "model", [1, 2], False, True, 0.0, None)
        served.until(lambda: served.left == [number])


def test_whoever_waits_for_a_body_learns_that_its_client_was_cut_off() -> None:
    """At the end of the grace period, or because it read nothing: its request would keep its place
    and what it holds until a time limit of its own."""
    with (
        serving(Secured()) as served,
        socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as client,
    ):
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        served.until(lambda: len(served.opened) == 1)
        served.plane.cut_all()
        served.until(lambda: served.left == served.opened)


def test_a_client_that_is_still_reading_as_the_plane_ends_gets_all_of_it() -> None:
    """A reset would take the end of its response from it, though that was sent."""
    with socket.socket() as client:
        client.settimeout(DEADLINE_S)
        with serving(Secured()) as served:
            client.connect((NAME, served.port))
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            served.until(lambda: len(served.opened) == 1)
        assert read_all(client).endswith(b"ok")


def test_a_client_that_reads_slowly_is_counted_until_it_has_its_response() -> None:
    """Nothing is under way any more, and the router would end before it is whole."""
    long = b"x" * 50_000_000
    with (
        serving(Secured(), Way(responds=False)) as served,
        socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as client,
    ):
        client.sendall(LAST)
        served.until(lambda: len(served.opened) == 1)
        assert served.plane.unread() == 0
        served.plane.respond(served.opened[0], 200, [(b"content-length", b"%d" % len(long))], long)
        served.until(lambda: served.plane.unread() == 1)
        assert read_all(client).endswith(long)
        served.until(lambda: served.plane.unread() == 0)
