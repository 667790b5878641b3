"""A network of a test's own: nothing is in it but the loopback device, and it has as few local
ports as the test wants."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
_NETWORK = "/proc/thread-self/ns/net"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914
_IS_UP = 1


@dataclass(frozen=True)
class OwnNetwork:
    """The network that this thread is in."""

    descriptor: int

    def enter(self) -> None:
        """Have the sockets of this thread in it from now on."""
        assert _LIBC.setns(self.descriptor, _NEW_NETWORK) == 0

    def use_ports(self, first: int, last: int) -> None:
        """Have it give these local ports to new connections, and no others."""
        try:
            _PORTS.write_text(f"{first} {last}")
        except OSError as error:
            pytest.skip(f"local ports cannot be set: {error}")


@contextlib.contextmanager
def own_network() -> Iterator[OwnNetwork]:
    """Have the sockets of this thread in a network of its own. Processes that were started before,
    such as the one that forks routers, are not in it: give `router_process` its `enter` as
    `limit`."""
    before = OwnNetwork(os.open(_NETWORK, os.O_RDONLY))
    try:
        if _LIBC.unshare(_NEW_NETWORK):
            pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        own = OwnNetwork(os.open(_NETWORK, os.O_RDONLY))
        try:
            _bring_loopback_up()
            yield own
        finally:
            before.enter()
            os.close(own.descriptor)
    finally:
        os.close(before.descriptor)


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = fcntl.ioctl(asked, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", found)[1] | _IS_UP
        fcntl.ioctl(asked, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags))
