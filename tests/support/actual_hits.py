"""What an engine reports as reused, and whether the router has seen all events that led to it."""

from __future__ import annotations

import asyncio
import json
from typing import Protocol

import zmq
import zmq.asyncio
from async_timeout import timeout

from kvevents.messages import encode_start, read_reply
from tests.support.http_client import Answer
from tests.support.router_process import RouterProcess
from tests.support.waiting import DEADLINE_S


def cached_tokens(answer: Answer) -> int:
    """The cached tokens that the engine reports, in a whole response or at the end of a stream."""
    body = answer.body
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        body = last.removeprefix(b"data: ")
    cached: int = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def hits(answer: Answer) -> tuple[int, int]:
    """The cached tokens that the router predicted, and those that the engine reports."""
    return int(answer.headers["x-kv-hit-tokens"]), cached_tokens(answer)


class Named(Protocol):
    """A replica that the router lists."""

    @property
    def name(self) -> str: ...


async def until_told(router: RouterProcess, engine: Named) -> None:
    """Wait until the router has applied everything that *engine* has published so far: its replay
    endpoint has nothing beyond."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while True:
        (source,) = (await router.replica(engine.name))["sources"]
        stream = source["feed"]["stream"]
        is_live = source["feed"]["state"] == "live" and stream["last_seq"] is not None
        if is_live and not await _batches_from(stream["replay_endpoint"], stream["last_seq"] + 1):
            return
        assert loop.time() < deadline, f"{engine.name}: not told within {DEADLINE_S:g} s: {source}"


async def _batches_from(endpoint: str, start: int) -> int:
    """How many batches the replay endpoint has from *start* on."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart([b"", encode_start(start)])
        count = 0
        async with timeout(DEADLINE_S):
            while read_reply(await socket.recv_multipart(), None) is not None:
                count += 1
        return count
