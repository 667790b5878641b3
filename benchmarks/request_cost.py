"""What does one proxied request cost the router's own code, and which part of it?

The whole router in this process, without sockets: clients and replicas are transports in memory,
between the same protocols that serve real ones. So other load on the machine changes little (the
least of many batches is taken), and two trees can be compared, run in turn. Each of the replicas
holds the first part of the prompt. `--calls` prints calls per request and the time in each module,
by a profile, whose times are too long by the profiler's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from router.http.connection_guard import ClientLimits, guarded_protocol
from uvicorn.server import ServerState

from benchmarks.figures import report
from benchmarks.text_path import write_model
from kvevents.codec import encode
from kvevents.events import BlockStored, EventBatch
from router.app import RouterApp, exempt_from_collection
from router.config import RouterConfig
from router.index import SourceId
from router.service import RouterService

_BLOCK = 16
_FORMS = ("ids", "text", "chat", "stream", "route")
_JSON = b'{"id":"x","choices":[{"text":"ok"}],"usage":{"prompt_tokens":%d,"completion_tokens":1}}'
_MODELS = b'{"data":[{"id":"bench"}]}'
_WHOLE = (
    b"HTTP/1.1 200 OK\r\ndate: today\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
_STREAM = (
    b"HTTP/1.1 200 OK\r\ndate: today\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" token"}],"usage":null}\n\n'
_TOKENS = 32
"""Of each stream."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="*", choices=_FORMS, default=["ids", "text", "stream"])
    parser.add_argument("--kilobytes", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--policy", default="least_delay")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--requests", type=int, default=100, help="in a batch")
    parser.add_argument("--calls", action="store_true", help="print calls by module")
    parser.add_argument("--no-events", action="store_true", help="caches are estimated")
    parser.add_argument("--beside", type=Path, help="another tree, measured batch by batch in turn")
    parser.add_argument("--on-demand", action="store_true", help="measure a batch for each line")
    options = parser.parse_args()
    if options.beside:
        _compare(options)
        return
    asyncio.set_event_loop_policy(_Policy())
    asyncio.run(_measure(options))


