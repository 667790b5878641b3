"""uvicorn's protocol, with a way to close a client's socket at once.

ASGI knows no abort. uvicorn ends an unfinished answer with ``transport.close()``, which waits until what is buffered was
sent: for a client that never reads, that is never, and the socket is lost. `uvicorn.Config(http=AbortableHttpProtocol)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT_EXTENSION = "kvroute.abort"


class AbortableHttpProtocol(HttpToolsProtocol):
    """Puts the transport's ``abort`` among the extensions of every request's scope."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}


def client_abort(scope: Mapping[str, Any]) -> Callable[[], object] | None:
    """The abort of this request's client, if the server offers one: for `ProxyRequest.abort_client`."""
    extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
    return None if extension is None else extension["abort"]
