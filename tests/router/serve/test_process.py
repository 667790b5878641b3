"""What the router writes to its log, and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import resource
import socket
import ssl
import subprocess
import sys

import pytest

from router.serve.process import EventLoop, _TextFormatter
from tests.support.resets import close_by_reset


def test_a_name_from_outside_cannot_begin_a_line_of_its_own() -> None:
    """Replicas and pods say what they are called, and the log is evidence."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(_TextFormatter())
    log = logging.Logger("router")
    log.addHandler(handler)
    name = "a\n2026-01-01T00:00:00.000+00:00 INFO router: forged\x1b[2J\u2028b\u00e9"
    log.warning("replica %s is away", name)
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("failed")
    first, second, *trace = written.getvalue().splitlines()
    assert first.endswith(
        "a\\n2026-01-01T00:00:00.000+00:00 INFO router: forged\\x1b[2J\\u2028b\u00e9 is away"
    )
    assert re.fullmatch(r"\S+ ERROR router: failed", second)
    assert trace[0] == "Traceback (most recent call last):"


def test_a_reset_tls_connection_is_closed_once() -> None:
    """uvloop closed its descriptor and left it to the socket as well: that closed the number again
    when it was collected, which another connection had by then. Each later connection that got the
    number failed, and with it whatever had asked for it."""
    with contextlib.closing(EventLoop()) as loop, socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        close_by_reset(far)
        near.setblocking(False)
        connecting = loop.create_connection(
            asyncio.Protocol,
            sock=near,
            ssl=ssl.create_default_context(),
            server_hostname="localhost",
        )
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            loop.run_until_complete(connecting)
        assert near.fileno() == -1


def test_the_table_of_files_has_grown_before_threads_begin() -> None:
    """Later each doubling would wait for all processors."""
    code = (
        "from router.serve.process import allow_open_files; allow_open_files()\n"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = re.search(r"^FDSize:\s*(\d+)$", done.stdout, re.M)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found is not None
    assert int(found[1]) >= (16_384 if hard < 0 else min(16_384, hard))
