"""Requests that were sent on: each has its attempts, one after the other, and an observer that
hears what the core tells of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from kvevents.lookups import addresses, is_numeric
from router.plane.exchanges import FailedFirst, PlaneExchange
from router.proxy.attempts import Attempt, Failure, RequestRetries, RetryBudget, failure_of
from router.proxy.messages import error_body, error_event
from router.proxy.trying import Trying
from router.proxy.types import Dialect, End, ProxyObserver, ProxyRequest, ProxySettings
from router.upstream import Header

if TYPE_CHECKING:
    from router._core import Plane

logger = logging.getLogger(__name__)

DIALECTS = (Dialect.OPENAI, Dialect.ANTHROPIC)
"""By the numbers that the core knows them by."""
MAY_REUSE, IS_CONTROL, WANTS_ID = 1, 2, 4
"""Flags of `Plane.forward`."""
_LOOKED_UP_S = 5.0
"""How long the addresses of a name are taken for known."""


def broken_events() -> list[bytes]:
    """What ends an event stream that a replica broke off, by dialect."""
    message = "the replica ended the stream before it was complete"
    return [error_event(dialect, message, "server_error", "replica_died") for dialect in DIALECTS]


class Addresses:
    """Of replicas' hosts: looked up when they are needed, and again after some seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._looking_up: dict[str, asyncio.Task[None]] = {}

    def known(self, host: str) -> list[str] | None:
        """Those of *host*; None if it has to be looked up."""
        found = self._known.get(host)
        if found is None or found[0] < asyncio.get_running_loop().time():
            return None
        return found[1]

    def latest(self, host: str) -> Sequence[str]:
        """Those of *host*, or what they were; none while they are looked up for the first time."""
        if is_numeric(host):
            return (host,)
        if self.known(host) is None and host not in self._looking_up:
            task = asyncio.get_running_loop().create_task(self._look_up_for_later(host))
            self._looking_up[host] = task
        found = self._known.get(host)
        return () if found is None else found[1]

    async def _look_up_for_later(self, host: str) -> None:
        try:
            await self.look_up(host)
        except (OSError, UnicodeError):
            self.forget(host)
        finally:
            del self._looking_up[host]

    async def look_up(self, host: str) -> list[str]:
        """Those of *host*.

        Raises:
            OSError: It has none.
            UnicodeError: It cannot be a name.
        """
        found = await addresses(host)
        until = asyncio.get_running_loop().time() + _LOOKED_UP_S
        self._known[host] = until, found
        return found

    def forget(self, host: str) -> None:
        """Nobody answers there."""
        self._known.pop(host, None)


def _others_first(plan: Iterator[Attempt], replica_id: str) -> Iterator[Attempt]:
    """The attempts of *plan*, those at one replica behind all others."""
    at_it = []
    for attempt in plan:
        if attempt.replica_id == replica_id:
            at_it.append(attempt)
        else:
            yield attempt
    yield from at_it


