"""Two prompts in turn, over two idle replicas with room for one each: whoever decides well sends
each to its own, and reuses nearly all; who forgets what it has decided sends both to one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from tests.support.actual_hits import cached_tokens, until_told
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.engine_stub import unique
from tests.support.http_client import Answer, ask
from tests.support.router_process import RouterProcess

PROMPT_TOKENS = 1024
TURNS = 12
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Turn:
    """One request."""

    predicted: int
    """Prompt tokens that were to be reused."""
    reused: int
    """Prompt tokens that were, as the engine reports."""


class Played(Protocol):
    """What a play needs of a replica."""

    @property
    def name(self) -> str: ...
    async def get(self, path: str) -> Answer: ...


AskOne = Callable[[RouterProcess, dict[str, Any]], Awaitable[tuple[str, int, Answer]]]
"""Sends a request in some way; returns the replica's name, the prediction and the response."""


async def by_proxy(router: RouterProcess, body: dict[str, Any]) -> tuple[str, int, Answer]:
    """The router sends it."""
    answer = await router.post("/v1/completions", body)
    return answer.headers["x-kv-replica"], int(answer.headers["x-kv-hit-tokens"]), answer


async def by_selection(router: RouterProcess, body: dict[str, Any]) -> tuple[str, int, Answer]:
    """The router is asked, and nothing is booked."""
    found = (await router.post("/select", body)).json
    return found["replica"], found["overlap"]["longest_matched"], await _send_direct(found, body)


async def by_reservation(router: RouterProcess, body: dict[str, Any]) -> tuple[str, int, Answer]:
    """The router is asked, and books what it says until it is told the end."""
    asked = await router.post("/select_and_reserve", body)
    assert asked.status == 200, asked.body
    answer = await _send_direct(asked.json, body)
    path = f"/reservations/{asked.json['selection_id']}"
    ended = await ask(router.port, "DELETE", path, {"usage": answer.json["usage"]}, _JSON)
    assert ended.status == 200, ended.body
    return asked.json["replica"], asked.json["overlap"]["longest_matched"], answer


def by_gateway(port: int) -> AskOne:
    """A gateway that asks the router sends it.

    Args:
        port: Where it listens.
    """

    async def send(router: RouterProcess, body: dict[str, Any]) -> tuple[str, int, Answer]:
        answer = await ask(port, "POST", "/v1/completions", body, _JSON)
        logged = await _ended(router)
        return logged["replica"], logged["predicted"]["cached_tokens"], answer

    return send


async def play(
    router: RouterProcess, replicas: Sequence[Played], seed: int, ask_one: AskOne
) -> list[Turn]:
    """Send them, one request at a time.

    Args:
        router: Decides.
        replicas: Fresh ones, of one model.
        seed: Of the prompts.
        ask_one: How.
    """
    random = Random(seed)
    prompts = [[random.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
    model = (await replicas[0].get("/v1/models")).json["data"][0]["id"]
    by_name = {replica.name: replica for replica in replicas}
    turns: list[Turn] = []
    for number in range(TURNS):
        body = {"model": model, "prompt": prompts[number % 2], "max_tokens": 2}
        name, predicted, answer = await ask_one(router, body)
        assert answer.status == 200, answer.body
        await until_told(router, by_name[name])
        turns.append(Turn(predicted, cached_tokens(answer)))
    return turns


def share_reused(turns: Sequence[Turn]) -> float:
    """Of all prompt tokens; 10/12 less the last block is possible, since each must come once."""
    return sum(turn.reused for turn in turns) / (len(turns) * PROMPT_TOKENS)


def room_for_one() -> tuple[str, ...]:
    """Arguments of an engine with room for one prompt and little more."""
    options = {
        "served_model_name": unique("turns"),
        "num_blocks": PROMPT_TOKENS // 16 * 11 // 10,
        "max_model_len": PROMPT_TOKENS + 64,
    }
    return simulated("full", **options)


@contextlib.asynccontextmanager
async def fresh_replicas(router: RouterProcess) -> AsyncIterator[list[EngineProcess]]:
    """Two of them."""
    async with engine_processes(2, *room_for_one()) as replicas, router.serving(*replicas):
        yield replicas


async def _send_direct(found: dict[str, Any], body: dict[str, Any]) -> Answer:
    port = int(found["address"].rpartition(":")[2])
    return await ask(port, "POST", "/v1/completions", body, found.get("headers"))


async def _ended(router: RouterProcess) -> dict[str, Any]:
    """The last request, when it is over. A scrape would do as well, but what the policy knows of a
    cache is kept for a moment when it is scraped."""
    while True:
        found: dict[str, Any] = (await router.get("/requests?limit=1")).json["requests"][0]
        if found["end"]:
            return found
