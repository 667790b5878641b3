"""How much CPU time does one request cost the sender, by HTTP client?

Ours (`router.upstream`) compared with aiohttp, httpx and httpx2, as far as they are installed: POST
requests over kept connections to a stub replica in another process, reading whole responses. On
uvloop, like the router. CPU time rather than wall time, since other load on the machine affects it
less.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.figures import report
from benchmarks.load import stub_replica
from router.upstream import Origin, Timeouts, UpstreamClient

Send = Callable[[bytes], Awaitable[bytes]]
"""Posts a body and returns the body of the response."""

_PATH = "/v1/completions"
_HEADERS = {"content-type": "application/json"}
_TIMEOUTS = Timeouts(connect_s=5, first_byte_s=60, idle_s=60)


@asynccontextmanager
async def ours(url: str, concurrency: int) -> AsyncIterator[Send]:  # noqa: ARG001
    client, origin = UpstreamClient(), Origin.parse(url)
    headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

    async def send(body: bytes) -> bytes:
        response = await client.send(origin, b"POST", _PATH.encode(), headers, body, _TIMEOUTS)
        content = b""
        while (chunk := await response.read_chunk()) is not None:
            content += chunk
        return content

    yield send
    await client.close()


@asynccontextmanager
async def aiohttp(url: str, concurrency: int) -> AsyncIterator[Send]:
    library: Any = import_module("aiohttp")
    connector = library.TCPConnector(limit=concurrency)
    async with library.ClientSession(connector=connector) as session:

        async def send(body: bytes) -> bytes:
            async with session.post(url + _PATH, data=body, headers=_HEADERS) as response:
                content: bytes = await response.read()
                return content

        yield send


def httpx_like(name: str) -> Callable[[str, int], Any]:
    @asynccontextmanager
    async def client(url: str, concurrency: int) -> AsyncIterator[Send]:
        library: Any = import_module(name)
        limits = library.Limits(max_connections=concurrency)
        async with library.AsyncClient(limits=limits, timeout=60) as session:

            async def send(body: bytes) -> bytes:
                response = await session.post(url + _PATH, content=body, headers=_HEADERS)
                content: bytes = response.content
                return content

            yield send

    return client


CLIENTS: dict[str, Callable[[str, int], Any]] = {
    "ours": ours,
    "aiohttp": aiohttp,
    "httpx": httpx_like("httpx"),
    "httpx2": httpx_like("httpx2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--requests", type=int, default=5000, help="per client and run")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    with _stub_in_another_process() as url:
        for _ in range(options.runs):
            for name in options.client:
                uvloop.run(_measure(name, url, options))


async def _measure(name: str, url: str, options: argparse.Namespace) -> None:
    if name != "ours" and find_spec(name) is None:
        report("http_clients", client=name, skipped="not installed")
        return
    body = b"x" * options.body_bytes
    async with CLIENTS[name](url, options.concurrency) as send:
        await _send_all(send, body, options.concurrency * 4, options.concurrency)
        cpu, wall = time.process_time(), time.perf_counter()
        await _send_all(send, body, options.requests, options.concurrency)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    version = "" if name == "ours" else import_module(name).__version__
    report(
        "http_clients",
        client=name,
        version=version,
        body_bytes=options.body_bytes,
        concurrency=options.concurrency,
        cpu_us=round(cpu / options.requests * 1e6, 1),
        requests_per_second=round(options.requests / wall),
    )


async def _send_all(send: Send, body: bytes, count: int, concurrency: int) -> None:
    async def one_after_another() -> None:
        for _ in range(count // concurrency):
            assert await send(body)

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))


@contextmanager
def _stub_in_another_process() -> Any:
    """Run a stub replica; yield its URL."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(parent: Connection) -> None:
    async def serve() -> None:
        parent.send(await stub_replica())
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
