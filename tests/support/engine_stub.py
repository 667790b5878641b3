"""An engine over real sockets, without a model. HTTP is written by hand, so that a test decides
every byte and close; KV events are real.

It runs on the test's own event loop. A `Behaviour`, by default `answer`, handles each prompt
request; everything around it (health, models, event sources, load, tokenisation) is as in vLLM. The
token ids of a text are its UTF-8 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

from kvevents.layout import KVCacheLayout
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher_config import PublisherConfig
from router.prompt.endpoints import PROMPT_ENDPOINTS
from tests.support.blocks import FULL, Prefix
from tests.support.vllm_publisher import free_port

BLOCK = FULL.block_size
DONE = b"data: [DONE]\n\n"
TOPIC = "kv-events"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PROMPT_PATHS = tuple(endpoint.value for endpoint in PROMPT_ENDPOINTS)

_names = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test uses: models and replicas share one router."""
    return f"{prefix}-{next(_names)}"


@dataclass(frozen=True)
class StubRequest:
    """A request as it arrived, with header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    names: tuple[str, ...] = ()
    """Of all headers, one by one."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def prompt_ids(self) -> list[int]:
        body = self.json
        return ids_of(body.get("token_ids", body.get("prompt", body.get("messages", ""))))


def ids_of(prompt: Any) -> list[int]:
    """Token ids of a text, of a list of ids, or of a chat."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if prompt and isinstance(prompt[0], list):
        return [token_id for one in prompt for token_id in ids_of(one)]
    if prompt and isinstance(prompt[0], dict):
        return ids_of("".join(str(message["content"]) for message in prompt))
    return list(prompt)


class Gone(Exception):
    """The router has closed the connection."""


class Exchange:
    """One request in the hands of a behaviour."""

    def __init__(
        self, stub: EngineStub, request: StubRequest, transport: asyncio.Transport
    ) -> None:
        self.stub = stub
        self.request = request
        self.gone = asyncio.Event()
        self.transport = transport

    async def send(self, data: bytes) -> None:
        """Write at once; raises `Gone` if the router has left."""
        if self.gone.is_set():
            raise Gone
        self.transport.write(data)
        # Let the loop run: continuous writing must not hide that the other side has left.
        await asyncio.sleep(0)

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; the empty one ends it."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def whole(
        self, body: bytes, status: str = "200 OK", content_type: str = "application/json"
    ) -> None:
        """Send a whole response with its length."""
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await self.send(head.encode() + body)

    async def wait(self, event: asyncio.Event) -> None:
        """Wait for *event*; raises `Gone` if the router leaves before it."""
        waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.gone.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if self.gone.is_set():
            raise Gone

    def close(self) -> None:
        """Close the connection, which ends a body without a length."""
        self.transport.close()

    def reset(self) -> None:
        """Reset the connection, as a dying process does."""
        self.transport.abort()


Behaviour: TypeAlias = Callable[[Exchange], Awaitable[None]]


# --- behaviours -----------------------------------------------------------------------------------


async def answer(exchange: Exchange) -> None:
    """The response of an engine: one token, and usage with the cached tokens; as a stream if the
    client asks for one."""
    if exchange.request.json.get("stream"):
        await exchange.send(STREAM_HEAD)
        for event in events_of(exchange, 1):
            await exchange.chunk(event)
        await exchange.chunk(b"")
    else:
        await exchange.whole(json.dumps(_answer_of(exchange)).encode())


def streaming(count: int, gap_s: float = 0.0) -> Behaviour:
    """A stream of *count* tokens, one every *gap_s*."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for event in events_of(exchange, count):
            await exchange.chunk(event)
            if gap_s:
                await asyncio.sleep(gap_s)
        await exchange.chunk(b"")

    return behave


def sending(*pieces: bytes) -> Behaviour:
    """Send these bytes as the chunks of an event stream."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for piece in pieces:
            await exchange.chunk(piece)
        await exchange.chunk(b"")

    return behave


def after(event: asyncio.Event, then: Behaviour = answer) -> Behaviour:
    """Do nothing before *event*, then behave as given."""

    async def behave(exchange: Exchange) -> None:
        await exchange.wait(event)
        await then(exchange)

    return behave


def begun_until(event: asyncio.Event, begin: int = 2, end: int = 2) -> Behaviour:
    """A stream that pauses after *begin* tokens until *event*."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for token in [token_event(exchange.request.path, index) for index in range(begin)]:
            await exchange.chunk(token)
        await exchange.wait(event)
        for piece in [
            *(token_event(exchange.request.path, begin + index) for index in range(end)),
            DONE,
            b"",
        ]:
            await exchange.chunk(piece)

    return behave


