"""Large work is done elsewhere: its result, its errors, and its process's end come back."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Iterator

import pytest

from router.errors import BadRequest
from router.prompt import processes
from router.prompt.body.requests import read_request
from router.prompt.endpoints import Endpoint
from router.prompt.errors import ProcessEndedError
from router.prompt.processes import PIECE_BYTES, LargeWork
from tests.support.waiting import eventually


def own_id(data: bytes) -> int:
    """The process in which it runs."""
    return os.getpid()


def mirrored(data: bytes, count: int) -> object:
    """A result of all that specs are made of, some of it larger than a piece."""
    messages = [{"role": "user", "content": [{"text": "x" * 100, "n": n} for n in range(count)]}]
    return [len(data), array("I", range(count)), messages, {"empty": {}}]


def killed(data: bytes) -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def waiting(data: bytes) -> None:
    """Until its process is ended."""
    signal.pause()


@pytest.fixture
def large_work() -> Iterator[LargeWork]:
    work = LargeWork(1)
    yield work
    work.close()


async def test_what_comes_back_is_what_was_made_there(large_work: LargeWork) -> None:
    """However large: it comes in pieces."""
    count = 4 * PIECE_BYTES // 100
    assert await large_work.run(mirrored, b"x" * 1_000_000, count) == mirrored(
        b"x" * 1_000_000, count
    )
    assert await large_work.run(own_id, b"") not in (os.getpid(), 0)
    assert await large_work.run(own_id, b"") == await large_work.run(own_id, b"")


async def test_a_result_that_found_no_memory_is_not_taken_for_the_next_one(
    large_work: LargeWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still waits on the socket: the next client would get what another one asked for."""

    def no_room(count: int) -> bytearray:
        if count > 1_000_000:
            raise MemoryError
        return bytearray(count)

    assert await large_work.run(mirrored, b"x", 1) == mirrored(b"x", 1)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "bytearray", no_room, raising=False)
        with pytest.raises(ProcessEndedError):
            await large_work.run(mirrored, b"x", 300_000)
    assert await large_work.run(mirrored, b"xyz", 2) == mirrored(b"xyz", 2)


async def test_what_was_raised_is_raised_here(large_work: LargeWork) -> None:
    """With place and rule: the client reads them."""
    with pytest.raises(BadRequest) as error:
        await large_work.run(read_request, b'{"prompt": [1, -1]}', Endpoint.COMPLETIONS, "json")
    assert (error.value.place, error.value.found) == ("$.prompt[1]", "an integer out of range")


async def test_a_process_that_is_killed_costs_its_own_work_only(large_work: LargeWork) -> None:
    """The next one gets a new process."""
    before = await large_work.run(own_id, b"")
    with pytest.raises(ProcessEndedError):
        await large_work.run(killed, b"")
    assert await large_work.run(own_id, b"") != before


async def test_closing_ends_the_processes_and_what_runs_there(large_work: LargeWork) -> None:
    """A router that stops leaves nothing behind."""
    process = await large_work.run(own_id, b"")
    running = asyncio.ensure_future(large_work.run(waiting, b""))
    await asyncio.sleep(0)
    large_work.close()
    with pytest.raises(ProcessEndedError):
        await running
    with pytest.raises(ProcessEndedError):
        await large_work.run(own_id, b"")
    await eventually(lambda: not os.path.exists(f"/proc/{process}"), "the process is gone")
