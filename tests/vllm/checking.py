"""Requests through the router, one at a time, comparing each prediction with what the server
reports as reused."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_client import Answer
from tests.support.router_process import RouterProcess
from tests.vllm.published import last_published
from tests.vllm.server import VllmServer

JSON = {"content-type": "application/json"}
SETTLE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Request:
    """One request as a client sends it; *kind* is its name in the figures."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One request with its response. All counts are tokens of its prompt."""

    kind: str
    replica: str
    prompt_tokens: int
    header: int
    """What the router predicted, as `x-kv-hit-tokens` of the response."""
    explained: int | None
    """What `/route` predicted for that replica a moment before; None if it was not asked."""
    full_attention: int | None
    """What an index of only the full-attention group would have predicted."""
    cached: int
    """What the server reports as reused."""
    content: str
    """The text of the response, for a next turn."""

    @property
    def is_exact(self) -> bool:
        return self.header == self.cached and self.explained in (self.header, None)

    @property
    def is_shortened(self) -> bool:
        """Whether full attention held more than could be reused: another group had lost, or never
        kept, the blocks needed for that."""
        return self.full_attention is not None and self.full_attention > self.cached

    def __str__(self) -> str:
        return (
            f"{self.kind} at {self.replica}: header {self.header}, /route {self.explained}, "
            f"full attention {self.full_attention}, server {self.cached} of {self.prompt_tokens}"
        )


@dataclass
class Ledger:
    """The outcomes so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_exact]

    @property
    def over(self) -> int:
        """Predictions of more than was reused."""
        return sum(outcome.header > outcome.cached for outcome in self.outcomes)

    @property
    def under(self) -> int:
        """Predictions of less than was reused."""
        return sum(outcome.header < outcome.cached for outcome in self.outcomes)

    @property
    def hits(self) -> int:
        return sum(outcome.cached > 0 for outcome in self.outcomes)

    @property
    def shortened(self) -> int:
        return sum(outcome.is_shortened for outcome in self.outcomes)

    @property
    def shortened_hits(self) -> int:
        """Shortened hits that are not empty."""
        return sum(outcome.is_shortened and outcome.cached > 0 for outcome in self.outcomes)

    @property
    def mean_error_tokens(self) -> float:
        """Over all requests, exact ones included."""
        return sum(abs(outcome.header - outcome.cached) for outcome in self.outcomes) / len(
            self.outcomes
        )

    @property
    def shares(self) -> str:
        """A summary for requests that run at the same time, when no prediction can know what is
        being computed."""
        asked = len(self.outcomes)
        exact = asked - len(self.wrong)
        mean_prompt = sum(outcome.prompt_tokens for outcome in self.outcomes) / asked
        return (
            f"{asked} requests, {exact} exact ({exact / asked:.0%}), {self.over} over, "
            f"{self.under} under, {self.hits} with hits; "
            f"mean error {self.mean_error_tokens:.1f} tokens of {mean_prompt:.0f}"
        )

    def __str__(self) -> str:
        asked = len(self.outcomes)
        reused = sum(outcome.cached for outcome in self.outcomes)
        prompts = sum(outcome.prompt_tokens for outcome in self.outcomes)
        return (
            f"{asked} requests, {asked - len(self.wrong)} exact, {self.hits} with hits; "
            f"{reused} of {prompts} prompt tokens reused{self._shortening()}"
        )

    def _shortening(self) -> str:
        if any(outcome.full_attention is None for outcome in self.outcomes):
            return ""
        naive = sum(outcome.full_attention == outcome.cached for outcome in self.outcomes)
        return (
            f"; {self.shortened} shorter than with full attention only, {self.shortened_hits} of "
            f"them hits: that would be exact on {naive}"
        )


class Checker:
    """Sends requests, and records how the predictions compare.

    Args:
        router: In front of the servers.
        servers: All of them.
    """

    def __init__(self, router: RouterProcess, servers: Sequence[VllmServer]) -> None:
        self._router = router
        self._servers = servers
        self.ledger = Ledger()

    async def check(self, request: Request) -> Outcome:
        """Wait until the router has read everything published, ask where the request would go, send
        it, compare."""
        await self.settle()
        explained = await self._router.post("/route?explain=true", request.body)
        assert explained.status == 200, explained
        return await self._sent(request, explained.json)

    async def send(self, request: Request) -> Outcome:
        """Send at once, compare."""
        return await self._sent(request, None)

    async def settle(self) -> None:
        """Wait until everything that any server has published is in the router's index."""
        for server in self._servers:
            await self._settle(server)

    async def _settle(self, server: VllmServer) -> None:
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        published = await last_published(server.replay_port)
        while await self._last_read(server) != published:
            view = await self._router.replica(server.name)
            assert time.monotonic() < deadline, f"{server.name}: not read up to {published}: {view}"
            # A heartbeat of our publisher has a number of its own.
            published = await last_published(server.replay_port)

    async def _last_read(self, server: VllmServer) -> int:
        (source,) = (await self._router.replica(server.name))["sources"]
        last: int | None = source["feed"]["stream"]["last_seq"]
        return -1 if last is None else last

    async def _sent(self, request: Request, explained: dict[str, Any] | None) -> Outcome:
        answer = await self._router.post(request.path, request.body, JSON)
        assert answer.status == 200, (request.kind, answer)
        usage, content = _read(answer)
        replica = answer.headers["x-kv-replica"]
        ranked = _ranked(explained, replica, usage) if explained else None
        outcome = Outcome(
            request.kind,
            replica,
            usage["prompt_tokens"],
            int(answer.headers["x-kv-hit-tokens"]),
            None if ranked is None else ranked["hit"]["cached_tokens"],
            None if ranked is None else _full_attention_tokens(ranked),
            cached_tokens(usage),
            content,
        )
        self.ledger.outcomes.append(outcome)
        return outcome


def _ranked(explained: dict[str, Any], replica: str, usage: dict[str, Any]) -> dict[str, Any]:
    """What `/route` predicted for the replica that then served the request."""
    assert explained["prompt_tokens"] == usage["prompt_tokens"], (
        "the router counts other tokens than the server"
    )
    found: dict[str, Any] = next(
        ranked for ranked in explained["ranking"] if ranked["replica"] == replica
    )
    return found


def cached_tokens(usage: dict[str, Any]) -> int:
    """The cached tokens; vLLM leaves out the details if there are none."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _full_attention_tokens(ranked: dict[str, Any]) -> int | None:
    """The tokens that full attention allows; None if the replica has no such group."""
    (groups,) = ranked["groups"] or ([],)
    full = [group["tokens"] for group in groups if group["kind"] == "full_attention"]
    return min(full, default=None if groups else 0)


def _read(answer: Answer) -> tuple[dict[str, Any], str]:
    """Usage and content of a response, streamed or not."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [
            line.removeprefix(b"data: ")
            for line in answer.body.split(b"\n")
            if line.startswith(b"data: {")
        ]
        return _joined([json.loads(line) for line in lines])
    return _joined([answer.json])


def _joined(pieces: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    usages = [piece["usage"] for piece in pieces if piece.get("usage")]
    choices = [choice for piece in pieces for choice in piece.get("choices", ())]
    return usages[-1], "".join(_text(choice) for choice in choices)


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return said.get("content") or ""
