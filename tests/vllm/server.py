"""A real vLLM on the CPU: a process group, at addresses that survive its restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

START_DEADLINE_S = 600.0
BLOCK_SIZE = 32

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "CUDA_VISIBLE_DEVICES": "",
}


class VllmServer:
    """`vllm serve`. It also has what a `RouterProcess` needs of a replica: `name`, `url`,
    `sources`.

    Args:
        name: The id of the replica.
        model: A directory written by `write_model`.
        directory: For its log and what it needs besides the model.
        blocks: Size of its whole cache, in blocks of all groups together.
        arguments: Further arguments of the command.
        publisher: Of its events.
        has_plugins: Whether it loads what is installed beside it, such as `kvroute-vllm`.
        environment: More of its environment.
    """

    sources = 1

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        blocks: int,
        *arguments: str,
        publisher: str = "zmq",
        has_plugins: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.model = model.name
        self.directory = directory
        self.port, self.events_port, self.replay_port = free_ports(3)
        self._command = self._command_line(model, blocks, publisher, arguments)
        self._environment = {**environment, **({} if has_plugins else {"VLLM_PLUGINS": ""})}
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Everything it has logged since its last start."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start it; `wait` returns when it serves."""
        path = _metadata_directory(self.directory)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **_ENVIRONMENT, **self._environment, "PYTHONPATH": str(path)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_be_nice,
            )

    def wait(self) -> None:
        """Wait until it responds."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} ended: {self.log()[-6000:]}"
            assert time.monotonic() < deadline, f"{self.name} does not serve: {self.log()[-6000:]}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Send SIGKILL to all its processes, as if its host had died."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _command_line(
        self, model: Path, blocks: int, publisher: str, arguments: tuple[str, ...]
    ) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": publisher,
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv-events",
        }
        command = f"""-m vllm.entrypoints.cli.main serve {model} --served-model-name {model.name}
            --host 127.0.0.1 --port {self.port} --load-format dummy --dtype bfloat16
            --enforce-eager --block-size {BLOCK_SIZE} --num-gpu-blocks-override {blocks}
            --max-model-len 1024 --max-num-seqs 4 --enable-prefix-caching
            --enable-prompt-tokens-details --kv-events-config"""
        return [sys.executable, *command.split(), json.dumps(events), *arguments]


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[None]:
    """Run all of them, started at the same time, until the block ends."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.kill()


def free_ports(count: int) -> list[int]:
    """Ports that are not in use."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _metadata_directory(directory: Path) -> Path:
    """vLLM's command line looks up the version of a distribution named vllm; the CPU build has
    another name."""
    version = metadata.version("vllm-cpu")
    path = directory / f"vllm-{version}+cpu.dist-info"
    path.mkdir(exist_ok=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return directory


def _be_nice() -> None:
    os.nice(5)
