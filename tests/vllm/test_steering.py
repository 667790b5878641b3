"""A running vLLM with the plug-in `kvroute-vllm`: told what to keep, it reuses what it would not
have had, and just as much as was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.http_client import ask
from tests.support.router_process import router_process
from tests.vllm.checking import JSON, Checker, Ledger, Request
from tests.vllm.conftest import Figures
from tests.vllm.model import FIRST_PLAIN_TOKEN, GEMMA, sentence, write_model
from tests.vllm.published import census
from tests.vllm.server import VllmServer, running

pytestmark = pytest.mark.timeout(1800)

BLOCKS = 600
"""Room for all that is kept of ten scripts, and not of thirty."""
QUESTIONS = 4
"""Of each script."""


@pytest.fixture(scope="module")
def servers(directory: Path) -> Iterator[list[VllmServer]]:
    """The same engine with the plug-in and its publisher, and as vLLM ships it."""
    model = write_model(directory / "gemma", GEMMA)
    started = [
        VllmServer("plugged", model, directory, BLOCKS, publisher="kvroute"),
        VllmServer("as-shipped", model, directory, BLOCKS, has_plugins=False),
    ]
    with running(*started):
        yield started


@dataclass
class Script:
    """Questions behind one text, each by itself or with all that was said before."""

    kind: str
    text: str
    questions: list[str]
    said: list[dict[str, str]] = field(default_factory=list)

    def next(self) -> Request:
        question = self.questions.pop(0)
        if self.kind == "plain document":
            return self._request("/v1/completions", {"prompt": f"{self.text} {question}"})
        asked = {"role": "user", "content": question}
        messages = [{"role": "system", "content": self.text}, *self.said, asked]
        if self.kind == "conversation":
            self.said.append(asked)
        return self._request("/v1/chat/completions", {"messages": messages})

    def take(self, answer: str) -> None:
        if self.kind == "conversation":
            self.said.append({"role": "assistant", "content": answer})

    def _request(self, path: str, content: dict[str, Any]) -> Request:
        body = {"model": "gemma", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **content}
        return Request(self.kind, path, body)


def scripts(random: Random, times: int) -> list[Script]:
    """Documents that are asked about, and conversations of which two at a time begin alike; three
    of either kind of document and four conversations, a number of times."""
    found = []
    for _ in range(times):
        systems = [sentence(random, 150) for _ in range(2)]
        texts = [
            *(("document", sentence(random, random.randrange(250, 400))) for _ in range(3)),
            *(("plain document", sentence(random, random.randrange(250, 400))) for _ in range(3)),
            *(("conversation", systems[number % 2]) for number in range(4)),
        ]
        for kind, text in texts:
            questions = [sentence(random, random.randrange(20, 80)) for _ in range(QUESTIONS)]
            found.append(Script(kind, text, questions))
    return found


async def first_play(checker: Checker, times: int) -> list[Request]:
    """Send everything in a mixed order; conversations go on with what the model said. Returns what
    was sent."""
    random, sent = Random("steering"), list[Request]()
    open_scripts = scripts(random, times)
    while open_scripts:
        script = random.choice(open_scripts)
        sent.append(script.next())
        script.take((await checker.check(sent[-1])).content)
        if not script.questions:
            open_scripts.remove(script)
    return sent


def configuration(server: VllmServer, directory: Path, retention_hints: str) -> dict[str, Any]:
    return {
        "models": [
            {
                "name": "gemma",
                "tokenizer": str(directory / "gemma"),
                "retention_hints": retention_hints,
            }
        ],
        "replicas": [{"url": server.url, "id": server.name}],
    }


async def emptied(server: VllmServer) -> None:
    """Empty its cache; vLLM publishes that with the next request."""
    assert (await ask(server.port, "POST", "/reset_prefix_cache")).status == 200
    request = {"model": "gemma", "prompt": [FIRST_PLAIN_TOKEN] * 8, "max_tokens": 1}
    assert (await ask(server.port, "POST", "/v1/completions", request, JSON)).status == 200


async def played(
    server: VllmServer,
    directory: Path,
    retention_hints: str,
    sent: Sequence[Request] = (),
    times: int = 1,
) -> Play:
    """Requests from an empty cache, one at a time, through a router that knows nothing yet.

    Args:
        server: The only replica.
        directory: With the model.
        retention_hints: Of the router's configuration.
        sent: What to send; empty: the scripts.
        times: Of the scripts.
    """
    await emptied(server)
    with router_process(configuration(server, directory, retention_hints)) as router:
        await router.until_in_rotation(server, 60)  # type: ignore[arg-type]
        checker = Checker(router, [server])
        if sent:
            for request in sent:
                await checker.check(request)
        else:
            sent = await first_play(checker, times)
        named = (await router.metrics()).sum("kvroute_boundaries_total")
        return Play(sent, checker.ledger, named)


@dataclass(frozen=True)
class Play:
    """What was sent, and what came of it."""

    sent: Sequence[Request]
    ledger: Ledger
    named: float
    """Boundaries that the router named."""

    @property
    def reused(self) -> list[int]:
        """Tokens, by request."""
        return [outcome.cached for outcome in self.ledger.outcomes]

    @property
    def hits_by_kind(self) -> str:
        """Hits and tokens reused, by kind of request."""
        kinds = dict.fromkeys(outcome.kind for outcome in self.ledger.outcomes)
        return ", ".join(f"{kind} {self._hits(kind)}" for kind in kinds)

    def _hits(self, kind: str) -> str:
        found = [each for each in self.ledger.outcomes if each.kind == kind]
        hits, tokens = sum(each.cached > 0 for each in found), sum(each.cached for each in found)
        return f"{hits} of {len(found)} hit ({tokens} tokens)"


async def test_what_the_router_names_is_hit_and_every_prediction_is_exact(
    servers: list[VllmServer], directory: Path, figures: Figures
) -> None:
    """This is what the plug-in is for. Without hints the engine with it is the one without it."""
    plugged, shipped = servers
    told = await played(plugged, directory, "auto")
    untold = await played(plugged, directory, "never", told.sent)
    without = await played(shipped, directory, "auto", told.sent)
    for what, play in (("told", told), ("not told", untold), ("no plug-in", without)):
        figures.add(f"plug-in, windows, serial, {what}", play.ledger)
        figures.add(f"plug-in, windows, serial, {what}", play.hits_by_kind)
    for play in (told, untold, without):
        assert not play.ledger.wrong, "\n".join(map(str, play.ledger.wrong))
    assert told.named > 0
    assert untold.named == without.named == 0
    assert untold.reused == without.reused
    assert sum(told.reused) > 1.15 * sum(untold.reused)
    assert told.ledger.hits > untold.ledger.hits
    assert all(hinted >= plain for hinted, plain in zip(told.reused, untold.reused, strict=True)), (
        "there is room for all that is kept"
    )


async def test_a_cache_that_evicts_what_was_named_is_predicted_exactly(
    servers: list[VllmServer], directory: Path, figures: Figures
) -> None:
    """Kept windows are evicted like others, and then a hit ends before them or is none."""
    plugged, _ = servers
    before = await census(plugged.replay_port)
    told = await played(plugged, directory, "auto", times=3)
    removed = await census(plugged.replay_port) - before
    figures.add("plug-in, windows, serial, told, too small a cache", told.ledger)
    assert not told.ledger.wrong, "\n".join(map(str, told.ledger.wrong))
    assert told.named > 0
    assert told.ledger.shortened > 0
    assert removed["group 0 removed"] > 0
    assert removed["group 2 removed"] > 0
