"""Requests on their way through the gateway, on real sockets: what its own tasks may do to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest_asyncio
import uvicorn
from uvicorn.server import ServerState

from router.config import RouterConfig
from router.http.connection_guard import ClientLimits, guarded_protocol
from router.routing.dispatcher import INLINE_BODY_BYTES
from router.serve import RouterApp
from router.service import RouterService
from tests.support.http_client import connect, eventually, request_bytes

LARGE = b'{"model": "m", "prompt": "%b"}' % (b"x" * INLINE_BODY_BYTES)
"""Decided on in a task: it is read in another process."""


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[RouterApp, int, ServerState]]:
    """A router without replicas, its port,."""
    app = RouterApp(RouterService(RouterConfig.from_yaml("server: {host_names: [router]}", {})))
    protocol = guarded_protocol(ClientLimits(), lambda _refusal: None, app.direct)
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, state, {}), sock=listener
    )
    yield app, listener.getsockname()[1], state
    server.close()
    for connection in tuple(state.connections):
        connection.transport.abort()  # type: ignore[union-attr]
    await eventually(lambda: not state.connections, "nothing is left")


def deciding() -> list[asyncio.Task[object]]:
    """The tasks that choose a replica."""
    return [task for task in asyncio.all_tasks() if "dispatch" in repr(task)]


async def test_a_request_whose_decision_is_cancelled_gets_a_response(
    served: tuple[RouterApp, int, ServerState],
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
        assert app.gateway.admission.under_way == 0
        again = await client.ask("POST", "/v1/completions", b"{}")
        assert again.status == 400


async def test_a_connection_that_is_cut_ends_its_decision_and_sends_nothing(
    served: tuple[RouterApp, int, ServerState],
) -> None:
    """At the end of the grace period, say: the decision may be made in that very moment."""
    app, port, state = served
    async with connect(port) as client:
        await client.write(request_bytes("POST", "/v1/completions", LARGE))
        await eventually(deciding, "a replica is being chosen")
        for connection in state.connections:
            connection.cut()  # type: ignore[union-attr]
        await eventually(lambda: not deciding(), "nobody chooses any more")
        await eventually(lambda: app.gateway.admission.under_way == 0, "its place is free")
