"""What the router writes to its log."""

from __future__ import annotations

import io
import logging
import re

from router.process import _TextFormatter


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
