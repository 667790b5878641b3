"""An engine on a thread of its own, for an event loop: requests in, their outputs as they come.

The engine is touched by its thread alone. What the loop wants of it is queued as a command, done
between two steps; what a step brings goes back to the loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from async_timeout import timeout

from offload.engine.core.requests import EngineRequest, EngineStatistics, FinishReason, StepOutput
from offload.engine.http.errors import EngineBusyError, EngineDeadError
from offload.engine.http.faults import Faults
from offload.errors import EngineRequestError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ServedEngine(Protocol):
    """What is asked of an engine. `offload.engine.core.engine.Engine` is one."""

    @property
    def has_work(self) -> bool:
        """Would a step do anything?"""

    def add_request(self, request: EngineRequest) -> None:
        """Raises EngineRequestError."""

    def abort(self, request_id: str) -> None:
        """No error if it is unknown."""

    def step(self) -> list[StepOutput]:
        """One scheduling step."""

    def reset_prefix_cache(self) -> bool:
        """False: not while requests hold blocks."""

    def statistics(self) -> EngineStatistics:
        """Now."""

    def close(self) -> None:
        """The last call."""


class LatencyObserver(Protocol):
    """Who wants to know how long things took. Called on the event loop, times in seconds."""

    def on_first_token(self, since_arrival_s: float) -> None:
        """A request's first token."""

    def on_next_tokens(self, gap_s: float, count: int) -> None:
        """Tokens of a request, *gap_s* after the ones before."""

    def on_end(self, since_arrival_s: float, reason: FinishReason) -> None:
        """A request is over."""


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """Requests now, and counts since the start."""

    under_way: int
    admitted: int
    refused: int
    """By the engine, or because nothing new was taken."""
    left: int
    """Aborted, since nobody wanted the rest."""
    is_dead: bool
    is_draining: bool


@dataclass(slots=True)
class _Progress:
    arrived_at: float
    last_token_at: float | None = None


