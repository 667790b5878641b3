"""The engine as users run it: a process, `kvroute engine`, with addresses that survive its
restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.http_client import Answer, ask
from tests.support.router_process import Metrics
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, START_S, eventually
from tests.support.warm_start import start

_ANNOUNCEMENT = re.compile(rb"listens on (http://\S+:(\d+))\n")
_names = itertools.count(1)


class EngineProcess:
    """One engine. It also has what a `RouterProcess` needs of a replica: `name`, `url`, `sources`.

    Args:
        arguments: Arguments of the command. The system chooses addresses that are not among them.
    """

    sources = 1

    def __init__(self, *arguments: str) -> None:
        self.name = f"engine-{next(_names)}"
        self._arguments = [*arguments]
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-engine-")
        self._log = Path(self._directory.name) / "stderr.log"
        self.port = free_port()  # nobody else's while it is restarted
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start a new process, on the port of the previous one if there was one."""
        events = [] if "--kv-events-endpoint" in self._arguments else _EVENTS
        with self._log.open("wb") as stderr:
            arguments = ("engine", "--port", str(self.port), *events, *self._arguments)
            self.process = start(arguments, stderr)
        try:
            self.port = self._announced()
        except BaseException:
            self.kill()
            raise

    def log(self) -> str:
        """Everything it has logged."""
        return self._log.read_text(errors="replace")

    async def get(self, path: str) -> Answer:
        return await ask(self.port, "GET", path)

    async def post(
        self, path: str, body: object = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        return await ask(self.port, "POST", path, body, headers)

    async def metrics(self) -> Metrics:
        return Metrics((await self.get("/metrics")).body.decode())

    async def until_healthy(self, within_s: float = DEADLINE_S) -> None:
        """Wait until it responds, for example after a restart."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                if (await self.get("/health")).status == 200:
                    return
            assert time.monotonic() < deadline, f"{self.name} does not answer within {within_s:g} s"
            await asyncio.sleep(0.01)

    def tell_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, within_s: float = DEADLINE_S) -> int:
        """Wait for the exit code."""
        await eventually(lambda: self.process.poll() is not None, "the engine has ended", within_s)
        return int(self.process.returncode)

    async def stop(self) -> None:
        """Send SIGTERM; it must exit with 0 and without an error of its own."""
        self.tell_to_stop()
        code = await self.ended()
        said = self.log()
        assert code == 0, f"exit code {code}\n{said[-4000:]}"
        assert "Traceback" not in said, said[-4000:]

    def kill(self) -> None:
        """Send SIGKILL if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Remove everything that is left of it."""
        self.kill()
        self._directory.cleanup()

    def _announced(self) -> int:
        deadline = time.monotonic() + START_S
        while True:
            said = self._log.read_bytes()
            found = _ANNOUNCEMENT.search(said)
            if found:
                return int(found[2])
            assert self.process.poll() is None, f"the engine ended: {said.decode(errors='replace')}"
            assert time.monotonic() < deadline, (
                f"the engine does not listen: {said.decode(errors='replace')}"
            )
            time.sleep(0.01)


_EVENTS = (
    "--kv-events-endpoint",
    "tcp://127.0.0.1:0",
    "--kv-events-replay-endpoint",
    "tcp://127.0.0.1:0",
)


@contextlib.asynccontextmanager
async def engine_processes(count: int, *arguments: str) -> AsyncIterator[list[EngineProcess]]:
    """Run several engines until the block ends; those that still run then must stop cleanly."""
    started: list[EngineProcess] = []
    try:
        started += await asyncio.gather(
            *(asyncio.to_thread(EngineProcess, *arguments) for _ in range(count))
        )
        yield started
        await asyncio.gather(
            *(engine.stop() for engine in started if engine.process.poll() is None)
        )
    finally:
        for engine in started:
            engine.forget()


def simulated(preset: str = "gemma", **options: Any) -> tuple[str, ...]:
    """Arguments of a simulated engine that takes almost no time."""
    quick = {"step-overhead-s": 0.0005, "prefill-tokens-per-s": 1e6, "decode-tokens-per-s": 1e5}
    named = {**quick, **{name.replace("_", "-"): value for name, value in options.items()}}
    flags = [
        part
        for name, value in named.items()
        for part in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    return ("--preset", preset, "--simulate", *flags)
