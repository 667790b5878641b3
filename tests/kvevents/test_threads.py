"""Pools whose threads have begun: what that means, and what becomes of one that cannot be."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvevents.threads import begun_pool

DEADLINE_S = 30.0

_TOO_MANY = """
import resource
from kvevents.threads import begun_pool

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    begun_pool(64, "many")
except RuntimeError as error:
    print(error)
"""


def test_all_threads_have_begun_and_work_begins_none() -> None:
    before = threading.active_count()
    pool = begun_pool(3, "some")
    try:
        assert threading.active_count() == before + 3
        assert sum(pool.map(abs, range(-50, 0))) == 1275
        assert threading.active_count() == before + 3
    finally:
        pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_a_pool_that_cannot_begin_does_not_hold_up_the_end() -> None:
    """The threads that had begun waited a minute for the others, and the process for them."""
    done = subprocess.run(
        [sys.executable, "-c", _TOO_MANY],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert "can't start new thread" in done.stdout
