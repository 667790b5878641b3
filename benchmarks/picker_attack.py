"""Does an endpoint picker under attack stay within its bounds, and serve again when it is over?

    python -m benchmarks.picker_attack --streams 10000

Each line is an attack with so many streams at once, over some connections, from another process:
memory and open files of the router at their highest, what the streams were told, how long an honest
request took meanwhile, and what is left a moment later: memory, files, reservations.

    silent      streams that say nothing at all
    beginning   headers and the beginning of a body, and nothing more
    endless     bodies that go on for ever, from every stream
    idle        whole requests, which are booked, and whose responses never come
    left        whole requests, cut off as soon as they are answered
    large       one message each of nearly the largest size, all at once; of at most 500 streams,
                since the attacker needs far more memory for them than the router
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc

from benchmarks.figures import report
from tests.e2e.test_endpoint_picker import picker_of
from tests.support.engine_stub import EngineStub
from tests.support.picker_streams import OpenStream, head, picker_streams, piece
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

PER_CONNECTION = 250
"""Streams; many servers allow no more over one."""
MOST_LARGE = 500
_PIECE = b"x" * 16_384
_WATCH_S = 0.05
_CLOSED = "closed"
RESET = "reset while it sent"


class Bounds(NamedTuple):
    """The limits that the router is configured with."""

    streams: int = 16_384
    reservations: int = 16_384
    body_bytes: int = 4 << 20
    buffered_bytes: int = 256 << 20
    body_s: float = 20.0
    idle_s: float = 20.0

    def config(self) -> dict[str, Any]:
        return {
            "health": {**QUICK_HEALTH, "interval_s": 5.0},
            "server": {
                "max_body_bytes": self.body_bytes,
                "max_buffered_bytes": self.buffered_bytes,
                "timeouts": {"client_body_s": self.body_s},
            },
            "doors": {
                "max_reservations": self.reservations,
                "reservation_idle_s": self.idle_s,
                "ext_proc": {"listen": "127.0.0.1:0", "max_streams": self.streams},
            },
        }


class Target(NamedTuple):
    """The attackers' knowledge of the router."""

    address: str
    model: str
    body_bytes: int


# --- the attackers --------------------------------------------------------------------------------

Attack = Callable[[Any, "Target"], Coroutine[Any, Any, str]]
"""The behaviour of a stream; it returns what the stream was answered."""


async def _silent(call: Any, _target: Target) -> str:
    return await _told(call)


async def _beginning(call: Any, _target: Target) -> str:
    await _say(call, head(), piece(b'{"model": '))
    return await _told(call)


async def _endless(call: Any, _target: Target) -> str:
    told = asyncio.ensure_future(_told(call))
    is_open = await _say(call, head())
    while is_open:
        is_open = await _say(call, piece(_PIECE))
    return await told


async def _idle(call: Any, target: Target) -> str:
    await _say(call, *_question(target))
    return await _told(call)


async def _left(call: Any, target: Target) -> str:
    await _say(call, *_question(target))
    answer = await call.read()
    call.cancel()
    return _name(answer)


async def _large(call: Any, target: Target) -> str:
    await _say(call, head(), piece(b"x" * (target.body_bytes - 1024)))
    return await _told(call)


ATTACKS: dict[str, Attack] = {
    "silent": _silent,
    "beginning": _beginning,
    "endless": _endless,
    "idle": _idle,
    "left": _left,
    "large": _large,
}


async def _say(call: Any, *messages: Any) -> bool:
    """Return whether all could be sent; else the other side has ended it, and why is to be read."""
    try:
        for message in messages:
            await call.write(message)
    except (grpc.RpcError, asyncio.InvalidStateError):
        return False
    return True


def _question(target: Target) -> tuple[Any, Any]:
    body = json.dumps({"model": target.model, "prompt": [1, 2, 3]}).encode()
    return head(), piece(body, is_last=True)


async def _told(call: Any) -> str:
    """Return the first refusal, or that the stream was ended without one."""
    told = ""
    while (answer := await call.read()) is not grpc.aio.EOF:
        told = told or _name(answer)
        if told.isdigit():
            return told
    return f"{told}, {_CLOSED}" if told else _CLOSED


def _name(answer: Any) -> str:
    if answer is grpc.aio.EOF:
        return _CLOSED
    if answer.HasField("immediate_response"):
        return str(answer.immediate_response.status.code)
    return "sent on"


