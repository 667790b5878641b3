"""The soak, in half a minute: a few faults of each kind of process, and every response checked."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys

import pytest

from benchmarks.soaking.links import Balancer
from tests.support.http_client import ask
from tests.support.vllm_publisher import free_port
from tests.support.waiting import eventually


def test_nothing_is_lost_but_what_was_on_a_killed_process() -> None:
    """Growth and times are for the long run: `python -m benchmarks.soak`."""
    if not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("neither valkey-server nor redis-server is installed")
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0", "--replicas", "3"]
    command += ["--models", "1", "--rate", "8", "--load-s", "1.5", "--hold-s", "0.5", "1"]
    # Health checks that wait for long: other load on the machine is no fault of an engine.
    command += ["--check-s", "8", "--serial", "3"]
    command += ["--faults", "engine_killed", "events_lost", "router_killed", "board_killed"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    figures = json.loads(done.stdout)
    assert figures["unexcused"] == figures["wrong"] == figures["quiet_inexact"] == 0
    assert figures["quiet_exact"] == 12
    assert figures["fates"]["served"] > 0


async def _agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_the_balancer_passes_over_a_target_that_has_just_died() -> None:
    """Each of many connections at once finds the other one, or it would count as lost."""
    async with await asyncio.start_server(_agree, "127.0.0.1", 0) as server:
        ports = dict.fromkeys(("alive", "dying"), server.sockets[0].getsockname()[1])
        balancer = Balancer({"alive": lambda: ports["alive"], "dying": lambda: ports["dying"]})
        await balancer.start()
        try:
            await eventually(lambda: all(balancer.ready.values()), "both are ready")
            ports["dying"] = free_port()
            answers = await asyncio.gather(
                *(ask(balancer.port, "GET", "/") for _ in range(40)), return_exceptions=True
            )
        finally:
            await balancer.stop()
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
