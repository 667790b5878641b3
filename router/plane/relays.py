"""Requests that were sent on: each has its attempts, one after the other, and an observer that
receives what the core reports of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from async_timeout import timeout
from msgspec.structs import replace

from router._core import Plane
from router.config.origin import Header, Timeouts
from router.errors import is_out_of_memory
from router.plane.addresses import Addresses
from router.plane.attempts import (
    NO_PORTS,
    OWN_LIMITS,
    SHORTAGES,
    Attempt,
    Failure,
    PrefillFailed,
    PrefillStep,
    RequestRetries,
    RetryBudget,
    RetryLimits,
    Unretried,
    failure_of,
)
from router.plane.exchanges import FailedFirst, PlaneExchange
from router.plane.proxied_messages import error_body, error_event
from router.plane.proxy_types import Dialect, End, ProxyObserver, ProxyRequest

logger = logging.getLogger(__name__)

DIALECTS = (Dialect.OPENAI, Dialect.ANTHROPIC)
"""The dialects, by the core's numbers."""
MAY_REUSE, IS_CONTROL, WANTS_ID = 1, 2, 4
"""Flags of `Plane.forward`."""
SendPrefill: TypeAlias = Callable[[Attempt, bytes, tuple[Header, ...], Timeouts], Awaitable[bytes]]
"""`PrefillRequests.send`."""
_KEPT_CLOSED = Failure.KEPT_CLOSED.value
_TOO_MANY = 429
_RETRY_AFTER_S = 1
"""Sent with the router's own errors where no replica has named another time."""
_NOT_SERVED = {
    None: "no replica could serve the request",
    Unretried.LIMIT: "no replica could serve the request in the attempts it may have",
    Unretried.BUDGET: "its replica failed, and too many requests are being tried again already",
    Unretried.CLOSED: "two replicas closed the connection over the request; no other gets it",
}


def broken_events() -> list[bytes]:
    """Return the event that ends a broken stream, by dialect."""
    message = "the replica ended the stream before it was complete"
    return [error_event(dialect, message, "server_error", "replica_died") for dialect in DIALECTS]


def _others_first(plan: Iterator[Attempt], replica_id: str) -> Iterator[Attempt]:
    """Yield the attempts of *plan*, those at one replica behind all others."""
    at_it = []
    for attempt in plan:
        if attempt.replica_id == replica_id:
            at_it.append(attempt)
        else:
            yield attempt
    yield from at_it


def _taken_out(
    plan: Iterator[Attempt], replica_id: str
) -> tuple[Attempt | None, Iterator[Attempt]]:
    """Return the first attempt of *plan* at a replica, if there is one, and the others."""
    before: list[Attempt] = []
    for attempt in plan:
        if attempt.replica_id == replica_id:
            return attempt, itertools.chain(before, plan)
        before.append(attempt)
    return None, iter(before)


class PlaneProxy:
    """Sends requests to replicas, and their responses to the clients, by the core's sockets."""

    def __init__(
        self,
        timeouts: Timeouts,
        retries: RetryLimits,
        on_shortage: Callable[[str], object],
        send_prefill: SendPrefill | None = None,
    ) -> None:
        """
        Args:
            timeouts: Of every request without its own.
            on_shortage: Called with what the router has run out of.
            send_prefill: Has prompts computed, for attempts with a step for that.
        """
        self.timeouts = timeouts
        self.send_prefill = send_prefill
        self.addresses = Addresses()
        self.on_shortage = on_shortage
        self.plane: Plane | None = None
        """Set before the first request."""
        self.relays: dict[int, PlaneRelay] = {}
        """The relays, by the number of the exchange."""
        self._retry_budget = RetryBudget(retries)
        self.tasks: set[asyncio.Task[None]] = set()

    def give_up(self, origin: str) -> None:
        """Wait no longer for prompts at a replica that is known not to respond."""
        for relay in list(self.relays.values()):
            relay.give_up_prefill(origin)

    def count_requests(self, count: int = 1) -> None:
        """Count requests that replicas got, of which a share may be tried again."""
        self._retry_budget.add_requests(count)

    def start(
        self,
        plan: Iterable[Attempt],
        request: ProxyRequest,
        recipient: PlaneExchange,
        observer: ProxyObserver,
        on_over: Callable[[], object] = lambda: None,
    ) -> PlaneRelay:
        """Send a request to the first candidate of *plan* that gives a first byte, and its response
        to the client.

        The response to the client begins with the first body byte, not with the headers: until then
        another candidate may serve, within the limits on retries. After the last one failed, the
        client gets 502, or 503 where a replica responded with that or *plan* is empty.

        Args:
            plan: Candidates, best first; each is taken from it when it is needed.
            request: The client's request, its body read to the end.
            observer: Receives what happens; `on_end` exactly once, in every case.
            on_over: Called after `on_end`.
        Returns:
            The relay, which receives the client's events. It may be over already.
        """
        self.count_requests()
        retries = RequestRetries(self._retry_budget)
        relay = PlaneRelay(self, retries, iter(plan), request, recipient, observer, on_over)
        self.relays[recipient.number] = relay
        relay.start()
        return relay


