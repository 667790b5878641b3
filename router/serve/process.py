"""Does what every process of the router does first: its event loop, its log, its announcement, its
sockets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import resource
import socket
import sys
from collections.abc import Coroutine
from datetime import datetime
from typing import Any

import uvloop
from typing_extensions import override

from router.config.schema import RouterConfig
from router.errors import ConfigError, ConfigProblem

BACKLOG = 4096
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MIN_OPEN_FILES = 64
"""Below that not even one replica and a few clients have their sockets."""
_FILE_TABLE = 16_384
"""Files that the kernel's table has room for from the start: 130 KiB."""


# --- the event loop -------------------------------------------------------------------------------


class EventLoop(uvloop.Loop):
    """uvloop's event loop, where a connection's descriptor is closed once.

    uvloop (0.21 to 0.23) closes the descriptor of a TLS connection that is reset before the
    handshake has begun, and then ties the caller's socket to it, which closes that number again
    when it is collected. Whoever has the number by then, a client's connection or an event stream,
    loses it to the next one.
    """

    @override
    async def create_connection(
        self, *arguments: Any, sock: socket.socket | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """Connect as asyncio's event loops do; a *sock* that fails is closed by uvloop alone."""
        try:
            return await super().create_connection(*arguments, sock=sock, **options)
        except (OSError, asyncio.CancelledError):
            if sock is not None:
                sock.detach()
            raise


if sys.version_info < (3, 11):

    class _EventLoopPolicy(asyncio.DefaultEventLoopPolicy):
        @override
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return EventLoop()


def run_on_event_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run *work* to its end, as `asyncio.run` does."""
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(work)
    else:
        asyncio.set_event_loop_policy(_EventLoopPolicy())
        asyncio.run(work)


# --- the log --------------------------------------------------------------------------------------


class _TextFormatter(logging.Formatter):
    """Lines for people, with the time as RFC 3339 has it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever a replica or a pod is called: no one else may begin one, or control
        the operator's terminal."""
        if not record.message.isprintable():
            record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message)
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        return (
            datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        )


class _JsonFormatter(_TextFormatter):
    """One JSON object a line; a record's own fields besides the common ones."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _under_our_name(record: logging.LogRecord) -> bool:
    """Rename what the HTTP server logs: it is a part of the router."""
    if record.name.startswith("uvicorn"):
        record.name = "router.doors.http"
    return True


def set_up_logging(config: RouterConfig) -> None:
    handler = logging.StreamHandler()
    is_json = config.observability.log_format == "json"
    handler.setFormatter(_JsonFormatter() if is_json else _TextFormatter())
    handler.addFilter(_under_our_name)
    level = config.observability.log_level.upper()
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    if level == "INFO":
        # Its start and end; ours are logged here.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def announce(text: str, config: RouterConfig) -> None:
    """Write a line to stderr, at any log level. A full disk behind it must not keep the router from
    starting."""
    if config.observability.log_format == "json":
        record = logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None)
        text = _JsonFormatter().format(record)
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def give_up_unwritten_log() -> None:
    """Drop what a full disk behind stderr did not take: Python would try to write it once more at
    the very end, and exit with 120 instead of 0."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        port: 0 lets the system choose.
    Raises:
        ConfigError: It cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            [ConfigProblem("server", f"{host} port {port} cannot be listened on: {error.strerror}")]
        ) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def allow_open_files() -> None:
    """Raise the limit on open files as far as the system allows: a stream needs two sockets, and
    shells often start with a limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= hard < _MIN_OPEN_FILES:
        rule = f"the router needs {_MIN_OPEN_FILES} at least, and two more for each stream"
        problem = f"the limit on open files is {hard}; {rule} (ulimit -n, LimitNOFILE=)"
        raise ConfigError([ConfigProblem("", problem)])
    _grow_file_table(_FILE_TABLE if hard < 0 else min(_FILE_TABLE, hard))


def _grow_file_table(size: int) -> None:
    """Have the kernel's table of this process's files hold so many.

    It doubles as files are opened, and in a process with threads each time waits until no processor
    reads the old one (`expand_fdtable`): a first burst of 1,024 streams stood still for 50 ms.
    """
    with contextlib.suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, size - 1))
