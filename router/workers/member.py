"""A worker's side of the line: its start, what it asks of the others, and what they ask of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from router.board import SharedMemoryBoard
from router.config import Overrides, RouterConfig
from router.workers.line import (
    Ask,
    Hurry,
    LineError,
    Ready,
    Reload,
    Start,
    Stop,
    WorkerLine,
    WorkerReplies,
    WorkerReply,
    receive_now,
)

logger = logging.getLogger(__name__)

Answer = Callable[[bytes], Awaitable[bytes]]
"""WorkerReplies to one kind of question."""


class Member:
    """One of several workers. Made without an event loop; belongs to one from `begin` on.

    Args:
        descriptor: The socket that its supervisor left it.
    Raises:
        LineError: The supervisor is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        start = receive_now(self._socket)
        if not isinstance(start, Start):
            raise LineError(f"a {type(start).__name__} came first: it must be a Start")
        self.start = start
        self.board = SharedMemoryBoard(start.board, start.number, start.workers)
        os.close(start.board)
        self.on_stop: Callable[[], None] = lambda: None
        self.on_reload: Callable[[], None] = lambda: None
        self.others_listen = start.others_listen
        """While others do, one that starts may take its time."""
        self.answers: dict[str, Answer] = {}
        """By kind of question."""
        self._config = start.config
        self._line: WorkerLine | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[WorkerReplies]] = {}
        self._replying: set[asyncio.Task[None]] = set()
        self._hearing: asyncio.Task[None] | None = None

    def read_config(self) -> RouterConfig:
        """The configuration as the supervisor read it last; raises `ConfigError`."""
        directory = self.start.directory
        return RouterConfig.from_yaml(
            self._config,
            os.environ,
            None if directory is None else Path(directory),
            Overrides(**self.start.overrides),
        )

    # --- on the event loop ------------------------------------------------------------------------

    async def begin(self) -> None:
        """Do what was asked of all before this worker started, and hear what comes."""
        self._line = await WorkerLine.over(self._socket)
        for change in self.start.changes:
            what, _, body = change.partition(b"\0")
            await self._answer(what.decode(), body)
        self._hearing = asyncio.create_task(self._hear(self._line), name="supervisor's line")

    async def listens(self) -> None:
        """Tell that clients can connect to this worker."""
        if self._line is not None:
            self._line.send(Ready())

    async def close(self) -> None:
        """Leave nothing running."""
        tasks = [*self._replying, *filter(None, [self._hearing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._line is not None:
            self._line.close()

    async def _hear(self, line: WorkerLine) -> None:
        """Hear the supervisor, until it is gone."""
        while (message := await line.receive()) is not None:
            if isinstance(message, Stop):
                self.on_stop()
            elif isinstance(message, Hurry):
                self.others_listen = False
            elif isinstance(message, Reload):
                self._config = message.config
                self.on_reload()
            elif isinstance(message, Ask):
                self._keep(asyncio.create_task(self._reply(message)))
            elif isinstance(message, WorkerReplies):
                waiting = self._asked.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        logger.error("the supervisor is gone: shutting down")
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result(WorkerReplies(0, {}, []))
        self.on_stop()

    async def ask(self, what: str, body: bytes = b"", key: str = "") -> dict[int, bytes]:
        """Ask all other workers; return their replies by number, of those that gave one in time.

        Args:
            what: The kind of question.
            body: The question.
            key: Of a change, which workers that start later hear, too: the last of each key.
        """
        if self._line is None:
            return {}  # it has just begun
        number = next(self._numbers)
        waiting = self._asked[number] = asyncio.get_running_loop().create_future()
        self._line.send(Ask(number, what, body, key))
        try:
            replies: WorkerReplies = await waiting
        finally:
            self._asked.pop(number, None)
        if replies.missing:
            logger.warning("%s: no reply from workers %s", what, replies.missing)
        return replies.bodies

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._replying.add(task)
        task.add_done_callback(self._replying.discard)

    async def _reply(self, ask: Ask) -> None:
        body = await self._answer(ask.what, ask.body)
        if self._line is not None:
            self._line.send(WorkerReply(ask.number, body))

    async def _answer(self, what: str, body: bytes) -> bytes:
        answer = self.answers.get(what)
        if answer is None:
            return b""
        try:
            return await answer(body)
        except Exception:
            logger.exception("a question of another worker failed: %s", what)
            return b""
