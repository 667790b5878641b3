"""Ray Serve's request router that asks ours. Named in
`RequestRouterConfig(request_router_class=...)`.

One lives in every process that holds a handle of the deployment, on the event loop that Ray keeps
for them. Ray sends this file there as it is where the application was built; what others must find
equal, such as errors, stands elsewhere.

A booking lives as long as its call: from the choice of a replica to the end of what that returns,
or, where the call never reached one, to the end of the task that was to send it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import uuid
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
from async_timeout import timeout
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError
from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter
from ray.util import metrics

from kvroute_ray.names import replica_name
from kvroute_ray.options import RoutingOptions
from kvroute_ray.outcomes import CallRefused, RoutingStatistics
from kvroute_ray.questions import prompt_of, question
from router.client import AsyncSelectionClient, Selection, SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica

logger = logging.getLogger("ray.serve")

MAX_REPORTS = 4096
"""Reports under way at a time; further ones are dropped and counted."""
MAX_QUESTIONS = 64
"""Calls that are being placed at a time; further ones wait in Ray's queue."""

_ATTRIBUTE = "kvroute_booking"


class _NotAsked(Exception):
    """The router gave no answer for a call; the text is a label's value."""


class _CallBooking:
    """The booking for one call, over all tries to place it."""

    __slots__ = ("_stop_watching", "replica_id", "selection", "tried")

    def __init__(self) -> None:
        self.selection: Selection | None = None
        self.replica_id: ReplicaID | None = None
        self.tried: list[str] = []
        """Replicas that Ray did not send it to: full, or gone."""
        self._stop_watching: Callable[[], object] | None = None

    def end_with(self, task: asyncio.Task[Any], end: Callable[[asyncio.Task[Any]], None]) -> None:
        """Call *end* when the task that is to send the call is over, unless `let_go` is first."""
        task.add_done_callback(end)
        self._stop_watching = functools.partial(task.remove_done_callback, end)

    def let_go(self) -> None:
        """Something else ends what is booked."""
        if self._stop_watching is not None:
            self._stop_watching()

    def take(self) -> Selection | None:
        """Return the booking, which is now the caller's to end."""
        selection, self.selection = self.selection, None
        return selection


class KVRouteRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Sends each call to the router's choice, and books it there; see `RoutingOptions`.

    Calls are not taken in turn, as Ray's own router does: a replica is chosen for one call, by its
    prompt.
    """

    # Ray has no types, so its classes are `Any` here.

    def initialize_state(self, **options: Any) -> None:
        """Ray calls this with the deployment's `request_router_kwargs`, on its event loop."""
        self._decisions: Counter[str] = Counter()
        self._chosen_for: dict[asyncio.Task[Any] | None, PendingRequest] = {}
        self._lost_reports = 0
        self._reports: set[asyncio.Task[None]] = set()
        self._asks_again_at = 0.0
        self._is_silent = False
        self._disputed: frozenset[str] = frozenset()
        self._decisions_metric = metrics.Counter(
            "serve_calls_placed",
            description="Calls, by who chose the replica: router, or why Ray did.",
            tag_keys=("application", "deployment", "chosen_by"),
        ).set_default_tags(
            {"application": self._deployment_id.app_name, "deployment": self._deployment_id.name}
        )
        self._router: AsyncSelectionClient | None = None
        try:
            self._options = RoutingOptions(**options)
            self._router = AsyncSelectionClient(
                self._options.url, self._options.api_key(), self._options.timeout_s
            )
        except (TypeError, ValueError, httpx.InvalidURL) as error:
            # An exception here would leave every call waiting for a router for ever.
            logger.error(
                "%s is not routed by KV cache: request_router_kwargs: %s",
                *(self._deployment_id, error),
            )

    def statistics(self) -> RoutingStatistics:
        """Return the counts of what it has done so far."""
        return RoutingStatistics(dict(self._decisions), self._lost_reports)

    async def close(self) -> None:
        """Report what has ended, and close its connections, on Ray's event loop. Ray does not: the
        end of the process does."""
        if self._reports:
            await asyncio.wait(self._reports)
        if self._router is not None:
            await self._router.close()

    @property
    def max_num_routing_tasks(self) -> int:
        """Ray's own bound, two for each replica, is for questions that replicas are asked: those to
        the router may wait there for their turn."""
        return MAX_QUESTIONS

    # --- what Ray asks ----------------------------------------------------------------------------

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica for the call; Ray asks again where that cannot take it."""
        if pending_request is None or not candidate_replicas:
            return self._by_load(candidate_replicas)
        self._note_task(pending_request)
        # Without it Ray asks again at once, and for ever, while the replica is full.
        pending_request.routing_context.should_backoff = True
        booking = self._booking_of(pending_request)
        self._end_soon(booking.take(), "client_left")
        try:
            chosen = await self._ask(pending_request, booking, candidate_replicas)
            self._count("router")
        except _NotAsked as why:
            self._count(str(why))
            self._set_argument(pending_request, None)
            chosen = self._by_load(self._allowed(candidate_replicas, pending_request))
        except CallRefused as refused:
            self._count("refused")
            self._refuse(pending_request, refused)
            return [candidate_replicas[:1]]
        return chosen

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """The replica has taken the call: what is booked ends with the result."""
        booking: _CallBooking | None = getattr(pending_request, _ATTRIBUTE, None)
        selection = None if booking is None else booking.take()
        if booking is None or selection is None:
            return
        booking.let_go()
        if booking.replica_id != replica_id:
            self._end_soon(selection, "client_left")
            return
        loop = self._event_loop

        def over(found: Any) -> None:  # in a thread of Ray's
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
                loop.call_soon_threadsafe(self._end_with, selection, found)

        result.add_done_callback(over)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose, in the task that sends the call as well: if that fails, the call reaches no
        replica, whether it was cancelled while a replica was chosen, asked, or waited for."""
        task = asyncio.current_task()
        if task is not None and not is_retry:
            booking = self._booking_of(pending_request)

            def over(sent: asyncio.Task[Any]) -> None:
                if sent.cancelled() or sent.exception() is not None:
                    self._end_soon(booking.take(), "client_left")

            booking.end_with(task, over)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: Any = None
    ) -> None:
        """Give the replica to the call that it was chosen for.

        Ray finds that by an id which all calls have in common that are made for one request of a
        client: the second of two at a time would get the first one's replica, and the other none.
        """
        pending = self._chosen_for.get(asyncio.current_task())
        if pending is None or pending.future.done():
            super()._fulfill_next_pending_request(replica, request_metadata)
            return
        self._record_queue_wait_time(pending)
        self._remove_pending_request_from_indices(pending)
        pending.future.set_result(replica)

    def _note_task(self, pending_request: PendingRequest) -> None:
        task = asyncio.current_task()
        if task is not None and task not in self._chosen_for:
            task.add_done_callback(self._chosen_for.pop)
        self._chosen_for[task] = pending_request

    # --- asking -----------------------------------------------------------------------------------

    async def _ask(
        self,
        pending_request: PendingRequest,
        booking: _CallBooking,
        candidates: Sequence[RunningReplica],
    ) -> list[list[RunningReplica]]:
        """Book the call at the router's choice.

        Raises:
            _NotAsked: It gave no answer; Ray chooses.
            CallRefused: The call should not be sent.
        """
        if self._router is None:
            raise _NotAsked("misconfigured")
        try:
            prompt = prompt_of(pending_request.args, pending_request.kwargs)
        except ValueError:
            prompt = None
        if prompt is None:
            raise _NotAsked("no_prompt")
        if self._event_loop.time() < self._asks_again_at:
            raise _NotAsked("paused")
        allowed = {
            replica_name(each.replica_id): each
            for each in self._allowed(candidates, pending_request)
        }
        if set(booking.tried) >= allowed.keys():
            booking.tried.clear()
        only = [*allowed] if len(allowed) < len(candidates) else []
        if self._disputed == allowed.keys():
            only = [*allowed]
        selection = await self._reserve(prompt.fields, only, booking.tried)
        if selection.replica not in allowed:
            # Ray knows which replicas it has. Naming all of them costs the router several times the
            # work, so that is done only for a set that it sees otherwise.
            self._end_soon(selection, "client_left")
            self._disputed = frozenset(allowed)
            selection = await self._reserve(prompt.fields, [*allowed], booking.tried)
        if selection.replica not in allowed:
            self._end_soon(selection, "client_left")
            raise _NotAsked("unknown_replica")
        replica = allowed[selection.replica]
        booking.selection, booking.replica_id = selection, replica.replica_id
        booking.tried.append(selection.replica)
        if selection.body_fields:
            holder = (
                pending_request.args if isinstance(prompt.place, int) else pending_request.kwargs
            )
            holder[prompt.place] = prompt.with_fields(selection.body_fields)
        self._set_argument(pending_request, selection)
        return [[replica]]

    async def _reserve(
        self, prompt: Mapping[str, Any], only: Sequence[str], avoid: Sequence[str]
    ) -> Selection:
        assert self._router is not None
        # The name is ours, so that what is booked can be ended though no answer came.
        name = uuid.uuid4().hex
        options = self._options
        asked = question(prompt, name, options.model, options.endpoint, only, avoid)
        try:
            async with timeout(options.timeout_s):
                selection = await self._router.reserve(asked)
        except SelectionError as error:
            raise self._refusal(error) from None
        except (httpx.HTTPError, OSError, asyncio.TimeoutError) as error:
            self._end_soon(_unanswered(name), "client_left")
            self._note_silence(error)
            raise _NotAsked("no_answer") from None
        except (ValueError, TypeError, RecursionError):  # JSON cannot express it
            raise _NotAsked("no_prompt") from None
        except asyncio.CancelledError:
            self._end_soon(_unanswered(name), "client_left")
            raise
        if self._is_silent:
            self._is_silent = False
            logger.info("%s: the router at %s answers again", self._deployment_id, options.url)
        return selection

    def _refusal(self, error: SelectionError) -> Exception:
        if error.code in CallRefused.CODES:
            return CallRefused(error.status, error.code, str(error), error.retry_after_s)
        if not self._decisions[error.code]:
            logger.warning(
                "%s: the router at %s refuses: %s; Ray chooses, as after all of this kind",
                *(self._deployment_id, self._options.url, error),
            )
        return _NotAsked(error.code)

    def _note_silence(self, error: Exception) -> None:
        self._asks_again_at = self._event_loop.time() + self._options.pause_s
        if not self._is_silent:
            self._is_silent = True
            logger.warning(
                "%s: the router at %s does not answer (%s); Ray chooses until it does",
                *(self._deployment_id, self._options.url, type(error).__name__),
            )

    def _allowed(
        self, candidates: Sequence[RunningReplica], pending_request: PendingRequest
    ) -> Sequence[RunningReplica]:
        """Return the replicas with the model that the call is multiplexed to, where it is."""
        if not pending_request.metadata.multiplexed_model_id:
            return candidates
        ids = self.apply_multiplex_routing(pending_request=pending_request)
        return [each for each in candidates if each.replica_id in ids] or candidates

    def _by_load(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        """Return two by chance, of which Ray takes the one with fewer calls."""
        return [random.sample(candidates, min(2, len(candidates)))] if candidates else []

    # --- the end ----------------------------------------------------------------------------------

    def _booking_of(self, pending_request: PendingRequest) -> _CallBooking:
        found: _CallBooking | None = getattr(pending_request, _ATTRIBUTE, None)
        if found is not None:
            return found
        booking = _CallBooking()
        setattr(pending_request, _ATTRIBUTE, booking)
        # However Ray gives a call up, it forgets it.
        forgotten = weakref.finalize(
            pending_request, _forget, weakref.ref(self), self._event_loop, booking
        )
        forgotten.atexit = False
        return booking

    def _refuse(self, pending_request: PendingRequest, refused: CallRefused) -> None:
        self._remove_pending_request_from_indices(pending_request)
        if not pending_request.future.done():
            pending_request.future.set_exception(refused)

    def _set_argument(self, pending_request: PendingRequest, selection: Selection | None) -> None:
        name = None if self._router is None else self._options.booking_argument
        if name is not None:
            pending_request.kwargs[name] = selection

    def _end_with(self, selection: Selection, found: Any) -> None:
        """End it as its call ended.

        Args:
            selection: What is booked.
            found: Ray's result: an exception if it failed, or the gRPC call.
        """
        cause = getattr(found, "cause", None) or found
        is_cancelled = getattr(found, "cancelled", None)
        if isinstance(cause, TaskCancelledError) or (callable(is_cancelled) and is_cancelled()):
            self._end_soon(selection, "client_left")
            return
        if isinstance(cause, (ActorDiedError, ActorUnavailableError)):
            selection.failure = "closed"
        self._end_soon(selection, "failed" if isinstance(found, Exception) else "completed")

    def _end_soon(self, selection: Selection | None, outcome: str) -> None:
        if selection is None:
            return
        if len(self._reports) >= MAX_REPORTS:
            self._lost_reports += 1
            return
        task = self._event_loop.create_task(self._end(selection, outcome))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _end(self, selection: Selection, outcome: str) -> None:
        assert self._router is not None
        try:
            async with timeout(self._options.timeout_s):
                await self._router.end(selection, outcome)
        except SelectionError as error:
            # The replica has ended it, or its time was over.
            self._lost_reports += error.code != "reservation_not_found"
        except (httpx.HTTPError, OSError, asyncio.TimeoutError):
            self._lost_reports += 1

    def _count(self, chosen_by: str) -> None:
        self._decisions[chosen_by] += 1
        self._decisions_metric.inc(tags={"chosen_by": chosen_by})


def _forget(
    owner: weakref.ref[KVRouteRequestRouter],
    loop: asyncio.AbstractEventLoop,
    booking: _CallBooking,
) -> None:
    """Ray has forgotten a call, in whichever thread: what is still booked for it ends."""
    if booking.selection is None:
        return

    def end() -> None:
        routes = owner()
        booking.let_go()
        if routes is not None:
            routes._end_soon(booking.take(), "client_left")

    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(end)


def _unanswered(name: str) -> Selection:
    """Return a selection that may have been booked under a name."""
    return Selection(
        id=name,
        replica="",
        endpoint="",
        address="",
        dp_rank=None,
        cached_tokens=0,
        reason="",
        headers={},
        body_fields={},
        answer={},
    )
