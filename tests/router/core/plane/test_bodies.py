"""Bodies that wait for Python in the events of the data plane."""

from __future__ import annotations

import select
import socket
from importlib import import_module

from router.fleet.entrance import OrderFacts
from router.policies.types import Weights
from tests.router.core.plane.harness import NAME, OPTIONS
from tests.support.waiting import DEADLINE_S

PATH = b"/v1/completions"


def test_a_body_counts_until_python_has_its_event() -> None:
    """An event loop that is busy for a second takes its events late; meanwhile as many bodies as
    ever came would be held."""
    core = import_module("router._core")
    books = core.Books()
    mirror = core.Mirror(books, 16, float, (), 1.0, 0)
    placing = core.Placing(
        core.Decider(books, "least_loaded", Weights(), 60.0, 1),
        *(60.0, OrderFacts(0.0, 0), core.Reservations(1)),
    )
    listener = socket.create_server((NAME, 0))
    address = listener.getsockname()
    listener.setblocking(False)
    plane = core.Plane({**OPTIONS, "prepared": ((PATH, 0),)}, [listener.detach()])
    plane.decide_by(placing)
    with socket.create_connection(address) as client:
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        client.sendall(head % PATH + b" " * 600)
        assert select.select([plane.fileno()], [], [], DEADLINE_S)[0], "Python gets it"
        assert plane.held_bytes() == 600
        ((kind, _, *what),) = plane.take()
        assert (kind, plane.held_bytes()) == ("opened", 600)
        what[-1].give_back()
        assert plane.held_bytes() == 0
    plane.stop()
    assert mirror is not None, "it is there for as long as the books are asked"
