"""The core's threads where memory is refused at any place: every request has its end, and after it
all is as before."""

from __future__ import annotations

import asyncio
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.engine_stub import engines, prompt_ids
from tests.support.http_client import ask
from tests.support.native import needed_compiler
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

SOURCE = Path(__file__).parents[1] / "support" / "failing_new.cpp"
CLIENTS, EACH = 16, 60


class Failing:
    """`operator new` of a process that fails once in so many calls."""

    def __init__(self, directory: Path) -> None:
        library, self._file = directory / "failing_new.so", directory / "one_of"
        options = ("-std=c++20", "-O1", "-fPIC", "-shared")
        command = [needed_compiler(), *options, "-o", library, SOURCE]
        subprocess.run(command, check=True)
        self._file.write_bytes(struct.pack("I", 0))
        self.environ = {"LD_PRELOAD": str(library), "FAILING_NEW": str(self._file)}

    def one_of(self, number: int) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("I", number))


@pytest.mark.parametrize("one_of", [1000, 100, 10])
async def test_refused_memory_ends_requests_and_nothing_else(one_of: int, tmp_path: Path) -> None:
    """A process ended where a connection was freed that was still watched, and a request waited for
    ever where what it waited for could not be told."""
    failing = Failing(tmp_path)
    config = {"health": QUICK_HEALTH, "doors": {"reservation_idle_s": 1}}
    async with engines(2) as stubs:
        with router_process(config, failing.environ) as router:
            async with router.serving(*stubs):
                failing.one_of(one_of)
                clients = (client(router, stubs[0].model, n, EACH) for n in range(CLIENTS))
                found = {status for each in await asyncio.gather(*clients) for status in each}
                assert router.process.poll() is None, router.log()[-4000:]
                failing.one_of(0)
                assert found <= {200, 404, 502, 503, None}
                assert found >= {200}
                assert set(await client(router, stubs[0].model, CLIENTS, EACH)) == {200}
                await router.until_idle()
                await router.until(
                    lambda now: not now.sum("kvroute_reservations"), "no reservation is left"
                )


async def client(router: RouterProcess, model: str, number: int, count: int) -> list[int | None]:
    """What a client got for each of *count* requests of all kinds; None where it was cut off."""
    random = Random(number)
    found: list[int | None] = []
    for each in range(count):
        found.extend(await got(play(router, model, random, each)))
    return found


async def got(statuses: AsyncIterator[int]) -> list[int | None]:
    try:
        return [status async for status in statuses]
    except (ConnectionError, EOFError):
        return [None]


async def play(router: RouterProcess, model: str, random: Random, each: int) -> AsyncIterator[int]:
    ids = prompt_ids(16 * random.randrange(1, 40), random.randrange(8))
    body: dict[str, Any] = {"model": model, "prompt": ids}
    kind = each % 6
    if kind == 0:
        yield (await router.post("/v1/completions", body)).status
    elif kind == 1:
        yield (await router.post("/v1/completions", {**body, "stream": True})).status
    elif kind == 2:
        messages = [{"role": "user", "content": "word " * len(ids)}]
        chat = {"model": model, "messages": messages}
        yield (await router.post("/v1/chat/completions", chat)).status
    elif kind == 3:
        yield (await router.post("/route", body)).status
    elif kind == 4:
        answer = await router.post("/select_and_reserve", {"model": model, "token_ids": ids})
        yield answer.status
        if answer.status == 200:
            path = f"/reservations/{answer.json['selection_id']}"
            yield (await ask(router.port, "DELETE", path)).status
    else:
        yield (await router.get("/replicas")).status
