"""A response as server-sent events, while it grows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvroute_engine.http.clients import RequestAbandoned, unless_client_leaves
from kvroute_engine.http.completion import CompletionBuilder
from kvroute_engine.http.errors import EngineDeadError, EngineErrorBody, EngineErrorDetails
from kvroute_engine.http.responses import CompletionResponse, ResponseFormat
from kvroute_engine.http.schemas import GenerateBody
from kvroute_engine.http.service import Generation

DONE = b"data: [DONE]\n\n"


async def events(
    completion: CompletionBuilder,
    generation: Generation,
    response: ResponseFormat,
    body: GenerateBody,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream.

    An engine that dies meanwhile is reported as an event, since the status has been sent.

    Args:
        body: The client's options for the stream.
    """
    # They are sent with the first token, as by vLLM: the first event is what clients measure the
    # time to the first token by.
    openings = [
        opening
        for index in range(completion.num_choices)
        if (opening := response.first_chunk(index)) is not None
    ]
    try:
        async with contextlib.aclosing(completion.pieces(generation)) as pieces:
            async for piece in pieces:
                for event in (*openings, response.chunk(piece)):
                    yield _event(_with_usage(event, completion, body))
                openings = []
        if body.wants_usage:
            yield _event(response.usage_chunk(completion.usage))
    except EngineDeadError as error:
        yield _event(EngineErrorBody(EngineErrorDetails(str(error), "InternalServerError", 500)))
    yield DONE


def _with_usage(
    event: CompletionResponse, completion: CompletionBuilder, body: GenerateBody
) -> CompletionResponse:
    """Add `usage` if the client asked for it; null unless it asked for it in every event."""
    if not body.wants_usage:
        return event
    usage = completion.usage if body.wants_running_usage else None
    return msgspec.structs.replace(event, usage=usage)


def _event(value: CompletionResponse | EngineErrorBody) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client leaves; either ends the generation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        """
        Args:
            events: From `events`.
        """
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (the protocol's)
        try:
            with contextlib.suppress(RequestAbandoned):
                await unless_client_leaves(self._send(send), receive)
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