def _compare(options: argparse.Namespace) -> None:
    """Measure this tree and another one in turn, batch by batch, and print how they compare."""
    for form in options.forms:
        for kilobytes in options.kilobytes if form != "stream" else [1]:
            command = [sys.executable, __file__, "--on-demand", "--forms", form]
            command += ["--kilobytes", str(kilobytes), "--policy", options.policy]
            command += ["--requests", str(options.requests), "--replicas", str(options.replicas)]
            with contextlib.ExitStack() as stack:
                both = [
                    stack.enter_context(
                        subprocess.Popen(
                            command,
                            env={**os.environ, "PYTHONPATH": str(tree)},
                            cwd=tree,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                    )
                    for tree in (options.beside.resolve(), Path.cwd())
                ]
                pairs = [tuple(map(_ask, both)) for _ in range(options.batches)][5:]
            before, after = (sorted(each) for each in zip(*pairs, strict=True))
            ratios = sorted(mine / other for other, mine in pairs)
            middle = len(pairs) // 2
            report(
                "request_cost_beside",
                of=form,
                kilobytes=kilobytes,
                before_us=round(before[0], 1),
                after_us=round(after[0], 1),
                before_median_us=round(before[middle], 1),
                after_median_us=round(after[middle], 1),
                ratio=round(ratios[middle], 3),
            )


def _ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


class _Loop(uvloop.Loop):
    """An event loop whose outgoing connections lead to replicas in memory."""

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        protocol = protocol_factory()
        transport = _Replica(protocol, self)
        protocol.connection_made(transport)
        return transport, protocol


class _Policy(uvloop.EventLoopPolicy):
    def new_event_loop(self) -> _Loop:
        return _Loop()


class _NoSocket:
    """Of a transport in memory."""

    family = None

    def setsockopt(self, *_: Any) -> None:
        """It has no options."""

    def fileno(self) -> int:
        return 0

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername


class _InMemory(asyncio.Transport):
    """What both ends have in common."""

    socket = _NoSocket()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Whatever was sent is read."""

    def resume_reading(self) -> None:
        """The same."""


class _Replica(_InMemory):
    """Answers every request at the next turn."""

    pieces: tuple[bytes, ...] = (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",)

    def __init__(self, protocol: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._protocol, self._loop = protocol, loop

    def write(self, _data: Any) -> None:
        """Without a body, so it is asked how it is."""
        self._loop.call_soon(self._answer, (_WHOLE % len(_MODELS) + _MODELS,))

    def writelines(self, _pieces: Any) -> None:
        self._loop.call_soon(self._answer, self.pieces)

    def abort(self) -> None:
        self._loop.call_soon(self._protocol.connection_lost, None)

    def _answer(self, pieces: tuple[bytes, ...]) -> None:
        for piece in pieces:
            self._protocol.data_received(piece)


class _Client(_InMemory):
    """Sends one request after the other."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.status = 0
        self.end = b""
        self.answered = asyncio.Event()

    def write(self, data: Any) -> None:
        if data.startswith(b"HTTP/"):
            self.status = int(data[9:12])
        if data.endswith(self.end):
            self.answered.set()

    async def ask(self, request: bytes) -> None:
        self.answered.clear()
        self.protocol.data_received(request)
        await self.answered.wait()
        assert self.status == 200, self.status


async def _measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as made:
        urls = [f"http://127.0.0.1:{9000 + number}" for number in range(options.replicas)]
        config: dict[str, Any] = {
            "replicas": [{"url": url, "models": ["bench"], "kv_events": []} for url in urls],
            "policy": {"name": options.policy},
            "observability": {"log_level": "warning"},
        }
        if not {"text", "chat"}.isdisjoint(options.forms):
            made_model = write_model(Path(made), "fastokens")
            config["models"] = [{"name": "bench", "tokenizer": str(made_model)}]
        service = RouterService(RouterConfig.model_validate(config))
        async with service.lifespan(None):
            while not all(found.is_healthy for found in service.registry.replicas()):
                await asyncio.sleep(0.05)
            exempt_from_collection()
            protocol = guarded_protocol(
                ClientLimits(), lambda _refusal: None, RouterApp(service).direct
            )
            connection = protocol(
                uvicorn.Config(None, http=protocol, log_config=None), ServerState(), {}
            )
            client = _Client(connection)
            connection.connection_made(client)
            for form in options.forms:
                for kilobytes in options.kilobytes if form != "stream" else [1]:
                    await _one(service, client, form, kilobytes, options)


async def _one(
    service: RouterService, client: _Client, form: str, kilobytes: int, options: argparse.Namespace
) -> None:
    path, bodies = _bodies(form, kilobytes)
    client.end = b"}"
    body = _JSON % (kilobytes * 150)
    _Replica.pieces = (_WHOLE % len(body) + body,)
    if form == "stream":
        client.end = b"0\r\n\r\n"
        chunk = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
        _Replica.pieces = (_STREAM, *([chunk] * _TOKENS), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    if form in ("ids", "stream", "route") and not options.no_events:
        _publish(service, json.loads(next(bodies))["prompt"])

    def request() -> bytes:
        content = next(bodies)
        return (
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path, len(content), content)
        )

    for _ in range(200):
        await client.ask(request())
    if options.on_demand:
        while sys.stdin.readline():
            print(await _batch(client, request, options.requests), flush=True)
        return
    costs = [await _batch(client, request, options.requests) for _ in range(options.batches)]
    costs.sort()
    figures: dict[str, Any] = {"median_us": round(costs[len(costs) // 2], 1)}
    if options.calls:
        await _print_calls(client, request, costs[0])
    report("request_cost", of=form, kilobytes=kilobytes, us=round(costs[0], 1), **figures)


async def _batch(client: _Client, request: Callable[[], bytes], count: int) -> float:
    """Microseconds of this process for one request."""
    requests = [request() for _ in range(count)]
    gc.collect()
    started = time.process_time()
    for each in requests:
        await client.ask(each)
    return (time.process_time() - started) / count * 1e6


async def _print_calls(client: _Client, request: Callable[[], bytes], us: float) -> None:
    """Calls by module from a profile; times from samples of the CPU's clock, C among its caller."""
    requests = [request() for _ in range(1000)]
    profile = cProfile.Profile()
    profile.enable()
    for each in requests:
        await client.ask(each)
    profile.disable()
    calls: Counter[str] = Counter()
    for (file, _, _), (_, number, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        calls[_module(file)] += number
    samples: Counter[tuple[str, str]] = Counter()

    def sample(_signal: int, frame: Any) -> None:
        code = frame.f_code
        samples[_module(code.co_filename), code.co_name] += 1

    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    for _ in range(20):
        for each in requests:
            await client.ask(each)
    signal.setitimer(signal.ITIMER_PROF, 0)
    share = us / max(sum(samples.values()), 1)
    modules: Counter[str] = Counter()
    for (module, _), number in samples.items():
        modules[module] += number
    print(
        f"{sum(calls.values()) / 1000:.0f} calls per request, {calls['C'] / 1000:.0f} of them of C"
    )
    for module, number in modules.most_common(45):
        print(f"{number * share:8.1f} us {calls[module] / 1000:7.1f} calls  {module}")
    for (module, name), number in samples.most_common(60):
        print(f"{number * share:8.2f} us  {module}:{name}")


def _module(file: str) -> str:
    if "/router/" in file:
        return file.rsplit("/router/")[-1]
    return "C" if file == "~" else Path(file).name


def _bodies(form: str, kilobytes: int) -> tuple[bytes, Iterator[bytes]]:
    if form in ("text", "chat"):
        text = _text(kilobytes * 1024)
        return (
            (b"/v1/completions", _texts(b'{"model":"bench","prompt":"%d %b","max_tokens":1}', text))
            if form == "text"
            else (
                b"/v1/chat/completions",
                _texts(b'{"model":"bench","messages":[{"role":"user","content":"%d %b"}]}', text),
            )
        )
    path = b"/route" if form == "route" else b"/v1/completions"
    return path, _lists(kilobytes * 1024 // 7, form == "stream")


def _texts(form: bytes, text: bytes) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        yield form % (number, text)


def _text(size: int) -> bytes:
    words = [name.encode() for name in sorted(sys.modules) if name.isalpha()]
    text = b" ".join(words)
    return (text * (size // len(text) + 1))[:size]


def _lists(tokens: int, is_stream: bool) -> Iterator[bytes]:
    """Prompts whose first three quarters are always the same."""
    common = ",".join(str(10_000 + number * 7 % 90_000) for number in range(tokens * 3 // 4))
    number = 0
    while True:
        number += 1
        own = ",".join(str(10_000 + (number * 31 + at) % 90_000) for at in range(tokens // 4))
        stream = ',"stream":true' if is_stream else ""
        yield f'{{"model":"bench","prompt":[{common},{own}],"max_tokens":1{stream}}}'.encode()


def _publish(service: RouterService, token_ids: list[int]) -> None:
    """Replica i of n holds i/n of the part that all prompts have in common."""
    index = service.models.resolve("bench")[0].index
    if service.approximate is not None:
        service.approximate.silent.clear()  # as if their events came over sockets
    replicas = sorted(replica.id for replica in service.registry.replicas())
    for number, replica in enumerate(replicas, 1):
        blocks = len(token_ids) * 3 * number // (4 * _BLOCK * len(replicas))
        event = BlockStored(
            block_hashes=[(number << 40) + block for block in range(1, blocks + 1)],
            parent_block_hash=None,
            token_ids=token_ids[: blocks * _BLOCK],
            block_size=_BLOCK,
            medium="GPU",
            group_idx=0,
            extra_keys=[None] * blocks,
            kv_cache_spec_kind="full_attention",
        )
        if blocks:
            index.apply(SourceId(replica), encode(EventBatch(1.0, [event])))


if __name__ == "__main__":
    main()
