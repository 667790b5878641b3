"""The board on a server, against a real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import trustme

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


class Authority:
    """Issues certificates as files."""

    def __init__(self, directory: Path, name: str) -> None:
        self._ca, self._directory = trustme.CA(), directory
        self.file = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, **options: Any) -> tuple[Path, Path]:
        issued = self._ca.issue_cert("127.0.0.1", **options)
        certificate, key = (self._directory / f"{name}.{kind}" for kind in ("pem", "key"))
        issued.private_key_pem.write_to_path(str(key))
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        return certificate, key


async def test_over_tls_only_the_right_server_is_spoken_to(tmp_path: Path) -> None:
    """What is said there is load and whose keys are whose: not for who poses as the server, nor for
    a server whose certificate is no longer good; and the server may want to see one as well."""
    ca, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    shown, key = ca.issue("router")
    expired = ca.issue("expired", not_after=datetime(2020, 1, 1, tzinfo=timezone.utc))

    def trusting(server: ValkeyServer, authority: Path | None, shows: bool = True) -> ValkeyBoard:
        files = (str(shown), str(key)) if shows else (None, None)
        credentials = Credentials(None, None, authority and str(authority), *files)
        return connect(server.url, credentials, "kvroute", b"secret", group=b"own")

    with contextlib.ExitStack() as stack:
        good, bad = (
            stack.enter_context(contextlib.closing(ValkeyServer(tls=(*files, ca.file))))
            for files in (ca.issue("server"), expired)
        )
        right = trusting(good, ca.file)
        wrong = [
            trusting(good, other.file),
            trusting(good, None),
            trusting(good, ca.file, shows=False),
            trusting(bad, ca.file),
        ]
        async with running(right, *wrong):
            await eventually(lambda: right.statistics().is_up, "the right one is connected")
            # Each end has failed at least once: speaking and hearing.
            await eventually(
                lambda: all(each.statistics().failures >= 2 for each in wrong), "others have tried"
            )
            assert not any(each.statistics().is_up for each in wrong)
            assert not any(each.statistics().published for each in wrong)


async def test_a_user_with_few_rights_is_enough() -> None:
    """Those that the documentation names, and nothing but the board's own keys and channel."""
    rights = "+set +publish +subscribe +unsubscribe +scan +mget +ping ~kvroute:* &kvroute:*"
    users = ["default off", f"router on >pass {rights}", f"reader on >pass {rights} -set"]
    with contextlib.closing(ValkeyServer(users=users)) as server:

        def known_as(name: str | None, password: str = "pass") -> ValkeyBoard:
            credentials = Credentials(name, password)
            return connect(server.url, credentials, "kvroute", b"secret", str(name).encode())

        one = known_as("router")
        two = connect(server.url, Credentials("router", "pass"), "kvroute", b"secret", b"2")
        refused = [known_as("router", "another"), known_as("reader"), known_as(None)]
        async with running(one, two, *refused):
            one.publish(b"load of one")
            await eventually(lambda: heard(two) == [b"load of one"], "it speaks and is heard")
            await eventually(
                lambda: all(each.statistics().failures for each in refused), "others have tried"
            )
            assert not any(each.statistics().is_up for each in refused)
