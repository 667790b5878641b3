"""Requests like those to a real service, one after the other: shared documents, conversations,
exact lengths, salts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from tests.vllm.checking import Outcome, Request
from tests.vllm.model import FIRST_PLAIN_TOKEN, VOCABULARY, sentence
from tests.vllm.server import BLOCK_SIZE

SALTS = (None, None, None, "tenant-a", "tenant-b")
LONGEST_CONVERSATION = 700
"""In prompt tokens; beyond it a conversation starts over."""


class Material:
    """The material for prompts, from *seed*, so that several workloads share prefixes."""

    def __init__(self, seed: str) -> None:
        random = Random(seed)
        self.documents = [sentence(random, words) for words in (40, 60, 90, 120)]
        self.systems = [sentence(random, words) for words in (15, 50)]
        self.ids = [token_ids(random, 640) for _ in range(3)]


class Workload:
    """Depends only on *seed* and on the responses.

    Args:
        check: Sends one request.
        model: Its name in requests.
        material: Documents, system prompts and token ids to choose from.
        seed: Determines all choices.
    """

    def __init__(
        self,
        check: Callable[[Request], Awaitable[Outcome]],
        model: str,
        material: Material,
        seed: str,
    ) -> None:
        self._send = check
        self._model = model
        self._random = Random(seed)
        self._material = material
        self._conversations: list[list[dict[str, str]]] = [[] for _ in range(3)]
        self._sent: list[Request] = []

    async def run(self, requests: int) -> None:
        """Send a number of requests, of all kinds mixed."""
        steps = (self._document, self._turn, self._turn, self._cut, self._multiple, self._again)
        for _ in range(requests):
            await self._random.choice(steps)()

    async def _document(self) -> None:
        """A question about one of a few documents."""
        question = sentence(self._random, self._random.choice((1, 5, 20)))
        prompt = f"{self._random.choice(self._material.documents)} {question}"
        await self._check("document", "/v1/completions", prompt=prompt)

    async def _turn(self) -> None:
        """The next turn of a conversation, with what the model really generated before."""
        messages = self._random.choice(self._conversations)
        if not messages:
            messages.append(
                {"role": "system", "content": self._random.choice(self._material.systems)}
            )
        messages.append(
            {"role": "user", "content": sentence(self._random, self._random.choice((3, 10, 25)))}
        )
        outcome = await self._check("turn", "/v1/chat/completions", messages=[*messages])
        messages.append({"role": "assistant", "content": outcome.content})
        if outcome.prompt_tokens > LONGEST_CONVERSATION:
            messages.clear()

    async def _cut(self) -> None:
        """Token ids that diverge from a common prefix at any point."""
        stem = self._random.choice(self._material.ids)[: self._random.randrange(1, 640)]
        await self._check(
            "cut",
            "/v1/completions",
            prompt=[*stem, *token_ids(self._random, self._random.choice((1, 40)))],
        )

    async def _multiple(self) -> None:
        """A whole number of blocks, or one token more or less: the last token is always computed
        again."""
        length = self._random.randrange(1, 16) * BLOCK_SIZE + self._random.choice((-1, 0, 0, 0, 1))
        await self._check(
            "multiple", "/v1/completions", prompt=self._random.choice(self._material.ids)[:length]
        )

    async def _again(self) -> None:
        """One of the last requests again."""
        if self._sent:
            earlier = self._random.choice(self._sent[-12:])
            await self._send(Request("again", earlier.path, earlier.body))

    async def _check(self, kind: str, path: str, **content: Any) -> Outcome:
        request = Request(kind, path, {"model": self._model, **content, **self._options()})
        self._sent.append(request)
        return await self._send(request)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_tokens": self._random.choice((1, 4, 40)),
            "temperature": 0,
            "ignore_eos": True,
        }
        salt = self._random.choice(SALTS)
        if salt is not None:
            options["cache_salt"] = salt
        if self._random.random() < 0.5:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        return options


def token_ids(random: Random, count: int) -> list[int]:
    """A prompt that was not made by a tokenizer."""
    return [random.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(count)]
