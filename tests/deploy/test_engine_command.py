"""The engine's command that images, compose file and manifests use, run with the engine."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.files import ENGINE_COMMAND, ENGINE_PORTS, run
from tests.deploy.test_metrics import OF_VLLM
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S, eventually

COMMAND = (sys.executable, "-m", "router.cli.main")


@pytest.fixture(scope="module", autouse=True)
def _command_is_there() -> None:
    if run(*COMMAND, "engine", "--help").returncode != 0:
        pytest.skip("this installation has no `kvroute engine`")


@contextlib.contextmanager
def engine() -> Iterator[int]:
    """Run the command on free ports; yields its HTTP port."""
    free = {port: free_port() for port in ENGINE_PORTS}
    words = [
        re.sub(r"\d{4}$", lambda port: str(free[int(port[0])]), word) for word in ENGINE_COMMAND
    ]
    words[words.index("--host") + 1] = "127.0.0.1"
    process = subprocess.Popen([*COMMAND, *words])
    try:
        yield free[8000]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


async def test_the_engine_serves_probes_routers_and_prometheus() -> None:
    """Started with this command only, it has health, models, event sources, and the dashboard's
    metrics."""
    with engine() as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await eventually(lambda: accepts(port), "the engine listens")
            for path in ("/health", "/v1/models", "/kv_event_sources", "/metrics"):
                assert (await client.get(path)).status_code == 200, path
            names = {name.removesuffix("_total").removesuffix("_bucket") for name in OF_VLLM}
            reported = set(
                re.findall(
                    r"^# TYPE (\S+?)(?:_total)? ", (await client.get("/metrics")).text, re.MULTILINE
                )
            )
            assert names <= reported


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
