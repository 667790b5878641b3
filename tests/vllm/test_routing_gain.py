"""Questions about documents longer than the window, routed in four ways to the same two servers:
what they report as reused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvroute_engine.demo.client import Client, TimedCompletion
from kvroute_engine.demo.fleet import until_live, until_read
from kvroute_engine.demo.phase import PhaseResult, PlayPhase, run_phase
from kvroute_engine.demo.play import MODES, RoutingMode
from kvroute_engine.demo.processes import router
from kvroute_engine.demo.workload import Workload, WorkloadSizes, questions_about_documents
from tests.support.http_client import ask
from tests.vllm.checking import JSON
from tests.vllm.conftest import Figures
from tests.vllm.model import FIRST_PLAIN_TOKEN, GEMMA, write_model
from tests.vllm.server import VllmServer, running

pytestmark = pytest.mark.timeout(1800)

BLOCKS = 128
SIZES = WorkloadSizes(
    documents=10,
    document_tokens=(320, 640),
    in_use=8,
    swapped=2,
    rounds=3,
    questions=2,
    question_tokens=20,
)
"""Windows have 64 tokens; all documents in use fit into both caches together, not into one."""
FULLER = replace(SIZES, documents=14, in_use=11)
"""They do not fit into both together."""


@pytest.fixture(scope="module")
def servers(directory: Path) -> Iterator[list[VllmServer]]:
    model = write_model(directory / "gemma", GEMMA)
    started = [VllmServer(name, model, directory, BLOCKS) for name in ("gain-a", "gain-b")]
    with running(*started):
        yield started


def plain_questions(sizes: WorkloadSizes) -> Workload:
    """The demo's, without the tokenizer's special tokens."""
    questions, prompts = questions_about_documents(sizes), []
    while prompt := questions.next():
        prompts.append([FIRST_PLAIN_TOKEN + token for token in prompt])
    return Workload(prompts, questions.answer_tokens)


async def emptied(server: VllmServer) -> None:
    """Empty its cache; vLLM publishes that with the next request."""
    assert (await ask(server.port, "POST", "/reset_prefix_cache")).status == 200
    request = {"model": "gemma", "prompt": [FIRST_PLAIN_TOKEN] * 8, "max_tokens": 1}
    assert (await ask(server.port, "POST", "/v1/completions", request, JSON)).status == 200


async def played(
    mode: RoutingMode, servers: list[VllmServer], directory: Path, sizes: WorkloadSizes
) -> PhaseResult:
    """The workload from empty caches; each request waits for the events of the one before."""
    for server in servers:
        await emptied(server)
    configuration = yaml.safe_dump(
        {
            "server": {"port": 0},
            "models": [{"name": "gemma", "tokenizer": "replica"}],
            "replicas": [{"url": server.url, "id": server.name} for server in servers],
            "policy": {"name": mode.policy or "least_delay"},
        }
    )
    blind = mode.blind_index
    command = ("kvroute_engine.demo.blind", blind) if blind else ("router.cli.main",)
    result = PhaseResult(mode.name, {})
    async with router(directory / f"{mode.policy}-{blind}.yaml", configuration, *command) as found:
        client = Client(found.url)
        try:
            await until_live(client, len(servers))

            async def completed(completion: TimedCompletion) -> None:
                await until_read(client, completion.replica)

            phase = PlayPhase("one at a time", clients=1)
            await run_phase(phase, result, client, "gemma", plain_questions(sizes), completed)
        finally:
            await client.close()
    return result


async def in_every_way(
    servers: list[VllmServer], directory: Path, figures: Figures, sizes: WorkloadSizes
) -> Sequence[PhaseResult]:
    """The same questions in every way of routing: the router's, two blind ones, in turn."""
    results = [await played(mode, servers, directory, sizes) for mode in MODES]
    for result in results:
        figures.add(
            f"questions about documents, {sizes.in_use} in use, {result.name}",
            f"{result.cached_tokens} of {result.prompt_tokens} tokens reused, "
            f"{result.requests - result.mispredicted} of {result.requests} exact",
        )
    return results


async def test_more_is_reused_than_in_turn_and_no_less_than_without_groups(
    servers: list[VllmServer], directory: Path, figures: Figures
) -> None:
    """The point of exact predictions, on real servers and by their own count."""
    ours, *blind, in_turn = await in_every_way(servers, directory, figures, SIZES)
    assert ours.mispredicted == in_turn.mispredicted == 0
    assert ours.cached_tokens > 1.2 * in_turn.cached_tokens
    # With little evicted they may know as much; then only ties decide.
    assert all(ours.cached_tokens > 0.95 * result.cached_tokens for result in blind)


async def test_predictions_stay_exact_where_those_without_groups_do_not(
    servers: list[VllmServer], directory: Path, figures: Figures
) -> None:
    """In caches that evict all the time, what is left of a window decides what is reused. How much
    that is depends on luck then."""
    ours, *blind, in_turn = await in_every_way(servers, directory, figures, FULLER)
    assert ours.mispredicted == in_turn.mispredicted == 0
    assert all(result.mispredicted for result in blind)
