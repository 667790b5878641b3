"""The streams of external processing when the router stops: responses pass through them, so their
end is the clients'."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
import pytest

from router.doors.messages import ProcessingRequest
from tests.e2e.test_endpoint_picker import health, picker_of
from tests.support.engine_stub import EngineStub, engines
from tests.support.picker_streams import head, picker_streams, piece, refusal
from tests.support.router_process import QUICK_HEALTH, router_process
from tests.support.waiting import DEADLINE_S, eventually

DOORS = {"ext_proc": {"listen": "127.0.0.1:0"}}


async def begin(call: Any, stub: EngineStub) -> None:
    """Have the picker choose, and begin the response."""
    body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
    await call.write(head())
    await call.write(piece(body, is_last=True))
    for _ in ("headers", "body"):
        assert not (await call.read()).HasField("immediate_response")
    begun = ProcessingRequest()
    begun.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    await call.write(begun)
    assert (await call.read()).HasField("response_headers")


def part(body: bytes, is_last: bool = False) -> Any:
    """The message with a piece of the response."""
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = body, is_last
    return message


async def test_responses_that_pass_are_finished_before_the_router_ends() -> None:
    """As those of its own clients are: each roll-out would else cut every response of a gateway."""
    async with engines(1) as (stub,):
        with router_process({"health": QUICK_HEALTH, "doors": DOORS}) as router:
            address = picker_of(router)
            async with router.serving(stub), picker_streams(address) as open_stream:
                call = open_stream()
                await begin(call, stub)
                router.tell_to_stop()
                await eventually(lambda: "shutting down" in router.log(), "it has heard the signal")
                until = time.monotonic() + 1  # longer than one that has nothing to do goes on
                while time.monotonic() < until:
                    await call.write(part(b"data: {}\n\n"))
                    assert (await call.read()).HasField("response_body")
                    assert (await router.get("/readyz")).status == 503
                assert await health(address, "readiness") == 2
                late = open_stream()
                await late.write(head())
                await late.write(piece(b"{}", is_last=True))
                assert await refusal(late) == (503, "shutting_down")
                await call.write(part(b"data: [DONE]\n\n", is_last=True))
                assert (await call.read()).HasField("response_body")
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
                assert await router.ended() == 0
            router.check_log()


@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_a_response_without_end_is_cut(how: str) -> None:
    """A stream that hangs must not keep the router alive forever."""
    timeouts = {"shutdown_grace_s": 1 if how == "grace" else 100 * DEADLINE_S}
    config = {"health": QUICK_HEALTH, "doors": DOORS, "server": {"timeouts": timeouts}}
    async with engines(1) as (stub,):
        with router_process(config) as router:
            async with router.serving(stub), picker_streams(picker_of(router)) as open_stream:
                call = open_stream()
                await begin(call, stub)
                router.tell_to_stop()
                if how == "second signal":
                    await eventually(lambda: "shutting down" in router.log(), "it has heard it")
                    router.tell_to_stop()
                assert await router.ended() == 0
            router.check_log()
