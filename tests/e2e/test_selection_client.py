"""The Python client that asks a router where to send, and reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import httpx
import pytest

from router.client import AsyncSelectionClient, SelectionClient, SelectionError
from tests.support.engine_stub import EngineStub, engines, prompt_ids
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process({"health": QUICK_HEALTH}) as process:
        yield process


async def test_a_block_is_a_reservation(router: RouterProcess) -> None:
    """Its user cannot forget to end it."""
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        AsyncSelectionClient(router.url) as client,
    ):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 1)}
        assert (await client.select(body)).address == f"127.0.0.1:{stub.port}"
        async with client.reserved(body) as found:
            assert (found.replica, found.endpoint) == (stub.name, stub.url)
            await client.prefill_complete(found)
            await client.output(found, 3)
            assert (await router.metrics()).sum("kvroute_reservations") == 1
            found.usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}}
        (logged,) = (await router.get("/requests?limit=1")).json["requests"]
        assert (logged["end"], logged["actual"]) == ("completed", 0)
        with pytest.raises(ZeroDivisionError):
            async with client.reserved(body):
                raise ZeroDivisionError
        assert (await router.metrics()).sum("kvroute_reservation_ends_total", end="failed") == 1
        await router.until_idle()


@pytest.mark.parametrize("how", ["a task", "a scope"])
async def test_a_block_that_is_cancelled_ends_its_reservation(
    router: RouterProcess, how: str
) -> None:
    """As servers cancel what a client waited for that has left; it is no replica's failure. In a
    scope of anyio, as Starlette's, each later await is cancelled as well."""
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        AsyncSelectionClient(router.url) as client,
    ):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 3)}
        left = (await router.metrics()).sum("kvroute_reservation_ends_total", end="client_left")

        async def send(begun: Callable[[], object]) -> None:
            async with client.reserved(body):
                begun()
                await asyncio.Event().wait()

        if how == "a task":
            begun = asyncio.Event()
            sending = asyncio.create_task(send(begun.set))
            await begun.wait()
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled()
        else:
            with anyio.CancelScope() as scope:
                await send(scope.cancel)
            assert scope.cancelled_caught
        now = await router.metrics()
        assert now.sum("kvroute_reservations") == 0
        assert now.sum("kvroute_reservation_ends_total", end="client_left") == left + 1


@pytest.mark.parametrize("how", ["cancelled", "cut", "cut, in a thread"])
async def test_who_gets_no_answer_leaves_nothing_booked(router: RouterProcess, how: str) -> None:
    """The router has booked, and its answer met nobody: the replica seemed busy for
    `doors.reservation_idle_s`, ten minutes."""
    async with (
        engines(1) as (stub,),
        router.serving(stub),
        _losing_the_first_answer(router.port, cuts=how != "cancelled") as (url, is_booked),
    ):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 5)}
        left = (await router.metrics()).sum("kvroute_reservation_ends_total", end="client_left")
        if how == "cut, in a thread":
            with SelectionClient(url) as client, pytest.raises(httpx.HTTPError):
                await asyncio.to_thread(client.reserve, body)
        async with AsyncSelectionClient(url) as on_loop:
            if how == "cut":
                with pytest.raises(httpx.HTTPError):
                    await on_loop.reserve(body)
            elif how == "cancelled":
                asking = asyncio.create_task(on_loop.reserve(body))
                await is_booked.wait()
                asking.cancel()
                await asyncio.wait([asking])
                assert asking.cancelled()
        now = await router.metrics()
        assert now.sum("kvroute_reservations") == 0
        assert now.sum("kvroute_reservation_ends_total", end="client_left") == left + 1


@contextlib.asynccontextmanager
async def _losing_the_first_answer(
    port: int, *, cuts: bool
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Pass everything on to *port* but its first answer: that sets the event, and cuts the
    connection where it is to."""
    is_lost = asyncio.Event()

    async def copy(
        source: asyncio.StreamReader, to: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if not is_answer or is_lost.is_set():
                    to.write(data)
                    continue
                is_lost.set()
                if cuts:
                    break
        to.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, to, is_answer=False), copy(there, writer, is_answer=True))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", is_lost


async def test_a_reservation_that_is_gone_takes_no_response_with_it(router: RouterProcess) -> None:
    """Its replica was removed, or the router restarted, while the replica responded all the
    same."""
    async with engines(1) as (stub,):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 4)}
        with SelectionClient(router.url) as client:
            async with router.serving(stub), AsyncSelectionClient(router.url) as on_loop:
                threads = client.reserved(body)
                await asyncio.to_thread(threads.__enter__)
                async with on_loop.reserved(body):
                    await router.delete(f"/replicas/{stub.name}")
                await asyncio.to_thread(threads.__exit__, None, None, None)
                with pytest.raises(ZeroDivisionError):
                    await in_vain(on_loop, router, stub, body)


async def in_vain(
    client: AsyncSelectionClient, router: RouterProcess, stub: EngineStub, body: dict[str, object]
) -> None:
    """Fail in a block whose reservation is gone."""
    async with router.serving(stub), client.reserved(body):
        await router.delete(f"/replicas/{stub.name}")
        raise ZeroDivisionError


async def test_threads_have_one_too(router: RouterProcess) -> None:
    """Most gateways in Python are not on an event loop."""
    async with engines(1) as (stub,), router.serving(stub):
        body = {"model": stub.model, "token_ids": prompt_ids(64, 2)}

        def ask_and_report() -> str:
            with SelectionClient(router.url) as client, client.reserved(body) as found:
                client.prefill_complete(found)
                client.output(found, 2)
                return found.replica

        assert await asyncio.to_thread(ask_and_report) == stub.name
        await router.until_idle()


async def test_a_refusal_is_an_error_with_a_code(router: RouterProcess) -> None:
    """Who asks must tell a full fleet from a wrong question."""
    async with AsyncSelectionClient(router.url) as client:
        with pytest.raises(SelectionError) as refused:
            await client.reserve({"model": "nobody-has-it", "token_ids": [1]})
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