class Generation:
    """Outputs of requests that came together, as they come, until all have ended. A context
    manager: what has not, is aborted.

    Raises:
        EngineDeadError: While iterating; the engine failed.
    """

    def __init__(
        self, request_ids: Sequence[str], leave: Callable[[str, FinishReason], None]
    ) -> None:
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()
        self._leave = leave

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> StepOutput:
        while self._open:
            output = await self._outputs.get()
            if output is None:
                raise EngineDeadError
            if output.request_id in self._open:
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
                return output
        raise StopAsyncIteration

    def end(self, request_id: str, reason: FinishReason) -> None:
        """Nothing more is wanted of this request."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._leave(request_id, reason)

    def close(self) -> None:
        """Nothing more is wanted."""
        for request_id in list(self._open):
            self.end(request_id, FinishReason.ABORT)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _v: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def put(self, output: StepOutput | None) -> None:
        """The service's side: an output, or None for the engine's death."""
        self._outputs.put_nowait(output)


class EngineService:
    """Runs one engine. Make it inside a running event loop, which all methods belong to; `close` it
    at the end."""

    def __init__(
        self,
        engine: ServedEngine,
        observer: LatencyObserver | None = None,
        *,
        max_under_way: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread, which owns *engine* from now on.

        Args:
            engine: What to run.
            observer: Told of every request's times.
            max_under_way: Requests that may be there at once; more are refused.
            clock: In seconds; read on both threads.
        """
        self.faults = Faults()
        self._engine = engine
        self._observer = observer
        self._max_under_way = max_under_way
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._progress: dict[str, _Progress] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_closing = self._is_draining = self._is_dead = False
        self._admitted = self._refused = self._left = 0
        self._engine_statistics = engine.statistics()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._thread = self._executor.submit(self._run)
        self._thread.add_done_callback(self._on_thread_end)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, *requests: EngineRequest) -> Generation:
        """Add requests, all or none; returns once the engine has taken them.

        Raises:
            EngineRequestError: The engine refuses one of them.
            EngineBusyError: Nothing new is taken.
            EngineDeadError: The engine failed.
        """
        self._check_open(requests)
        generation = Generation([request.request_id for request in requests], self._leave)
        arrived_at = self._clock()
        for request in requests:
            self._generations[request.request_id] = generation
            self._progress[request.request_id] = _Progress(arrived_at)
        self._idle.clear()
        try:
            await self._ask(partial(self._add, requests))
        except EngineRequestError:
            self._refused += 1
            generation.close()
            raise
        except BaseException:
            generation.close()
            raise
        self._admitted += len(requests)
        return generation

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False if requests hold some.

        Raises:
            EngineDeadError: The engine failed.
        """
        return await self._ask(self._engine.reset_prefix_cache)

    async def run(self, action: Callable[[], Result]) -> Result:
        """Call *action* on the engine's thread, between two steps. What it raises kills the engine.

        Raises:
            EngineDeadError: The engine failed.
        """
        return await self._ask(action)

    # --- state ------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Did the engine fail?"""
        return self._is_dead

    def statistics(self) -> ServiceStatistics:
        return ServiceStatistics(
            under_way=len(self._generations),
            admitted=self._admitted,
            refused=self._refused,
            left=self._left,
            is_dead=self._is_dead,
            is_draining=self._is_draining,
        )

    def engine_statistics(self) -> EngineStatistics:
        """As of the last step or command; never waits for the engine."""
        return self._engine_statistics

    # --- the end ----------------------------------------------------------------------------------

    def start_draining(self) -> None:
        """Take nothing new; what runs goes on."""
        self._is_draining = True

    async def drain(self, within_s: float) -> bool:
        """Take nothing new, and wait for what runs; False if some still does after *within_s*."""
        self.start_draining()
        try:
            async with timeout(within_s):
                await self._idle.wait()
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, within_s: float = 10.0) -> bool:
        """End the thread; requests under way end with `EngineDeadError`. Again: nothing happens.

        Returns:
            False if a step does not come to its end *within_s*: the thread is left behind.
        """
        self._is_draining = self._is_closing = True
        self.faults.release()
        self._commands.put(_nothing)
        self._executor.shutdown(wait=False)
        await asyncio.wait([self._ended], timeout=within_s)
        self._end_all()
        return self._ended.done()

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._obey()
                self.faults.before_step()
                if self._engine.has_work and not self._is_closing:
                    self._step()
        finally:
            self._engine.close()

    def _obey(self) -> None:
        """Do what waits; without work, wait for it."""
        must_wait = not self._engine.has_work
        for _ in range(max(self._commands.qsize(), must_wait)):  # nobody else takes from the queue
            self._commands.get()()
            self._engine_statistics = self._engine.statistics()

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._engine.add_request(request)

    def _step(self) -> None:
        began = self._clock()
        outputs = self._engine.step()
        self.faults.after_step(self._clock() - began)
        self._engine_statistics = self._engine.statistics()
        if outputs:
            self._tell(partial(self._deliver, outputs, self._clock()))

    def _tell(self, action: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _on_thread_end(self, thread: Future[None]) -> None:
        error = thread.exception()
        if error is not None:
            # The message may hold a client's data; where it happened does not.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.critical("the engine failed with %s at\n%s", type(error).__name__, where)
        self._tell(partial(self._on_engine_end, error is not None))

    # --- the event loop ---------------------------------------------------------------------------

    def _check_open(self, requests: Sequence[EngineRequest]) -> None:
        if self._is_dead:
            raise EngineDeadError
        if self._is_draining or len(self._generations) + len(requests) > self._max_under_way:
            self._refused += 1
            why = (
                "is shutting down"
                if self._is_draining
                else f"has its limit of {self._max_under_way} requests under way"
            )
            raise EngineBusyError(f"the engine {why}; try again")
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or any(request_id in self._generations for request_id in ids):
            raise EngineRequestError("request_id: in use; every request needs one of its own")

    async def _ask(self, action: Callable[[], Result]) -> Result:
        """Queue a command for the engine's thread, and wait for what comes of it."""
        if self._is_dead or self._is_closing:
            raise EngineDeadError
        answer: Future[Result] = Future()
        self._commands.put(partial(_answer, answer, action))
        asked = asyncio.wrap_future(answer)
        either: list[asyncio.Future[Any]] = [asked, self._ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()  # what has not begun is not done any more
        raise EngineDeadError

    def _deliver(self, outputs: Sequence[StepOutput], now: float) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                self._note(output, now)
                generation.put(output)

    def _note(self, output: StepOutput, now: float) -> None:
        progress = self._progress[output.request_id]
        if output.new_token_ids:
            self._observe_tokens(progress, len(output.new_token_ids), now)
        if output.finish_reason is not None:
            self._forget(output.request_id, output.finish_reason, now)

    def _observe_tokens(self, progress: _Progress, count: int, now: float) -> None:
        before, progress.last_token_at = progress.last_token_at, now
        if self._observer is None:
            return
        if before is None:
            self._observer.on_first_token(now - progress.arrived_at)
        else:
            self._observer.on_next_tokens(now - before, count)

    def _forget(self, request_id: str, reason: FinishReason, now: float) -> None:
        self._generations.pop(request_id, None)
        progress = self._progress.pop(request_id, None)
        if progress is not None and self._observer is not None:
            self._observer.on_end(now - progress.arrived_at, reason)
        if not self._generations:
            self._idle.set()

    def _leave(self, request_id: str, reason: FinishReason) -> None:
        """Nobody reads this request any more."""
        if request_id in self._generations:
            self._left += reason is FinishReason.ABORT
            self._forget(request_id, reason, self._clock())
            self._commands.put(partial(self._engine.abort, request_id))

    def _on_engine_end(self, is_failure: bool) -> None:
        self._is_dead = self._is_dead or is_failure
        self._ended.set_result(None)
        self._end_all()

    def _end_all(self) -> None:
        now = self._clock()
        for request_id, generation in list(self._generations.items()):
            generation.put(None)
            self._forget(request_id, FinishReason.ABORT, now)


def _answer(answer: Future[Result], action: Callable[[], Result]) -> None:
    """Do as asked, if that is still wanted. A refusal is the asker's; anything else is the engine's
    failure, and goes on."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(action())
    except EngineRequestError as error:
        answer.set_exception(error)


def _nothing() -> None:
    """Wakes the thread."""
