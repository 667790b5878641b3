"""Requests at random times; whether each response is the right one."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from async_timeout import timeout

from benchmarks.soaking.links import Balancer
from kvroute_engine.core.simulated import SimulatedRunner
from kvroute_engine.core.time_model import RealClock, TimeModel
from kvroute_engine.http.chat import Chat
from kvroute_engine.http.tokenizer import ByteTokenizer
from tests.support.http_client import HttpClient, connect

PATIENCE_S = 60.0
"""After it a request counts as one that never ends."""
_DONE = b"data: [DONE]\n\n"
_TOKENIZER = ByteTokenizer()
_BYTES = 256
_QUESTIONS, _TALKS, _TURNS = 250, 24, 6
_RUNNER = SimulatedRunner(TimeModel(), RealClock(), _BYTES)


class Fate(Enum):
    """The end of a request, for its client."""

    SERVED = "served"
    LEFT = "left"
    """The client left, as it meant to."""
    WRONG = "wrong"
    """Another text than the model's, another number of tokens, or more than one response."""
    BROKEN = "broken"
    """A stream that ended with an error event."""
    REFUSED = "refused"
    """An error status."""
    CUT = "cut"
    """The connection ended before the response did."""
    LATE = "late"
    """It had no end within a minute."""


@dataclass
class Sent:
    """One request; times on the monotonic clock."""

    model: str
    body: dict[str, Any] = field(repr=False)
    path: str
    expected: str = field(repr=False)
    began_at: float
    ended_at: float = 0.0
    fate: Fate = Fate.CUT
    status: int = 0
    router: str = ""
    replica: str = ""
    predicted: int | None = None
    cached: int | None = None
    response: bytes = field(default=b"", repr=False)

    @property
    def streams(self) -> bool:
        return "stream" in self.body


def continuation(ids: Sequence[int], count: int) -> str:
    """Return what a simulated engine generates after *ids*."""
    grown = list(ids)
    for _ in range(count):
        grown.append(_RUNNER.next_token(grown[-1], len(grown), 0))
    return bytes(grown[len(ids) :]).decode()


