"""Is as much of the prompts reused with eight routers over one fleet as with one?

    python -m benchmarks.fleet_routers --trace mooncake_conversation.jsonl.gz

Simulated engines, and before them 1, 2, 4 and 8 routers, all of them real processes, which follow
all event streams and share their load over one Valkey or Redis. Requests go to the routers in turn,
so many at a time. They are those of a trace (JSON lines with `hash_ids`, of which equal ones at the
beginning are a shared prefix; every id stands for --tokens-per-id tokens here), or without one
those of conversations that begin alike, whose clients wait for each response and then for
--pause-s, as people and tools do. With `--pause-s 0` the next turn is at another router before that
one can know that the last one is over. One line a count: `reused_pct` of all prompt tokens, as the
engines report them. How soon the routers know of each
other's load is what `benchmarks.board_delay --routers 8` measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.figures import report
from tests.support.actual_hits import hits
from tests.support.engine_process import EngineProcess, engine_processes, simulated
from tests.support.http_client import ask
from tests.support.router_process import RouterProcess, router_process
from tests.support.valkey_server import ValkeyServer

_MODEL = "fleet"
_JSON = {"content-type": "application/json"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2000, help="of 16 tokens, of each engine")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.25, help="of a client between turns")
    parser.add_argument("--tokens-per-id", type=int, default=32)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    clients = conversations(options.requests) if options.trace is None else _of_trace(options)
    prompts = [[_prompt(ids, options.tokens_per_id) for ids in turns] for turns in clients]
    for count in options.routers:
        asyncio.run(_measure(options, count, prompts))


def conversations(count: int) -> list[list[list[int]]]:
    """Return the ids of the prompts of each conversation, turn by turn, behind one of a few
    instructions."""
    random, found = Random(3), []
    fresh = itertools.count(100)
    while sum(map(len, found)) < count:
        ids = [random.randrange(4)]
        turns = []
        for _ in range(random.randint(4, 12)):
            ids = [*ids, *itertools.islice(fresh, random.randint(1, 6))]
            turns.append(ids)
        found.append(turns)
    return found


def _of_trace(options: argparse.Namespace) -> list[list[list[int]]]:
    opened = gzip.open if options.trace.suffix == ".gz" else open
    with opened(options.trace, "rt") as file:
        lines = itertools.islice(file, options.requests)
        return [[json.loads(line)["hash_ids"]] for line in lines]


def _prompt(ids: Sequence[int], tokens_per_id: int) -> list[int]:
    return [token for each in ids for token in Random(each).choices(range(256), k=tokens_per_id)]


async def _measure(options: argparse.Namespace, count: int, clients: list[list[list[int]]]) -> None:
    prompts = [prompt for turns in clients for prompt in turns]
    longest = max(map(len, prompts))
    blocks = max(options.blocks, longest // 16 + 64)
    engine = simulated(
        "full", served_model_name=_MODEL, num_blocks=blocks, max_model_len=longest + 64
    )
    async with (
        engine_processes(options.engines, *engine) as engines,
        _routers(engines, count) as routers,
    ):
        room, in_turn = asyncio.Semaphore(options.at_a_time), itertools.cycle(routers)
        played = await asyncio.gather(
            *(_converse(room, in_turn, turns, options.pause_s) for turns in clients)
        )
    found = [each for turns in played for each in turns]
    reused, exact = sum(each[1] for each in found), sum(each[0] == each[1] for each in found)
    tokens = sum(map(len, prompts))
    report(
        "fleet_routers",
        routers=count,
        engines=options.engines,
        requests=len(prompts),
        pause_s=options.pause_s,
        prompt_tokens=tokens,
        reused_pct=round(100 * reused / tokens, 2),
        exact_pct=round(100 * exact / len(found), 1),
    )


@contextlib.asynccontextmanager
async def _routers(
    engines: Sequence[EngineProcess], count: int
) -> AsyncIterator[list[RouterProcess]]:
    with contextlib.closing(ValkeyServer()) as server, contextlib.ExitStack() as stack:
        config: dict[str, Any] = {
            "replicas": [{"url": each.url, "id": each.name} for each in engines],
            "board": {"url": server.url, "secret": "shared-by-all"},
        }
        routers = [stack.enter_context(router_process(config)) for _ in range(count)]
        for router in routers:
            for engine in engines:
                await router.until_in_rotation(engine)  # type: ignore[arg-type]
            await router.until(
                lambda now: now.sum("kvroute_board_writers", board="valkey") == count - 1, "heard"
            )
        yield routers


async def _converse(
    room: asyncio.Semaphore,
    routers: Iterator[RouterProcess],
    turns: Sequence[list[int]],
    pause_s: float,
) -> list[tuple[int, int]]:
    """Return the tokens predicted and the tokens reused in each turn."""
    found = []
    async with room:
        for prompt in turns:
            body = {"model": _MODEL, "prompt": prompt, "max_tokens": 4}
            answer = await ask(next(routers).port, "POST", "/v1/completions", body, _JSON)
            assert answer.status == 200, answer.body
            found.append(hits(answer))
            await asyncio.sleep(pause_s)
    return found


if __name__ == "__main__":
    main()
