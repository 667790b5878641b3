"""How many replicas can one router follow? Simulated engines publish over real sockets; the router
applies their events and decides.

    python -m benchmarks.scale --replicas 256

The engines are those of `kvroute engine --simulate`, in a few processes, each with a steady rate of
steps, all of which are published. One small HTTP server serves the HTTP side of all of them.
Figures: batches and changed blocks per second, how far the router is behind at the end, its CPU
time and memory, and how long a decision takes, as clients see it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import report
from benchmarks.simulation.outcome import percentile
from kvevents.publisher import EventPublisher
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, SamplingParams
from kvroute_engine.core.time_model import VirtualClock
from kvroute_engine.demo.client import Client
from kvroute_engine.demo.processes import router

MODEL = "simulated"
_HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n"
_PROMPT_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--processes", type=int, default=2, help="that the engines share")
    parser.add_argument("--steps-per-s", type=float, default=4.0, help="of each engine")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--decisions-per-s", type=float, default=20.0)
    parser.add_argument("--preset", default="gptoss")
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    for replicas in options.replicas:
        asyncio.run(measure(replicas, options))


# --- engines --------------------------------------------------------------------------------------


class Busy:
    """One engine with more work than it can do: prompts with shared prefixes."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self.config = EngineConfig(
            preset=options.preset, simulate=True, num_blocks=options.num_blocks, kv_events_endpoint="tcp://127.0.0.1:0",
            kv_events_replay_endpoint="tcp://127.0.0.1:0",
        )  # fmt: skip
        self.engine: Engine = build_engine(self.config, VirtualClock())
        self._random = random.Random(number)
        self._serial = 0

    @property
    def publisher(self) -> EventPublisher:
        return self.engine.publisher

    def step(self) -> None:
        """Do one step, with a request or two always waiting."""
        while self.engine.scheduler.statistics().num_waiting < 2:
            self._serial += 1
            base = self._random.randrange(64)
            tokens = [(base * 7919 + place * 31) % 256 for place in range(_PROMPT_TOKENS - 64)]
            tokens += [self._random.randrange(256) for _ in range(64)]
            self.engine.add_request(
                EngineRequest(
                    str(self._serial), tokens, SamplingParams(max_tokens=8, ignore_eos=True)
                )
            )
        self.engine.step()


def work(options: argparse.Namespace) -> None:
    """Run a process of engines: print their addresses, run while stdin is open, print how many
    batches each published."""
    engines = [
        Busy(options, options.worker * 10_000 + number) for number in range(options.replicas[0])
    ]
    addresses = [(busy.publisher.endpoint, busy.publisher.replay_endpoint) for busy in engines]  # type: ignore[attr-defined]
    print(json.dumps(addresses), flush=True)
    sys.stdin.readline()
    until = time.monotonic() + options.seconds
    step = blocks = 0
    while time.monotonic() < until:
        due = time.monotonic() + 1 / (options.steps_per_s * len(engines))
        engines[step % len(engines)].step()
        step += 1
        time.sleep(max(0.0, due - time.monotonic()))
    for busy in engines:
        groups = busy.engine.cache.statistics().pool.groups
        blocks += sum(group.stored + group.evicted for group in groups)
    seqs = [busy.publisher.statistics().stream.last_seq for busy in engines]
    print(json.dumps({"steps": step, "blocks": blocks, "last_seqs": seqs}), flush=True)
    sys.stdin.readline()
    for busy in engines:
        busy.engine.close()


# --- the router -----------------------------------------------------------------------------------


async def measure(replicas: int, options: argparse.Namespace) -> None:
    """Measure one size."""
    share = replicas // options.processes
    workers = [await _worker(number, share, options) for number in range(options.processes)]
    face = await asyncio.start_server(_say_healthy, "127.0.0.1", 0)
    port = face.sockets[0].getsockname()[1]
    addresses = [address for worker in workers for address in json.loads(await _line(worker))]
    with TemporaryDirectory() as directory:
        async with router(
            Path(directory) / "kvroute.yaml", _configuration(addresses, port)
        ) as process:
            client = Client(process.url)
            pid = _pid_listening(process.url)
            await _until_connected(client, len(addresses))
            idle_rss = _rss_mib(pid)
            for worker in workers:
                _say(worker)
            started, cpu = time.monotonic(), _cpu_s(pid)
            decisions = sorted(await _decide(client, options))
            ends = [json.loads(await _line(worker)) for worker in workers]
            seconds = time.monotonic() - started
            behind_s = await _until_applied(
                client, [seq for end in ends for seq in end["last_seqs"]]
            )
            blocks, steps = sum(end["blocks"] for end in ends), sum(end["steps"] for end in ends)
            report(
                "scale",
                replicas=len(addresses),
                batches_per_s=round(steps / seconds),
                block_changes_per_s=round(blocks / seconds),
                behind_s=round(behind_s, 2),
                router_cpu_share=round((_cpu_s(pid) - cpu) / (seconds + behind_s), 3),
                idle_rss_mib=round(idle_rss),
                rss_mib=round(_rss_mib(pid)),
                decisions=len(decisions),
                decision_ms_p50=round(percentile(decisions, 50), 2),
                decision_ms_p99=round(percentile(decisions, 99), 2),
            )
            await client.close()
    face.close()
    for worker in workers:
        _say(worker)
        await worker.wait()


