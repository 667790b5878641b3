"""How many requests a second does the router pass on, and how much latency does it add?

One router process; stub replicas and the load generator share another. Compared in the same run
with the same load sent straight to a stub replica. Prompts are token ids, all different, so every
request is parsed, hashed, matched and ranked. `router_cpu_us` is the CPU time of the router per
request, or per token of the paced streams, which other load on the machine affects little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from async_timeout import timeout

from benchmarks.figures import report
from benchmarks.load import Load, run_load, run_paced, stub_replica

_JSON_HEAD = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--kilobytes", type=int, nargs="*", default=[1, 64], help="prompt sizes")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument(
        "--streams", type=int, nargs="*", default=[64], help="concurrent event streams to measure"
    )
    parser.add_argument(
        "--paced", type=int, nargs="*", default=[64, 1024], help="concurrent paced streams"
    )
    parser.add_argument("--pace-ms", type=int, default=20, help="between two tokens of each")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="pin the router to core 0 and the rest to the others (Linux)",
    )
    uvloop.install()
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    if options.pin:
        os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)))
    replicas = [await stub_replica() for _ in range(options.replicas)]
    async with RouterProcess(replicas, options.pin) as router:
        for kilobytes in options.kilobytes:
            await _compare(
                "proxy", kilobytes, router, replicas[0], options, "/v1/completions", stream=False
            )
            await _compare("route", kilobytes, router, None, options, "/route", stream=False)
        for count in options.streams:
            options.concurrency = count
            await _compare(
                "stream", 1, router, replicas[0], options, "/v1/completions", stream=True
            )
        for count in options.paced:
            await _pace("paced", router.port, router, count, options)
            await _pace("paced_direct", replicas[0], None, count, options)


async def _compare(
    name: str,
    kilobytes: int,
    router: RouterProcess,
    direct_port: int | None,
    options: argparse.Namespace,
    path: str,
    stream: bool,
) -> None:
    body = _body_maker(kilobytes, stream)
    cpu_before = router.cpu_seconds()
    through = await run_load(
        router.port, _request_maker(path, body), options.concurrency, options.seconds
    )
    cpu_us = (router.cpu_seconds() - cpu_before) / len(through.latencies) * 1e6
    alone = await run_load(router.port, _request_maker(path, body), 1, min(options.seconds, 2.0))
    figures = {**_figures(through, alone), "router_cpu_us": round(cpu_us, 1)}
    if direct_port is not None:
        direct = await run_load(
            direct_port, _request_maker(path, body), options.concurrency, options.seconds
        )
        direct_alone = await run_load(
            direct_port, _request_maker(path, body), 1, min(options.seconds, 2.0)
        )
        figures |= {
            "direct_requests_per_second": round(direct.per_second),
            "ratio": round(through.per_second / direct.per_second, 3),
            "added_latency_ms_p50": round(
                (alone.quantile(0.5) - direct_alone.quantile(0.5)) * 1e3, 3
            ),
            "added_latency_ms_p99": round(
                (alone.quantile(0.99) - direct_alone.quantile(0.99)) * 1e3, 3
            ),
        }
    report(
        name,
        kilobytes=kilobytes,
        concurrency=options.concurrency,
        stream=stream,
        errors=through.errors,
        **figures,
    )


async def _pace(
    name: str, port: int, router: RouterProcess | None, streams: int, options: argparse.Namespace
) -> None:
    """Streams whose tokens come at an even pace, as engines send them."""
    body = _body_maker(1, True, f'"pace_ms":{options.pace_ms},"tokens":50,'.encode())
    cpu_before = router.cpu_seconds() if router else 0.0
    load = await run_paced(port, _request_maker("/v1/completions", body), streams, options.seconds)
    cpu_s = (router.cpu_seconds() if router else 0.0) - cpu_before
    firsts, gaps = sorted(load.first_tokens), sorted(load.gaps)
    report(
        name,
        concurrency=streams,
        pace_ms=options.pace_ms,
        errors=load.errors,
        tokens_per_second=round(load.tokens / load.seconds),
        first_token_ms_p50=round(firsts[len(firsts) // 2] * 1e3, 1),
        first_token_ms_p99=round(firsts[len(firsts) * 99 // 100] * 1e3, 1),
        gap_ms_p99=round(gaps[len(gaps) * 99 // 100] * 1e3, 1),
        router_cpu_us=round(cpu_s / load.tokens * 1e6, 1),
    )


def _figures(through: Load, alone: Load) -> dict[str, float]:
    return {
        "requests_per_second": round(through.per_second),
        "latency_ms_p50": round(alone.quantile(0.5) * 1e3, 3),
        "latency_ms_p99": round(alone.quantile(0.99) * 1e3, 3),
        "loaded_latency_ms_p50": round(through.quantile(0.5) * 1e3, 3),
        "loaded_latency_ms_p99": round(through.quantile(0.99) * 1e3, 3),
    }


def _body_maker(kilobytes: int, stream: bool, extra: bytes = b"") -> Callable[[int], bytes]:
    """Make bodies of about a size, all different from their first token on."""
    count = kilobytes * 1024 // 7
    common = ",".join(str(10_000 + index % 90_000) for index in range(count))
    tail = b'],"max_tokens":1,"stream":true}' if stream else b'],"max_tokens":1}'
    middle = b"," + common.encode()
    tail = tail.replace(b'"max_tokens"', extra + b'"max_tokens"')
    return lambda number: (
        b'{"model":"bench","prompt":[%d,%d' % (number % 90_000, number // 90_000) + middle + tail
    )


def _request_maker(path: str, body: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def make(number: int) -> bytes:
        content = body(number)
        return _JSON_HEAD % (path.encode(), len(content)) + content

    return make


class RouterProcess:
    """A router process in front of the stubs.

    Args:
        replica_ports: Where the stubs listen.
        pin: Keep it on core 0 (Linux).
        models: `models` of its configuration.
    """

    def __init__(
        self,
        replica_ports: list[int],
        pin: bool,
        models: list[dict[str, str]] | None = None,
    ) -> None:
        self._ports = replica_ports
        self._pin = pin
        self._models = models or []
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-bench-")

    def cpu_seconds(self) -> float:
        """Return the CPU time it has used (Linux)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Return the memory it holds (Linux)."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def __aenter__(self) -> RouterProcess:
        config = Path(self._directory.name) / "kvroute.yaml"
        replicas = [
            {"url": f"http://127.0.0.1:{port}", "models": ["bench"], "kv_events": []}
            for port in self._ports
        ]
        config.write_text(
            json.dumps(
                {
                    "server": {"port": 0},
                    "observability": {"log_level": "warning"},
                    "replicas": replicas,
                    "models": self._models,
                }
            )
        )
        command = [sys.executable, "-m", "router.cli.main", "serve", "--config", str(config)]
        if self._pin:
            command = ["taskset", "-c", "0", *command]
        self._process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        async with timeout(60):
            line = await self._process.stderr.readline()
        self.port = int(line.rsplit(b":", 1)[1])
        await _until(lambda: _is_ready(self.port))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._process.terminate()
        await self._process.wait()
        self._directory.cleanup()


async def _is_ready(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the router did not become ready")
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
