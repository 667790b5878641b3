"""The two C programs, and processes whose CPU time and memory are read from /proc (Linux)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Settings:
    """Sizes; the defaults take some 40 minutes."""

    programs: Path
    """The directory of the C programs."""
    with_peers: bool = True
    core: int | None = None
    """The CPU of the router that is measured; None: any."""
    other_core: int | None = None
    """The CPU of load generator and replicas."""
    rounds: int = 3
    seconds: float = 5.0
    """The duration of each measurement under load."""
    blocks: int = 131_072
    """Ingested at one block an event; twice and four times as many at 8 and 64."""
    blocks_per_event: Sequence[int] = (1, 8, 64)
    memory_blocks: int = 1_048_576
    """The blocks of all sources together, in each of two fillings."""
    prompt_tokens: Sequence[int] = (1024, 8192, 32768, 131072)
    match_replicas: Sequence[int] = (64,)
    route_sources: int = 64
    events: int = 300
    kilobytes: Sequence[int] = (1, 64)
    streams: Sequence[int] = (64, 1024)


class Missing(Exception):
    """A program or a package that this machine lacks; the message says which."""


def build(directory: Path) -> None:
    """Compile `replica` and `load` into *directory*.

    Raises:
        Missing: There is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Missing("a C compiler (cc or gcc)")
    for name in ("replica", "load"):
        command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        source = str(_SOURCES / f"{name}.c")
        subprocess.run([*command, "-o", str(directory / name), source], check=True)


class Process:
    """A process of its own group, ended with everything it started.

    Args:
        command: What to run.
        core: The CPU it is bound to; None: any.
        environment: Added to ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        core: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the process
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        self._process = subprocess.Popen(
            [*pinned, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def first_line(self) -> str:
        """Return the first line it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def log(self) -> str:
        """Return what it has written to stderr so far."""
        # A seek would move the place at which the process writes: they share it.
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """Return the CPU time that it and its children have used."""
        return sum(_cpu_s(pid) for pid in self._pids())

    def wait_until_idle(self, quiet_s: float = 0.5) -> float:
        """Wait until it does nothing any more: what it does after its start, or still applies, is
        over then. Returns for how long it went on."""
        started, before = time.monotonic(), -1.0
        while self.cpu_s() - before > quiet_s / 20:
            before = self.cpu_s()
            time.sleep(quiet_s)
        return time.monotonic() - started - quiet_s

    def rss_bytes(self) -> int:
        """Return the memory that it and its children hold."""
        return sum(_rss_bytes(pid) for pid in self._pids())

    def end(self) -> None:
        """End it and its children."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, sent)
                self._process.wait(5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._output.close()

    def _pids(self) -> list[int]:
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except FileNotFoundError:
                continue
            todo += [int(child) for child in children.split()]
        return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A keep-alive connection that costs little on our side."""

    def __init__(self, port: int, timeout_s: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str, body: Any = None) -> Answer:
        """GET, or POST a JSON body.

        Args:
            path: Where.
            body: What to post; None: nothing, with GET.
        """
        data = b"" if body is None else json.dumps(body).encode()
        return self.send("GET" if body is None else "POST", path, data)

    def send(self, method: str, path: str, data: bytes = b"", fields: str = "") -> Answer:
        """Send a request with a body as it is.

        Args:
            fields: Further ones of the head, each with its end of line.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{fields}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        top, _, rest = received.partition(b"\r\n\r\n")
        lines = top.decode().lower().split("\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
        while len(rest) < length:
            rest += self._more()
        return Answer(int(lines[0].split()[1]), rest)

    def close(self) -> None:
        self._socket.close()

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionResetError("the server hung up")
        return data


def request(port: int, path: str, body: Any = None) -> Answer:
    """Ask once; see `Connection.ask`.

    Args:
        port: On loopback.
        path: See there, as for *body*.
        body: The question.
    """
    with closing(Connection(port)) as connection:
        return connection.ask(path, body)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait; a refused connection counts as "not yet".

    Args:
        condition: What to wait for.
        what: Its name in the error.
        timeout_s: Give up after this time.
    Raises:
        TimeoutError: It did not come.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.05)


class Replicas:
    """Some replicas in one process.

    Args:
        programs: Where `replica` is.
        count: How many.
        tokens: Of a stream.
        interval_ms: Between two tokens.
        core: The CPU; None: any.
    """

    def __init__(
        self,
        programs: Path,
        count: int,
        tokens: int = 100,
        interval_ms: int = 20,
        core: int | None = None,
    ) -> None:
        command = [str(programs / "replica"), str(count), str(tokens), str(interval_ms)]
        self._process = Process(command, core)
        self.ports = [int(port) for port in self._process.first_line().split()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]

    def cpu_s(self) -> float:
        """Return the CPU time that they have used."""
        return self._process.cpu_s()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.end()


@dataclass(frozen=True)
class Prompts:
    """Request bodies: one of the prefixes, a number of its own, and the tail."""

    path: str
    prefixes: Sequence[str]
    tail: str
    separator: str


def load(
    programs: Path,
    port: int,
    prompts: Prompts,
    connections: int,
    seconds: float,
    rate: float = 0.0,
    core: int | None = None,
) -> dict[str, Any]:
    """Run the load generator; returns what it printed.

    Args:
        programs: Where `load` is.
        port: Where to send to.
        prompts: What.
        connections: Over how many connections.
        seconds: How long.
        rate: Requests a second; 0: as many as are answered.
        core: The CPU; None: any.
    """
    with tempfile.NamedTemporaryFile(prefix="kvroute-bench-") as file:
        file.write(b"".join(part.encode() + b"\0" for part in (prompts.tail, *prompts.prefixes)))
        file.flush()
        command = [
            *([] if core is None else ["taskset", "-c", str(core)]),
            str(programs / "load"),
            *(str(port), prompts.path, str(connections), str(seconds), str(rate)),
            *(file.name, prompts.separator),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