async def hang(exchange: Exchange) -> None:
    """Accept the request and never respond."""
    await exchange.wait(asyncio.Event())


async def hang_up(exchange: Exchange) -> None:
    """Accept the request and cut the connection."""
    exchange.reset()


def dying_after(count: int) -> Behaviour:
    """A stream that is cut after *count* tokens."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for index in range(count):
            await exchange.chunk(token_event(exchange.request.path, index))
        exchange.reset()

    return behave


def refusing(status: str) -> Behaviour:
    """Respond with an error of the engine, such as `429 Too Many Requests`."""
    return always(b'{"error": {"message": "the engine says no", "type": "x", "code": "y"}}', status)


def always(body: bytes, status: str = "200 OK") -> Behaviour:
    """Send the same response to every request."""

    async def behave(exchange: Exchange) -> None:
        await exchange.whole(body, status)

    return behave


def token_event(path: str, index: int) -> bytes:
    """One token of a stream."""
    if path == "/v1/messages":
        delta = {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": f"t{index} "},
        }
        return b"event: content_block_delta\ndata: " + json.dumps(delta).encode() + b"\n\n"
    choice = (
        {"index": 0, "delta": {"content": f"t{index} "}}
        if "chat" in path
        else {"index": 0, "text": f"t{index} "}
    )
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def events_of(exchange: Exchange, count: int) -> Iterator[bytes]:
    """A whole stream."""
    path = exchange.request.path
    if path == "/v1/messages":
        start = {"type": "message_start", "message": {"usage": _anthropic_usage(exchange)}}
        yield b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n"
    yield from (token_event(path, index) for index in range(count))
    if path == "/v1/messages":
        yield b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    else:
        yield b"data: " + json.dumps({"choices": [], "usage": _usage(exchange)}).encode() + b"\n\n"
        yield DONE


def _answer_of(exchange: Exchange) -> dict[str, Any]:
    if exchange.request.path == "/v1/messages":
        return {
            "type": "message",
            "content": [{"type": "text", "text": "."}],
            "usage": _anthropic_usage(exchange),
        }
    return {
        "id": "x",
        "choices": [{"index": 0, "text": "."}],
        "usage": _usage(exchange),
        "served_by": exchange.stub.name,
    }


def _usage(exchange: Exchange) -> dict[str, Any]:
    ids = exchange.request.prompt_ids
    cached = {"cached_tokens": exchange.stub.cached_tokens(ids)}
    return {"prompt_tokens": len(ids), "completion_tokens": 1, "prompt_tokens_details": cached}


def _anthropic_usage(exchange: Exchange) -> dict[str, Any]:
    ids = exchange.request.prompt_ids
    cached = exchange.stub.cached_tokens(ids)
    return {
        "input_tokens": len(ids) - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": 1,
    }


# --- the engine -----------------------------------------------------------------------------------


@dataclass
class EngineStub:
    """One replica. `start` and `stop` it, or use it as an async context manager.

    Args:
        model: The model it serves. behaviour: Handles prompt requests; may be changed at any time.
        name: Its id in the router. adapters: LoRA adapters of the model, served as well.
        has_events: Whether it publishes KV events and reports where.
    """

    model: str
    behaviour: Behaviour = answer
    name: str = field(default_factory=lambda: unique("stub"))
    adapters: tuple[str, ...] = ()
    has_events: bool = False
    layout: KVCacheLayout = field(default_factory=lambda: KVCacheLayout.build([FULL]))
    """That it announces. What it stores is of the first group."""
    health_status: str = "200 OK"
    tokenizing: Behaviour | None = None
    """What /tokenize does instead of responding."""
    waiting_requests: int = 0
    """The value of its gauge of queued requests."""
    paths: dict[str, Behaviour] = field(default_factory=dict)
    """What else it has, and what a request there meets."""
    model_details: dict[str, Any] = field(default_factory=dict)
    """What it says of its model beside the name."""
    tls: ssl.SSLContext | None = None
    """What it shows and asks for; None: plain HTTP."""
    silent_paths: tuple[str, ...] = ()
    """Paths whose requests are accepted and never responded to."""

    port: int = 0
    active: int = 0
    """Prompt requests in progress."""
    peak: int = 0
    served: int = 0
    """Prompt requests whose response was completed."""
    left: list[float] = field(default_factory=list)
    """When the router closed a connection in the middle of a prompt request, on the clock of
    `time.monotonic`."""
    health_checks: int = 0
    requests: list[StubRequest] = field(default_factory=list)
    """Prompt requests, and others that came through the router's proxy."""
    connections: int = 0
    stored_blocks: int = 0
    errors: list[BaseException] = field(default_factory=list)
    """Exceptions raised by behaviours; `stop` raises the first of them."""

    def __post_init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._prompts: list[list[int]] = []
        self._publisher: ZmqEventPublisher | None = None
        self._kv_addresses = (_own_address(), _own_address())

    @property
    def event_addresses(self) -> tuple[str, str]:
        """Where it publishes, and replays."""
        return self._kv_addresses

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def sources(self) -> int:
        """How many event streams it reports."""
        return int(self.has_events)

    async def __aenter__(self) -> EngineStub:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the previous address if there was one."""
        loop = asyncio.get_running_loop()
        self.port = self.port or free_port()  # where nobody else listens while it is stopped
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, backlog=4096, ssl=self.tls
        )
        if self.has_events:
            endpoint, replay = self._kv_addresses
            config = PublisherConfig(
                endpoint=endpoint, replay_endpoint=replay, topic=TOPIC, heartbeat_s=0.2
            )
            self._publisher = ZmqEventPublisher(config, self.layout)

    async def stop(self) -> None:
        """Stop like a killed process: every connection is cut, and the cache is lost."""
        if self._server is not None:
            self._server.close()
            # A connection that was just being accepted appears one turn later.
            for _ in range(3):
                for connection in tuple(self._open):
                    connection.abort()
                await asyncio.sleep(0)
            await self._server.wait_closed()
            self._server = None
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.shutdown)
            self._publisher = None
        self._prompts.clear()
        self.stored_blocks = 0
        if self.errors:
            raise self.errors.pop(0)

    # --- its cache --------------------------------------------------------------------------------

    def store(self, ids: Sequence[int], salt: str | None = None) -> None:
        """Cache the whole blocks of this prompt, for requests of this *salt*; and publish that, if
        it publishes anything."""
        blocks = len(ids) // BLOCK
        whole = list(ids[: blocks * BLOCK])
        self._prompts.append(whole)
        self.stored_blocks += blocks
        if self._publisher is not None:
            self._publisher.publish([Prefix(whole, salt=salt).stored(0, FULL)])

    def evict(self, ids: Sequence[int]) -> None:
        """Evict the blocks of a stored prompt, and publish that. No other prompt may share them."""
        assert self._publisher is not None
        whole = list(ids[: len(ids) // BLOCK * BLOCK])
        self._prompts.remove(whole)
        self._publisher.publish([Prefix(whole).removed(0, range(BLOCK, len(whole) + 1, BLOCK))])
        self.stored_blocks -= len(whole) // BLOCK

    def offload(self, ids: Sequence[int], medium: str) -> None:
        """Publish that the blocks of a stored prompt are in a lower tier, by their hashes alone.
        `stored_blocks` does not count them."""
        assert self._publisher is not None
        whole = list(ids[: len(ids) // BLOCK * BLOCK])
        ends = range(BLOCK, len(whole) + 1, BLOCK)
        self._publisher.publish([Prefix(whole).offloaded(0, ends, medium)])

    def forget(self) -> None:
        """Empty the cache without publishing it, as an engine must never do."""
        self._prompts.clear()

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens of a prompt are cached, by the rule of full attention: whole blocks, and
        never the last token."""
        most = (len(ids) - 1) // BLOCK * BLOCK
        common = [
            sum(1 for _ in itertools.takewhile(_is_same, zip(ids, prompt, strict=False)))
            for prompt in self._prompts
        ]
        return min(max(common, default=0) // BLOCK * BLOCK, most)

    # --- HTTP -------------------------------------------------------------------------------------

    async def serve(self, exchange: Exchange) -> None:
        """Serve any request."""
        path = exchange.request.path
        if path in self.silent_paths:
            await hang(exchange)
        elif path == "/health":
            self.health_checks += 1
            await exchange.whole(b"", self.health_status)
        elif path == "/v1/models":
            await exchange.whole(json.dumps(self._models()).encode())
        elif path == "/kv_event_sources":
            await exchange.whole(json.dumps(self._event_sources()).encode())
        elif path == "/metrics":
            await exchange.whole(self._gauges().encode(), content_type="text/plain")
        elif path == "/tokenize":
            await self._tokenize(exchange)
        elif path in PROMPT_PATHS:
            await self._generate(exchange)
        elif path in self.paths:
            self.requests.append(exchange.request)
            await self.paths[path](exchange)
        else:
            await exchange.whole(b'{"error": {"message": "no such path"}}', "404 Not Found")

    async def _generate(self, exchange: Exchange) -> None:
        self.requests.append(exchange.request)
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            await self.behaviour(exchange)
            self.served += 1
        finally:
            self.active -= 1

    async def _tokenize(self, exchange: Exchange) -> None:
        self.requests.append(exchange.request)
        if self.tokenizing is not None:
            await self.tokenizing(exchange)
            return
        ids = exchange.request.prompt_ids
        await exchange.whole(
            json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode()
        )

    def _models(self) -> dict[str, Any]:
        adapters = [
            {"id": adapter, "object": "model", "parent": self.model} for adapter in self.adapters
        ]
        return {
            "object": "list",
            "data": [
                {"id": self.model, "object": "model", "parent": None, **self.model_details},
                *adapters,
            ],
        }

    def _event_sources(self) -> dict[str, Any]:
        if self._publisher is None:
            return {}
        endpoint, replay = self._kv_addresses
        return {
            "0": {
                "publisher": "zmq",
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "topic": TOPIC,
            }
        }

    def _gauges(self) -> str:
        return (
            f"vllm:num_requests_running {self.active}\n"
            f"vllm:num_requests_waiting {self.waiting_requests}\n"
        )

    # --- what its connections tell ----------------------------------------------------------------

    def connection_opened(self, connection: _Connection) -> None:
        self._open.add(connection)
        self.connections += 1

    def connection_closed(self, connection: _Connection) -> None:
        self._open.discard(connection)


class _Connection(asyncio.Protocol):
    """Requests of one connection, one after the other."""

    def __init__(self, stub: EngineStub) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self._needed_bytes = 1
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stub.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._take_next()

    def connection_lost(self, error: Exception | None) -> None:
        self._stub.connection_closed(self)
        if self._exchange is not None:
            self._exchange.gone.set()
            if self._exchange.request.path in PROMPT_PATHS:
                self._stub.left.append(time.monotonic())
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def _take_next(self) -> None:
        if self._exchange is not None or len(self._buffer) < self._needed_bytes:
            return
        head, separator, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        names = tuple(line.partition(":")[0].lower() for line in lines)
        if headers.get("transfer-encoding") == "chunked":
            found = _chunked(rest)
            if found is None:
                return
            body, length = found
        else:
            length = int(headers.get("content-length", "0"))
            self._needed_bytes = len(head) + len(separator) + length
            body = rest[:length]
        if len(rest) < length:
            return
        self._buffer, self._needed_bytes = bytearray(rest[length:]), 1
        method, target, _ = first.split(" ")
        self._exchange = Exchange(
            self._stub, StubRequest(method, target, headers, body, names), self._transport
        )
        self._task = asyncio.get_running_loop().create_task(self._serve(self._exchange))
        self._task.add_done_callback(self._on_end)

    async def _serve(self, exchange: Exchange) -> None:
        with contextlib.suppress(Gone):
            await self._stub.serve(exchange)
            self._exchange = None
            self._take_next()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """An error in a behaviour must not look like a slow engine."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._stub.errors.append(error)
            self._transport.abort()


def _chunked(rest: bytes) -> tuple[bytes, int] | None:
    """A body in chunks without trailers, and the bytes it takes; None where more must come."""
    body, at = b"", 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        at = end + 2 + size + 2
        if len(rest) < at:
            return None
        if size == 0:
            return body, at
        body += rest[end + 2 : end + 2 + size]
    return None


def _own_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def _is_same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


@contextlib.asynccontextmanager
async def engines(
    count: int, model: str | None = None, **options: Any
) -> AsyncIterator[list[EngineStub]]:
    """Several replicas of one model."""
    async with contextlib.AsyncExitStack() as stack:
        name = model or unique("model")
        yield [await stack.enter_async_context(EngineStub(name, **options)) for _ in range(count)]


def prompt_ids(count: int, first: int) -> list[int]:
    """A prompt that shares no block with one of another *first*."""
    return [first * 100_000 + index for index in range(count)]
