"""Work on large bodies in processes of their own, started when the first one comes.

JSON parsers hold Python's interpreter lock from the first byte of a body to the last, in a thread
as well: 16 MB would stop every stream for a second. A process of its own stops none. The result is
rebuilt in this process in small pieces, so that other threads get their turn.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import override

from kvevents.threads import begun_pool
from router.prompt.errors import ProcessEndedError

_Result = TypeVar("_Result")

PROCESSES = 2
"""Parsed JSON takes ten times the memory of its text and more."""
MAX_SECONDS = 120.0
"""The longest for one piece of work; then its process is ended."""
PIECE_BYTES = 64 * 1024
"""The part of a pickle made or read at once: about half a millisecond."""

_LENGTHS = struct.Struct("!QQ")
_START = (
    "import socket, sys; sys.path[:] = {path!r}; from router.prompt.processes import work; "
    "work(socket.socket(fileno={fd}))"
)


class LargeWork:
    """Runs functions in processes. Belongs to one event loop.

    Args:
        processes: How many run at once; more work waits.
    """

    def __init__(self, processes: int = PROCESSES) -> None:
        self._pool = begun_pool(processes, "large-bodies")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._is_closed = False

    async def run(
        self, function: Callable[..., _Result], data: bytes, *arguments: object
    ) -> _Result:
        """Return `function(data, *arguments)`, or raise its error.

        Args:
            function: A module's; without side effects.
            data: Sent as it is.
            arguments: Pickled, like the result.
        Raises:
            ProcessEndedError: The process did not survive it, or took too long.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, self._call, function, data, arguments)
        except RuntimeError:
            raise ProcessEndedError from None  # closed

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.end()

    def _call(
        self, function: Callable[..., Any], data: bytes, arguments: tuple[object, ...]
    ) -> Any:
        """Call the process of this thread."""
        try:
            worker: _Worker | None = getattr(self._of_thread, "worker", None)
            if worker is None:
                worker = self._of_thread.worker = self._start()
            succeeded, result = worker.call(pickle.dumps((function, arguments)), data)
        except BaseException as error:
            # After any error the rest on the socket would be read as the next result.
            self._give_up()
            if isinstance(error, OSError | EOFError | MemoryError | pickle.PickleError):
                raise ProcessEndedError from None
            raise
        if not succeeded:
            raise result
        return result

    def _give_up(self) -> None:
        """End the process of this thread."""
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        self._of_thread.worker = None
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.end()

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
            if self._is_closed:
                worker.end()
        return worker


class _Worker:
    """One process, at the other end of a socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(MAX_SECONDS)
        start = _START.format(path=sys.path, fd=theirs.fileno())
        with theirs:
            # Its own session: a terminal's Ctrl-C is for the router, which ends it.
            self._process = subprocess.Popen(  # our own words  # nosec B603
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def call(self, work: bytes, data: bytes) -> tuple[bool, Any]:
        """Return whether it succeeded, and the result or the error."""
        _send(self._socket, work, data)
        result, _ = _receive(self._socket)
        succeeded, value = _Unpickler(io.BytesIO(result)).load()
        return succeeded, value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


def work(parent: socket.socket) -> None:
    """Run such a process until its parent closes the socket, or is gone."""
    while True:
        try:
            request, data = _receive(parent)
        except EOFError:
            return
        function, arguments = pickle.loads(request)  # from our parent  # nosec B301
        del request
        try:
            outcome = True, function(bytes(data), *arguments)
        except MemoryError:
            return
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            outcome = False, error
        del data
        result = io.BytesIO()
        _PiecewisePickler(result, pickle.HIGHEST_PROTOCOL).dump(outcome)
        del outcome
        _send(parent, result.getbuffer(), b"")


class _PiecewisePickler(pickle.Pickler):
    """Pickles objects of up to `PIECE_BYTES` by themselves: to load one more, Python code has to
    run, and a thread that runs Python code lets others go on."""

    @override
    def persistent_id(self, obj: object) -> bytes | None:
        if type(obj) is not dict:
            return None
        piece = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        return piece if len(piece) <= PIECE_BYTES else None


class _Unpickler(pickle.Unpickler):
    @override
    def persistent_load(self, pid: bytes) -> Any:
        return pickle.loads(pid)  # from our child  # nosec B301


def _send(to: socket.socket, first: bytes | memoryview, second: bytes) -> None:
    to.sendall(_LENGTHS.pack(len(first), len(second)))
    to.sendall(first)
    to.sendall(second)


def _receive(source: socket.socket) -> tuple[bytearray, bytearray]:
    first, second = _LENGTHS.unpack(_exactly(source, _LENGTHS.size))
    return _exactly(source, first), _exactly(source, second)


def _exactly(source: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        received = source.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return data