class Workload:
    """Questions about documents that many share, and conversations that go on: as texts, as token
    ids and as chats; half of the responses are streamed.

    There are so many questions and conversations and no more, so that whatever a router remembers
    of prompts is full after some minutes: what grows then is a leak.

    Args:
        models: Names, each asked as often as the others.
        seed: Of all choices.
    """

    def __init__(self, models: Sequence[str], seed: int) -> None:
        self.random = Random(seed)
        self._models = list(models)
        self._documents = [self._text(length) for length in (150, 300, 300, 500, 500, 800)]
        self._questions = [self._text(self.random.randint(1, 60)) for _ in range(_QUESTIONS)]
        self._talks = [self._talk() for _ in range(_TALKS)]
        self._turns = {model: [0] * _TALKS for model in models}
        """The progress of each conversation with a model; after its last turn it begins again."""

    def next(self, model: str | None = None) -> Sent:
        """Return one request, to a model chosen at random where none is given."""
        model = model or self.random.choice(self._models)
        kind = self.random.random()
        if kind < 0.3:
            path, body, ids = self._chat(model)
        else:
            text = self.random.choice(self._documents) + self.random.choice(self._questions)
            ids = _TOKENIZER.encode(text, True)
            path, body = "/v1/completions", {"prompt": text if kind < 0.6 else ids}
        count = self.random.choice((1, 2, 4, 12))
        body |= {"model": model, "max_tokens": count, "ignore_eos": True, "temperature": 0}
        if self.random.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Sent(model, body, path, continuation(ids, count), time.monotonic())

    def _chat(self, model: str) -> tuple[str, dict[str, Any], list[int]]:
        """Return the next turn of a conversation."""
        number = self.random.randrange(_TALKS)
        turn, talk = self._turns[model][number], self._talks[number]
        self._turns[model][number] = (turn + 1) % (len(talk) // 2)
        messages = talk[: 2 * turn + 2]
        return (
            "/v1/chat/completions",
            {"messages": messages},
            _TOKENIZER.encode_chat(Chat(messages)),
        )

    def _talk(self) -> list[dict[str, str]]:
        """Return a conversation with all its questions and answers; its last message is a
        question."""
        messages = [{"role": "system", "content": self.random.choice(self._documents)}]
        for _ in range(_TURNS):
            messages.append({"role": "user", "content": self._text(self.random.randint(5, 40))})
            ids = _TOKENIZER.encode_chat(Chat(messages))
            answer = continuation(ids, self.random.choice((1, 2, 4, 12)))
            messages.append({"role": "assistant", "content": answer})
        return messages[:-1]

    def _text(self, length: int) -> str:
        return "".join(self.random.choices("abcdefgh ", k=length))


@dataclass
class Tally:
    """The counts of all requests' ends; only the requests that failed are kept."""

    fates: Counter[Fate] = field(default_factory=Counter)
    failed: list[Sent] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    exact: int = 0
    over: int = 0
    under: int = 0

    def add(self, sent: Sent) -> None:
        self.fates[sent.fate] += 1
        if sent.fate not in (Fate.SERVED, Fate.LEFT):
            self.failed.append(sent)
        if sent.fate is Fate.SERVED:
            self.latencies.append(sent.ended_at - sent.began_at)
        if sent.predicted is not None and sent.cached is not None:
            self.exact += sent.predicted == sent.cached
            self.over += sent.predicted > sent.cached
            self.under += sent.predicted < sent.cached

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies) or [0.0]
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class Clients:
    """Send requests through *balancer* at random times, whatever becomes of the others."""

    def __init__(self, balancer: Balancer, workload: Workload) -> None:
        self.tally = Tally()
        self.sent_s = 0.0
        """The time for which requests were sent."""
        self._balancer = balancer
        self._workload = workload
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    async def send(self, per_s: float, until: asyncio.Event) -> None:
        """Send *per_s* on average; return when all of them have ended."""
        random = self._workload.random
        began = at = time.monotonic()
        while not until.is_set():
            at += random.expovariate(per_s)
            await asyncio.sleep(at - time.monotonic())
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.sent_s += time.monotonic() - began
        await asyncio.gather(*self._tasks)

    async def _one(self) -> None:
        sent = self._workload.next()
        leaves = sent.streams and self._workload.random.random() < 0.05
        await self.ask(sent, leaves)
        self.tally.add(sent)

    async def ask(self, sent: Sent, leaves: bool = False) -> None:
        """Send one request on a connection of its own, and read until that ends."""
        try:
            async with timeout(PATIENCE_S), connect(self._balancer.port) as client:
                port = client.writer.get_extra_info("sockname")[1]
                try:
                    await client.send("POST", sent.path, sent.body, {"connection": "close"})
                    await _read(client, sent, leaves)
                finally:
                    sent.router = self._balancer.chosen.pop(port, "")
        except (ConnectionError, asyncio.IncompleteReadError):
            sent.fate = Fate.CUT
        except asyncio.TimeoutError:
            sent.fate = Fate.LATE
        sent.ended_at = time.monotonic()


async def _read(client: HttpClient, sent: Sent, leaves: bool) -> None:
    sent.status = await client.read_head(PATIENCE_S)
    sent.replica = client.headers.get("x-kv-replica", "")
    if "x-kv-hit-tokens" in client.headers:
        sent.predicted = int(client.headers["x-kv-hit-tokens"])
    if "content-length" in client.headers:
        sent.response = await client.reader.readexactly(int(client.headers["content-length"]))
    else:
        while piece := await client.read_piece(PATIENCE_S):
            sent.response += piece
            if leaves:
                sent.fate = Fate.LEFT
                return
    more = await client.reader.read()
    sent.fate = Fate.WRONG if more else _fate(sent)


def _fate(sent: Sent) -> Fate:
    """Return the fate of a response that came whole."""
    if sent.status != 200:
        return Fate.REFUSED
    if not sent.streams:
        whole = json.loads(sent.response)
        text, usage = _text(whole["choices"][0]), whole["usage"]
    else:
        events = sent.response.split(b"\n\n")
        if b'"error"' in sent.response:
            return Fate.BROKEN
        if not sent.response.endswith(_DONE) or sent.response.count(_DONE) != 1:
            return Fate.WRONG
        parts = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
        text = "".join(_text(part["choices"][0]) for part in parts if part["choices"])
        usage = parts[-1]["usage"]
    sent.cached = usage["prompt_tokens_details"]["cached_tokens"]
    is_right = text == sent.expected and usage["completion_tokens"] == sent.body["max_tokens"]
    return Fate.SERVED if is_right else Fate.WRONG


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a completion or a chat, whole or a part of one."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")
