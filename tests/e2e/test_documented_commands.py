"""The commands of the documents, as a shell runs them: real engines, a real router, real keys.

Only addresses are others than in the text, and the small engine stands for vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest
import zmq.auth
from async_timeout import timeout

from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
MODEL = "google/gemma-3-12b-it"
BUILD = (
    "docker build --file deploy/Dockerfile --target router "
    "--tag registry.example/kvroute:0.1.0 --push .\n"
)

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl is not installed (Debian: curl)"
)

RUN = {
    ("README.md", "kvroute engine --simulate"): "here",
    ("README.md", "kvroute serve --config"): "here",
    ("docs/engines.md", "python examples/engine.py"): "tests/test_documents.py",
    ("docs/deployment.md", f"{BUILD}helm install"): "tests/deploy/test_chart.py",
    ("docs/deployment.md", "helm upgrade router"): "tests/deploy/test_chart.py",
    ("docs/deployment.md", "promtool test rules"): "tests/deploy/test_prometheus.py",
    ("docs/index.md", "kvroute serve --replica"): "here",
    ("docs/index.md", "prompt="): "here",
    ("docs/index.md", f"{BUILD}helm install"): "tests/deploy/test_chart.py",
    ("docs/offloading.md", "python examples/hybrid_engine.py"): "tests/test_documents.py",
    ("docs/operations.md", "# in use after a passed check"): "tests/test_documents.py",
    ("docs/security.md", "kvroute keys engine"): "here",
    ("docs/security.md", "kvroute keys --hash"): "here",
}
"""Blocks by how they begin, and where they are run."""

NOT_RUN = {
    ("docs/ray.md", "kvroute serve --port 8080"): "a GPU; tests/ray runs the same, small engines",
    ("docs/gateways.md", ""): "a gateway's side; tests/e2e/test_selection.py asks the same",
    ("README.md", "make demo"): "minutes; the demo is run in tests/e2e/test_demo.py",
    ("README.md", "python3 -m venv"): "installs; make test begins with the same",
    ("README.md", "kvroute serve --replica"): "as the quick start's, which is run",
    ("README.md", "vllm serve"): "a GPU",
    ("README.md", "kvroute serve --replica http://10.0.0.1:8000 --allow-capture"): (
        "a fleet under load; tests/e2e/test_capture.py runs each of them"
    ),
    ("CONTRIBUTING.md", "make test"): "this is it",
    ("docs/deployment.md", "export OPERATOR_KEY"): "docker; tests/deploy/test_compose.py reads it",
    ("docs/deployment.md", f"{BUILD}docker build"): "docker; tests/deploy/test_image.py reads it",
    ("docs/deployment.md", "kubectl create namespace"): "a cluster",
    ("docs/deployment.md", "kubectl -n models"): "a cluster; its helm is in test_chart.py",
    (
        "docs/deployment.md",
        "python3 -m venv /opt",
    ): "root; tests/deploy/test_systemd.py runs the unit",
    ("docs/deployment.md", "vllm serve"): "a GPU",
    ("docs/deployment.md", "# feed.state is live"): "as the quick start's, with a key",
    ("docs/engine.md", "pip install"): "installs; the engine is run in tests/e2e",
    ("docs/engine.md", "kvroute engine --preset"): "as README's, with another size",
    ("docs/engines.md", "vllm serve"): "a GPU",
    ("docs/engines.md", "LMCACHE_ENABLE_KV_EVENTS"): "a GPU",
    ("docs/engines.md", "python -m sglang"): "a GPU",
    ("docs/index.md", "git clone"): "the network; CI begins with it",
    ("docs/index.md", "python3 -m venv"): "installs; make test begins with the same",
    ("docs/index.md", "vllm serve"): "a GPU",
    ("docs/offloading.md", "pip install"): "installs",
    ("docs/operations.md", "kvroute capture"): "a fleet under load; tests/e2e/test_capture.py",
    ("docs/routing-quality.md", "pip install"): "hours",
}
"""Blocks that are not run, and why."""


def blocks(name: str) -> list[str]:
    """The shell's in a document."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [dedent(found) for found in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.M | re.S)]


def block(name: str, beginning: str, others: Mapping[str, object]) -> str:
    """One of them, with other addresses."""
    text = next(each for each in blocks(name) if each.startswith(beginning))
    for written, other in others.items():
        assert written in text, (name, beginning, written)
        text = text.replace(written, str(other))
    return text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_is_run_or_it_is_said_why_not(name: str) -> None:
    """What nobody runs is wrong sooner or later."""
    for text in blocks(name):
        known = [
            beginning
            for document, beginning in (*RUN, *NOT_RUN)
            if document == name and text.startswith(beginning)
        ]
        assert known, f"{name}: is it run? {text}"
    for document, beginning in (*RUN, *NOT_RUN):
        if document == name:
            assert any(text.startswith(beginning) for text in blocks(name)), beginning


class Shell:
    """A directory in which commands are run, with `kvroute` of this tree."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        programs = directory / ".bin"
        programs.mkdir()
        kvroute = programs / "kvroute"
        kvroute.write_text(f'#!/bin/sh\nexec {sys.executable} -m router.cli.main "$@"\n')
        kvroute.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self._environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def run(self, script: str) -> str:
        """What the commands print; each must succeed."""
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.directory,
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def background(self, command: str) -> Iterator[None]:
        """A command that runs until the block is left."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.directory,
            env=self._environ,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield
            finally:
                process.terminate()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


