"""The board on a server, against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
import trustme
import uvloop

from router.config.sharing import BoardConfig
from router.sharing.valkey import (
    EXPIRY_S,
    MOST_OFF_S,
    ClockDoubt,
    ValkeyBoard,
    connect,
)
from tests.router.raw_http import RawConnection, raw_server
from tests.support.relay import CuttingRelay
from tests.support.valkey_server import ValkeyServer
from tests.support.waiting import DEADLINE_S, eventually


def board(server: ValkeyServer, secret: bytes = b"secret", **options: Any) -> ValkeyBoard:
    return connect(BoardConfig(url=server.url, secret=secret.decode(), **options), secret)


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
        one, two = board(server), board(server)
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
        one, two = board(server), board(server)
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


def test_a_connection_may_be_cut_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop has an error of its own for what is written to a connection that was just reset."""
    monkeypatch.setattr("router.sharing.valkey.MAX_DELAY_S", 0.01)
    with contextlib.closing(ValkeyServer()) as server:
        relay = CuttingRelay(server.url, seed=1, cut=0.2, resets=True)
        with contextlib.closing(relay):
            uvloop.run(_finds_back_after_cuts(relay))


def board_at(relay: CuttingRelay) -> ValkeyBoard:
    url = relay.endpoint.replace("tcp", "redis")
    return connect(BoardConfig(url=url, secret="secret"), b"secret")


async def _finds_back_after_cuts(relay: CuttingRelay) -> None:
    one, two = board_at(relay), board_at(relay)
    async with running(one, two):
        await eventually(lambda: relay.cuts >= 400, "it is cut")
        relay.cut = 0
        one.publish(b"one")
        two.publish(b"two")
        await eventually(lambda: (heard(one), heard(two)) == ([b"two"], [b"one"]), "they hear")


NONSENSE = (
    b"x" * 100_000,
    b":x\r\n",
    b":1\r\n" * 20,
    b"*1\r\n:1\r\n" * 20,
    b"+OK\r\n" * 4 + b",x\r\n",
)


async def test_what_is_no_server_of_this_kind_may_answer_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another service had the address for a moment: the client raised what Python says of its
    answers, and the routers heard nothing of each other ever after."""
    monkeypatch.setattr("router.sharing.valkey.MAX_DELAY_S", 0.01)
    turns = itertools.cycle(NONSENSE)

    async def answer(connection: RawConnection) -> None:
        await connection.reader.read(1)
        await connection.send(next(turns))

    with contextlib.closing(ValkeyServer()) as server:
        async with raw_server(answer) as other:
            relay = CuttingRelay(other.url, seed=1, cut=0)
            with contextlib.closing(relay):
                one, two = board_at(relay), board_at(relay)
                async with running(one, two):
                    await eventually(lambda: other.accepted >= 20 * len(NONSENSE), "it is asked")
                    relay.lead_to(server.url)
                    one.publish(b"one")
                    two.publish(b"two")
                    await eventually(lambda: heard(one) == [b"two"], "one hears")
                    await eventually(lambda: heard(two) == [b"one"], "two hears")


async def test_what_is_not_sealed_with_the_secret_is_dropped() -> None:
    """Whoever reaches the server could make up load otherwise."""
    with contextlib.closing(ValkeyServer(password="a-password")) as server:
        one = board(server, password="a-password")
        stranger = board(server, b"another", password="a-password")
        refused = board(server, password="wrong")
        async with running(one, stranger, refused):
            for each in (one, stranger, refused):
                each.publish(b"words")
            await eventually(lambda: one.statistics().failures, "the stranger is counted")
            assert heard(one) == [], "nor does it hear itself"
            assert not refused.statistics().is_up


class Recorder:
    """Reaches the server without the secret: it records what is said there, and says it again."""

    def __init__(self, server: ValkeyServer) -> None:
        self._server = redis.Redis.from_url(server.url)
        self.words: list[bytes] = []
        self.repeated = 0
        self._is_over = False
        """Instead of a cancellation, which the client of Python 3.11 may lose."""

    async def __aenter__(self) -> Recorder:
        self._channel = self._server.pubsub(ignore_subscribe_messages=True)
        while True:  # until the server listens
            with contextlib.suppress(redis.ConnectionError):
                await self._channel.subscribe("kvroute:board")
                break
            await asyncio.sleep(0.01)
        await self._channel.get_message(timeout=DEADLINE_S)
        self._tasks = [asyncio.create_task(self._record())]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._channel.aclose()  # type: ignore[no-untyped-call]
        await self._server.aclose()

    def repeat(self, words: Sequence[bytes]) -> None:
        """From now on, on the channel and as keys."""
        self._tasks.append(asyncio.create_task(self._repeat(words)))

    async def _record(self) -> None:
        while not self._is_over:
            message = await self._channel.get_message(timeout=0.1)
            if message is not None:
                self.words.append(message["data"])

    async def _repeat(self, words: Sequence[bytes]) -> None:
        while not self._is_over:
            for number, word in enumerate(words):
                await self._server.set(f"kvroute:slot:{number:032x}", word)
                await self._server.publish("kvroute:board", word)
            self.repeated += 1
            await asyncio.sleep(0.005)


async def test_a_recorded_word_said_again_is_not_believed() -> None:
    """Whoever reaches the server without the secret could have made a tenant's two requests of an
    hour ago last for ever: another router refused that tenant 10 of 10."""
    with contextlib.closing(ValkeyServer()) as server:
        one, two = board(server), board(server)
        async with running(two), Recorder(server) as recorder:
            await eventually(lambda: two.statistics().is_up, "it hears")
            async with running(one):
                one.publish(b"busy")
                await eventually(lambda: heard(two) == [b"busy"], "it is heard")
                one.publish(b"idle")
                await eventually(lambda: heard(two) == [b"idle"], "it is heard")
                recorder.repeat(recorder.words[:])
                before = recorder.repeated
                while recorder.repeated < before + 50:
                    assert heard(two) == [b"idle"]
                    await asyncio.sleep(0)
            await eventually(
                lambda: heard(two) == [], "who is gone is forgotten, whoever repeats it"
            )
            before = recorder.repeated
            while recorder.repeated < before + 50:
                assert heard(two) == []
                await asyncio.sleep(0)
            assert two.statistics().failures, "and that is counted"


async def test_a_router_that_starts_believes_no_word_of_the_past() -> None:
    """It knows no numbers yet, and what was recorded has a valid seal."""
    with contextlib.closing(ValkeyServer()) as server:
        async with Recorder(server) as recorder:
            one = board(server)
            async with running(one):
                one.publish(b"busy")
                await eventually(lambda: one.statistics().published > 2, "it speaks")
                await eventually(lambda: len(recorder.words) > 2, "that is recorded")
            recorder.repeat(recorder.words[:])
            await eventually(lambda: recorder.repeated > 1, "it is repeated, its keys are there")
            late = ValkeyBoard(
                redis.Redis.from_url(server.url),
                "kvroute",
                b"secret",
                wall_clock=lambda: time.time() + 2 * MOST_OFF_S,
            )
            async with running(late):
                await eventually(lambda: late.statistics().failures > 20, "it hears all of that")
                assert late.statistics().writers == 0
                assert heard(late) == []


@pytest.mark.parametrize("ahead_s", [-60.0, 60.0])
async def test_a_router_whose_clock_is_off_is_told_so(
    ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It believes nobody and nobody believes it: an operator must not have to guess why."""
    with contextlib.closing(ValkeyServer()) as server:
        right = board(server)
        wrong = ValkeyBoard(
            redis.Redis.from_url(server.url),
            "kvroute",
            b"secret",
            wall_clock=lambda: time.time() + ahead_s,
        )
        async with running(right, wrong):
            right.publish(b"right")
            wrong.publish(b"wrong")
            for each, off_s in ((wrong, ahead_s), (right, -ahead_s)):
                await eventually(lambda each=each: each.statistics().clock_off_s, "it is told")  # type: ignore[misc]
                assert abs(each.statistics().clock_off_s - off_s) < MOST_OFF_S
                assert heard(each) == []
        for side in ("ahead of", "behind"):
            assert f"the clock here is 60.0 s {side} another router's" in caplog.text
        assert sum("clock" in each for each in caplog.messages) == 2, "once a minute each"


