"""Engines and a router as processes: started, awaited and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_timeout import timeout

from router.errors import RouterError

_START_S = 90.0
_END_S = 10.0
_KEPT_OUTPUT_BYTES = 4000


class DemoFailed(RouterError):
    """The demo cannot continue; the message names what failed."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process that listens for requests."""

    name: str
    url: str


@asynccontextmanager
async def running(name: str, *command: str) -> AsyncIterator[Running]:
    """Run a Python module until the block ends; inside it, the process listens.

    Raises:
        DemoFailed: It ended, or did not listen in time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *command,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Running(name, await _announced(name, process))
    finally:
        await _end(process)


@asynccontextmanager
async def engines(count: int, arguments: Sequence[str]) -> AsyncIterator[list[Running]]:
    """Run engines of one kind, started together, until the block ends.

    Args:
        arguments: Each engine's, as for `kvroute engine`.
    Raises:
        DemoFailed: One of them did not start.
    """
    async with AsyncExitStack() as stack:
        command = (
            "router.cli.main",
            "engine",
            "--port",
            "0",
            "--kv-events-endpoint",
            "tcp://127.0.0.1:0",
        )
        replay = ("--kv-events-replay-endpoint", "tcp://127.0.0.1:0")
        starting = [
            running(f"replica-{index + 1}", *command, *replay, *arguments) for index in range(count)
        ]
        # Wait for all: one that fails must not leave another behind that has just started.
        started = await asyncio.gather(
            *(stack.enter_async_context(engine) for engine in starting), return_exceptions=True
        )
        failed = next((each for each in started if isinstance(each, BaseException)), None)
        if failed is not None:
            raise failed
        yield [each for each in started if isinstance(each, Running)]


@asynccontextmanager
async def router(
    config: Path, text: str, module: str = "router.cli.main", *arguments: str
) -> AsyncIterator[Running]:
    """Run a router until the block ends.

    Args:
        module: `kvroute`, or a module whose first argument is the configuration's path.
    Raises:
        DemoFailed: It did not start.
    """
    config.write_text(text)
    options = ("serve", "--config") if module == "router.cli.main" else ()
    async with running("router", module, *options, str(config), *arguments) as process:
        yield process


async def _announced(name: str, process: asyncio.subprocess.Process) -> str:
    """Wait for the URL that a process prints when it listens; from then on pass on its output."""
    assert process.stderr is not None
    output = b""
    try:
        async with timeout(_START_S):
            while line := await process.stderr.readline():
                if b"listens on" in line:
                    asyncio.create_task(_pass_on(process.stderr))  # noqa: RUF006 (it ends with the pipe)
                    return line.split()[-1].decode()
                output = (output + line)[-_KEPT_OUTPUT_BYTES:]
    except asyncio.TimeoutError:
        raise DemoFailed(f"{name} did not listen within {_START_S:.0f} s") from None
    raise DemoFailed(f"{name} did not start: {output.decode(errors='replace')}")


async def _pass_on(pipe: asyncio.StreamReader) -> None:
    """Copy a process's output to ours; unread, it would fill the pipe and block the process."""
    while line := await pipe.readline():
        sys.stderr.buffer.write(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with timeout(_END_S):
                await process.wait()
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