@dataclass(slots=True, eq=False, repr=False)
class PlaneRelay:
    """One request that was sent on: which candidate is next, until one has given its first byte,
    and what becomes of a request that none serves."""

    _proxy: PlaneProxy
    _retries: RequestRetries
    _plan: Iterator[Attempt]
    _request: ProxyRequest
    _exchange: PlaneExchange
    _observer: ProxyObserver
    _on_over: Callable[[], object]
    is_over: bool = False
    _attempt: Attempt | None = None
    _tried: bool = False
    _unavailable: bool = False
    _lacked_port: bool = False
    """There was no local port for one of the attempts."""
    _retry_after_s: int = 0
    """The least `retry-after` of a replica; 0: none had one."""
    _prefill: asyncio.Task[None] | None = None
    """While another replica computes the prompt of the attempt, which is not sent yet."""
    _started_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    # --- from its server --------------------------------------------------------------------------

    def start(self) -> None:
        if self._exchange.is_gone:
            self._finish(End.CLIENT_LEFT, None)
            return
        failed = self._exchange.failed_first
        if failed is None:
            self._take(self._try_next)
        else:
            self._take(lambda: self._resume_after(failed))

    def _resume_after(self, failed: FailedFirst) -> None:
        """The first attempt was the core's: all others come before that replica again, unless only
        a kept connection failed. The client has waited since then."""
        self._started_at -= failed.seconds
        self._note_tried(failed)
        self._tried = True
        self._unavailable = failed.failure is None
        self._retry_after_s = failed.retry_after_s or 0
        again = None
        if failed.failure == _KEPT_CLOSED:
            again, self._plan = _taken_out(self._plan, failed.replica)
        else:
            self._plan = _others_first(self._plan, failed.replica)
        if again is not None and self._may_try(again):
            self._send_to(again, may_reuse=False)
        else:
            self._try_next()

    def _note_tried(self, failed: FailedFirst) -> None:
        if failed.beside is not None:
            self._note_tried(failed.beside)
        self._note_shortage(failed.failure)
        self._retries.start(lambda: True)
        failure, is_replica_lost = self._observer.on_tried(failed)
        self._retries.failed(failed.replica, failure, is_replica_lost)

    def cancel(self) -> None:
        """The router will not finish it: its end comes as an event of the core, once it is sent."""
        if not self.is_over:
            self._exchange.abort()
            if self._prefill is not None:
                self._finish(End.ABANDONED, None)

    def client_left(self) -> None:
        """The client's connection is closed; the core reports it only for what it was told to
        send."""
        if self._prefill is not None:
            self._finish(End.CLIENT_LEFT, None)

    # --- from the core ----------------------------------------------------------------------------

    def on_failed(self, failure: str, why: str) -> None:
        """An attempt failed before its first byte."""
        self._take(lambda: self._failed_before(failure, why))

    def on_not_now(self, status: int, retry_after_s: int | None) -> None:
        """The replica responds 429, 502, 503 or 504."""
        self._take(lambda: self._not_now(status, retry_after_s))

    def on_first_byte(self, status: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._exchange.status = status
        self._exchange.response_started = True
        if status >= 500:
            self._observer.on_failure(attempt, Failure.SERVER_ERROR)
        now = asyncio.get_running_loop().time()
        self._observer.on_first_byte(attempt, now - self._started_at, status)

    def on_progress(self, events: int) -> None:
        self._observer.on_events(events)

    def on_beginning(self, data: bytes) -> None:
        self._observer.on_beginning(data)

    def on_ended(
        self,
        end: str,
        status: int,
        _seconds: float,
        body_bytes: int,
        failure: str | None,
        events: int,
        is_json: bool,
        usage: bytes,
        first_usage: bytes,
    ) -> None:
        self._exchange.body_bytes = body_bytes
        if events:
            self._observer.on_events(events)
        self._observer.on_usage(is_json, usage, first_usage)
        if failure is not None and self._attempt is not None:
            self._observer.on_failure(self._attempt, failure_of(failure))
        self._finish(End(end), status or None)

    def on_lost(self) -> None:
        self._finish(End.ABANDONED, None)

    # --- the attempts -----------------------------------------------------------------------------

    def _send_to(self, attempt: Attempt, may_reuse: bool = True) -> None:
        self._attempt = attempt
        self._observer.on_attempt(attempt)
        if attempt.prefill is None:
            self._reach(attempt, may_reuse)
        else:
            self._prefill = self._run(self._have_prefilled(attempt, attempt.prefill))

    def _reach(self, attempt: Attempt, may_reuse: bool) -> None:
        host = attempt.origin.host
        known = self._proxy.addresses.known(host)
        if known is not None:
            self._connect(attempt, known, may_reuse)
            return
        self._run(self._look_up(attempt, may_reuse))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._proxy.tasks.add(task)
        task.add_done_callback(self._proxy.tasks.discard)
        return task

    # --- its prompt, computed elsewhere -----------------------------------------------------------

    async def _have_prefilled(self, attempt: Attempt, step: PrefillStep) -> None:
        """Have another replica compute the prompt, then send the request."""
        send, request = self._proxy.send_prefill, self._request
        assert send is not None
        headers = (*request.client_keys, *request.added)
        try:
            response = await send(step.at, self._exchange.target, headers, self._proxy.timeouts)
        except PrefillFailed as error:
            failure = error.failure
            self._take(lambda: self._send_unprefilled(attempt, failure))
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(error)
        else:
            self._take(lambda: self._hand_over(attempt, step, response))

    def _hand_over(self, attempt: Attempt, step: PrefillStep, response: bytes) -> None:
        self._observer.on_prefilled(response)
        body = self._request.body if attempt.body is None else attempt.body
        body = step.hand_over(body, response)
        self._send_after_prefill(replace(attempt, body=body, prefill=None))

    def _send_unprefilled(self, attempt: Attempt, failure: Failure | None) -> None:
        attempt = replace(attempt, prefill=None, prefiller=None)
        self._observer.on_unprefilled(attempt, failure)
        self._send_after_prefill(attempt)

    def _send_after_prefill(self, attempt: Attempt) -> None:
        self._prefill, self._attempt = None, attempt
        self._reach(attempt, may_reuse=True)

    def give_up_prefill(self, origin: str) -> None:
        """Wait no longer for the prompt, if a replica that is known not to respond computes it."""
        attempt, task = self._attempt, self._prefill
        if task is None or attempt is None or attempt.prefill is None:
            return
        if attempt.prefill.at.origin.key == origin:
            task.cancel()
            self._take(lambda: self._send_unprefilled(attempt, Failure.UNHEALTHY))

    @property
    def _times(self) -> Timeouts:
        return self._request.timeouts or self._proxy.timeouts

    async def _look_up(self, attempt: Attempt, may_reuse: bool) -> None:
        connect_s = self._times.connect_s
        try:
            async with timeout(connect_s):
                hosts = await self._proxy.addresses.look_up(attempt.origin.host)
        except asyncio.TimeoutError:  # first: since Python 3.11 it is an `OSError`
            self.on_failed("connect_timeout", f"no address within {connect_s:g} s")
            return
        except OSError as error:
            if is_out_of_memory(error):
                self._fail(error)
            else:
                self.on_failed("connect", str(error))
            return
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(error)
            return
        self._take(lambda: self._connect(attempt, hosts, may_reuse))

    def _connect(self, attempt: Attempt, hosts: list[str], may_reuse: bool) -> None:
        if self.is_over:
            return
        allowed = attempt.origin.allowed(hosts)
        if not allowed:
            why = f"{', '.join(hosts)} lies where nothing may be connected to"
            self._failed_before("connect", why)
            return
        self._forward(attempt, allowed, may_reuse)

    def _forward(self, attempt: Attempt, hosts: Sequence[str], may_reuse: bool) -> None:
        request, origin, plane = self._request, attempt.origin, self._proxy.plane
        assert plane is not None
        body = request.body if attempt.body is None else attempt.body
        times = self._times
        wants_id = self._observer.wants_beginning
        try:
            plane.forward(
                self._exchange.number,
                origin.key,
                hosts,
                origin.port,
                origin.host if origin.tls else "",
                origin.host_header,
                origin.target_prefix,
                attempt.request_headers,
                request.added,
                attempt.response_headers + request.response_headers,
                None if body is self._exchange.body else body,
                (times.connect_s, times.first_byte_s, times.idle_s),
                (MAY_REUSE if may_reuse else 0) | (WANTS_ID if wants_id else 0),
                DIALECTS.index(request.dialect),
            )
        except ValueError:
            self._failed_before("connect", f"{', '.join(hosts)}: no address")

    def _failed_before(self, failure: str, why: str) -> None:
        attempt = self._attempt
        if self.is_over or attempt is None:
            return
        if failure in OWN_LIMITS:
            self._note_shortage(failure)
            if failure == NO_PORTS:  # there may be one towards another replica
                self._try_next()
            else:
                self._refuse_for_limit()
            return
        if failure in ("connect", "connect_timeout"):
            self._proxy.addresses.forget(attempt.origin.host)
        logger.debug("%s: %s", attempt.origin, why)
        self._failed(attempt, failure_of(failure))
        if failure == _KEPT_CLOSED and self._may_try(attempt):
            self._send_to(attempt, may_reuse=False)
        else:
            self._try_next()

    def _note_shortage(self, failure: str | None) -> None:
        if failure in SHORTAGES:
            self._proxy.on_shortage(SHORTAGES[failure])
        self._lacked_port |= failure == NO_PORTS

    def _not_now(self, status: int, retry_after_s: int | None) -> None:
        attempt, plane = self._attempt, self._proxy.plane
        if self.is_over or attempt is None or plane is None:
            return
        if not self._go_elsewhere(attempt, status, retry_after_s):
            plane.pass_on(self._exchange.number)

    # --- which candidate is next ------------------------------------------------------------------

    def _take(self, step: Callable[[], None]) -> None:
        """Take a step. An error in it is our own fault; it ends this request and no other."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        is_memory = is_out_of_memory(error)
        if not is_memory:
            logger.error("a request could not be passed on", exc_info=error)
        if self._exchange.response_started:
            self._exchange.abort()
        elif is_memory:
            self._refuse(End.OVERLOADED, 503, "the router is out of memory", "overloaded")
        else:
            self._refuse(End.ABANDONED, 500, "the router failed", "internal_error")

    def _try_next(self) -> None:
        """Try the next candidate; without one, refuse the request."""
        attempt = next(self._plan, None)
        if attempt is not None and self._may_try(attempt):
            self._tried = True
            self._send_to(attempt)
            return
        refused = self._retries.refused
        if refused is not None:
            self._observer.on_unretried(refused)
        if self._lacked_port:
            self._refuse_for_limit()
            return
        status = 502 if self._tried and not self._unavailable else 503
        self._refuse(End.NO_REPLICA, status, _NOT_SERVED[refused], "no_replica_available")

    def _may_try(self, attempt: Attempt) -> bool:
        return self._retries.start(lambda: self._observer.is_at_ease(attempt))

    def _go_elsewhere(self, attempt: Attempt, status: int, retry_after_s: int | None) -> bool:
        """The replica responded that it is unavailable or busy. A 429 is passed on if it has no
        `retry-after`, or if no other replica may be tried."""
        is_429 = status == _TOO_MANY
        is_busy = retry_after_s is not None and self._observer.on_busy(
            attempt, retry_after_s, is_429
        )
        following: Attempt | None = None
        if is_429:
            following = next(self._plan, None) if is_busy else None
            if following is None or not self._may_try(following):
                return False
        if retry_after_s is not None and is_busy:
            self._retry_after_s = min(self._retry_after_s or retry_after_s, retry_after_s)
        self._failed(attempt, Failure.BUSY if is_busy else Failure.UNAVAILABLE)
        if following is not None:
            self._send_to(following)
        else:
            self._unavailable = True
            self._try_next()
        return True

    def _failed(self, attempt: Attempt, failure: Failure) -> None:
        is_replica_lost = self._observer.on_failure(attempt, failure)
        self._retries.failed(attempt.replica_id, failure, is_replica_lost)

    # --- the end ----------------------------------------------------------------------------------

    def _refuse_for_limit(self) -> None:
        message = "the router is at its limit of connections"
        self._refuse(End.OVERLOADED, 503, message, "overloaded")

    def _refuse(self, end: End, status: int, message: str, code: str) -> None:
        """End with an error of the router's own."""
        body = error_body(self._request.dialect, message, "server_error", code)
        after_s = self._retry_after_s or _RETRY_AFTER_S
        headers: list[Header] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % after_s),
            *self._request.response_headers,
        ]
        self._exchange.respond(status, headers, body)
        self._finish(end, status)

    def _finish(self, end: End, status: int | None) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None
        self._proxy.relays.pop(self._exchange.number, None)
        seconds = asyncio.get_running_loop().time() - self._started_at
        try:
            self._observer.on_end(end, status, seconds)
        except Exception:
            logger.exception("the end of a request could not be recorded")
        try:
            self._on_over()
        except Exception:
            logger.exception("what a request held could not be given back")
        self._exchange.over()
