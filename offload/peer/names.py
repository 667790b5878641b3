"""Looks up the names of peers, in threads of its own.

ZMQ would look them up in the thread that moves the bytes of all peers: a name server that does not
answer would hold up every pull and every peer that is served, for 20 s or more.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from ipaddress import ip_address

from offload.errors import TransferError
from offload.request import PeerSource


class PeerNames:
    """Looks up names, each once at a time; any thread may call it."""

    MOST_AT_ONCE = 16
    """Names that are being looked up; further ones fail at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, Future[str]] = {}

    def endpoint(self, source: PeerSource, within_s: float) -> str:
        """Return the address of a peer, for ZMQ.

        Args:
            within_s: How long to wait for a name's.

        Raises:
            TransferError: The name has no address, or none was found in time.
        """
        host = source.host.strip("[]")
        with suppress(ValueError):
            ip_address(host)
            return f"tcp://{source.host}:{source.port}"
        address = ""
        with suppress(FutureTimeoutError):
            address = self._begin(host).result(within_s)
        if not address:
            raise TransferError(f"peer tier: {host}: no address was found")
        return f"tcp://[{address}]:{source.port}"

    def _begin(self, host: str) -> Future[str]:
        with self._lock:
            found = self._pending.get(host)
            if found is not None:
                return found
            if len(self._pending) >= self.MOST_AT_ONCE:
                raise TransferError(f"peer tier: {host}: too many names are being looked up")
            found = self._pending[host] = Future()
        # A daemon, since the end of the process need not wait for a name server.
        thread = threading.Thread(
            target=self._look_up, args=(host, found), name="kv-peer-name", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no more
            self._end(host, found, "")
        return found

    def _look_up(self, host: str, found: Future[str]) -> None:
        address = ""
        with suppress(OSError, UnicodeError):
            address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        self._end(host, found, address)

    def _end(self, host: str, found: Future[str], address: str) -> None:
        """Hand over what was found; an empty address: none."""
        with self._lock:
            del self._pending[host]
        found.set_result(address)
