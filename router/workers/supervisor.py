"""Starts workers, starts those again that end, and passes on what one asks of all others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_timeout import timeout

from kvevents.pacing import Backoff
from router.board.memory import create_memory
from router.config import RouterConfig
from router.errors import ConfigError, ConfigProblem
from router.files import Stamp, stamp_of
from router.process import announce, bind, give_up_unwritten_log, in_url, set_up_logging
from router.workers.line import (
    Ask,
    Hurry,
    Ready,
    Reload,
    Start,
    Stop,
    WorkerLine,
    WorkerReplies,
    WorkerReply,
)

logger = logging.getLogger(__name__)

REPLY_S = 2.0
"""For all workers to reply to a question."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
"""Before a worker is started again; doubles each time until one has lived this long."""
MAX_CHANGES = 16_384
_COMMAND = (sys.executable, "-m", "router.cli.main", "serve", "--worker-line")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    read_text: Callable[[], str]
    """Reads the configuration's text; raises `ConfigError`."""
    check: Callable[[str], RouterConfig]
    """Checks it as a whole; raises `ConfigError`."""
    directory: str | None
    overrides: dict[str, Any]
    """As of `Start`."""
    watched: Path | None = None
    """The configuration's file, if a change of it is to be noticed."""


@dataclass(eq=False, slots=True)
class _WorkerProcess:
    number: int
    process: asyncio.subprocess.Process | None = None
    line: WorkerLine | None = None
    is_ready: bool = False
    restarts: int = 0


@dataclass(eq=False, slots=True)
class _Question:
    """One that is under way."""

    asker: _WorkerProcess
    ask: Ask
    waiting: set[int]
    bodies: dict[int, bytes] = field(default_factory=dict)
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)


def supervise(config: RouterConfig, plan: Plan) -> int:
    """Run the workers until a signal; return the exit code.

    Args:
        config: As it was read first.
        plan: How it is read again, and what else workers need.
    Raises:
        ConfigError: The address cannot be had, or this system has no room for several workers.
    """
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_REUSEPORT"):
        rule = f"{config.server.workers}; several workers need Linux"
        raise ConfigError([ConfigProblem("server.workers", rule)])
    set_up_logging(config)
    try:
        return asyncio.run(Supervisor(config, plan).run())
    finally:
        give_up_unwritten_log()


