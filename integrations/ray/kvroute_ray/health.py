"""`GET /health` for a replica whose engine serves no HTTP: the router asks it whether it lives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override


class _IPv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class HealthPort:
    """Answers 200 as long as the replica is well, in a thread.

    Args:
        host: The address to listen at, and in `url`: one that the router reaches.
        is_well: Asked for every answer, in that thread.
        port: 0 for one that the system chooses.
    """

    def __init__(
        self, host: str = "127.0.0.1", is_well: Callable[[], bool] = lambda: True, port: int = 0
    ) -> None:
        class Answer(BaseHTTPRequestHandler):
            timeout = 5.0
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status = 404 if self.path != "/health" else 200 if is_well() else 503
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            @override
            def log_message(self, format: str, *args: object) -> None:
                """Nothing: it is asked every few seconds."""

        is_ipv6 = ":" in host
        self._server = (_IPv6Server if is_ipv6 else ThreadingHTTPServer)((host, port), Answer)
        self._server.daemon_threads = True
        in_url = f"[{host}]" if is_ipv6 else host
        self.url = f"http://{in_url}:{self._server.server_address[1]}"
        """The URL to register."""
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
