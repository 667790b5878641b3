"""A real Valkey or Redis server, which a test can kill and start again at the same port."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.vllm_publisher import free_port


class ValkeyServer:
    """Runs until it is closed; skips the test where no such server is installed."""

    def __init__(self, password: str | None = None) -> None:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        self._command = found
        self._password = password
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"]
        if self._password is not None:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen(
            [self._command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def send_signal(self, number: int) -> None:
        """For example, freeze it."""
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
