"""`Fetch` over the router's own HTTP client."""

from __future__ import annotations

from collections.abc import Sequence

from async_timeout import timeout

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
        async with timeout(timeout_s):
            status, _, body = await self._client.fetch(
                origin, b"GET", path.encode("ascii"), b"", phases, max_bytes, headers
            )
        return status, body
