"""The moment at which an answer begins and its deadline passes."""

from __future__ import annotations

import asyncio

from router.upstream import Origin, Timeouts
from router.upstream.response import UpstreamResponse


class Connection:
    """What a response asks of its source."""

    is_cut = False

    def resume(self) -> None:
        """Nothing was paused."""

    def cut(self) -> None:
        self.is_cut = True


async def test_an_answer_that_has_begun_is_not_cut_for_a_late_first_byte() -> None:
    """After a stall, bytes and the deadline's timer are served in one pass of the loop, and the
    reader runs after both."""
    loop, connection = asyncio.get_running_loop(), Connection()
    response = UpstreamResponse(
        connection, Origin.parse("http://127.0.0.1:1"), Timeouts(1.0, 1e-9, 60.0), loop
    )
    reader = asyncio.create_task(response.wait_for_first_byte())
    await asyncio.sleep(0)
    response.add(b"first")
    response.wake()
    if response.deadline <= loop.time():  # as the client's timer asks
        response.expire()
    await reader
    assert await response.read_chunk() == b"first"
    assert response.error is None
    assert not connection.is_cut
