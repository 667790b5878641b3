"""A client's side of a request: its body, bounded in size and time, and whether it is still
there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from async_timeout import timeout
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from offload.engine.http.errors import ApiError, RequestTooLarge

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Nobody is there to be answered."""


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        RequestTooLarge: It is longer than *limit_bytes*.
        ApiError: It is not there within *timeout_s*.
        ClientDisconnected: The client left in the middle of it.
    """
    try:
        async with timeout(timeout_s):
            return await _read(request, limit_bytes)
    except asyncio.TimeoutError:
        raise ApiError(
            f"body: not there within {timeout_s:g} s", 408, "RequestTimeoutError"
        ) from None
    except ClientDisconnect:
        raise ClientDisconnected from None


async def unless_disconnected(work: Awaitable[Result], receive: Receive) -> Result:
    """What *work* brings; it is cancelled if the client leaves. To be used once the body was read.

    Raises:
        ClientDisconnected: The client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    tasks: list[asyncio.Future[Any]] = [working, leaving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
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
