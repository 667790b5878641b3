"""For how long does one large body stop everything else?

A router in this process, a stub replica in another. While one large request is served, the event
loop is asked for a turn every millisecond; the longest wait is what every stream would have seen.
Other processes cause waits, too: of several runs the shortest counts, and `idle` is the same
without a request.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
import uvloop
from router.http.connection_guard import ClientLimits, guarded_protocol
from uvicorn.server import ServerState

from benchmarks.figures import report
from benchmarks.load import stub_replica
from router.config import RouterConfig
from router.serve import SWITCH_INTERVAL_S, RouterApp, exempt_from_collection
from router.service import RouterService

_PIECE_BYTES = 64 * 1024
_MODEL = '"model":"bench"'


def bodies(megabytes: float) -> Mapping[str, tuple[str, Callable[[], bytes]]]:
    """Path and body by what is large in it."""
    size = int(megabytes * 1_000_000)

    def repeated(before: str, item: str, after: str) -> bytes:
        return (
            f"{{{_MODEL},{before}{','.join([item] * (size // (len(item) + 1)))}{after}}}".encode()
        )

    chat, completions = "/v1/chat/completions", "/v1/completions"
    message = '{"role":"user","content":"' + "word " * 200 + '"}'
    part = '{"type":"text","text":"' + "word " * 20 + '"}'
    return {
        "idle": ("", lambda: b""),
        "unknown field": (completions, lambda: repeated('"prompt":[1],"x":[', '{"a":[1]}', "]")),
        "token ids": (completions, lambda: repeated('"prompt":[', "123456", "]")),
        "text": (completions, lambda: repeated('"prompt":"', "word word", '"')),
        "messages": (chat, lambda: repeated('"messages":[', message, "]")),
        "parts": (chat, lambda: repeated('"messages":[{"role":"user","content":[', part, "]}]")),
        "refused": (chat, lambda: repeated('"messages":[', "{}", "]")),
        "no prompt": ("/tokenize", lambda: repeated('"prompt":[', '{"a":[1]}', "]")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--replica", action="store_true", help="be the stub replica")
    options = parser.parse_args()
    if options.replica:
        asyncio.run(_be_replica())
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.install()
    asyncio.run(_measure(options))


async def _be_replica() -> None:
    print(await stub_replica(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _measure(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.stalls", "--replica"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as replica:
        assert replica.stdout is not None
        url = f"http://127.0.0.1:{int(replica.stdout.readline())}"
        entry = {"url": url, "models": ["bench"], "kv_events": []}
        service = RouterService(RouterConfig.model_validate({"replicas": [entry]}))
        async with service.lifespan(None):
            while not all(found.is_healthy for found in service.registry.replicas()):
                await asyncio.sleep(0.05)
            exempt_from_collection()
            app = RouterApp(service)
            for megabytes in options.megabytes:
                for name, (path, make_body) in bodies(megabytes).items():
                    await _report(app, name, megabytes, path, make_body(), options.repeats)
        replica.communicate()


async def _report(
    app: RouterApp, name: str, megabytes: float, path: str, body: bytes, repeats: int
) -> None:
    longest, status = [], None
    for _ in range(repeats):
        watch = asyncio.ensure_future(_longest_wait_s())
        await asyncio.sleep(0.1)
        if path:
            status = await _status(app, path, body)
        await asyncio.sleep(0.1)
        watch.cancel()
        longest.append(await watch)
    report(
        "stall",
        of=name,
        megabytes=megabytes,
        status=status,
        ms=round(min(longest) * 1e3, 1),
        worst_ms=round(max(longest) * 1e3, 1),
    )


async def _longest_wait_s() -> float:
    loop = asyncio.get_running_loop()
    longest, before = 0.0, loop.time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = loop.time()
            longest, before = max(longest, now - before - 0.001), now
    except asyncio.CancelledError:
        return longest


class _Client(asyncio.Transport):
    """The other end of a connection that exists only in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        if not self.status.done():
            self.status.set_result(int(data[9:12]))

    def pause_reading(self) -> None:
        """Whatever was sent is read."""

    def resume_reading(self) -> None:
        """The same."""


async def _status(app: RouterApp, path: str, body: bytes) -> int:
    """Send one request: its body in pieces, as it would arrive."""
    protocol = guarded_protocol(ClientLimits(), lambda _refusal: None, app.gateway)
    config = uvicorn.Config(app, http=protocol, log_config=None)
    connection = protocol(config, ServerState(), {})
    client = _Client()
    connection.connection_made(client)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.data_received(head.encode())
    for at in range(0, len(body), _PIECE_BYTES):
        connection.data_received(body[at : at + _PIECE_BYTES])
        await asyncio.sleep(0)
    status = await client.status
    connection.connection_lost(ConnectionResetError())
    return status


if __name__ == "__main__":
    main()
