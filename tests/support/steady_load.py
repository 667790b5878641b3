"""Clients that send requests all the time, and the fate of each request: this shows what a fault
costs clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from types import TracebackType
from typing import Any

from tests.support.http_client import HttpClient, connect
from tests.support.waiting import eventually

DONE = b"data: [DONE]\n\n"
_BREATH_S = 0.05
"""How long a client waits before it tries again after a refused connection."""


class Fate(Enum):
    """How a request ended, for its client."""

    SERVED = "served"
    BROKEN = "broken"
    """A stream that ended with an error event."""
    CUT = "cut"
    """The response had begun and broke off without an error event."""
    TURNED_AWAY = "turned away"
    """The response had an error status."""
    UNANSWERED = "unanswered"
    """The connection ended before a status."""
    REFUSED = "refused"
    """The connection was refused."""


@dataclass
class Sent:
    """One request; times on the monotonic clock."""

    streams: bool
    began_at: float
    ended_at: float = 0.0
    fate: Fate = Fate.UNANSWERED
    status: int = 0
    replica: str = ""
    body: bytes = field(default=b"", repr=False)

    @property
    def events(self) -> int:
        """Events of a stream, the last one included."""
        return self.body.count(b"data: ")


class ChaosWorkload:
    """Questions about documents, short and long, so that many prompts share a prefix; half of the
    responses are streamed."""

    def __init__(self, seed: int, model: str) -> None:
        self._random = Random(seed)
        self._model = model
        self._documents = [self._text(length) for length in (200, 400, 400, 800, 800, 3000)]

    def next(self) -> dict[str, Any]:
        """The body of a completion."""
        prompt = self._random.choice(self._documents) + self._text(self._random.randint(1, 60))
        max_tokens = self._random.choice((2, 20, 60))
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if self._random.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _text(self, chars: int) -> str:
        return "".join(self._random.choices("abcdefgh ", k=chars))


class SteadyLoad:
    """Clients, each with one request in progress until the block ends; requests that then still run
    may end in any way."""

    def __init__(self, port: int, workload: ChaosWorkload, clients: int = 10) -> None:
        self.sent: list[Sent] = []
        self._port = port
        self._workload = workload
        self._clients = clients
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def fates(self) -> Counter[Fate]:
        return Counter(sent.fate for sent in self.sent)

    @property
    def failed(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.fate is not Fate.SERVED]

    async def until_served(self, count: int, within_s: float = 60.0) -> None:
        """Wait until that many more requests have been served."""
        wanted = self.fates[Fate.SERVED] + count
        await eventually(
            self._unless_failed(lambda: self.fates[Fate.SERVED] >= wanted),
            f"{count} requests served",
            within_s,
        )

    async def __aenter__(self) -> SteadyLoad:
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(self._clients)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    def _unless_failed(self, condition: Any) -> Any:
        def check() -> object:
            for task in self._tasks:
                if task.done():
                    task.result()
            return condition()

        return check

    async def _ask_on(self) -> None:
        while not self._is_over:
            sent = await self._ask(self._workload.next())
            self.sent.append(sent)
            if sent.fate in (Fate.REFUSED, Fate.TURNED_AWAY):
                await asyncio.sleep(_BREATH_S)

    async def _ask(self, body: dict[str, Any]) -> Sent:
        sent = Sent("stream" in body, time.monotonic())
        try:
            async with connect(self._port) as client:
                await client.send("POST", "/v1/completions", body)
                await _read(client, sent)
        except ConnectionRefusedError:
            sent.fate = Fate.REFUSED
        except (ConnectionError, asyncio.IncompleteReadError):
            sent.fate = Fate.CUT if sent.status else Fate.UNANSWERED
        sent.ended_at = time.monotonic()
        return sent


async def _read(client: HttpClient, sent: Sent) -> None:
    """The response, as far as it arrives."""
    sent.status = await client.read_head()
    sent.replica = client.headers.get("x-kv-replica", "")
    if "content-length" in client.headers:
        sent.body = await client.read_body()
    else:
        while piece := await client.read_piece():
            sent.body += piece
    if sent.status != 200:
        sent.fate = Fate.TURNED_AWAY
    elif sent.streams and (b'"error"' in sent.body or not sent.body.endswith(DONE)):
        sent.fate = Fate.BROKEN
    else:
        sent.fate = Fate.SERVED
