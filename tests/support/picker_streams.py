"""Streams of external processing as anybody can open them, without an Envoy between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from router.doors.messages import EXT_PROC_SERVICE, ProcessingRequest, ProcessingResponse

DUPLEX = 4
OpenStream = Callable[[], Any]
"""Opens one; the call has `write`, `read` and `cancel`."""


@contextlib.asynccontextmanager
async def picker_streams(address: str) -> AsyncIterator[OpenStream]:
    """What opens them, over one connection of its own.

    Args:
        address: The picker's `host:port`.
    """
    # Else gRPC shares one connection among all channels of a process.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel.stream_stream(
            f"/{EXT_PROC_SERVICE}/Process",
            request_serializer=lambda each: (
                each if isinstance(each, bytes) else each.SerializeToString()
            ),
            response_deserializer=ProcessingResponse.FromString,
        )


def head(mode: int = DUPLEX, path: str = "/v1/completions", **headers: str) -> Any:
    """The message with the headers of a POST."""
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    for key, value in {":path": path, ":method": "POST", **headers}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message


def piece(body: bytes, is_last: bool = False) -> Any:
    """The message with a piece of the body."""
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, is_last
    return message


async def refusal(call: Any) -> tuple[int, str]:
    """Status and code of the immediate response that must come next."""
    answer = await call.read()
    assert answer is not grpc.aio.EOF
    assert answer.HasField("immediate_response"), answer
    immediate = answer.immediate_response
    return immediate.status.code, json.loads(immediate.body)["error"]["code"]