async def _decide(client: Client, options: argparse.Namespace) -> list[float]:
    """Ask for routes at an even rate while the engines publish; return the milliseconds of each."""
    chance, took = random.Random(5), []
    until = time.monotonic() + options.seconds
    while (now := time.monotonic()) < until:
        base = chance.randrange(64)
        tokens = [(base * 7919 + place * 31) % 256 for place in range(_PROMPT_TOKENS)]
        await client.post("/route", {"model": MODEL, "token_ids": tokens})
        took.append((time.monotonic() - now) * 1000)
        await asyncio.sleep(max(0.0, 1 / options.decisions_per_s - (time.monotonic() - now)))
    return took


async def _until_connected(client: Client, count: int) -> None:
    while True:
        feeds = [
            source["feed"] for replica in await _replicas(client) for source in replica["sources"]
        ]
        if sum(1 for feed in feeds if feed and feed["state"] == "live") == count:
            return
        await asyncio.sleep(0.2)


async def _until_applied(client: Client, last_seqs: list[int]) -> float:
    """Return the seconds until the router has seen the last batch of every engine."""
    started = time.monotonic()
    while True:
        found = [
            source["feed"]["stream"]["last_seq"]
            for replica in await _replicas(client)
            for source in replica["sources"]
        ]
        if all(
            seen is not None and seen >= last for seen, last in zip(found, last_seqs, strict=True)
        ):
            return time.monotonic() - started
        await asyncio.sleep(0.05)


async def _replicas(client: Client) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = (await client.get_json("/replicas"))["replicas"]
    return sorted(replicas, key=lambda replica: int(replica["id"].removeprefix("r")))


def _configuration(addresses: list[tuple[str, str]], port: int) -> str:
    lines = [
        "server: {port: 0}",
        "health: {interval_s: 30, timeout_s: 30, scrape_metrics: false}",
        "observability: {log_level: error}",
        "replicas:",
    ]
    for number, (endpoint, replay) in enumerate(addresses):
        events = f"[{{endpoint: '{endpoint}', replay_endpoint: '{replay}', topic: kv-events}}]"
        lines.append(
            f"  - {{id: r{number}, url: 'http://127.0.0.1:{port}/r{number}', "
            f"models: [{MODEL}], kv_events: {events}}}"
        )
    return "\n".join(lines) + "\n"


async def _say_healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(_HEALTHY)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _worker(
    number: int, engines: int, options: argparse.Namespace
) -> asyncio.subprocess.Process:
    command = [
        "--worker",
        str(number),
        "--replicas",
        str(engines),
        "--seconds",
        str(options.seconds),
    ]
    command += [
        "--steps-per-s",
        str(options.steps_per_s),
        "--preset",
        options.preset,
        "--num-blocks",
        str(options.num_blocks),
    ]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.scale", *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**20,
    )  # fmt: skip


async def _line(worker: asyncio.subprocess.Process) -> bytes:
    assert worker.stdout is not None
    return await worker.stdout.readline()


def _say(worker: asyncio.subprocess.Process) -> None:
    assert worker.stdin is not None
    worker.stdin.write(b"\n")


def _pid_listening(url: str) -> int:
    """Return the process that listens on a port of this machine."""
    port = int(url.rpartition(":")[2])
    inodes = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it may have been closed meanwhile
            if path.readlink().name.removeprefix("socket:[").removesuffix("]") in inodes:
                return int(path.parts[2])
    raise RuntimeError(f"nobody listens on {port}")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _rss_mib(pid: int) -> float:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
