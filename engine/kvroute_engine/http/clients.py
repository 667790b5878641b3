"""A client's body, bounded in size and time, and whether the client is still connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from async_timeout import timeout
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from kvroute_engine.http.errors import ApiError, RequestTooLarge

Result = TypeVar("Result")


class RequestAbandoned(Exception):
    """The client has left; there is no one to send a response to."""


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """Read the whole body.

    Args:
        limit_bytes: Longest body that is read.
        timeout_s: How long the client may take to send it, in seconds.

    Raises:
        RequestTooLarge: The body is longer.
        ApiError: 408, it took longer.
        RequestAbandoned: The client left before the end of the body.
    """
    try:
        async with timeout(timeout_s):
            return await _read(request, limit_bytes)
    except asyncio.TimeoutError:
        raise ApiError(
            f"body: not there within {timeout_s:g} s", 408, "RequestTimeoutError"
        ) from None
    except ClientDisconnect:
        raise RequestAbandoned from None


async def unless_client_leaves(work: Awaitable[Result], receive: Receive) -> Result:
    """Return the result of *work*, which is cancelled if the client leaves.

    Args:
        receive: The ASGI channel of its request, from which the body has been read.

    Raises:
        RequestAbandoned: The client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    tasks: list[asyncio.Future[Any]] = [working, leaving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestAbandoned
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _read(request: Request, limit_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit_bytes:
        raise RequestTooLarge(limit_bytes)
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > limit_bytes:
            raise RequestTooLarge(limit_bytes)
    return bytes(pieces)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
