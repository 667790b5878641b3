"""The whole application: proxied paths as raw ASGI, everything else through FastAPI."""

from __future__ import annotations

from router.http.api import create_api
from router.http.gateway import PROXIED_PATHS, Receive, Scope, Send
from router.service import RouterService


class RouterApp:
    """The ASGI application of one router.

    FastAPI and its middleware cost some 200 µs a request; the proxied paths need nothing of it.
    """

    def __init__(self, service: RouterService) -> None:
        self.service = service
        self._api = create_api(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PROXIED_PATHS:
            await self.service.gateway(scope, receive, send)
        else:
            await self._api(scope, receive, send)
