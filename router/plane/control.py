"""Requests that go to no replica: pages, probes, scrapes, operators. The plane passes them on to
the application behind it, which listens on a socket of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT_HEADER = b"x-kvroute-client"
"""The client's address in a request from the plane; a client's own header of this name is
dropped."""


class BehindPlane:
    """The application, with the real client's address in its scope."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            client = next((value for name, value in headers if name == CLIENT_HEADER), b"")
            host, _, port = client.decode("latin-1").rpartition(" ")
            scope["client"] = host, int(port or 0)
            scope["headers"] = [pair for pair in headers if pair[0] != CLIENT_HEADER]
        await self._application(scope, receive, send)
