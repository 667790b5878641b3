"""A replica reports what comes of a call: the first token, progress, and what was cached.

```python
async def complete(self, body, kvroute=None):  # with booking_argument="kvroute"
    async with self._reporter.report(kvroute) as report:
        async for piece in engine(body):
            report.saw(piece)
            yield piece
```
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import httpx
from async_timeout import timeout

from kvroute_ray.options import check_url, key_of
from router.client import AsyncSelectionClient, Selection, SelectionError

PROGRESS_EVERY_S = 10.0
"""The time between two reports that a long response goes on."""
TIMEOUT_S = 1.0
"""The longest wait for a report; the end of a response waits for the last one, no longer."""
_TAIL_BYTES = 16_384
_USAGE = b'"usage"'


class Report:
    """One call, as it goes on. Without a booking nothing is reported.

    Args:
        client: Of the router.
        selection: What is booked.
        timeout_s: For each report.
    """

    def __init__(
        self,
        client: AsyncSelectionClient,
        selection: Selection | None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = client
        self._selection = selection
        self._timeout_s = timeout_s
        self._last: asyncio.Task[None] | None = None
        self._tokens = 0
        self._reported_at: float | None = None
        self._tail = b""
        self.usage: Mapping[str, Any] | None = None
        """The engine's report; `saw` finds it in what passes."""
        self.status: int | None = None
        """The status of the engine's response: set it where it is not 200."""
        self.failure: str | None = None
        """The engine's failure, as in `router.client.Selection`: set it where it is to blame for
        an exception."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers to send to the engine with the request."""
        return {} if self._selection is None else dict(self._selection.headers)

    def saw(self, piece: object) -> None:
        """A piece of the response is there.

        Args:
            piece: Bytes or text of JSON or of server-sent events, a mapping, or a pydantic model:
                about a token. Its usage is read.
        """
        self._tokens += 1
        if isinstance(piece, str):
            piece = piece.encode(errors="replace")
        if isinstance(piece, (bytes, bytearray)):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        else:
            self.usage = _usage_in(piece) or self.usage
        if self._selection is None:
            return
        now = time.monotonic()
        if self._reported_at is None:
            self._reported_at = now
            self._say(self._client.prefill_complete(self._selection))
        elif now - self._reported_at >= PROGRESS_EVERY_S and self._is_idle:
            self._reported_at = now
            count, self._tokens = self._tokens, 0
            self._say(self._client.output(self._selection, count))

    async def end(self, outcome: str = "completed") -> None:
        """The response is over: `completed`, or `failed`."""
        if self._selection is None:
            return
        self._selection.failure = self.failure
        self._selection.usage = self.usage or usage_at_the_end_of(self._tail)
        self._selection.status = self.status
        if self._last is not None:
            await self._last
        await self._send(self._client.end(self._selection, outcome))

    @property
    def _is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def _say(self, report: Coroutine[Any, Any, None]) -> None:
        self._last = asyncio.ensure_future(self._send(report))

    async def _send(self, report: Coroutine[Any, Any, None]) -> None:
        """Report, unless the router does not answer: of the end, the handle's process reports as
        well."""
        with contextlib.suppress(
            SelectionError, httpx.HTTPError, OSError, ValueError, asyncio.TimeoutError
        ):
            async with timeout(self._timeout_s):
                await report


class Reporter:
    """Reports to one router, from one replica. Belongs to one event loop.

    Args:
        url: The router's, as in the deployment's `request_router_kwargs`.
        api_key_env: The environment variable with the client's key, in the replica's process; the
            same key as the handles'.
    Raises:
        ValueError: The URL, or the key, is none.
    """

    def __init__(self, url: str, api_key_env: str | None = None) -> None:
        check_url("url", url)
        self._client = AsyncSelectionClient(url, key_of(api_key_env), TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def report(self, selection: Selection | None) -> AsyncIterator[Report]:
        """Report for as long as the block runs; an exception that leaves it is a failure. Of a call
        that is cancelled the handle's process reports.

        Args:
            selection: The call's booking argument.
        """
        report = Report(self._client, selection)
        try:
            yield report
        except Exception:
            await report.end("failed")
            raise
        await report.end()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


def usage_at_the_end_of(text: bytes) -> Mapping[str, Any] | None:
    """Return the last `usage` of a response in JSON, or of the events of a stream; None without
    one.

    Args:
        text: Its last part.
    """
    place = text.rfind(_USAGE)
    while place >= 0:
        rest = text[place + len(_USAGE) :].decode(errors="replace").lstrip()
        if rest.startswith(":"):
            with contextlib.suppress(ValueError, RecursionError):
                found, _ = json.JSONDecoder().raw_decode(rest[1:].lstrip())
                if isinstance(found, dict):
                    return found
        place = text.rfind(_USAGE, 0, place)
    return None


def _usage_in(piece: object) -> Mapping[str, Any] | None:
    usage = piece.get("usage") if isinstance(piece, Mapping) else getattr(piece, "usage", None)
    if isinstance(usage, Mapping):
        return usage
    dump = getattr(usage, "model_dump", None)
    if dump is None:
        return None
    found: Mapping[str, Any] = dump(mode="json", exclude_none=True)
    return found