async def _attack(name: str, target: Target, streams: int, over: Connection) -> None:
    """Run all streams, and return what each was answered."""
    async with contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(picker_streams(target.address))
            for _ in range(-(-streams // PER_CONNECTION))
        ]
        told = await asyncio.gather(
            *(
                _one(ATTACKS[name], connections[number % len(connections)], target)
                for number in range(streams)
            )
        )
    over.send(dict(collections.Counter(told)))


async def _one(attack: Attack, open_stream: OpenStream, target: Target) -> str:
    call = open_stream()
    try:
        return await attack(call, target)
    except grpc.aio.AioRpcError as error:
        # gRPC's client lost the answer: the stream was ended while a message was on its way. What a
        # server fails with has other details.
        was_reset = error.details() == "Internal error from Core"
        return RESET if was_reset else str(error.code().name)


def _be_attacker(name: str, target: Target, streams: int, over: Connection) -> None:
    asyncio.run(_attack(name, target, streams, over))


# --- what is seen of the router -------------------------------------------------------------------


class _Watch:
    """The highest values of a process while an attack goes on, and the longest honest request."""

    def __init__(self, router: RouterProcess, target: Target) -> None:
        self._router = router
        self._target = target
        self.rss_bytes = 0
        self.files = 0
        self.honest_s: list[float] = []
        self.honest: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(each) for each in (self._sample(), self._ask())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _sample(self) -> None:
        while True:
            self.rss_bytes = max(self.rss_bytes, self._router.rss_bytes)
            self.files = max(self.files, open_files(self._router))
            await asyncio.sleep(_WATCH_S)

    async def _ask(self) -> None:
        async with picker_streams(self._target.address) as open_stream:
            while True:
                began = time.monotonic()
                told = await _one(_left, open_stream, self._target)
                self.honest[told] += 1
                self.honest_s.append(time.monotonic() - began)
                await asyncio.sleep(0.2)


def open_files(router: RouterProcess) -> int:
    """Return how many files it has open."""
    return len(os.listdir(f"/proc/{router.process.pid}/fd"))


async def attacked(
    router: RouterProcess, stub: EngineStub, name: str, streams: int, bounds: Bounds
) -> dict[str, Any]:
    """Attack a router, and wait until it is as before.

    Args:
        router: It runs, and *stub* is among its replicas.
        stub: Whose model is asked for.
        name: Which attack.
        streams: How many at once.
        bounds: What the router was started with.
    Returns:
        What was seen.
    """
    before = router.rss_bytes, open_files(router)
    target = Target(picker_of(router), stub.model, bounds.body_bytes)
    watch = _Watch(router, target)
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    arguments = (name, target, streams, theirs)
    began = time.monotonic()
    attacker = spawning.Process(target=_be_attacker, args=arguments, daemon=True)
    attacker.start()
    try:
        async with watch.watching():
            while not ours.poll() and attacker.is_alive():
                await asyncio.sleep(_WATCH_S)
            seconds = time.monotonic() - began
            assert ours.poll(), "the attacker has ended without a word"
            told = ours.recv()
            attacker.join()
    finally:
        attacker.kill()
    await router.until(
        lambda now: not now.sum("kvroute_reservations"), "no booking", 4 * bounds.idle_s
    )
    await router.until_idle()
    return {
        "streams": streams,
        "seconds": round(seconds, 1),
        "told": told,
        "mb_before": before[0] >> 20,
        "mb_highest": watch.rss_bytes >> 20,
        "mb_after": router.rss_bytes >> 20,
        "files_before": before[1],
        "files_highest": watch.files,
        "files_after": open_files(router),
        "honest": dict(watch.honest),
        "honest_longest_ms": round(max(watch.honest_s, default=0) * 1e3),
    }


async def run(names: Sequence[str], streams: int) -> None:
    """Run the attacks one after another against one router."""
    bounds = Bounds()
    with router_process(bounds.config()) as router:
        async with EngineStub("attacked") as stub, router.serving(stub):
            for name in names:
                count = min(streams, MOST_LARGE) if name == "large" else streams
                found = await attacked(router, stub, name, count, bounds)
                report("picker_attack", of=name, **found)
            router.check_log()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options = parser.parse_args()
    asyncio.run(run(options.attacks, options.streams))


if __name__ == "__main__":
    main()