class Supervisor:
    """The parent of all workers. Belongs to one event loop.

    Args:
        config: As it was read first.
        plan: How it is read again, and what else workers need.
    """

    def __init__(self, config: RouterConfig, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._text = plan.read_text()
        self._workers = [_WorkerProcess(number) for number in range(config.server.workers)]
        self._started_at = time.time()
        self._secret = secrets.token_bytes(32)
        self._board = create_memory(len(self._workers))
        self._port = 0
        self._has_started = asyncio.Event()
        self._is_stopping = False
        self._reload = asyncio.Event()
        self._code = 0
        self._changes: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._relaying: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until a signal, or until a worker refuses its first start."""
        loop = asyncio.get_running_loop()
        with self._reserved() as reserved:
            self._port = reserved.getsockname()[1]
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload.set)
            keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
            others = [asyncio.create_task(job) for job in (self._announce(), self._follow_config())]
            if self._plan.watched is not None:
                others.append(asyncio.create_task(self._watch(self._plan.watched)))
            await asyncio.wait(keepers)
            for task in (*others, *self._relaying):
                task.cancel()
            await asyncio.wait(others)
            for keeper in keepers:
                keeper.result()
        os.close(self._board)
        logger.info("stopped")
        return self._code

    def stop(self) -> None:
        """A signal to stop came: pass it on."""
        self._is_stopping = True
        for worker in self._workers:
            if worker.line is not None:
                worker.line.send(Stop())

    @contextlib.contextmanager
    def _reserved(self) -> Any:
        """Hold the address without listening there, so that it stays ours between two workers."""
        server = self._config.server
        # Without sharing first: another router of the same user would not be noticed otherwise.
        with contextlib.closing(bind(server.host, server.port)) as alone:
            port = alone.getsockname()[1]
        with contextlib.closing(bind(server.host, port, is_shared=True)) as reserved:
            yield reserved

    # --- workers ----------------------------------------------------------------------------------

    async def _keep(self, worker: _WorkerProcess) -> None:
        """Keep a worker running, until all are to stop."""
        retry = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            began = loop.time()
            code = await self._live(worker)
            if self._is_stopping:
                break
            if not self._has_started.is_set():
                self._code = code or 1
                self.stop()
                break
            if loop.time() - began > MAX_DELAY_S:
                retry.reset()
            worker.restarts += 1
            delay_s, how = retry.next_delay(), _how(code)
            logger.error(
                "worker %d ended (%s); started again in %.2g s", worker.number, how, delay_s
            )
            await asyncio.sleep(delay_s)

    async def _live(self, worker: _WorkerProcess) -> int:
        """One worker's life; returns how it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker.process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._board),
                # A terminal's Ctrl-C is for the supervisor, which passes it on.
                start_new_session=True,
            )
        ours.setblocking(False)
        line = worker.line = await WorkerLine.over(ours)
        line.send(self._start_of(worker))
        if self._is_stopping:
            line.send(Stop())
        try:
            await self._hear(worker, line)
        finally:
            worker.line, worker.is_ready = None, False
            line.close()
            self._hurry_the_rest()
            self._give_up_on(worker.number)
        return await worker.process.wait()

    def _hurry_the_rest(self) -> None:
        """If nobody listens any more, those that start must, whatever they know."""
        if not any(worker.is_ready for worker in self._workers):
            for worker in self._workers:
                if worker.line is not None:
                    worker.line.send(Hurry())

    def _start_of(self, worker: _WorkerProcess) -> Start:
        return Start(
            worker.number,
            len(self._workers),
            self._port,
            self._board,
            self._secret,
            self._text,
            self._plan.directory,
            self._plan.overrides,
            list(self._changes.values()),
            worker.restarts,
            self._started_at,
            any(other.is_ready for other in self._workers),
        )

    async def _hear(self, worker: _WorkerProcess, line: WorkerLine) -> None:
        while (message := await line.receive()) is not None:
            if isinstance(message, Ready):
                worker.is_ready = True
                if all(each.is_ready for each in self._workers):
                    self._has_started.set()
            elif isinstance(message, Ask):
                task = asyncio.create_task(self._relay(worker, message))
                self._relaying.add(task)
                task.add_done_callback(self._relaying.discard)
            elif isinstance(message, WorkerReply):
                self._take_reply(worker.number, message)

    async def _announce(self) -> None:
        await self._has_started.wait()
        scheme = "http" if self._config.server.tls.certificate is None else "https"
        host = in_url(self._config.server.host)
        announce(f"kvroute listens on {scheme}://{host}:{self._port}", self._config)
        logger.info("%d workers", len(self._workers))

    # --- questions --------------------------------------------------------------------------------

    async def _relay(self, asker: _WorkerProcess, ask: Ask) -> None:
        """Ask all others, and give the replies to the one who asked."""
        if ask.key:
            self._remember(ask)
        number = next(self._numbers)
        others = [other for other in self._workers if other is not asker and other.line is not None]
        waiting = {other.number for other in others if other.is_ready}
        question = self._questions[number] = _Question(asker, ask, set(waiting))
        for other in others:
            # One that is starting hears what changes something when it is up.
            if other.line is not None and (other.is_ready or ask.key):
                other.line.send(Ask(number, ask.what, ask.body))
        try:
            if question.waiting:
                async with timeout(REPLY_S):
                    await question.is_answered.wait()
        except asyncio.TimeoutError:
            pass
        finally:
            del self._questions[number]
        if asker.line is not None:
            asker.line.send(WorkerReplies(ask.number, question.bodies, sorted(question.waiting)))

    def _take_reply(self, worker: int, reply: WorkerReply) -> None:
        question = self._questions.get(reply.number)
        if question is not None and worker in question.waiting:
            question.bodies[worker] = reply.body
            question.waiting.discard(worker)
            if not question.waiting:
                question.is_answered.set()

    def _give_up_on(self, worker: int) -> None:
        """Wait no longer for the replies of one that is gone."""
        for question in self._questions.values():
            if worker in question.waiting and question.waiting == {worker}:
                question.is_answered.set()

    def _remember(self, ask: Ask) -> None:
        self._changes.pop(ask.key, None)
        self._changes[ask.key] = ask.what.encode() + b"\0" + ask.body
        if len(self._changes) > MAX_CHANGES:
            del self._changes[next(iter(self._changes))]

    # --- the configuration ------------------------------------------------------------------------

    async def _follow_config(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                text = await asyncio.to_thread(self._plan.read_text)
            except ConfigError as error:
                logger.error("the changed configuration is refused, the old one stays: %s", error)
                continue
            with contextlib.suppress(ConfigError):  # each worker says what is wrong
                await asyncio.to_thread(self._plan.check, text)
                self._text = text
            for worker in self._workers:
                if worker.line is not None:
                    worker.line.send(Reload(text))

    async def _watch(self, path: Path, interval_s: float = 1.0) -> None:
        seen: Stamp | None = await asyncio.to_thread(stamp_of, path)
        while True:
            await asyncio.sleep(interval_s)
            stamp = await asyncio.to_thread(stamp_of, path)
            if stamp != seen and stamp is not None:
                self._reload.set()
            seen = stamp or seen


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with {code}"
