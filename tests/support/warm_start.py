"""Processes of `kvroute` that need not import it again.

What the command imports takes it a second of computing, and the tests start hundreds of processes.
Here one interpreter imports it and forks, for each start, a process that goes on as `python -m
router.cli.main` does: with its own arguments, environment, files and exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[2]
MODULE = "router.cli.main"
COMMAND = (sys.executable, "-m", MODULE)
IMPORTED = ("router.cli.serve_command", "kvroute_engine.command")
_AT_FIRST = {**os.environ}
_MOST_BYTES = 1 << 20
_PID_BYTES = 8


class WarmProcess:
    """A process that was forked; what tests use of `subprocess.Popen`.

    Args:
        pid: Its number.
        ended: Gets its exit code, in one line, and is then closed.
    """

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Its exit code, where it has ended."""
        return self._seen_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Args:
            timeout: In seconds.
        """
        code = self._seen_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(MODULE, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _seen_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._ended, 64))
            os.close(self._ended)
        return self.returncode


class _Starter:
    """The interpreter that has imported the commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=_AT_FIRST,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], stderr: int
    ) -> WarmProcess:
        ended, ending = os.pipe()
        request = json.dumps([[*arguments], {**environ}]).encode()
        with self._lock:
            socket.send_fds(self._control, [request], [stderr, ending])
            os.close(ending)
            pid = self._control.recv(_PID_BYTES)
        assert pid, "the process that starts others has ended"
        return WarmProcess(int.from_bytes(pid, "big"), ended)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def _starter() -> _Starter:
    return _Starter()


def _read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """What Python or something that is imported reads before the command runs."""
    early = ("LD_", "OTEL_", "PYTHON")
    return {name: value for name, value in environ.items() if name.startswith(early)}


def start(
    arguments: Sequence[str],
    stderr: IO[bytes],
    environ: Mapping[str, str] | None = None,
    limit: Callable[[], None] | None = None,
) -> WarmProcess | subprocess.Popen[bytes]:
    """Start `kvroute` in the directory of the checkout.

    It is started from nothing where something has to be done before Python begins or imports, and
    for what is measured, which is outside of pytest.

    Args:
        arguments: Of the command line.
        stderr: Where its log goes.
        environ: Added to the environment.
        limit: Called in the new process before it becomes `kvroute`.
    """
    whole = {**os.environ, **(environ or {})}
    if limit or _read_early(whole) != _read_early(_AT_FIRST) or "PYTEST_VERSION" not in whole:
        command = [*COMMAND, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=whole, stderr=stderr, preexec_fn=limit)
    return _starter().start(arguments, whole, stderr.fileno())


# --- the interpreter that forks -------------------------------------------------------------------


def _next_process(control: socket.socket) -> list[str]:
    """Fork as requested; return only in the new processes, with the arguments of each."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, 2)
        if not request:
            sys.exit()
        arguments, environ = json.loads(request)
        stderr, ending = descriptors
        if not os.fork():
            pid = os.fork()
            if not pid:
                control.close()
                os.close(ending)
                os.dup2(stderr, 2)
                os.close(stderr)
                os.environ.clear()
                os.environ.update(environ)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return list(arguments)
            _watch(pid, control, ending)
        os.close(stderr)
        os.close(ending)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watch(pid: int, control: socket.socket, ending: int) -> NoReturn:
    """Tell the test the number of the process, and in the end its exit code."""
    control.send(pid.to_bytes(_PID_BYTES, "big"))
    control.close()
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(ending, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those that were started
    for name in IMPORTED:
        import_module(name)
    control = socket.socket(fileno=int(sys.argv[1]))
    arguments = _next_process(control)
    sys.argv[1:] = arguments
    sys.orig_argv[1:] = ["-m", MODULE, *arguments]  # with which an engine starts itself anew
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
