"""Requests to one engine, for an event loop: prompts in, outputs as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, TypeVar

from async_timeout import timeout

from kvroute_engine.core.engine import Engine, EngineStatistics
from kvroute_engine.core.requests import EngineRequest, FinishReason, StepOutput
from kvroute_engine.http.engine_thread import EngineThread
from kvroute_engine.http.errors import EngineBusyError, EngineDeadError
from kvroute_engine.http.faults import Faults
from offload.errors import EngineRequestError

Result = TypeVar("Result")


class LatencyObserver(Protocol):
    """Gets the latencies of requests; called on the event loop."""

    def on_first_token(self, since_arrival_s: float) -> None:
        """A request got its first token, *since_arrival_s* seconds after its arrival."""

    def on_next_tokens(self, gap_s: float, count: int) -> None:
        """A request got more tokens.

        Args:
            gap_s: Seconds since its tokens before these.
        """

    def on_end(self, since_arrival_s: float, reason: FinishReason) -> None:
        """A request ended.

        Args:
            reason: `ABORT` also if the engine died.
        """


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """Requests now, and counts since the start."""

    in_flight: int
    admitted: int
    refused: int
    """Requests refused by the engine, or because no new ones are taken."""
    aborted: int
    """Abandoned by their client before their end."""
    is_dead: bool
    is_draining: bool


@dataclass(slots=True)
class _Latency:
    arrived_at: float
    last_token_at: float | None = None


class Generation:
    """The outputs of requests that were added together, as they come, until all have ended.

    Use it as a context manager: requests that have not ended when it exits are aborted. Iterating
    raises `EngineDeadError` if the engine fails.
    """

    def __init__(
        self, request_ids: Sequence[str], leave: Callable[[str, FinishReason], None]
    ) -> None:
        """
        Args:
            leave: Called with the id of a request whose further outputs are not wanted, and why.
        """
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
        """Take no more outputs of one request.

        Args:
            request_id: The request; nothing happens if it has ended.
        """
        if request_id in self._open:
            self._open.discard(request_id)
            self._leave(request_id, reason)

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for request_id in list(self._open):
            self.end(request_id, FinishReason.ABORT)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _v: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def put(self, output: StepOutput | None) -> None:
        """Add an output, or None for the engine's death; called by the service."""
        self._outputs.put_nowait(output)