async def test_words_that_waited_while_a_router_was_stopped_raise_no_doubt_of_its_clock() -> None:
    """They are old, and what comes behind them is not: the warning would send operators after a
    clock that is right."""
    now = 100.0
    doubt = ClockDoubt(lambda: now)
    for _ in range(1000):
        doubt.note(30.0)
    assert doubt.off_s == 0.0
    for _ in range(10):
        now += 0.4
        doubt.note(30.0)
    assert doubt.off_s == 30.0
    now += 2 * EXPIRY_S
    assert doubt.off_s == 0.0, "it was set right"


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
        ca = authority and str(authority)
        return board(server, ca=ca, certificate=files[0], key=files[1])

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
            return board(server, username=name, password=password)

        one, two = known_as("router"), known_as("router")
        refused = [known_as("router", "another"), known_as("reader"), known_as(None)]
        async with running(one, two, *refused):
            one.publish(b"load of one")
            await eventually(lambda: heard(two) == [b"load of one"], "it speaks and is heard")
            await eventually(
                lambda: all(each.statistics().failures for each in refused), "others have tried"
            )
            assert not any(each.statistics().is_up for each in refused)


async def test_a_server_that_refuses_from_the_start_is_told_with_its_reason_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong password would else be a number in the metrics and no word; so would a user without
    channels, as all users are whose rules name none."""
    users = ["default off", "router on >pass +@all ~kvroute:*"]
    with contextlib.closing(ValkeyServer(users=users)) as server:
        reasons = {
            "wrong": ("nothing is published", "invalid username-password pair"),
            "pass": ("nothing arrives from others", "channel"),
        }
        for password, (what, why) in reasons.items():
            caplog.clear()
            refused = board(server, username="router", password=password)
            async with running(refused):
                await until_told(caplog, what, why)
                failures = refused.statistics().failures
                await until_failed(refused, failures + 4)
            assert sum(why in each and what in each for each in caplog.messages) == 1


async def until_told(caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    def is_told() -> bool:
        return any(all(part in each for part in parts) for each in caplog.messages)

    await eventually(is_told, f"it is told: {parts}")


async def until_failed(refused: ValkeyBoard, times: int) -> None:
    await eventually(lambda: refused.statistics().failures >= times, "it has tried again")


async def test_it_ends_at_whatever_moment_it_is_told_to() -> None:
    """The server's client swallows a cancellation here and there; a router that stops would wait
    for good."""
    with contextlib.closing(ValkeyServer(password="right")) as server:
        for turns in range(80):
            refused = board(server, password="wrong")
            running_task = asyncio.create_task(refused.run(lambda: None))
            for _ in range(turns):
                await asyncio.sleep(0)
            running_task.cancel()
            done, _ = await asyncio.wait([running_task], timeout=DEADLINE_S)
            assert done, f"cancelled after {turns} turns of the loop"
