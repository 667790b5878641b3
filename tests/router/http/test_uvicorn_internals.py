"""What our protocol and server use of uvicorn beyond its public interface, by name.

A new uvicorn may change any of it without notice. So `pyproject.toml` bounds its version; to raise
the bound, run this file and the tests of the connection guard with the new version, and read the
diff of what is named here.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections import deque
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from uvicorn.protocols import utils
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.connection_guard import GuardedHttpProtocol
from router.http.uvicorn_protocol import DirectHttpProtocol, JoiningTransport

METHODS = [
    (HttpToolsProtocol, "connection_made", ["transport"]),
    (HttpToolsProtocol, "connection_lost", ["exc"]),
    (HttpToolsProtocol, "data_received", ["data"]),
    (HttpToolsProtocol, "on_message_begin", []),
    (HttpToolsProtocol, "on_headers_complete", []),
    (HttpToolsProtocol, "on_body", ["body"]),
    (HttpToolsProtocol, "on_message_complete", []),
    (HttpToolsProtocol, "on_response_complete", []),
    (HttpToolsProtocol, "_unset_keepalive_if_required", []),
    (HttpToolsProtocol, "eof_received", []),
    (HttpToolsProtocol, "shutdown", []),
    (HttpToolsProtocol, "_start_asgi_task", ["cycle", "app"]),
    (HttpToolsProtocol, "resume_writing", []),
    (FlowControl, "pause_reading", []),
    (FlowControl, "resume_reading", []),
    (uvicorn.Server, "capture_signals", []),
    (uvicorn.Server, "on_tick", ["counter"]),
]
"""Overridden or called, with their parameters."""

OF_A_CONNECTION: dict[str, type | None] = {
    "loop": asyncio.AbstractEventLoop,
    "transport": JoiningTransport,
    "parser": httptools_impl.httptools.HttpRequestParser,
    "flow": FlowControl,
    "pipeline": deque,
    "connections": set,
    "app": None,
    "client": None,
    # Of one request: there before the first, set by the callbacks.
    "cycle": None,
    "scope": None,
    "headers": None,
    "url": bytes,
    "expect_100_continue": bool,
}
OF_A_REQUEST: dict[str, type | None] = {
    "chunked_encoding": None,
    "expected_content_length": int,
    "scope": dict,
    "disconnected": bool,
    "keep_alive": bool,
    "message_event": asyncio.Event,
    "more_body": bool,
    "response_complete": bool,
    "response_started": bool,
}


class Socket(asyncio.Transport):
    """A transport that goes nowhere."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Responds once its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest_asyncio.fixture
async def connection() -> AsyncIterator[GuardedHttpProtocol]:
    """One connection whose first request is being answered and whose second one waits."""
    state = ServerState()
    config = uvicorn.Config(application, proxy_headers=False)
    protocol = GuardedHttpProtocol(config, state, {})
    protocol.connection_made(Socket())
    protocol.data_received(
        b"GET /first HTTP/1.1\r\nhost: x\r\n\r\nGET /second HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    await asyncio.sleep(0)
    yield protocol
    protocol.connection_lost(ConnectionResetError())
    await asyncio.gather(*state.tasks)


def test_the_installed_uvicorn_is_within_the_bound_that_was_tested() -> None:
    """Without an upper bound, an upgrade elsewhere could take these internals away in
    production."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    ((major, minor),) = re.findall(r'"uvicorn>=[\d.]+,<(\d+)\.(\d+)"', text)
    installed = tuple(map(int, version("uvicorn").split(".")[:2]))
    assert installed < (int(major), int(minor))


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    METHODS,
    ids=[f"{each[0].__name__}.{each[1]}" for each in METHODS],
)
def test_a_method_that_is_overridden_or_called_takes_what_it_took(
    owner: type, name: str, parameters: list[str]
) -> None:
    """An override of a method that was renamed would silently never run."""
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters]


def test_every_override_is_listed() -> None:
    """The list above must not fall behind the code."""
    ours = {
        name
        for owner in (GuardedHttpProtocol, DirectHttpProtocol)
        for name in vars(owner)
        if hasattr(HttpToolsProtocol, name) and not name.startswith("__")
    }
    assert ours <= {name for owner, name, _ in METHODS if owner is HttpToolsProtocol}


@pytest.mark.parametrize("name", OF_A_CONNECTION)
async def test_a_connection_has_the_attribute(connection: GuardedHttpProtocol, name: str) -> None:
    """Reading one that is gone would end the connection in the middle of a request."""
    kind = OF_A_CONNECTION[name]
    assert hasattr(connection, name)
    assert kind is None or isinstance(getattr(connection, name), kind)


@pytest.mark.parametrize("name", OF_A_REQUEST)
async def test_a_request_has_the_attribute(connection: GuardedHttpProtocol, name: str) -> None:
    """The guard reads them to see what is under way, and writes some to end it."""
    kind = OF_A_REQUEST[name]
    assert isinstance(connection.cycle, RequestResponseCycle)
    assert hasattr(connection.cycle, name)
    assert kind is None or isinstance(getattr(connection.cycle, name), kind)


async def test_the_state_of_a_connection_means_what_the_guard_takes_it_for(
    connection: GuardedHttpProtocol,
) -> None:
    """The pipeline holds pairs that begin with the request, the next one last."""
    ((waiting, app),) = connection.pipeline
    assert (waiting, app.__name__) == (connection.cycle, "application")
    assert connection.scope["path"] == "/second"
    assert isinstance(connection.url, bytes)
    assert isinstance(connection.flow.write_paused, bool)
    assert connection in connection.server_state.connections


def test_a_server_has_the_attributes_that_ours_uses() -> None:
    """They stop it, and find its connections."""
    server = uvicorn.Server(uvicorn.Config(application))
    assert server.should_exit is server.force_exit is False
    assert server.server_state.connections == set()


def test_our_transport_has_every_method_that_uvicorn_calls() -> None:
    """It stands between uvicorn and the socket, and passes on only what it names."""
    called = {
        node.attr
        for module in (httptools_impl, flow_control, utils)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("transport")
    }
    assert called >= {"close", "get_extra_info", "is_closing", "pause_reading", "write"}
    assert [name for name in called if not hasattr(JoiningTransport, name)] == []