async def until_live(port: int) -> None:
    """Until the router follows its first replica's events."""
    async with timeout(DEADLINE_S):
        while not await is_live(port):
            await asyncio.sleep(0.05)


async def is_live(port: int) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        replicas = (await get(port, "/overview"))["replicas"]
        return "live" in [source["state"] for each in replicas for source in each["sources"]]
    return False


async def get(port: int, path: str) -> Any:
    async with httpx.AsyncClient() as client:
        found = await client.get(f"http://127.0.0.1:{port}{path}")
        return found.raise_for_status().json()


@needs_curl
def test_the_readme_leads_to_a_first_response_without_a_gpu_and_without_an_error(
    shell: Shell,
) -> None:
    """It is the first thing a reader without an engine tries: curl must not come before the
    router."""
    ports = {written: free_port() for written in (":8000", "8001", ":5557", ":6557")}
    beginning = "kvroute engine --simulate"
    text = block(
        "README.md",
        beginning,
        {written: re.sub(r"\d+", str(port), written) for written, port in ports.items()},
    )
    serve = "kvroute serve"
    text = text.replace(serve, f"{serve} --port {ports[':8000']}")
    text = text.replace("--retry 60", "--retry 600")  # however busy the machine is
    printed = shell.run(f"exec 2>&1; trap 'kill $(jobs -p); wait' EXIT\n{text}")
    assert "curl:" not in printed
    assert "WARNING" not in printed
    assert "HTTP/1.1 200 OK" in printed
    assert "x-kv-hit-tokens: 0" in printed
    body, _ = json.JSONDecoder().raw_decode(printed, printed.index('{"id"'))
    assert body["choices"][0]["text"]


@needs_curl
async def test_the_quick_start_leads_to_a_correct_prediction(shell: Shell) -> None:
    """And the commands of the README show where prompts go, and what caches hold."""
    port, http, events, replay = (free_port() for _ in range(4))
    engine = (
        f"kvroute engine --simulate --preset gemma --served-model-name {MODEL} --port {http}"
        f" --kv-events-endpoint tcp://*:{events} --kv-events-replay-endpoint tcp://*:{replay}"
    )
    serve = block(
        "docs/index.md",
        "kvroute serve --replica",
        {"http://10.0.0.1:8000": f"http://127.0.0.1:{http}", "10.0.0.2:8000": "127.0.0.1:1"},
    )
    asks = block(
        "docs/index.md", "prompt=", {"127.0.0.1:8000": f"127.0.0.1:{port}", "MODEL": MODEL}
    )
    looks = block("README.md", "kvroute serve --config", {"127.0.0.1:8000": f"127.0.0.1:{port}"})
    with (
        shell.background(engine),
        shell.background(f"{serve.strip()} --port {port}"),
    ):
        await until_live(port)
        said = shell.run(asks)
        assert said.count("HTTP/1.1 200") == 2
        newest: dict[str, Any] = {}
        while not newest.get("actual"):
            shell.run(asks)  # the second follows the first at once, maybe before its events
            newest = (await get(port, "/requests?limit=1"))["requests"][0]
        assert newest["verdict"] == "exact"
        check, _, route, top = looks.strip().splitlines()
        (shell.directory / "kvroute.yaml").write_text("server: {}\n")
        said = shell.run(f"{check}\n{route}\n{top.partition('#')[0]} --once")
        assert f"{MODEL}, " in said, "where the prompt would go"
        assert said.count(f"127.0.0.1:{http}") >= 2, "in both tables"


@pytest.mark.parametrize(
    ("beginning", "files"),
    [
        ("kvroute keys engine", ("engine.key_secret",)),
        ("kvroute keys --hash", ("cluster.hash_key",)),
    ],
    ids=["encrypted", "without prompts"],
)
async def test_keys_as_in_the_security_guide_lead_to_a_live_stream(
    shell: Shell, beginning: str, files: tuple[str, ...]
) -> None:
    """With what the text below the commands says of the router."""
    events, replay, http, port = free_port(), free_port(), free_port(), free_port()
    text = block("docs/security.md", beginning, {"*:5557": f"*:{events}", "*:6557": f"*:{replay}"})
    make, _, engine = text.partition("kvroute engine")
    shell.run(make)
    assert all((shell.directory / name).stat().st_mode & 0o77 == 0 for name in files)
    if "engine.key_secret" in files:
        public, _ = zmq.auth.load_certificate(str(shell.directory / "engine.key"))
        own = {"curve_keys": "router.key_secret", "curve_server_key": public.decode()}
    else:
        own = {"hash_key": "cluster.hash_key"}
    config = {"events": own, "replicas": [{"url": f"http://127.0.0.1:{http}"}]}
    (shell.directory / "kvroute.yaml").write_text(repr(config).replace("'", '"'))
    command = f"kvroute engine --simulate --port {http} {engine.partition('#')[0].strip()}"
    with (
        shell.background(command),
        shell.background(f"kvroute serve --config kvroute.yaml --port {port}"),
    ):
        await until_live(port)
