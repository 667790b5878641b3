"""A real nginx of the system that asks by a script, as `examples/gateways` has it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_publisher import free_port
from tests.support.waiting import START_S
from tests.support.warm_start import ROOT

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
_MODULES = Path("/usr/lib/nginx/modules")
_LISTENS = "listen 127.0.0.1:10000;"
_ROUTER = "127.0.0.1:8080"


def has_nginx(module: str) -> bool:
    """Whether it is installed with that module: `js` or `lua`."""
    return NGINX is not None and (_MODULES / f"ngx_http_{module}_module.so").exists()


def needs_nginx(module: str) -> pytest.MarkDecorator:
    """Skips where it is not installed with that module."""
    reason = f"nginx with libnginx-mod-http-{module} is not installed"
    return pytest.mark.skipif(not has_nginx(module), reason=reason)


class Nginx:
    """One that runs; `port` is its listener's.

    Args:
        config: Its name in `examples/gateways`.
        router_port: Where the router listens.
    """

    def __init__(self, config: str, router_port: int) -> None:
        assert NGINX is not None
        self.port = free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-nginx-")
        folder = Path(self._directory.name)
        shutil.copytree(ROOT / "examples/gateways", folder, dirs_exist_ok=True)
        text = (folder / config).read_text()
        assert _LISTENS in text
        assert _ROUTER in text
        text = text.replace(_LISTENS, f"listen 127.0.0.1:{self.port};")
        text = text.replace(_ROUTER, f"127.0.0.1:{router_port}")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        mine = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        text = text.replace("http {", f"http {{ access_log off; {mine}", 1)
        path = folder / "nginx.conf"
        path.write_text(f"daemon off; worker_processes 1; pid {folder}/pid;\n{text}")
        # Its worker has no rights of its own to read what a test has made.
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            command = [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(path)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            address = ("127.0.0.1", self.port)
            with contextlib.suppress(OSError), socket.create_connection(address, 5):
                return
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._directory.cleanup()


@contextlib.contextmanager
def scripted_nginx(config: str, router_port: int) -> Iterator[Nginx]:
    """Run one until the block ends.

    Args:
        config: Its name in `examples/gateways`.
        router_port: Where the router listens.
    """
    running = Nginx(config, router_port)
    try:
        running.until_ready()
        yield running
    finally:
        running.stop()
