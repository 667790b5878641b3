"""Load as SGLang 0.5.23 publishes it (`--load-publish-endpoint`), over real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from router.fleet.engine_load import EngineLoad, EngineRankLoad
from router.fleet.load_topic import LoadStat, read_load, whole_load
from router.fleet.replica import Replica
from tests.router.fleet.test_registry import SGLANG, Setting, setting, until

_SEQ = (0).to_bytes(8, "big")


def _payload(*values: object) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", *values])


class Publisher:
    """The load socket of one rank: bound, with a short queue, a `LoadStat` for each call."""

    def __init__(self, context: zmq.Context[Any], rank: int, base: int | None = None) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self.socket.set_hwm(8)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = 0 if base is None else base + rank
        if base is None:
            self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        else:
            self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        self._rank = rank
        self._seq = itertools.count()

    def say(self, running: int, waiting: int, tokens: int, max_tokens: int) -> None:
        payload = _payload(
            *(running, waiting, tokens, max_tokens, self._rank),
            *(waiting * 100, tokens + waiting * 100, 48, 123_456, 7_890),
        )
        seq = next(self._seq).to_bytes(8, "big")
        self.socket.send_multipart((b"load", seq, payload))


@contextmanager
def publishers(count: int) -> Iterator[list[Publisher]]:
    """Those of one replica, at ports that follow each other."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        while True:
            made = [Publisher(context, 0)]
            try:
                for rank in range(1, count):
                    made.append(Publisher(context, rank, made[0].port))
            except zmq.ZMQError:  # a port was taken
                context.destroy(linger=0)
                context = zmq.Context()
                continue
            yield made
            return
    finally:
        context.destroy(linger=0)


async def sglang(here: Setting, ranks: list[Publisher], **more: object) -> Replica:
    """A replica that names these sockets."""
    engine = await here.engine()
    engine.respond("/kv_event_sources", {}, status=404)
    named = {"dp_size": len(ranks), "load_endpoint_port_base": ranks[0].port}
    engine.respond("/server_info", {"kv_events": SGLANG | named | more})
    engine.respond("/metrics", b"sglang:num_running_reqs 1\nsglang:num_queue_reqs 1\n")
    return here.add(engine, "r")


async def until_load(replica: Replica, expected: EngineLoad, *said: tuple[Publisher, int]) -> None:
    """Say it again, as the engine does, until the router has heard it."""

    def is_known() -> bool:
        for publisher, running in said:
            publisher.say(running, 2, 500, 1000)
        return replica.engine_load == expected

    await until(is_known)


async def test_the_load_that_is_published_is_taken_at_once() -> None:
    """Requests of other clients count before the next scrape, which may be seconds away."""
    with publishers(1) as (publisher,):
        async with setting() as here:
            replica = await sglang(here, [publisher])
            expected = EngineLoad(5, 2, 0.5, cache_tokens=1000)
            await until_load(replica, expected, (publisher, 5))
            assert replica.foreign_requests == 7
            asked = here.engines[0].asked["/metrics"]
            for running in range(6, 40):
                await until_load(
                    replica, EngineLoad(running, 2, 0.5, cache_tokens=1000), (publisher, running)
                )
            assert here.engines[0].asked["/metrics"] <= asked + 1, "nothing more to be asked"


async def test_every_rank_has_a_load_of_its_own() -> None:
    """Each publishes at a port of its own; one that has said nothing is not taken for idle."""
    with publishers(2) as (first, second):
        async with setting() as here:
            replica = await sglang(here, [first, second])
            expected = EngineLoad(
                *(10, 4, 0.5, (EngineRankLoad(0, 7, 2), EngineRankLoad(1, 3, 2))),
                cache_tokens=1000,
            )
            await until_load(replica, expected, (first, 7), (second, 3))
            assert replica.foreign_requests_by_rank == {0: 9, 1: 5}


async def test_when_it_falls_silent_its_metrics_are_asked_again() -> None:
    """The socket may be gone, or a firewall may have closed its port."""
    with publishers(1) as (publisher,):
        async with setting() as here:
            replica = await sglang(here, [publisher])
            await until_load(replica, EngineLoad(5, 2, 0.5, cache_tokens=1000), (publisher, 5))
            publisher.socket.close()
            await until(lambda: replica.engine_load == EngineLoad(1, 1, None))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"load", _SEQ],
        [b"load", _SEQ, b"", b""],
        [b"load", _SEQ, b""],
        [b"load", _SEQ, b"\xc1"],
        [b"load", _SEQ, msgspec.msgpack.encode(["KVStat", 1, 2, 3, 4])],
        [b"load", _SEQ, _payload(1, 2, 3)],
        [b"load", _SEQ, _payload(-1, 2, 3, 4)],
        [b"load", _SEQ, _payload(10**9, 2, 3, 4)],
        [b"load", _SEQ, _payload(1, 2, 3, 2**60)],
        [b"load", _SEQ, _payload("1", 2, 3, 4)],
    ],
    ids=str,
)
def test_what_is_no_load_is_ignored(frames: list[bytes]) -> None:
    """A socket is whoever listens at that port."""
    assert read_load(frames) is None


@pytest.mark.parametrize("more", [(), (None,), (3, 0, 0), (3, 1, 2, 3, 4, 5, "new", {"a": [1]})])
def test_what_newer_versions_append_is_ignored(more: tuple[object, ...]) -> None:
    """Four positions came after the first release, and SGLang says that more may."""
    assert read_load([b"load", _SEQ, _payload(1, 2, 3, 4, *more)]) == LoadStat(1, 2, 3, 4)


def test_a_capacity_of_zero_is_one_that_is_not_known() -> None:
    """So says SGLang; nothing is divided by it."""
    assert whole_load({0: LoadStat(1, 2, 3, 0)}) == EngineLoad(1, 2, None)
    assert whole_load({1: LoadStat(1, 0, 30, 10), 0: LoadStat(0, 0, 1, 20)}) == EngineLoad(
        *(1, 0, 1.0, (EngineRankLoad(0, 0, 0), EngineRankLoad(1, 1, 0))), cache_tokens=10
    )
