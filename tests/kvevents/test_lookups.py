"""Host names where DNS is silent."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from async_timeout import timeout

from kvevents import lookups
from kvevents.lookups import addresses
from tests.support.waiting import DEADLINE_S

TEXT = """
import asyncio, socket, time
from kvevents.lookups import addresses

socket.getaddrinfo = lambda *_, **__: time.sleep(3600)

async def main():
    asking = asyncio.create_task(addresses("silent.test"))
    await asyncio.sleep(0)
    asking.cancel()

asyncio.run(main())
"""


class SilentServer:
    """Answers no lookup before it may; counts them."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = threading.Event()

    def getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        self.may_answer.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))] * 2


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentServer]:
    server = SilentServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.may_answer.set()


async def test_those_who_ask_meanwhile_get_the_same_answer(silent: SilentServer) -> None:
    """Each check of a replica's health would leave another lookup behind, and the next name would
    wait for all of them."""
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            async with timeout(0.01):
                await addresses("silent.test")
    asking = asyncio.create_task(addresses("silent.test"))
    await asyncio.sleep(0)
    assert silent.asked == 1
    silent.may_answer.set()
    assert await asking == ["192.0.2.7"]
    assert await addresses("silent.test") == ["192.0.2.7"]
    assert silent.asked == 2, "nothing is remembered"


async def test_a_lookup_that_is_lost_is_made_anew(
    silent: SilentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its thread found no memory, its name could never be looked up again."""
    monkeypatch.setattr(lookups, "_MAX_S", 0.01)
    with pytest.raises(OSError, match=r"no answer within 0\.01 s"):
        await addresses("silent.test")
    silent.may_answer.set()
    monkeypatch.setattr(lookups, "_MAX_S", DEADLINE_S)
    assert await addresses("silent.test") == ["192.0.2.7"]


async def test_a_name_without_an_address_is_an_error_for_each_who_asks() -> None:
    """Of the operating system, as callers know it."""
    asking = [addresses("does-not-exist.invalid") for _ in range(2)]
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, OSError) for error in found), found


async def test_whatever_keeps_a_name_from_being_looked_up_is_such_an_error() -> None:
    """Callers try again after it. Any other ended the task that followed an event stream."""
    with pytest.raises(OSError, match="cannot be a name"):
        await addresses("x" * 64 + ".test")
    before = threading.stack_size(2**46)
    try:
        with pytest.raises(OSError, match="there is no memory") as found:
            await addresses("localhost")
        assert found.value.errno == errno.ENOMEM
    finally:
        threading.stack_size(before)
    assert await addresses("localhost")


def test_a_process_ends_although_a_lookup_does_not() -> None:
    """A router that was told to stop waited for a minute and more, until it was killed."""
    done = subprocess.run([sys.executable, "-c", TEXT], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