class EngineService:
    """Serves requests with one engine.

    Make it inside a running event loop, on which all methods are called; `close` it at the end.
    """

    def __init__(
        self,
        engine: Engine,
        observer: LatencyObserver | None = None,
        *,
        max_in_flight: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the engine's thread, which owns *engine* from now on.

        Args:
            max_in_flight: Requests that may run or wait at once; more are refused.
            clock: A monotonic clock, in seconds; read on both threads.
        """
        self.faults = Faults()
        self._engine = engine
        self._observer = observer
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._latencies: dict[str, _Latency] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._admitted = self._refused = self._aborted = 0
        self._thread = EngineThread(engine, self.faults, clock, self._deliver, self._end_all)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, *new: EngineRequest) -> Generation:
        """Add requests, all or none; returns once the engine has taken them.

        Raises:
            EngineRequestError: The engine refuses one of them.
            EngineBusyError: No new requests are taken.
            EngineDeadError: The engine failed.
        """
        requests = await self._with_peers(new)
        self._check_open(requests)
        generation = Generation([request.request_id for request in requests], self._leave)
        arrived_at = self._clock()
        for request in requests:
            self._generations[request.request_id] = generation
            self._latencies[request.request_id] = _Latency(arrived_at)
        self._idle.clear()
        try:
            await self._thread.call(partial(self._add, requests))
        except EngineRequestError:
            self._refused += 1
            self._withdraw(requests)
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
        return await self._thread.call(self._engine.reset_prefix_cache)

    async def run(self, action: Callable[[], Result]) -> Result:
        """Call *action* on the engine's thread, between two steps; an exception kills the engine.

        Raises:
            EngineDeadError: The engine failed.
        """
        return await self._thread.call(action)

    # --- state ------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Return whether the engine has failed."""
        return self._thread.is_dead

    def statistics(self) -> ServiceStatistics:
        """Return requests now, and counts since the start."""
        return ServiceStatistics(
            in_flight=len(self._generations),
            admitted=self._admitted,
            refused=self._refused,
            aborted=self._aborted,
            is_dead=self.is_dead,
            is_draining=self._is_draining,
        )

    def engine_statistics(self) -> EngineStatistics:
        """Return the engine as of its last step or command; never waits for it."""
        return self._thread.statistics

    # --- the end ----------------------------------------------------------------------------------

    def start_draining(self) -> None:
        """Refuse new requests; those in flight run on."""
        self._is_draining = True

    async def drain(self, within_s: float) -> bool:
        """Refuse new requests and wait for those in flight.

        Args:
            within_s: How long to wait, in seconds.

        Returns:
            False if some are still in flight.
        """
        self.start_draining()
        try:
            async with timeout(within_s):
                await self._idle.wait()
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self, within_s: float = 10.0) -> bool:
        """End the thread; requests in flight end with `EngineDeadError`.

        Calling it again is harmless.

        Args:
            within_s: How long the step that runs may take, in seconds.

        Returns:
            False if the step took longer; then the thread is left behind.
        """
        self._is_draining = True
        has_ended = await self._thread.close(within_s)
        self._end_all()
        return has_ended

    async def _with_peers(self, requests: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """Return the requests with the blocks that their peers hold."""
        if self._engine.peers is None:
            return requests
        self._check_open(requests)
        try:
            return [
                await asyncio.to_thread(self._engine.ask_peer, request)
                if request.kv_transfer_params
                else request
                for request in requests
            ]
        except EngineRequestError:
            self._refused += 1
            raise

    # --- called on the engine's thread ------------------------------------------------------------

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        with ExitStack() as if_refused:
            for request in requests:
                self._engine.add_request(request)
                if_refused.callback(self._engine.abort, request.request_id)
            if_refused.pop_all()

    # --- called on the event loop -----------------------------------------------------------------

    def _check_open(self, requests: Sequence[EngineRequest]) -> None:
        if self.is_dead:
            raise EngineDeadError
        if self._is_draining or len(self._generations) + len(requests) > self._max_in_flight:
            self._refused += 1
            why = (
                "is shutting down"
                if self._is_draining
                else f"has reached its limit of {self._max_in_flight} requests in flight"
            )
            raise EngineBusyError(f"the engine {why}; try again")
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or any(request_id in self._generations for request_id in ids):
            raise EngineRequestError("request_id: in use; every request needs its own")

    def _deliver(self, outputs: Sequence[StepOutput], now: float) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                self._note(output, now)
                generation.put(output)

    def _note(self, output: StepOutput, now: float) -> None:
        if output.new_token_ids:
            self._observe_tokens(self._latencies[output.request_id], len(output.new_token_ids), now)
        if output.finish_reason is not None:
            self._forget(output.request_id, output.finish_reason, now)

    def _observe_tokens(self, latency: _Latency, count: int, now: float) -> None:
        before, latency.last_token_at = latency.last_token_at, now
        if self._observer is None:
            return
        if before is None:
            self._observer.on_first_token(now - latency.arrived_at)
        else:
            self._observer.on_next_tokens(now - before, count)

    def _withdraw(self, requests: Sequence[EngineRequest]) -> None:
        """Forget requests of which the engine refused one, and so took none."""
        for request in requests:
            self._generations.pop(request.request_id, None)
            self._latencies.pop(request.request_id, None)
        if not self._generations:
            self._idle.set()

    def _forget(self, request_id: str, reason: FinishReason, now: float) -> None:
        self._generations.pop(request_id, None)
        latency = self._latencies.pop(request_id, None)
        if latency is not None and self._observer is not None:
            self._observer.on_end(now - latency.arrived_at, reason)
        if not self._generations:
            self._idle.set()

    def _leave(self, request_id: str, reason: FinishReason) -> None:
        """Abort a request that is not read any more."""
        if request_id in self._generations:
            self._aborted += reason is FinishReason.ABORT
            self._forget(request_id, reason, self._clock())
            self._thread.post(partial(self._engine.abort, request_id))

    def _end_all(self) -> None:
        now = self._clock()
        for request_id, generation in list(self._generations.items()):
            generation.put(None)
            self._forget(request_id, FinishReason.ABORT, now)
