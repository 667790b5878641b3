"""The board on a server, against a real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from router.board.valkey import Credentials, ValkeyBoard, connect
from tests.support.http_client import eventually
from tests.support.valkey_server import ValkeyServer


def board(
    server: ValkeyServer,
    group: bytes,
    secret: bytes = b"secret",
    password: str | None = None,
) -> ValkeyBoard:
    return connect(server.url, Credentials(None, password), "kvroute", secret, group)


@contextlib.asynccontextmanager
async def running(*boards: ValkeyBoard) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.run(lambda: None)) for each in boards]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def heard(one: ValkeyBoard) -> list[bytes]:
    return list(one.read().values())


async def test_routers_hear_each_other_until_one_is_gone() -> None:
    """Each knows what the others have in flight, and forgets those that died."""
    with contextlib.closing(ValkeyServer()) as server:
        one, two = board(server, group=b"1"), board(server, group=b"2")
        async with running(one):
            one.publish(b"load of one")
            await eventually(lambda: one.statistics().is_up, "it is connected")
            async with running(two):
                two.publish(b"load of two")
                await eventually(lambda: heard(two) == [b"load of one"], "who was there is heard")
                await eventually(lambda: heard(one) == [b"load of two"], "who came is heard")
                before = one.read()
                two.publish(b"more")
                await eventually(lambda: heard(one) == [b"more"], "a change is heard")
                assert before.keys() == one.read().keys()
            await eventually(lambda: heard(one) == [], "who is gone is forgotten")


async def test_while_the_server_is_away_nobody_is_heard_and_afterwards_everybody() -> None:
    """Each router must go on by itself, and find back without help."""
    with contextlib.closing(ValkeyServer()) as server:
        one, two = board(server, group=b"1"), board(server, group=b"2")
        async with running(one, two):
            one.publish(b"one")
            two.publish(b"two")
            await eventually(lambda: heard(one) == [b"two"], "they hear each other")
            server.kill()
            await eventually(lambda: not one.statistics().is_up, "it is away")
            await eventually(lambda: heard(one) == [], "what was said is forgotten")
            two.publish(b"new")
            server.start()
            await eventually(lambda: heard(one) == [b"new"], "they hear each other again")
            assert one.statistics().failures


async def test_what_is_not_sealed_with_the_secret_is_dropped() -> None:
    """Whoever reaches the server could make up load otherwise."""
    with contextlib.closing(ValkeyServer(password="a password")) as server:
        one, sibling = (board(server, b"1", password="a password") for _ in range(2))
        stranger = board(server, b"2", b"another", "a password")
        refused = board(server, b"3", password="wrong")
        async with running(one, stranger, sibling, refused):
            for each in (one, stranger, sibling, refused):
                each.publish(b"words")
            await eventually(lambda: one.statistics().failures, "the stranger is counted")
            assert heard(one) == [], "nor is a sibling heard twice"
            assert not refused.statistics().is_up
