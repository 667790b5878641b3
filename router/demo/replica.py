"""A replica that plays the recording of a real engine: its events over ZMQ, its answers over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

import uvicorn

from kvevents.publisher import RecordedStreamPublisher
from kvevents.publisher_config import PublisherConfig
from router.recording import Query, RecordingReader

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

MODEL = "demo"
_TOPIC = "kv-events"


class RecordedReplica:
    """Speaks as vLLM does: discovery, health, and completions whose usage tells what was cached."""

    def __init__(self, name: str, recording: Path) -> None:
        self.name = name
        self.recording = recording
        self.published = 0
        """Batches sent so far."""
        self.served = 0
        self._truth: dict[tuple[int, ...], int] = {}
        self._publisher = RecordedStreamPublisher(
            PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic=_TOPIC)
        )
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none", interface="asgi3")
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; returns when it does."""
        self._task = asyncio.create_task(self._server.serve(), name=f"replica {self.name}")
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._publisher.shutdown()

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def play(self) -> Iterator[Query]:
        """Publish the recording up to each of its queries in turn; the engine's answer to that query is then the truth."""
        with RecordingReader(self.recording) as reader:
            for record in reader:
                if isinstance(record, Query):
                    self._truth = {tuple(record.query): record.hit}
                    yield record
                else:
                    self._publisher.publish_raw(record)
                    self.published += 1

    # --- HTTP -------------------------------------------------------------------------------------------------------------

    async def _app(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if scope["path"] == "/health":
            await _answer(send, {})
        elif scope["path"] == "/v1/models":
            await _answer(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif scope["path"] == "/kv_event_sources":
            await _answer(send, {"0": self._event_source()})
        elif scope["path"] == "/v1/completions":
            await _answer(send, self._complete(json.loads(body)))
        else:
            await _answer(send, {"error": {"message": "not found", "type": "not_found", "code": "404"}}, 404)

    def _event_source(self) -> dict[str, Any]:
        return {
            "publisher": "zmq",
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay_endpoint,
            "topic": _TOPIC,
            "data_parallel_rank": 0,
        }

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the engine said of this prompt; of another replica's it holds nothing."""
        self.served += 1
        prompt = tuple(request["prompt"])
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "total_tokens": len(prompt) + 1,
            "prompt_tokens_details": {"cached_tokens": self._truth.get(prompt, 0)},
        }
        choice = {"index": 0, "text": ".", "finish_reason": "length"}
        return {"id": "cmpl-demo", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, value: dict[str, Any], status: int = 200) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