class PlaneProxy:
    """Sends requests to replicas, and their responses to the clients, by the core's sockets."""

    def __init__(self, settings: ProxySettings, on_shortage: Callable[[str], object]) -> None:
        """
        Args:
            settings: Bounds on every request.
            on_shortage: Told what the system refused.
        """
        self.settings = settings
        self.addresses = Addresses()
        self.on_shortage = on_shortage
        self.plane: Plane | None = None
        """Before any request it is there."""
        self.relays: dict[int, PlaneRelay] = {}
        """By the number of the exchange."""
        self._retry_budget = RetryBudget(settings.retries)
        self.tasks: set[asyncio.Task[None]] = set()

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
            recipient: Gets the response.
            observer: Hears what happens; `on_end` exactly once, in every case.
            on_over: Called when that has been said.
        Returns:
            What is told of the client. It may be over already.
        """
        self._retry_budget.add_request()
        retries = RequestRetries(self._retry_budget)
        relay = PlaneRelay(self, retries, iter(plan), request, recipient, observer, on_over)
        self.relays[recipient.number] = relay
        relay.start()
        return relay


class PlaneRelay(Trying):
    """One request that was sent on."""

    __slots__ = (
        "_exchange",
        "_on_over",
        "_proxy",
        "_request",
        "_started_at",
        "is_over",
    )

    def __init__(
        self,
        proxy: PlaneProxy,
        retries: RequestRetries,
        plan: Iterator[Attempt],
        request: ProxyRequest,
        exchange: PlaneExchange,
        observer: ProxyObserver,
        on_over: Callable[[], object],
    ) -> None:
        super().__init__(retries, plan, observer)
        self.is_over = False
        self._proxy = proxy
        self._request = request
        self._exchange = exchange
        self._on_over = on_over
        self._started_at = asyncio.get_running_loop().time()

    # --- what its server says ---------------------------------------------------------------------

    def start(self) -> None:
        """Take the first steps."""
        if self._exchange.is_gone:
            self._finish(End.CLIENT_LEFT, None)
            return
        if self._exchange.failed_first is not None:
            self._go_on_after(self._exchange.failed_first)
        self._take(self._try_next)

    def _go_on_after(self, failed: FailedFirst) -> None:
        """The first attempt was the core's: all others come before that replica again."""
        self._retries.start(lambda: True)
        self._tried = True
        self._unavailable = failed.failure is None
        self._retry_after_s = failed.retry_after_s or 0
        unavailable = Failure.UNAVAILABLE if failed.retry_after_s is None else Failure.BUSY
        failure = unavailable if failed.failure is None else failure_of(failed.failure)
        self._retries.failed(failed.replica, failure, False)
        self._observer.on_tried(failure)
        self._plan = _others_first(self._plan, failed.replica)

    def client_left(self) -> None:
        """The core tells of it, as an end."""

    def cancel(self) -> None:
        """The router will not finish it: the core tells of the end."""
        if not self.is_over:
            self._exchange.abort()

    # --- what the core tells ----------------------------------------------------------------------

    def on_failed(self, failure: str, why: str) -> None:
        """An attempt failed before its first byte."""
        self._take(lambda: self._failed_before(failure, why))

    def on_not_now(self, status: int, retry_after_s: int | None) -> None:
        """The replica responds 429, 502, 503 or 504."""
        self._take(lambda: self._not_now(status, retry_after_s))

    def on_first_byte(self, status: int, _seconds: float) -> None:
        """The response has begun."""
        attempt = self._attempt
        assert attempt is not None
        self._exchange.status = status
        self._exchange.response_started = True
        if status >= 500:
            self._observer.on_failure(attempt, Failure.SERVER_ERROR)
        now = asyncio.get_running_loop().time()
        self._observer.on_first_byte(attempt, now - self._started_at)

    def on_progress(self, events: int) -> None:
        """So many more events of a stream have passed."""
        self._observer.on_events(events)

    def on_beginning(self, data: bytes) -> None:
        """A part of the beginning of the body has passed."""
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
        """All is over."""
        self._exchange.body_bytes = body_bytes
        if events:
            self._observer.on_events(events)
        self._observer.on_usage(is_json, usage, first_usage)
        if failure is not None and self._attempt is not None:
            self._observer.on_failure(self._attempt, failure_of(failure))
        self._finish(End(end), status or None)

    # --- the attempts -----------------------------------------------------------------------------

    @override
    def _send_to(self, attempt: Attempt, may_reuse: bool = True) -> None:
        self._attempt = attempt
        self._observer.on_attempt(attempt)
        host = attempt.origin.host
        known = self._proxy.addresses.known(host)
        if known is not None:
            self._connect(attempt, known, may_reuse)
            return
        task = asyncio.get_running_loop().create_task(self._look_up(attempt, may_reuse))
        self._proxy.tasks.add(task)
        task.add_done_callback(self._proxy.tasks.discard)

    async def _look_up(self, attempt: Attempt, may_reuse: bool) -> None:
        try:
            hosts = await self._proxy.addresses.look_up(attempt.origin.host)
        except (OSError, UnicodeError) as error:
            self.on_failed("connect", str(error))
            return
        self._take(lambda: self._connect(attempt, hosts, may_reuse))

    def _connect(self, attempt: Attempt, hosts: list[str], may_reuse: bool) -> None:
        if self.is_over:
            return
        allows = attempt.origin.allows
        if allows is not None:
            hosts = [host for host in hosts if allows(host)]
        if not hosts:
            self._failed_before("connect", "nothing may be connected to there")
            return
        self._forward(attempt, hosts, may_reuse)

    def _forward(self, attempt: Attempt, hosts: Sequence[str], may_reuse: bool) -> None:
        request, origin, plane = self._request, attempt.origin, self._proxy.plane
        assert plane is not None
        body = request.body if attempt.body is None else attempt.body
        times = request.timeouts or self._proxy.settings.timeouts
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
                None if request.target == self._exchange.target else request.target,
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
        if failure in ("no_files", "at_limit"):
            if failure == "no_files":
                self._proxy.on_shortage("open_files")
            message = "the router is at its limit of connections"
            self._refuse(End.OVERLOADED, 503, message, "overloaded")
            return
        if failure in ("connect", "connect_timeout"):
            self._proxy.addresses.forget(attempt.origin.host)
        logger.debug("%s: %s", attempt.origin, why)
        self._failed(attempt, failure_of(failure))
        if failure == "kept_closed" and self._may_try(attempt):
            self._send_to(attempt, may_reuse=False)
        else:
            self._try_next()

    def _not_now(self, status: int, retry_after_s: int | None) -> None:
        attempt, plane = self._attempt, self._proxy.plane
        if self.is_over or attempt is None or plane is None:
            return
        if not self._go_elsewhere(attempt, status, retry_after_s):
            plane.pass_on(self._exchange.number)

    @property
    @override
    def _has_begun(self) -> bool:
        return self._exchange.response_started

    @override
    def _let_go(self) -> None:
        """The core does, with the next command."""

    @override
    def _abandon(self) -> None:
        self._exchange.abort()

    # --- the end ----------------------------------------------------------------------------------

    @override
    def _refuse(self, end: End, status: int, message: str, code: str) -> None:
        """End with an error of the router's own."""
        body = error_body(self._request.dialect, message, "server_error", code)
        after_s = self._retry_after_s or self._proxy.settings.retry_after_s
        headers: list[Header] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % after_s),
            *self._request.response_headers,
        ]
        self._exchange.respond(status, headers, body, True)
        self._finish(end, status)

    def _finish(self, end: End, status: int | None) -> None:
        if self.is_over:
            return
        self.is_over = True
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
