"""A real Valkey or Redis server, which a test can kill and start again at the same port."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.vllm_publisher import free_port


class ValkeyServer:
    """Runs until it is closed; skips the test where no such server is installed.

    Args:
        password: Of its default user. tls: Files of its certificate and key, and of the authority
        whose certificate a client must show; then it speaks nothing but TLS. users: Lines of its
        ACL.
    """

    def __init__(
        self,
        password: str | None = None,
        tls: tuple[Path, Path, Path | None] | None = None,
        users: Sequence[str] = (),
    ) -> None:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        self._command = found
        self._options: list[str] = []
        if password is not None:
            self._options += ["--requirepass", password]
        for user in users:
            self._options += ["--user", *user.split()]
        self._tls = tls
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        scheme = "redis" if self._tls is None else "rediss"
        return f"{scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--bind", "127.0.0.1", "--save", "", "--dir", "/tmp", *self._options]
        if self._tls is None:
            options += ["--port", str(self.port)]
        else:
            certificate, key, authority = self._tls
            options += ["--port", "0", "--tls-port", str(self.port)]
            options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
            options += ["--tls-auth-clients", "no" if authority is None else "yes"]
            options += ["--tls-ca-cert-file", str(authority or certificate)]
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
