"""Reads the prompts of requests that the data plane holds: a body in, token ids out.

    core thread ──Prepare──> Preparation ──> Dispatcher.read ──> Tokenization
         ^                                                            │
         └──────────── Ask, to be decided there; or Open ─────────────┘

Whatever is not usual about a request is left to who opens it, errors included.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING

from router.errors import RequestError
from router.routing.decision import Asked
from router.routing.dispatcher import INLINE_BODY_BYTES, Dispatcher
from router.tokenize import Endpoint, TokenizedPrompt
from router.upstream import Header

if TYPE_CHECKING:
    from router._core import Plane

logger = logging.getLogger(__name__)

PREPARED = (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.MESSAGES)
"""The paths of such requests, by the numbers that the core knows them by."""


class Preparation:
    """Belongs to one event loop.

    Args:
        dispatcher: Knows the models.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._tasks: set[asyncio.Task[None]] = set()
        self.plane: Plane | None = None
        """The core's; it is there before any request."""

    @property
    def under_way(self) -> int:
        """Requests whose prompts are being tokenised."""
        return len(self._tasks)

    def prepare(self, number: int, path: int, _headers: list[Header], body: bytes) -> None:
        """Read a prompt, and answer.

        Args:
            number: Of the request, in the core.
            path: Its place among `PREPARED`.
            body: As the client sent it.
        """
        asked = self._read(PREPARED[path], body)
        if asked is None:
            self._open(number)
            return
        started = time.perf_counter()
        tokenized = asked.model.tokenization.tokenize_now(asked.spec, lora_name=asked.lora_name)
        if tokenized is not None:
            self._place(number, body, asked, tokenized[0], time.perf_counter() - started)
            return
        task = asyncio.get_running_loop().create_task(self._tokenize(number, body, asked))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._tokenized, number))

    def _read(self, endpoint: Endpoint, body: bytes) -> Asked | None:
        if len(body) > INLINE_BODY_BYTES:
            return None
        try:
            asked = self._dispatcher.read(endpoint, body)
        except RequestError:
            return None
        spec = asked.spec
        is_usual = (
            len(spec.prompts) == 1
            and spec.reads_cache
            and spec.stored_response is None
            and asked.target is None
            and not spec.has_report_mode
        )
        return asked if is_usual else None

    async def _tokenize(self, number: int, body: bytes, asked: Asked) -> None:
        started = time.perf_counter()
        tokenization = asked.model.tokenization
        (tokenized,) = await tokenization.tokenize(asked.spec, lora_name=asked.lora_name)
        self._place(number, body, asked, tokenized, time.perf_counter() - started)

    def _tokenized(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._open(number)
        elif (error := task.exception()) is not None:
            logger.error("a prompt could not be read", exc_info=error)
            self._open(number)

    def _place(
        self, number: int, body: bytes, asked: Asked, tokenized: TokenizedPrompt, seconds: float
    ) -> None:
        spec = asked.spec
        if not tokenized.exact or not tokenized.token_ids:
            self._open(number)
            return
        changed = None if asked.body is body else asked.body
        session = (asked.session or "").encode("utf-8", "surrogatepass")
        more = None
        if changed is not None or tokenized.cache_salt is not None or session or asked.tenant:
            more = changed, tokenized.cache_salt, session, asked.tenant, (), ()
        assert self.plane is not None
        self.plane.place(
            number,
            spec.model or asked.model.name,
            tokenized.token_ids,
            spec.stream,
            spec.choices == 1,
            False,
            seconds,
            more,
        )

    def _open(self, number: int) -> None:
        assert self.plane is not None
        self.plane.open(number)
