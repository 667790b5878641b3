"""Two real vLLM servers of a hybrid model behind the router: the server reuses exactly what is
predicted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.http_client import ask
from tests.support.router_process import RouterProcess, router_process
from tests.vllm.checking import JSON, Checker, Ledger, Request
from tests.vllm.conftest import Figures
from tests.vllm.model import GEMMA, sentence, write_model
from tests.vllm.published import census
from tests.vllm.server import VllmServer, running
from tests.vllm.workload import Material, Workload, token_ids

pytestmark = pytest.mark.timeout(1800)

BLOCKS = 128
"""Room for the blocks of some five of the longer prompts, in all three groups together."""
SLIDING, FULL = "group 0", "group 2"
MATERIAL = Material("hybrid")


@pytest.fixture(scope="module")
def servers(directory: Path) -> Iterator[list[VllmServer]]:
    """The second one computes prompts in chunks."""
    model = write_model(directory / "gemma", GEMMA)
    started = [
        VllmServer("a", model, directory, BLOCKS),
        VllmServer("b", model, directory, BLOCKS, "--max-num-batched-tokens", "192"),
    ]
    with running(*started):
        yield started


def configuration(
    servers: list[VllmServer], policy: str = "prefix", tokenizer: str = "replica"
) -> dict[str, Any]:
    return {
        "models": [{"name": "gemma", "tokenizer": tokenizer}],
        "replicas": [{"url": server.url, "id": server.name} for server in servers],
        "policy": {"name": policy},
        "health": {"interval_s": 1.0, "timeout_s": 1.0, "engine_load_stale_after_s": 5.0},
    }


async def in_rotation(router: RouterProcess, servers: list[VllmServer]) -> None:
    for server in servers:
        await router.until_in_rotation(server, 60)  # type: ignore[arg-type]


def check_all_exact(ledger: Ledger) -> None:
    assert not ledger.wrong, "\n".join(map(str, ledger.wrong))


async def evictions(servers: list[VllmServer]) -> dict[str, int]:
    """Blocks that the servers reported as evicted, of one of the two sliding-window groups and of
    full attention."""
    counts = [await census(server.replay_port) for server in servers]
    return {group: sum(count[f"{group} removed"] for count in counts) for group in (SLIDING, FULL)}


@pytest.mark.parametrize(
    ("policy", "tokenized"), [("prefix", "by the router"), ("random", "by a replica")]
)
async def test_every_serial_prediction_is_what_the_server_reuses(
    servers: list[VllmServer], directory: Path, figures: Figures, policy: str, tokenized: str
) -> None:
    """Also while blocks of sliding windows are evicted and full attention stays: an index that
    looks only at full attention fails here."""
    tokenizer = str(directory / "gemma") if tokenized == "by the router" else "replica"
    before = await evictions(servers)
    with router_process(configuration(servers, policy, tokenizer)) as router:
        await in_rotation(router, servers)
        checker = Checker(router, servers)
        await Workload(checker.check, "gemma", MATERIAL, policy).run(120)
        predictions = await router.metrics()
    lost = {group: count - before[group] for group, count in (await evictions(servers)).items()}
    figures.add(f"hybrid, serial, policy {policy}", f"{checker.ledger}; removed {lost}")
    check_all_exact(checker.ledger)
    assert predictions.sum("kvroute_predictions_total", outcome="exact") == 120, (
        "the router's own comparison says the same"
    )
    assert checker.ledger.hits >= 10
    assert checker.ledger.shortened_hits >= 1, (
        "hits of which sliding windows left less than full attention had"
    )
    assert checker.ledger.shortened - checker.ledger.shortened_hits >= 1, (
        "and those of which nothing was left"
    )
    assert min(lost.values()) > 0


async def test_one_request_after_the_other_without_any_wait(
    servers: list[VllmServer], figures: Figures
) -> None:
    """Clients do not wait for events: the figure shows what the few milliseconds between a response
    and its events cost."""
    with router_process(configuration(servers)) as router:
        await in_rotation(router, servers)
        checker = Checker(router, servers)
        await Workload(checker.send, "gemma", MATERIAL, "at once").run(100)
    figures.add("hybrid, serial, nothing waited for", checker.ledger.shares)
    figures.add(
        "hybrid, serial, nothing waited for, wrong",
        "; ".join(map(str, checker.ledger.wrong)) or "none",
    )
    assert checker.ledger.hits >= 10


async def test_a_router_restarted_in_the_middle_is_exact_at_once(
    servers: list[VllmServer], figures: Figures
) -> None:
    """It knows the servers' caches only from their replay, and the second router must know what the
    first one did."""
    ledgers = []
    for _ in range(2):
        router = RouterProcess(configuration(servers))
        try:
            await in_rotation(router, servers)
            checker = Checker(router, servers)
            await Workload(checker.check, "gemma", MATERIAL, "router restarted").run(40)
        finally:
            router.kill()
        ledgers.append(checker.ledger)
        check_all_exact(checker.ledger)
    figures.add("hybrid, serial, after the router was killed and restarted", ledgers[1])
    assert any(outcome.cached for outcome in ledgers[1].outcomes[:5]), (
        "it began with what it learned from a replay"
    )


async def test_a_server_restarted_at_its_address_is_forgotten_and_learned_again(
    servers: list[VllmServer], figures: Figures
) -> None:
    """It starts again at number 0 and does not say that it is another process."""
    with router_process(configuration(servers, "random")) as router:
        await in_rotation(router, servers)
        before = Checker(router, servers)
        await Workload(before.check, "gemma", MATERIAL, "server restarted").run(40)
        await restarted(router, servers[0], servers)
        after = Checker(router, servers)
        await Workload(after.check, "gemma", MATERIAL, "server restarted").run(60)
    figures.add("hybrid, serial, after a server was killed and restarted", after.ledger)
    check_all_exact(before.ledger)
    check_all_exact(after.ledger)
    assert any(
        outcome.replica == servers[0].name and outcome.cached for outcome in after.ledger.outcomes
    )


async def restarted(router: RouterProcess, server: VllmServer, servers: list[VllmServer]) -> None:
    server.kill()
    healthy = "kvroute_replica_healthy"
    await router.until(
        lambda now: now.sum(healthy, replica=server.name) == 0, "the router has seen it die", 30
    )
    server.start()
    await asyncio.to_thread(server.wait)
    await in_rotation(router, servers)


async def test_requests_at_the_same_time(servers: list[VllmServer], figures: Figures) -> None:
    """What another request is computing cannot be known; afterwards, every prediction is exact
    again."""
    with router_process(configuration(servers)) as router:
        await in_rotation(router, servers)
        together = Checker(router, servers)
        clients = [
            Workload(together.send, "gemma", MATERIAL, f"client {number}") for number in range(6)
        ]
        await asyncio.gather(*(client.run(20) for client in clients))
        afterwards = Checker(router, servers)
        await Workload(afterwards.check, "gemma", MATERIAL, "afterwards").run(30)
    figures.add("hybrid, 6 clients at a time", together.ledger.shares)
    assert together.ledger.hits >= 10
    figures.add("hybrid, serial, after those", afterwards.ledger)
    check_all_exact(afterwards.ledger)


async def test_an_emptied_cache_is_known_with_the_next_request(
    servers: list[VllmServer], figures: Figures
) -> None:
    """vLLM reports the reset only then: one prediction is made from a cache that is gone, but not a
    second one."""
    request = Request(
        "reset",
        "/v1/completions",
        {"model": "gemma", "prompt": token_ids(Random("reset"), 200), "max_tokens": 2},
    )
    with router_process(configuration(servers[:1])) as router:
        await in_rotation(router, servers[:1])
        checker = Checker(router, servers[:1])
        for _ in range(2):
            await checker.check(request)
        assert (await ask(servers[0].port, "POST", "/reset_prefix_cache")).status == 200
        for _ in range(3):
            await checker.check(request)
    figures.add(
        "hybrid, /reset_prefix_cache between the 2nd and the 3rd",
        "; ".join(map(str, checker.ledger.outcomes)),
    )
    assert [outcome.header for outcome in checker.ledger.outcomes] == [0, 192, 192, 192, 192]
    assert [outcome.cached for outcome in checker.ledger.outcomes] == [0, 192, 0, 192, 192]


WITH_PROMPT_LOGPROBS: list[dict[str, Any]] = [
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0},
    {"echo": True, "logprobs": 1},
    {"messages": [], "prompt_logprobs": 1},
    {"messages": [], "echo": True},
]
"""Fields of a request. In a chat, an echo is enough: the number of logprobs it asks for is then 0
instead of none."""


@pytest.mark.parametrize("options", WITH_PROMPT_LOGPROBS, ids=str)
async def test_a_request_for_the_logprobs_of_its_prompt_reuses_nothing(
    servers: list[VllmServer], options: dict[str, Any]
) -> None:
    """vLLM must compute the whole prompt for them; its blocks are still cached, a second time."""
    random = Random(str(options))
    content: dict[str, Any] = {"prompt": token_ids(random, 200)}
    if "messages" in options:
        content = {"messages": [{"role": "user", "content": sentence(random, 150)}]}
    path = "/v1/chat/completions" if "messages" in options else "/v1/completions"
    plain = {"model": "gemma", "max_tokens": 2, **content}
    asking = {**plain, **options, **content}
    with router_process(configuration(servers[:1])) as router:
        await in_rotation(router, servers[:1])
        await answered_in_time(servers[0], path, asking)
        checker = Checker(router, servers[:1])
        for body in (plain, asking, asking, plain):
            await checker.check(Request("logprobs of the prompt", path, body))
    check_all_exact(checker.ledger)


async def answered_in_time(server: VllmServer, path: str, body: dict[str, Any]) -> None:
    """Repeat the request until it succeeds: the first such request takes vLLM half a minute."""
    while True:
        try:
            assert (await ask(server.port, "POST", path, body, JSON)).status == 200
        except asyncio.TimeoutError:
            continue
        return
