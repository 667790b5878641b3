"""For how long does one large body stop everything else?

A whole router in this process; replicas, and clients that read streams, in others. While one large
request is served, the control loop is asked for a turn every millisecond (`loop_ms`: the longest
wait; every other decision would have waited as long), and the clients note the longest gap between
two tokens beyond their pace (`stream_ms`). Other processes cause waits, too: of several runs the
shortest counts, and `idle` is the same without a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvloop

from benchmarks.figures import report
from benchmarks.load import run_paced, stub_replica
from router.config.schema import RouterConfig
from router.serve.server import SWITCH_INTERVAL_S, serve
from tests.support.http_client import ask
from tests.support.vllm_publisher import free_port

_MODEL = '"model":"bench"'
_STREAMS = 8
_PACE_MS = 5
_TOKENS = 200
_BEGIN_S = 0.1
"""Within which all streams begin; then the large request is sent."""


def bodies(megabytes: float) -> Mapping[str, tuple[str, Callable[[], bytes]]]:
    """Return the path and body by what is large in it."""
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
    parser.add_argument("--be", choices=("replica", "clients"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        asyncio.run({"replica": _be_replica, "clients": _be_clients}[options.be]())
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.install()
    asyncio.run(_measure(options))


# --- the other processes --------------------------------------------------------------------------


async def _be_replica() -> None:
    print(await stub_replica(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _be_clients() -> None:
    """Be the clients of streams, whose replica is here as well; and, in a thread, of the large
    request."""
    print(await stub_replica(), flush=True)
    port = int(await asyncio.to_thread(sys.stdin.readline))
    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        path, make_body = bodies(float(await asyncio.to_thread(sys.stdin.readline)))[name]
        head, body = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n", make_body()
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body if path else b""
        print("ready", flush=True)
        streams = asyncio.create_task(run_paced(port, _stream_request, _STREAMS, 0.15, _BEGIN_S))
        await asyncio.sleep(2 * _BEGIN_S)
        status = await asyncio.to_thread(_status, port, request) if path else None
        load = await streams
        figures = {"status": status, "gap_s": max(load.gaps), "errors": load.errors}
        print(json.dumps(figures), flush=True)


def _stream_request(number: int) -> bytes:
    body = (
        f'{{"model":"paced","prompt":[{number}],"pace_ms":{_PACE_MS},"tokens":{_TOKENS},'
        '"stream":true}'
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


def _status(port: int, request: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        return int(client.recv(1024)[9:12])


# --- this one -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(role: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield one of the other processes, and the port of its replica."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stalls", "--be", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.communicate()


async def _measure(options: argparse.Namespace) -> None:
    with _started("replica") as (_, large), _started("clients") as (clients, paced):
        replicas = [
            {"url": f"http://127.0.0.1:{port}", "models": [model], "kv_events": []}
            for port, model in ((large, "bench"), (paced, "paced"))
        ]
        port = free_port()
        config = {"server": {"port": port, "host_names": ["router"]}, "replicas": replicas}
        router = asyncio.create_task(serve(RouterConfig.model_validate(config)))
        await until_healthy(port)
        _say(clients, port)
        for megabytes in options.megabytes:
            for name in bodies(megabytes):
                runs = [await _run(clients, name, megabytes) for _ in range(options.repeats)]
                _report(name, megabytes, runs)
        signal.raise_signal(signal.SIGTERM)
        await router


async def until_healthy(port: int) -> None:
    """Wait until a router answers, and all of its replicas are healthy."""
    while not await _is_healthy(port):
        await asyncio.sleep(0.05)


async def _is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        found = (await ask(port, "GET", "/replicas")).json
        return all(replica["state"] == "healthy" for replica in found["replicas"])
    return False


def _say(process: subprocess.Popen[str], *lines: object) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()


async def _run(clients: subprocess.Popen[str], name: str, megabytes: float) -> dict[str, Any]:
    """Return what the clients saw of one large request, and the control loop meanwhile."""
    assert clients.stdout is not None
    _say(clients, name, megabytes)
    await asyncio.to_thread(clients.stdout.readline)
    watch = asyncio.ensure_future(_longest_wait_s())
    found: dict[str, Any] = json.loads(await asyncio.to_thread(clients.stdout.readline))
    watch.cancel()
    return {**found, "wait_s": await watch}


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


def _report(name: str, megabytes: float, runs: list[dict[str, Any]]) -> None:
    waits_ms = [run["wait_s"] * 1e3 for run in runs]
    gaps_ms = [max(run["gap_s"] * 1e3 - _PACE_MS, 0) for run in runs]
    report(
        "stall",
        of=name,
        megabytes=megabytes,
        status=runs[0]["status"],
        errors=sum(run["errors"] for run in runs),
        loop_ms=round(min(waits_ms), 1),
        loop_worst_ms=round(max(waits_ms), 1),
        stream_ms=round(min(gaps_ms), 1),
        stream_worst_ms=round(max(gaps_ms), 1),
    )


if __name__ == "__main__":
    main()
