"""How many more requests do two workers serve than one?

The router with one worker and with two, in turn and several times, between a load generator and
replicas in C. `router_cpu_us` is the CPU time of all processes of the router per request,
`others_cpu_us` that of the generator and the replicas. Where these leave two whole cores to the
router, the requests per second tell; on a machine with few cores they do not, and then the CPU per
request does: unchanged, it says that two cores serve twice as many.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import report
from benchmarks.peers.contestants import MODEL
from benchmarks.peers.programs import Replicas, build, load
from benchmarks.peers.proxying import id_prompts

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    figures: dict[int, list[tuple[float, float]]] = {count: [] for count in options.workers}
    with tempfile.TemporaryDirectory() as programs:
        build(Path(programs))
        for number in range(options.rounds):
            for workers, found in figures.items():
                found.append(_measure(number, workers, options, Path(programs)))
    for workers, found in figures.items():
        rate, cpu_us = (statistics.median(values) for values in zip(*found, strict=True))
        report(
            "workers",
            median_of=options.rounds,
            workers=workers,
            requests_per_second=rate,
            router_cpu_us=cpu_us,
        )


def _measure(
    number: int, workers: int, options: argparse.Namespace, programs: Path
) -> tuple[float, float]:
    """Requests per second, and the router's CPU time for each, in microseconds."""
    prompts = id_prompts(1)
    with (
        tempfile.TemporaryDirectory() as directory,
        Replicas(programs, options.replicas, 1, 0) as replicas,
    ):
        process, port = _start(workers, replicas.urls, Path(directory))
        try:
            # Connections, and learned rates.
            load(programs, port, prompts, options.concurrency, 1.0)
            idle_cores = _idle_cores(process.pid)
            before, theirs = _cpu_s(process.pid), replicas.cpu_s() + _ended_cpu_s()
            found = load(programs, port, prompts, options.concurrency, options.seconds)
            cpu_s = _cpu_s(process.pid) - before
            others_s = replicas.cpu_s() + _ended_cpu_s() - theirs
        finally:
            process.terminate()
            process.wait()
    requests = max(1, found["requests"])
    rate, cpu_us = round(requests / found["seconds"]), round(cpu_s / requests * 1e6, 1)
    report(
        "workers",
        round=number,
        workers=workers,
        concurrency=options.concurrency,
        replicas=options.replicas,
        errors=found["errors"],
        requests_per_second=rate,
        router_cpu_us=cpu_us,
        others_cpu_us=round(others_s / requests * 1e6, 1),
        cores_used=round(cpu_s / found["seconds"], 2),
        idle_cores=round(idle_cores, 3),
    )
    return rate, cpu_us


def _idle_cores(pid: int, seconds: float = 2.0) -> float:
    """What a router uses without requests: for health checks, and the board of its workers."""
    before = _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / seconds


def _start(workers: int, urls: list[str], directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    config = {
        "server": {"port": 0, "workers": workers},
        "replicas": [{"url": url, "models": [MODEL], "kv_events": []} for url in urls],
        "models": [{"name": MODEL}],
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
        time.sleep(0.05)
    (line,) = (line for line in log.read_text().splitlines() if "listens on" in line)
    time.sleep(3.0)  # every worker has checked every replica
    return process, int(line.rsplit(":", 1)[1])


def _ended_cpu_s() -> float:
    """Of children that have ended, as the load generator has."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    """Of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / _TICKS
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_cpu_s(int(child)) for child in children)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
