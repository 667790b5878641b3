"""`Fetch` over the router's own HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.upstream import Header, Origin, Timeouts, UpstreamClient


class UpstreamFetch:
    """Small GETs over kept connections; implements `Fetch`."""

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    async def __call__(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """See `Fetch`."""
        phases = Timeouts(timeout_s, timeout_s, timeout_s)
        asking = self._client.fetch(origin, b"GET", path.encode("ascii"), b"", phases, max_bytes, headers)
        whole = asyncio.ensure_future(asking)
        whole.add_done_callback(_retrieve)
        status, _, body = await asyncio.wait_for(whole, timeout_s)
        return status, body


def _retrieve(asked: asyncio.Task[tuple[int, list[Header], bytes]]) -> None:
    """Look at how it ended: a failure that meets a cancellation is nobody's, and would be logged as lost."""
    if not asked.cancelled():
        asked.exception()
