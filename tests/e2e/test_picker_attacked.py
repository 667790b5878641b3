"""The endpoint picker's port, spoken to by something that is no honest gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from router.doors.messages import ProcessingRequest
from tests.e2e.test_endpoint_picker import health, picker_of, post, until_unbooked
from tests.support.engine_stub import engines
from tests.support.envoy import envoy, needs_envoy
from tests.support.picker_streams import OpenStream, head, picker_streams, piece, refusal
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

MAX_BODY = 100_000
CONFIG: dict[str, Any] = {
    "health": QUICK_HEALTH,
    "server": {"max_body_bytes": MAX_BODY, "timeouts": {"client_body_s": 0.5}},
    "doors": {
        "reservation_idle_s": 1.0,
        "ext_proc": {"listen": "127.0.0.1:0", "max_streams": 20},
    },
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG) as process:
        yield process


def streams(router: RouterProcess) -> contextlib.AbstractAsyncContextManager[OpenStream]:
    """What opens a stream of external processing."""
    return picker_streams(picker_of(router))


async def test_a_body_without_end_is_413(router: RouterProcess) -> None:
    """It is not kept beyond the bound."""
    async with streams(router) as open_stream:
        call = open_stream()
        await call.write(head())
        for _ in range(3):
            await call.write(piece(b"x" * (MAX_BODY // 2)))
        assert await refusal(call) == (413, "body_too_large")
        await until_unbooked(router)


async def test_a_stream_that_never_sends_its_body_is_ended(router: RouterProcess) -> None:
    """Within the time that any client has for its body."""
    async with streams(router) as open_stream:
        silent, headless = open_stream(), open_stream()
        await silent.write(head())
        await silent.write(piece(b'{"model": '))
        assert await refusal(silent) == (400, "invalid_value")
        assert await refusal(headless) == (400, "invalid_value")


async def test_a_stream_of_which_nothing_is_heard_ends(router: RouterProcess) -> None:
    """With its reservation; else some that never end would take all the room for streams."""
    async with engines(1) as (stub,), router.serving(stub), streams(router) as open_stream:
        calls = [open_stream() for _ in range(20)]
        body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
        for call in calls:
            await call.write(head())
            await call.write(piece(body, is_last=True))
        for call in calls:
            assert not (await call.read()).HasField("immediate_response")
            await call.read()
            assert await call.read() is grpc.aio.EOF
        await until_unbooked(router)
        again = open_stream()
        await again.write(head())
        await again.write(piece(body, is_last=True))
        assert not (await again.read()).HasField("immediate_response")


async def test_more_streams_than_may_be_are_refused(router: RouterProcess) -> None:
    """And when they are gone, others are served."""
    async with engines(1) as (stub,), router.serving(stub), streams(router) as open_stream:
        calls = [open_stream() for _ in range(60)]
        statuses = [await refusal(call) for call in calls]
        assert statuses.count((503, "overloaded")) >= 40
        call = open_stream()
        await call.write(head())
        body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
        await call.write(piece(body, is_last=True))
        answer = await call.read()
        endpoint = answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
        assert endpoint == f"127.0.0.1:{stub.port}"
        set_headers = answer.request_headers.response.header_mutation.set_headers
        told = {each.header.key: each.header.raw_value for each in set_headers}
        assert told["x-gateway-destination-endpoint"].decode() == endpoint, "both, and equal"
        assert answer.request_headers.response.clear_route_cache
        echoed = await call.read()
        streamed = echoed.request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (body, True)
        call.cancel()
        await until_unbooked(router)


@pytest.mark.parametrize("mode", [1, 3])
async def test_a_mode_that_is_none_of_ours_is_named(router: RouterProcess, mode: int) -> None:
    """Else the gateway would wait for its timeout."""
    async with streams(router) as open_stream:
        call = open_stream()
        await call.write(head(mode))
        assert await refusal(call) == (400, "invalid_value")


async def test_messages_out_of_order_and_garbage_break_nothing(router: RouterProcess) -> None:
    """Whoever sends them loses its stream, nobody else."""
    async with engines(1) as (stub,), router.serving(stub), streams(router) as open_stream:
        for messages in (
            [piece(b"{}", is_last=True)],
            [head(), head()],
            [head(path="/\x00%ff?" + "x" * 3000), piece(b"{", is_last=True)],
            [head(**{"x-request-id": "y" * 5000}), piece(b"\xff", is_last=True)],
        ):
            call = open_stream()
            for message in messages:
                await call.write(message)
            assert (await refusal(call))[0] == 400
        garbage = open_stream()
        await garbage.write(b"\xff\xff\xff\xff")
        assert (await refusal(garbage))[0] == 400
        silent = ProcessingRequest()
        call = open_stream()
        await call.write(silent)
        await call.write(head())
        await call.write(piece(b"{", is_last=True))
        assert (await refusal(call))[0] == 400
        assert await health(picker_of(router), "readiness") == 1
        await until_unbooked(router)


async def test_a_gateway_that_dies_leaves_nothing_booked(router: RouterProcess) -> None:
    """Its streams end with its connection."""
    async with engines(1) as (stub,), router.serving(stub):
        body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
        async with streams(router) as open_stream:
            calls = [open_stream() for _ in range(10)]
            for call in calls:
                await call.write(head())
                await call.write(piece(body, is_last=True))
            for call in calls:
                await call.read()
            assert (await router.metrics()).sum("kvroute_reservations") == 10
        await until_unbooked(router)
        router.check_log()


@needs_envoy
async def test_the_picker_can_speak_tls(tmp_path: Path) -> None:
    """Gateways on other machines want it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    with (tmp_path / "cert.pem").open("wb") as chain:
        for blob in issued.cert_chain_pems:
            chain.write(blob.bytes())
    tls = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    config = {"doors": {"ext_proc": {"listen": "127.0.0.1:0", "tls": tls}}, "health": QUICK_HEALTH}
    with router_process(config) as router:
        async with engines(1) as (stub,), router.serving(stub):
            with envoy(picker_of(router), ca=tmp_path / "ca.pem") as gateway:
                answer = await post(gateway, {"model": stub.model, "prompt": [1]})
                assert answer.status == 200, answer.body
                await until_unbooked(router)


@needs_envoy
async def test_a_restarted_picker_serves_again() -> None:
    """While it is away requests are refused by the gateway; what it had booked went with it."""
    with router_process(CONFIG) as first:
        address = picker_of(first)
        with envoy(address) as gateway:
            async with engines(1) as (stub,):
                body = {"model": stub.model, "prompt": [1]}
                async with first.serving(stub):
                    assert (await post(gateway, body)).status == 200
                first.stop()
                assert (await post(gateway, body)).status == 500
                again = {**CONFIG, "doors": {"ext_proc": {"listen": address}}}
                with router_process(again) as second:
                    picker_of(second)
                    async with second.serving(stub):
                        while (await post(gateway, body)).status != 200:
                            await asyncio.sleep(0.05)
                        await until_unbooked(second)
