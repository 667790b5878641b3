"""Clients of TLS whose bytes a test sends by itself."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable

from tests.router.core.plane.harness import NAME


class InMemory:
    """A client whose bytes the test sends by itself."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname=NAME)

    def said(self) -> bytes:
        """What is to be sent."""
        return self._out.read()

    def heard(self, data: bytes) -> None:
        """What has come."""
        self._in.write(data)

    def shake_hands(self, send: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
        while not self._is_done():
            send(self.said())
            self.heard(receive())
        send(self.said())

    def _is_done(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read_all(self) -> bytes:
        """All that can be read of what has come."""
        found = b""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while piece := self.tls.read(65536):
                found += piece
        return found


def hello(context: ssl.SSLContext) -> bytes:
    """A client's first message."""
    client = InMemory(context)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.tls.do_handshake()
    return client.said()
