"""Clients that leave while Python is at work for them."""

from __future__ import annotations

import socket

from router.plane.secured import Secured
from tests.router.core.plane.harness import DEADLINE_S, LAST, NAME, read_all, serving


def test_whoever_places_a_request_learns_that_its_client_has_left() -> None:
    """What is kept until the end of a request would stay for ever, and is bounded in number."""
    with serving(Secured()) as served:
        with socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as client:
            client.sendall(LAST)
            assert read_all(client).endswith(b"ok")
        (number,) = served.opened
        served.plane.place(number, "model", [1, 2], False, True, 0.0, None)
        served.until(lambda: served.left == [number])
