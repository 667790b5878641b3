"""Looks up addresses of hosts, without a queue of abandoned lookups.

A lookup cannot be interrupted: where DNS is silent, each takes ten seconds and more. An event
loop's own pool has four threads for them, so abandoned lookups would queue up, and a process that
ends would wait for them all.
"""

from __future__ import annotations

import _thread
import asyncio
import errno
import ipaddress
import socket
from contextlib import suppress
from functools import lru_cache

_Key = tuple[asyncio.AbstractEventLoop, str]
_MAX_S = 120.0
"""Three name servers that are silent, asked twice for each of a few domains, take less."""
_under_way: dict[_Key, asyncio.Future[list[str]]] = {}


@lru_cache(maxsize=1024)
def is_numeric(host: str) -> bool:
    """Return whether *host* is an address already."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def addresses(host: str) -> list[str]:
    """Look *host* up, unless it is an address itself; concurrent callers get the same answer. A
    caller that is cancelled leaves the lookup to the others.

    Raises:
        OSError: It has no address; with ENOMEM: there is no memory to look it up.
    """
    if is_numeric(host):
        return [host]
    loop = asyncio.get_running_loop()
    key = loop, host
    answer = _under_way.get(key)
    if answer is None:
        answer = loop.create_future()
        # No one waits for such a thread to begin (see `kvevents.threads`), nor for its end.
        try:
            _thread.start_new_thread(_look_up, (loop, host, answer))
        except RuntimeError:
            raise _no_memory() from None
        _under_way[key] = answer
        lost = OSError(f"{host}: the lookup gave no answer within {_MAX_S:g} s")
        giving_up = loop.call_later(_MAX_S, _settle, answer, lost)
        answer.add_done_callback(lambda _: giving_up.cancel())
        answer.add_done_callback(lambda _: _under_way.pop(key, None))
        # The exception is marked as seen: all who asked may have left.
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(answer)


def _look_up(loop: asyncio.AbstractEventLoop, host: str, answer: asyncio.Future[list[str]]) -> None:
    found: list[str] | OSError
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    except OSError as error:
        found = error
    except UnicodeError as error:
        found = OSError(None, f"it cannot be a name: {error}")
    except (MemoryError, RuntimeError):
        found = _no_memory()
    with suppress(RuntimeError):  # the event loop has been closed
        loop.call_soon_threadsafe(_settle, answer, found)


def _no_memory() -> OSError:
    return OSError(errno.ENOMEM, "there is no memory to look it up")


def _settle(answer: asyncio.Future[list[str]], found: list[str] | OSError) -> None:
    if answer.done():
        return
    if isinstance(found, OSError):
        answer.set_exception(found)
    else:
        answer.set_result(found)
