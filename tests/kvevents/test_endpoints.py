"""Addresses: which are refused, which are bound, and which a data-parallel rank has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvevents.endpoints import ZmqEndpoint, open_socket
from kvevents.errors import EndpointError
from kvevents.publisher_config import PublisherConfig, ReplyLimits

ELSEWHERE = "tcp://240.0.0.1:5557"
"""A reserved address (RFC 1112): no machine has it, and nothing is sent there."""


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
    yield socket
    socket.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    "text",
    [
        "tcp://*:5557",
        "tcp://127.0.0.1:0",
        "tcp://[::1]:5557",
        "tcp://router.example:5557",
        "ipc:///run/kv.sock",
        "ipc://*",
        "inproc://kv",
    ],
)
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    """What is shown to people is what they configured."""
    assert str(ZmqEndpoint.parse("endpoint", text)) == text


def test_a_star_for_a_port_leaves_it_to_the_system() -> None:
    """ZMQ has two spellings for it."""
    assert ZmqEndpoint.parse("endpoint", "tcp://*:*") == ZmqEndpoint.parse("endpoint", "tcp://*:0")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must begin with tcp:// or ipc:// or inproc://"),
        ("127.0.0.1:5557", "must begin with"),
        ("udp://127.0.0.1:5557", "must begin with"),
        ("tcp://", "lacks an address"),
        ("inproc://", "lacks an address"),
        ("tcp://127.0.0.1", "must be tcp://host:port"),
        ("tcp://:5557", "must be tcp://host:port"),
        ("tcp://::1:5557", "IPv6 host in brackets"),
        ("tcp://127.0.0.1:99999", r"port '99999' .*must be a number in \[0, 65535\]"),
        ("tcp://127.0.0.1:-1", "must be a number"),
        ("tcp://127.0.0.1:http", "must be a number"),
        ("tcp://127.0.0.1:٣", "must be a number"),
        ("tcp://127.0.0.1:", "must be a number"),
    ],
)
def test_a_malformed_address_is_refused_with_its_place_and_rule(text: str, rule: str) -> None:
    """libzmq accepts some of these, and binds elsewhere."""
    with pytest.raises(EndpointError, match=f"^replay_endpoint: .*{rule}"):
        ZmqEndpoint.parse("replay_endpoint", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::1]:5557", "tcp://[::1]:5560"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("inproc://kv", "inproc://kv_dp3"),
        ("ipc:///run/kv.sock", "ipc:///run/kv.sock_dp3"),
        ("ipc://*", "ipc://*"),
    ],
)
def test_a_rank_shifts_the_address(text: str, expected: str) -> None:
    """As vLLM counts, so that one configuration serves all ranks."""
    endpoint = ZmqEndpoint.parse("endpoint", text)
    assert str(endpoint.for_rank(3)) == expected
    assert endpoint.for_rank(0) == endpoint


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    """Ports end at 65535."""
    with pytest.raises(EndpointError, match="65536 must not lie above 65535"):
        ZmqEndpoint.parse("endpoint", "tcp://*:65535").for_rank(1)


def test_an_address_of_this_machine_is_bound(socket: zmq.Socket[bytes]) -> None:
    """And the port that the system picked is reported."""
    opened = open_socket(
        socket, "endpoint", ZmqEndpoint.parse("endpoint", "tcp://127.0.0.1:0"), may_connect=True
    )
    assert opened.is_bound
    assert opened.address.startswith("tcp://127.0.0.1:")
    assert not opened.address.endswith(":0")


def test_an_ipc_path_is_bound(socket: zmq.Socket[bytes], tmp_path: Path) -> None:
    """For a router on the engine's machine."""
    path = f"ipc://{tmp_path}/kv"
    assert (
        open_socket(
            socket, "endpoint", ZmqEndpoint.parse("endpoint", path), may_connect=True
        ).address
        == path
    )


def test_an_address_of_another_machine_is_connected_to(socket: zmq.Socket[bytes]) -> None:
    """There a collector binds, and the engines connect to it."""
    opened = open_socket(
        socket, "endpoint", ZmqEndpoint.parse("endpoint", ELSEWHERE), may_connect=True
    )
    assert not opened.is_bound
    assert opened.address == ELSEWHERE


@pytest.mark.parametrize(
    ("text", "may_connect", "rule"),
    [
        (ELSEWHERE, False, "is not an address of this machine"),
        ("tcp://240.0.0.1:0", True, "needs a port other than 0"),
        ("ipc:///nowhere/at/all", True, "cannot bind"),
    ],
)
def test_what_can_be_neither_bound_nor_connected_to_is_refused(
    socket: zmq.Socket[bytes], text: str, may_connect: bool, rule: str
) -> None:
    """At the start, instead of silence afterwards."""
    with pytest.raises(EndpointError, match=f"^endpoint: .*{rule}"):
        open_socket(socket, "endpoint", ZmqEndpoint.parse("endpoint", text), may_connect)


@pytest.mark.parametrize("name", ["buffer_steps", "buffer_bytes", "hwm", "max_queue_size"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_bound_of_zero_is_refused(name: str, value: int) -> None:
    """To ZMQ a high-water mark of 0 means no bound."""
    with pytest.raises(ValueError, match=rf"^{name}: {value} must lie in"):
        PublisherConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 100_000.0])
def test_a_time_that_is_not_positive_is_refused(value: float) -> None:
    """A heartbeat every 0 seconds is a busy loop."""
    with pytest.raises(ValueError, match=r"^heartbeat_s: "):
        PublisherConfig(heartbeat_s=value)
    with pytest.raises(ValueError, match=r"^reply_limits\.stall_s: "):
        ReplyLimits(stall_s=value)


@pytest.mark.parametrize("name", ["concurrent", "requests_per_s", "queued_messages"])
def test_a_reply_limit_of_zero_is_refused(name: str) -> None:
    """No client would ever get a reply, or all of them at once."""
    with pytest.raises(ValueError, match=rf"^reply_limits\.{name}: 0 must lie in"):
        ReplyLimits(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_a_configuration_with_a_malformed_address_is_refused(name: str) -> None:
    """Where it is read, with its place."""
    with pytest.raises(EndpointError, match=f"^{name}: 'tcp:/oops' must begin with"):
        PublisherConfig(**{name: "tcp:/oops"})  # type: ignore[arg-type]


def test_the_default_address_is_not_reachable_from_outside() -> None:
    """Events carry prompts."""
    assert PublisherConfig().endpoint.startswith("tcp://127.0.0.1:")


def test_a_port_of_any_length_is_refused_with_the_rule() -> None:
    """Python refuses to read a number of more than 4,300 digits."""
    with pytest.raises(EndpointError, match="must be a number in"):
        ZmqEndpoint.parse("endpoint", "tcp://host:" + "9" * 5000)
