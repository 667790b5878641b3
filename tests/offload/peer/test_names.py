"""Peers by their names, with a name server that is in no hurry."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from offload.base import OffloadKey
from offload.errors import TransferError
from offload.peer.client import PeerClient
from offload.peer.names import PeerNames
from offload.peer.server import PeerServer
from offload.request import PeerSource

KEY = OffloadKey(b"key")


class Memory:
    """Holds everything."""

    def holds(self, key: OffloadKey) -> bool:
        return True

    def read(self, key: OffloadKey) -> bytes:
        return b"block"


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Names in `.slow` are answered when it is set, `peer.quick` at once."""
    event = threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host.endswith(".slow"):
            event.wait()
        if host == "peer.nowhere":
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield event
    event.set()


def test_a_slow_name_server_holds_up_no_other_peer(answered: threading.Event) -> None:
    """One thread moves the bytes of all peers, also of those that are served."""
    with closing(PeerServer("127.0.0.1", 0, b"us", Memory())) as server:
        peers = PeerClient(b"us", 5, 0.01)
        slow = PeerSource("peer.slow", server.port)
        assert not peers.find(slow, [KEY]).keys
        assert peers.is_silent(slow)
        patient = PeerClient(b"us", 5, 60.0)
        assert patient.find(PeerSource("peer.quick", server.port), [KEY]).keys == {KEY}
        assert patient.fetch(PeerSource("127.0.0.1", server.port), [KEY]) == [b"block"]
        answered.set()
        assert patient.find(slow, [KEY]).keys == {KEY}


def test_a_name_without_an_address_is_a_peer_that_does_not_answer(
    answered: threading.Event,
) -> None:
    """The prompt is computed."""
    nowhere = PeerSource("peer.nowhere", 7777)
    peers = PeerClient(b"us", 5, 60.0)
    assert not peers.find(nowhere, [KEY]).keys
    with pytest.raises(TransferError, match="no address"):
        peers.fetch(nowhere, [KEY])


def test_the_names_that_are_looked_up_at_once_are_bounded(answered: threading.Event) -> None:
    """Requests name them; each takes a thread until its name server answers."""
    names = PeerNames()
    for index in range(names.MOST_AT_ONCE + 1):
        with pytest.raises(TransferError):
            names.endpoint(PeerSource(f"{index}.slow", 1), 0)
    assert len(names._pending) == names.MOST_AT_ONCE
    with pytest.raises(TransferError, match="too many"):
        names.endpoint(PeerSource("peer.quick", 1), 60)
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "kv-peer-name":
            thread.join()
    assert names.endpoint(PeerSource("peer.quick", 1), 60) == "tcp://[127.0.0.1]:1"
