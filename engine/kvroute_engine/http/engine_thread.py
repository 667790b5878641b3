"""An engine on its own thread, driven from an event loop.

Only that thread touches the engine. The loop's calls are queued as commands and executed between
two steps; the outputs of a step go back to the loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import StepOutput
from kvroute_engine.http.errors import EngineDeadError
from kvroute_engine.http.faults import Faults
from offload.errors import EngineRequestError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class EngineThread:
    """Steps an engine while it has work, and executes commands between steps.

    Make it inside a running event loop, on which all methods are called; `close` it at the end.
    """

    def __init__(
        self,
        engine: Engine,
        faults: Faults,
        clock: Callable[[], float],
        on_outputs: Callable[[Sequence[StepOutput], float], None],
        on_end: Callable[[], None],
    ) -> None:
        """Start the thread, which owns *engine* from now on and closes it at the end.

        Args:
            faults: The engine's faults, made on purpose.
            clock: A monotonic clock, in seconds; read on both threads.
            on_outputs: Called on the loop with each step's outputs and the time of its end.
            on_end: Called on the loop once the thread has ended; `is_dead` has the reason.
        """
        self.is_dead = False
        """True if the engine has failed."""
        self.statistics = engine.statistics()
        """The engine as of its last step or command."""
        self._engine = engine
        self._faults = faults
        self._clock = clock
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_closing = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._executor.submit(self._run).add_done_callback(self._on_thread_end)

    # --- the event loop's side --------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Queue a command without waiting for it. If it raises, the engine is dead."""
        self._commands.put(command)

    async def call(self, command: Callable[[], Result]) -> Result:
        """Execute *command* on the thread and return its result.

        If the caller is cancelled before the command has begun, it is not executed. An exception
        other than `EngineRequestError` kills the engine.

        Raises:
            EngineRequestError: The command raised it.
            EngineDeadError: The engine failed or was closed.
        """
        if self.is_dead or self._is_closing:
            raise EngineDeadError
        result: Future[Result] = Future()
        self.post(partial(_execute, command, result))
        waiting = asyncio.wrap_future(result)
        either: list[asyncio.Future[Any]] = [waiting, self._ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        raise EngineDeadError

    async def close(self, within_s: float) -> bool:
        """End the thread after the step it is in; calling it again is harmless.

        Args:
            within_s: How long that step may take, in seconds.

        Returns:
            False if the step took longer; then the thread is left behind.
        """
        self._is_closing = True
        self._faults.release()
        self.post(_wake_up)
        self._executor.shutdown(wait=False)
        await asyncio.wait([self._ended], timeout=within_s)
        return self._ended.done()

    def _finish(self, has_failed: bool) -> None:
        self.is_dead = self.is_dead or has_failed
        self._ended.set_result(None)
        self._on_end()

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._execute_commands()
                self._faults.before_step()
                if self._engine.has_work and not self._is_closing:
                    self._step()
        finally:
            self._engine.close()

    def _execute_commands(self) -> None:
        """Execute queued commands; if the engine has no work, wait for one."""
        must_wait = not self._engine.has_work
        for _ in range(max(self._commands.qsize(), must_wait)):  # only this thread takes from it
            self._commands.get()()
            self.statistics = self._engine.statistics()

    def _step(self) -> None:
        began = self._clock()
        outputs = self._engine.step()
        self._faults.after_step(self._clock() - began)
        self.statistics = self._engine.statistics()
        if outputs:
            self._on_loop(partial(self._on_outputs, outputs, self._clock()))

    def _on_loop(self, action: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _on_thread_end(self, thread: Future[None]) -> None:
        error = thread.exception()
        if error is not None:
            # The message may hold a client's data; the traceback's places do not.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.critical("the engine failed with %s at\n%s", type(error).__name__, where)
        self._on_loop(partial(self._finish, error is not None))


def _execute(command: Callable[[], Result], result: Future[Result]) -> None:
    """Execute a command unless its caller has gone.

    A refused request is the caller's error; any other exception is the engine's failure.
    """
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(command())
    except EngineRequestError as error:
        result.set_exception(error)


def _wake_up() -> None:
    """Do nothing; a thread that waits for a command sees that it is closing."""
