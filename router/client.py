"""A client for programs that send requests themselves: ask where, send, report the outcome. Needs
the extra `client`.

```python
with SelectionClient("http://router:8080") as router:
    with router.reserved({"model": "gemma-3", "token_ids": ids}) as reservation:
        response = post(reservation.endpoint, headers=reservation.headers)
        reservation.usage = response["usage"]
```

Leaving the block ends the reservation: `failed` where an exception left it, `client_left` where it
was cancelled, else `completed`. What the block did stands where the router cannot be told: then the
reservation ends by itself. `AsyncSelectionClient` is the same with `async with` and `await`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from typing_extensions import Self

TIMEOUT_S = 60.0
"""Longer than a request waits for its turn at the router."""


class SelectionError(Exception):
    """The router has refused.

    Args:
        code: The same for every error of one kind.
        retry_after_s: When to try again, where that makes sense.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        # All of them, so that it can be pickled: programs hand errors from process to process.
        super().__init__(status, code, message, retry_after_s)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[2])


@dataclass
class Selection:
    """A replica for a request."""

    id: str
    """The id of its reservation."""
    replica: str
    endpoint: str
    """The replica's URL."""
    address: str
    """Its `host:port`."""
    dp_rank: int | None
    cached_tokens: int
    """Prompt tokens that it is predicted to reuse."""
    reason: str
    headers: Mapping[str, str]
    """Headers to send with the request."""
    body_fields: Mapping[str, Any]
    """Fields to set in its body."""
    answer: Mapping[str, Any] = field(repr=False)
    """The router's whole answer."""
    usage: Mapping[str, Any] | None = None
    """The engine's report: set it, and it is compared with the prediction."""
    status: int | None = None
    """The status of the replica's response: set it where it is not 200."""
    failure: str | None = None
    """How the replica failed, where it is to blame: `connect`, `closed`, `first_byte_timeout` or
    `unavailable`. It counts against its health."""

    def report(self, outcome: str) -> dict[str, Any]:
        """Return the body that ends the reservation."""
        found = {
            "outcome": outcome,
            "usage": self.usage,
            "status": self.status,
            "failure": self.failure,
        }
        return {name: value for name, value in found.items() if value is not None}


def _selection(response: httpx.Response) -> Selection:
    _check(response)
    try:
        found = response.json()
        return Selection(
            id=found.get("selection_id", ""),
            replica=found["replica"],
            endpoint=found["endpoint"],
            address=found["address"],
            dp_rank=found["dp_rank"],
            cached_tokens=found["overlap"]["longest_matched"],
            reason=found["reason"],
            headers=found.get("headers", {}),
            body_fields=found.get("body_fields", {}),
            answer=found,
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        message = "what answered is no router: it names no replica"
        raise SelectionError(response.status_code, "unreadable", message) from None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        code, message = "unreadable", f"the router answered {response.status_code}"
    after = response.headers.get("retry-after", "")
    retry_after_s = float(after) if after.isdigit() else None
    raise SelectionError(response.status_code, code, message, retry_after_s)


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


_END_S = 10.0
"""The longest time for the router to take the end of a block on an event loop."""
_UNTOLD = (SelectionError, httpx.HTTPError)
_NOT_BOOKED = (SelectionError, httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def _named(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return *body* with an id for its reservation, so that what is booked can be ended though no
    answer came."""
    return {**body, "selection_id": body.get("selection_id") or uuid.uuid4().hex}


_UNANSWERED = {"outcome": "client_left"}


class SelectionClient:
    """Asks one router.

    Args:
        api_key: A client's, where the router requires one.
        timeout_s: For each answer, with the time that a request waits for its turn.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._http = httpx.Client(base_url=url, headers=_headers(api_key), timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def select(self, body: Mapping[str, Any]) -> Selection:
        """Ask without booking; raises `SelectionError`, as all do."""
        return _selection(self._http.post("/select", json=body))

    def reserve(self, body: Mapping[str, Any]) -> Selection:
        """Ask, and book it until `end`. Without an answer nothing stays booked."""
        asked = _named(body)
        try:
            return _selection(self._http.post("/select_and_reserve", json=asked))
        except _NOT_BOOKED:
            raise
        except BaseException:
            with suppress(*_UNTOLD):
                self._end(asked["selection_id"], _UNANSWERED)
            raise

    def prefill_complete(self, selection: Selection) -> None:
        """Report the first token."""
        _check(self._http.post(f"/reservations/{selection.id}/prefill_complete"))

    def output(self, selection: Selection, tokens: int) -> None:
        """Report more output tokens."""
        _check(self._http.post(f"/reservations/{selection.id}/output", json={"tokens": tokens}))

    def end(self, selection: Selection, outcome: str = "completed") -> None:
        """End it: `completed`, `client_left` or `failed`."""
        self._end(selection.id, selection.report(outcome))

    def _end(self, selection_id: str, report: Mapping[str, Any]) -> None:
        _check(self._http.request("DELETE", f"/reservations/{selection_id}", json=report))

    @contextmanager
    def reserved(self, body: Mapping[str, Any]) -> Iterator[Selection]:
        """Reserve for as long as the block runs."""
        selection, outcome = self.reserve(body), "client_left"
        try:
            yield selection
            outcome = "completed"
        except Exception:
            outcome = "failed"
            raise
        finally:
            with suppress(*_UNTOLD):
                self.end(selection, outcome)


class AsyncSelectionClient:
    """The same for programs on an event loop."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers=_headers(api_key), timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `SelectionClient.close`, as for all others."""
        await self._http.aclose()

    async def select(self, body: Mapping[str, Any]) -> Selection:
        """Ask without booking."""
        return _selection(await self._http.post("/select", json=body))

    async def reserve(self, body: Mapping[str, Any]) -> Selection:
        """Ask, and book it until `end`."""
        asked = _named(body)
        try:
            return _selection(await self._http.post("/select_and_reserve", json=asked))
        except _NOT_BOOKED:
            raise
        except BaseException:
            # In a cancelled scope every other await is cancelled, too.
            with anyio.move_on_after(_END_S, shield=True), suppress(*_UNTOLD):
                await self._end(asked["selection_id"], _UNANSWERED)
            raise

    async def prefill_complete(self, selection: Selection) -> None:
        """Report the first token."""
        _check(await self._http.post(f"/reservations/{selection.id}/prefill_complete"))

    async def output(self, selection: Selection, tokens: int) -> None:
        """Report more output tokens."""
        path = f"/reservations/{selection.id}/output"
        _check(await self._http.post(path, json={"tokens": tokens}))

    async def end(self, selection: Selection, outcome: str = "completed") -> None:
        """End it."""
        await self._end(selection.id, selection.report(outcome))

    async def _end(self, selection_id: str, report: Mapping[str, Any]) -> None:
        _check(await self._http.request("DELETE", f"/reservations/{selection_id}", json=report))

    @asynccontextmanager
    async def reserved(self, body: Mapping[str, Any]) -> AsyncIterator[Selection]:
        """Reserve for as long as the block runs."""
        selection, outcome = await self.reserve(body), "client_left"
        try:
            yield selection
            outcome = "completed"
        except Exception:
            outcome = "failed"
            raise
        finally:
            with anyio.move_on_after(_END_S, shield=True), suppress(*_UNTOLD):
                await self.end(selection, outcome)
