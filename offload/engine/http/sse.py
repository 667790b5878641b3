"""An answer as server-sent events, while it grows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offload.engine.http.clients import ClientDisconnected, unless_disconnected
from offload.engine.http.completion import CompletionBuilder
from offload.engine.http.errors import EngineDeadError, error_body
from offload.engine.http.responses import ResponseFormat
from offload.engine.http.schemas import GenerateBody
from offload.engine.http.service import Generation

DONE = b"data: [DONE]\n\n"


async def events(
    completion: CompletionBuilder, generation: Generation, form: ResponseFormat, body: GenerateBody
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An engine that dies in between is told as an event, since the status
    is gone already."""
    # They come with the first token, as vLLM's do: who measures the time to it looks at the first
    # event.
    openings = [
        opening
        for index in range(completion.num_choices)
        if (opening := form.opening(index)) is not None
    ]
    try:
        async with contextlib.aclosing(completion.pieces(generation)) as pieces:
            async for piece in pieces:
                for event in (*openings, form.piece(piece)):
                    yield _event(_with_usage(event, completion, body))
                openings = []
        if body.wants_usage:
            yield _event(form.closing(completion.usage))
    except EngineDeadError as error:
        yield _event(error_body(str(error), "InternalServerError", 500))
    yield DONE


def _with_usage(
    event: dict[str, Any], completion: CompletionBuilder, body: GenerateBody
) -> dict[str, Any]:
    """Where a client wants the usage, every event has the field, and most of them nothing in it."""
    if not body.wants_usage:
        return event
    return {**event, "usage": completion.usage.to_dict() if body.wants_running_usage else None}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client leaves, which ends the generation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (the interface's)
        try:
            with contextlib.suppress(ClientDisconnected):
                await unless_disconnected(self._send(send), receive)
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
