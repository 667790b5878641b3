"""How many more requests do two workers serve than one?

The router with one worker and with two, in turn and several times; stub replicas and the load
generator share another process. `router_cpu_us` is the CPU time of all processes of the router per
request. Where the generator and the replicas leave two whole cores to the router, the requests per
second tell; on a machine with few cores they do not, and then the CPU per request does: unchanged,
it says that two cores serve twice as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.figures import report
from benchmarks.load import run_load, stub_replica

_TICKS = os.sysconf("SC_CLK_TCK")
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    uvloop.install()
    asyncio.run(_measure(parser.parse_args()))


async def _measure(options: argparse.Namespace) -> None:
    replicas = [await stub_replica() for _ in range(options.replicas)]
    for number in range(options.rounds):
        for workers in options.workers:
            with tempfile.TemporaryDirectory() as directory:
                await _measure_one(number, workers, replicas, options, Path(directory))


async def _measure_one(
    number: int, workers: int, replicas: list[int], options: argparse.Namespace, directory: Path
) -> None:
    process, port = await _start(workers, replicas, directory)
    try:
        await run_load(port, _request, options.concurrency, 1.0)  # connections, learned rates
        before = _cpu_s(process.pid)
        load = await run_load(port, _request, options.concurrency, options.seconds)
        cpu_s = _cpu_s(process.pid) - before
        report(
            "workers",
            round=number,
            workers=workers,
            concurrency=options.concurrency,
            replicas=options.replicas,
            errors=load.errors,
            requests_per_second=round(load.per_second),
            router_cpu_us=round(cpu_s / len(load.latencies) * 1e6, 1),
            cores_used=round(cpu_s / options.seconds, 2),
        )
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def _start(
    workers: int, replicas: list[int], directory: Path
) -> tuple[subprocess.Popen[bytes], int]:
    config = {
        "server": {"port": 0, "workers": workers},
        "replicas": [
            {"url": f"http://127.0.0.1:{port}", "models": ["m"], "kv_events": []}
            for port in replicas
        ],
        "models": [{"name": "m"}],
    }
    path, log = directory / "kvroute.yaml", directory / "log"
    path.write_text(json.dumps(config))
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.cli.main", "serve", "--config", str(path)],
            stderr=stderr,
        )
    while b"listens on" not in log.read_bytes():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        await asyncio.sleep(0.05)
    (line,) = (line for line in log.read_text().splitlines() if "listens on" in line)
    await asyncio.sleep(3.0)  # every worker has checked every replica
    return process, int(line.rsplit(":", 1)[1])


def _cpu_s(pid: int) -> float:
    """Of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / _TICKS
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_cpu_s(int(child)) for child in children)


def _request(number: int) -> bytes:
    ids = [(number * 31 + place) % 50_000 for place in range(200)]
    body = json.dumps({"model": "m", "prompt": ids, "max_tokens": 1}).encode()
    return _HEAD % len(body) + body


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
