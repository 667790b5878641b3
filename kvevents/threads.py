"""Makes pools whose threads begin before there is work for them.

A thread that finds no memory for its first steps ends without having reported that it began, and
`threading.Thread.start` waits for that for ever (CPython 3.10 to 3.13: `Thread._bootstrap_inner`).
Python's own pools start threads as work comes: an event loop that gives them work in a process
short of memory may so stand still for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_BEGIN_S = 60.0
"""For all threads of a pool; those that have begun then take work without the rest."""


def begun_pool(
    threads: int, name: str, warm: Callable[[], None] | None = None
) -> ThreadPoolExecutor:
    """Return a pool whose threads have all begun; it starts none later.

    Args:
        name: What their names begin with.
        warm: Done first in each thread, after this function has returned.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=warm)
    # A thread that waits for the others takes no second job: so each of them begins.
    all_begun = threading.Barrier(threads, timeout=_BEGIN_S)
    try:
        for _ in range(threads):
            pool.submit(all_begun.wait)
    except BaseException:
        all_begun.abort()  # those that wait would hold up the end of the process
        pool.shutdown(wait=False)
        raise
    return pool
