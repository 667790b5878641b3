"""Requests on their way through the gateway, on real sockets: what its own tasks may do to them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from router.config.schema import RouterConfig
from router.errors import Unauthorized
from router.plane.data_plane import DataPlane
from router.plane.secured import Secured
from router.routing.dispatcher import INLINE_BODY_BYTES
from router.serve.server import RouterApp
from router.serve.service import RouterService
from tests.router.proxy_server import NOBODY_LISTENS, NothingPrepared, plane_options
from tests.support.http_client import connect, request_bytes
from tests.support.waiting import eventually

LARGE = b'{"model": "m", "prompt": "%b"}' % (b"x" * INLINE_BODY_BYTES)
"""Decided on in a task: it is read in another process."""


@pytest.fixture
def config() -> str:
    return "server: {host_names: [router]}"


class _Served(NamedTuple):
    """A router without replicas."""

    app: RouterApp
    port: int
    plane: DataPlane


@pytest_asyncio.fixture
async def served(config: str) -> AsyncIterator[_Served]:
    """It serves on a real data plane, and nothing is behind that."""
    service = RouterService(RouterConfig.from_yaml(config, {}))
    app = RouterApp(service)
    plane = DataPlane(
        app.direct, service.proxy, plane_options(), "", NOBODY_LISTENS, NothingPrepared()
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        plane.start([os.dup(listener.fileno())], Secured())
        yield _Served(app, listener.getsockname()[1], plane)
        plane.cut_all()
        await eventually(lambda: sum(plane.plane.clients()) == 0, "nothing is left")
        await plane.close()


def deciding() -> list[asyncio.Task[object]]:
    """The tasks that choose a replica."""
    return [task for task in asyncio.all_tasks() if "dispatch" in repr(task)]


async def test_a_request_whose_decision_is_cancelled_gets_a_response(
    served: _Served,
) -> None:
    """What it waits for may be cancelled by another one's end; its client must not wait for ever,
    nor its place among the requests stay taken."""
    app, port, _ = served
    async with connect(port) as client:
        await client.write(request_bytes("POST", "/v1/completions", LARGE))
        await eventually(deciding, "a replica is being chosen")
        deciding()[0].cancel()
        answer = await client.read_answer()
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert app.gateway.router.admission.under_way == 0
        again = await client.ask("POST", "/v1/completions", b"{}")
        assert again.status == 400


async def test_a_connection_that_is_cut_ends_its_decision_and_sends_nothing(
    served: _Served,
) -> None:
    """At the end of the grace period, say: the decision may be made in that very moment."""
    app, port, plane = served
    async with connect(port) as client:
        await client.write(request_bytes("POST", "/v1/completions", LARGE))
        await eventually(deciding, "a replica is being chosen")
        plane.cut_all()
        await eventually(lambda: not deciding(), "nobody chooses any more")
        await eventually(lambda: app.gateway.router.admission.under_way == 0, "its place is free")


SLOW_BODIES = "server: {host_names: [router], timeouts: {client_body_s: 0.1}}"


@pytest.mark.parametrize("config", [SLOW_BODIES])
async def test_a_body_that_does_not_come_ends_its_request(
    served: _Served,
) -> None:
    """It holds a place and what it has sent so far; one that trickles would hold them for ever."""
    app, port, _ = served
    async with connect(port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 100\r\n\r\n"
        await client.write(head + b"{")
        answer = await client.read_answer()
        assert answer.status == 400
        assert "must arrive within 0.1 s" in answer.error["message"]
        assert app.gateway.router.admission.under_way == 0


KEYED = "server: {client_api_key: right, wrong_key_delay_s: 0.01}"


@pytest.mark.parametrize("config", [KEYED])
async def test_refusals_are_counted_and_held_back_however_many_there_were(
    served: _Served,
) -> None:
    """Only so many are held back at a time; one that was sent must leave its place to the next."""
    app, port, _ = served
    gateway, wrong = app.gateway, {"authorization": "Bearer wrong"}
    async with connect(port) as client:
        for _ in range(300):
            answer = await client.ask("POST", "/v1/completions", b"{}", wrong)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert gateway.guard.wrong_keys.hold(Unauthorized(was_given=True), "x", "127.0.0.1") > 0
    counted = gateway.router.observers.metrics.bad_requests.labels("invalid_api_key")
    assert counted.value == 300
