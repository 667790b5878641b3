"""How often a request is tried again, and what a replica that is known not to respond costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvevents.lookups import is_numeric
from router.config.origin import Origin, Timeouts
from router.plane import addresses
from router.plane.attempts import (
    Attempt,
    Failure,
    RetryBudget,
    RetryLimits,
    Unretried,
)
from router.plane.proxy_types import End
from tests.router.plane.test_proxy import (
    DONE,
    attempt,
    close_after_the_headers,
    close_at_once,
    dead,
    event,
    say_nothing,
    split_events,
    streaming,
    streaming_now,
)
from tests.router.proxy_server import ProxyServer, proxy_server
from tests.router.raw_http import Handler, RawConnection, answer, answering, raw_client, raw_server
from tests.support.waiting import eventually
from tests.support.without_ipv6 import refuse_ipv6

DEFAULT = RetryLimits()
QUICK_TO_CONNECT = Timeouts(connect_s=1.0, first_byte_s=600, idle_s=600)
POISON = b'{"prompt": "poison"}'


class Fragile:
    """A replica that serves everything but POISON: at that it closes its connection."""

    def __init__(self) -> None:
        self.poisoned = 0

    async def __call__(self, connection: RawConnection) -> None:
        while (request := await connection.read_request()) is not None:
            if request.body == POISON:
                self.poisoned += 1
                return
            await connection.send(answer())


@contextlib.asynccontextmanager
async def fragile_fleet(
    count: int, retries: RetryLimits = DEFAULT
) -> AsyncIterator[tuple[ProxyServer, list[Fragile]]]:
    fleet = [Fragile() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(raw_server(each)) for each in fleet]
        plan = [attempt(server, f"r{number}") for number, server in enumerate(servers)]
        proxy = await stack.enter_async_context(proxy_server(plan, retries=retries))
        yield proxy, fleet


async def test_a_kind_of_address_that_this_machine_lacks_is_no_shortage_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without IPv6 (`ipv6.disable=1`) the router refused what another replica would have served:
    it was said to be out of descriptors. The name `localhost` has both kinds, and so do many."""
    run = ProxyServer.run

    def run_without_ipv6(*arguments: Any) -> None:
        refuse_ipv6()
        run(*arguments)

    monkeypatch.setattr(ProxyServer, "run", run_without_ipv6)
    absent = Attempt("absent", Origin.parse("http://[::1]:8000"))
    async with (
        raw_server(answering(answer())) as replica,
        proxy_server([absent, attempt(replica, "present")]) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.ask()
        assert client.status == 200
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.attempts == ["absent", "present"]
        assert recorder.failures == [("absent", Failure.CONNECT)]


async def test_a_name_about_which_dns_is_silent_has_no_longer_than_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request waited for as long as the system asks its name servers, ten seconds for each,
    while another replica was there."""

    async def look_up(host: str) -> list[str]:
        if is_numeric(host):
            return [host]
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(addresses, "addresses", look_up)
    unanswered = Attempt("unanswered", Origin.parse("http://engine.test:8000"))
    async with (
        raw_server(answering(answer())) as replica,
        proxy_server([unanswered, attempt(replica, "present")], QUICK_TO_CONNECT) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.ask()
        assert client.status == 200
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.attempts == ["unanswered", "present"]
        assert recorder.failures == [("unanswered", Failure.CONNECT)]


@pytest.mark.parametrize("further_attempts", [2, 11])
@pytest.mark.parametrize("is_kept", [False, True], ids=["new connections", "kept connections"])
async def test_a_prompt_that_closed_two_replicas_is_not_tried_on_a_third(
    is_kept: bool, further_attempts: int
) -> None:
    """One poisonous prompt would kill the whole fleet. A kept connection may have been closed for
    its age, so its replica gets a second chance, but that is an attempt as well."""
    limits = RetryLimits(further_attempts=further_attempts, budget_burst=100)
    async with (
        fragile_fleet(12, limits) as (proxy, fleet),
        raw_client(proxy.port) as client,
    ):
        plan = list(proxy.plan)
        for candidate in plan if is_kept else ():
            proxy.plan = [candidate]
            await client.ask()
        proxy.plan = plan
        body = json.loads(await client.ask(POISON))
        assert (client.status, body["error"]["code"]) == (502, "no_replica_available")
        assert [each.poisoned for each in fleet] == [2 if is_kept else 1, 1] + 10 * [0]
        recorder = proxy.recorders[-1]
        assert recorder.unretried == [Unretried.CLOSED]
        kept = [("r0", Failure.KEPT_CLOSED)] if is_kept else []
        last = Failure.KEPT_CLOSED if is_kept else Failure.CLOSED
        assert recorder.failures == [*kept, ("r0", Failure.CLOSED), ("r1", last)]


async def test_an_engine_that_dies_after_its_headers_counts_as_closed() -> None:
    """Engines send them before the prefill, so this is what a prompt that kills them looks like."""
    async with raw_server(close_after_the_headers) as one, raw_server(close_at_once) as other:
        plan = [attempt(one, "a"), attempt(other, "b"), attempt(other, "never asked")]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            await client.ask()
            recorder = await proxy.recorder(End.NO_REPLICA)
            assert recorder.attempts == ["a", "b"]
            assert recorder.unretried == [Unretried.CLOSED]


async def test_a_kept_connection_closed_for_its_age_costs_the_client_nothing() -> None:
    """An engine closes an idle connection in the very moment a request is written to it."""
    served = 0

    async def handle(connection: RawConnection) -> None:
        nonlocal served
        await connection.read_request()
        served += 1
        await connection.send(answer(b"%d" % served))
        if served == 1:
            await connection.read_request()
        else:
            await connection.wait_closed()

    async with raw_server(handle) as replica, proxy_server([attempt(replica)]) as proxy:
        async with raw_client(proxy.port) as client:
            assert await client.ask() == b"1"
            assert await client.ask() == b"2"
        recorder = proxy.recorders[-1]
        assert (recorder.attempts, recorder.failures) == (
            ["r0", "r0"],
            [("r0", Failure.KEPT_CLOSED)],
        )


@pytest.mark.parametrize("further_attempts", [0, 1, 2, 5])
async def test_a_request_has_so_many_attempts_and_no_more(further_attempts: int) -> None:
    """Each attempt may take a first_byte_s; the client has given up long before the last of 12."""
    limits = RetryLimits(further_attempts=further_attempts, budget_burst=100)
    async with (
        proxy_server([dead() for _ in range(12)], retries=limits) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.ask()
        recorder = await proxy.recorder(End.NO_REPLICA)
        assert len(recorder.attempts) == 1 + further_attempts
        assert recorder.unretried == [Unretried.LIMIT]


async def test_a_plan_that_has_ended_is_no_limit() -> None:
    """The counter tells an operator to raise a limit, so it must not count what no limit did."""
    async with proxy_server([dead(), dead()]) as proxy, raw_client(proxy.port) as client:
        await client.ask()
        assert (await proxy.recorder(End.NO_REPLICA)).unretried == []


async def test_retries_have_a_budget_of_all_requests() -> None:
    """Where much fails, retries would double the load on what still works."""
    limits = RetryLimits(budget_share=0.1, budget_burst=3)
    async with raw_server(answering(answer(b"busy", "503 X"))) as busy:
        plan = [attempt(busy, "a"), attempt(busy, "b")]
        async with proxy_server(plan, retries=limits) as proxy, raw_client(proxy.port) as client:
            for _ in range(40):
                await client.ask()
            retried = sum(len(recorder.attempts) - 1 for recorder in proxy.recorders)
            refused = [recorder.unretried for recorder in proxy.recorders if recorder.unretried]
            assert 3 + 3 <= retried <= 3 + 4
            assert refused == [[Unretried.BUDGET]] * (40 - retried)


async def test_what_leaves_a_lost_replica_takes_nothing_from_the_budget() -> None:
    """All that was sent to a replica that died has to move, however much it is; and as nothing new
    goes there, it cannot become a load that stays."""
    limits = RetryLimits(budget_share=0, budget_burst=0)
    async with raw_server(answering(answer())) as good:
        plan = [dead(), attempt(good, "good")]
        async with proxy_server(plan, retries=limits) as proxy, raw_client(proxy.port) as client:
            await client.ask()
            assert (client.status, proxy.recorders[0].unretried) == (502, [Unretried.BUDGET])
            proxy.out_of_rotation = {"dead"}
            for _ in range(5):
                assert await client.ask() == b"{}"


async def test_what_goes_to_a_replica_at_ease_takes_nothing_from_the_budget() -> None:
    """One of two replicas resets every connection: the other had room for all, and requests got 502
    since too many were being tried again."""
    limits = RetryLimits(budget_share=0, budget_burst=0)
    async with raw_server(answering(answer())) as good:
        plan = [dead(), attempt(good, "good")]
        async with proxy_server(plan, retries=limits) as proxy, raw_client(proxy.port) as client:
            proxy.at_ease = {"good"}
            for _ in range(5):
                assert await client.ask() == b"{}"
            proxy.plan = [*[dead()] * 2, *plan]
            await client.ask()
            assert proxy.recorders[-1].unretried == [Unretried.BUDGET]


def test_the_budget_never_saves_up_more_than_its_burst() -> None:
    """A quiet night must not pay for a morning of retries."""
    budget = RetryBudget(RetryLimits(budget_share=0.5, budget_burst=2))
    for _ in range(1000):
        budget.add_requests()
    assert [budget.take() for _ in range(4)] == [True, True, False, False]
    budget.add_requests()
    assert not budget.take()
    budget.add_requests()
    assert budget.take()


# A replica that is known not to respond


async def send_headers_only(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    await connection.wait_closed()


@pytest.mark.parametrize("handler", [say_nothing, send_headers_only])
async def test_what_waits_for_a_replica_that_was_given_up_goes_elsewhere(handler: Handler) -> None:
    """A frozen process keeps its sockets open: without this, its requests wait for first_byte_s,
    ten minutes by default."""
    async with raw_server(handler) as bad, raw_server(answering(answer())) as good:
        plan = [attempt(bad, "bad"), attempt(good, "good")]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            await client.request()
            await eventually(lambda: proxy.recorders and proxy.recorders[0].attempts, "it is sent")
            await eventually(lambda: bad.accepted, "it has arrived")
            await eventually(lambda: proxy.count("connections") == 1, "it waits")
            while not proxy.count("given_up"):  # an attempt to connect is not given up
                proxy.give_up(plan[0].origin, silent_s=60)
                await asyncio.sleep(0)
            assert await client.read_head() == 200
            assert await client.read_body() == b"{}"
            recorder = await proxy.recorder(End.COMPLETED)
            assert recorder.failures == [("bad", Failure.UNHEALTHY)]
            assert proxy.count("given_up") == 1


async def test_a_silent_stream_of_a_replica_that_was_given_up_ends_with_an_error_event() -> None:
    """Its client would wait for idle_s, two minutes by default, for a process that is gone."""
    async with raw_server(streaming(event("a"), then="wait")) as replica:
        plan = [attempt(replica)]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            await client.request()
            await client.read_head()
            assert await client.read_piece() == event("a")
            while not proxy.count("given_up"):  # not before the proxy waits for more
                proxy.give_up(plan[0].origin, silent_s=0)
                await asyncio.sleep(0)
            *_, error, done = split_events(await client.read_body())
            assert (b'"replica_died"' in error, done) == (True, b"[DONE]")
            recorder = await proxy.recorder(End.REPLICA_DIED)
            assert recorder.failures == [("r0", Failure.LOST)]


async def test_a_stream_that_flows_is_left_alone_when_its_replica_is_given_up() -> None:
    """An overloaded engine answers its health checks late and its streams all the same."""
    goes_on = asyncio.Event()

    async def handle(connection: RawConnection) -> None:
        await connection.read_request()
        await streaming_now(connection, event("a"))
        await goes_on.wait()
        await connection.send_chunk(DONE)
        await connection.send_chunk(b"")
        await connection.wait_closed()

    async with raw_server(handle) as replica:
        plan = [attempt(replica)]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            await client.request()
            await client.read_head()
            assert await client.read_piece() == event("a")
            proxy.give_up(plan[0].origin, silent_s=5)
            goes_on.set()
            assert await client.read_body() == DONE
            await proxy.recorder(End.COMPLETED)


async def test_giving_one_server_up_leaves_the_others_alone() -> None:
    """Two replicas may share a host, or a gateway in front of them."""
    async with raw_server(say_nothing) as one, raw_server(answering(answer())) as other:
        plan = [attempt(one, "one"), attempt(other, "other")]
        async with proxy_server(plan) as proxy, raw_client(proxy.port) as client:
            await client.request()
            await eventually(lambda: one.accepted, "it has arrived")
            await eventually(lambda: proxy.count("active") == 1, "it waits")
            proxy.give_up(plan[1].origin, silent_s=0)
            assert proxy.count("active") == 1
            proxy.give_up(plan[0].origin, silent_s=0)
            assert await client.read_head() == 200
            await client.read_body()


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_a_replica_that_says_when_to_come_back_is_left_for_another(status: str) -> None:
    """It is well, and full: that is no failure, and another may have room."""
    async with (
        raw_server(answering(answer(b"full", status, "retry-after: 7"))) as full,
        raw_server(answering(answer(b"served"))) as free,
        proxy_server([attempt(full, "full"), attempt(free, "free")]) as proxy,
        raw_client(proxy.port) as client,
    ):
        assert await client.ask() == b"served"
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.busy == [("full", 7)]
        assert recorder.failures == [("full", Failure.BUSY)]


async def test_a_429_is_passed_on_where_nobody_else_is_left_or_it_says_no_time() -> None:
    """What the engine says is more than the router knows; without a time it may be the client's own
    limit there."""
    async with (
        raw_server(answering(answer(b"mine", "429 Too Many Requests", "retry-after: 7"))) as last,
        proxy_server([attempt(last)]) as proxy,
        raw_client(proxy.port) as client,
    ):
        assert await client.ask() == b"mine"
        assert (client.status, client.headers["retry-after"]) == (429, "7")
        recorder = await proxy.recorder(End.COMPLETED)
        assert recorder.failures == []
    for header in ("x-other: 7", "retry-after: Fri, 31 Dec 1999 23:59:59 GMT"):
        async with (
            raw_server(answering(answer(b"mine", "429 Too Many Requests", header))) as first,
            raw_server(answering(answer(b"served"))) as free,
            proxy_server([attempt(first), attempt(free)]) as proxy,
            raw_client(proxy.port) as client,
        ):
            assert await client.ask() == b"mine"
            recorder = await proxy.recorder(End.COMPLETED)
            assert (recorder.busy, recorder.failures) == ([], [])


async def test_the_least_that_full_replicas_say_is_what_the_client_is_told() -> None:
    """Then one of them has room."""
    async with (
        raw_server(answering(answer(b"", "503 X", "retry-after: 9"))) as one,
        raw_server(answering(answer(b"", "503 X", "retry-after: 4"))) as other,
        proxy_server([attempt(one), attempt(other)]) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.ask()
        assert (client.status, client.headers["retry-after"]) == (503, "4")
        await proxy.recorder(End.NO_REPLICA)
