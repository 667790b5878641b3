"""Runs the core's threads and hands their events to their handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from router._core import BodyShare, Plane
from router.config.origin import Header
from router.errors import BodyTooLarge, Overloaded, RequestError, is_out_of_memory
from router.plane.exchanges import FailedFirst, Handler, PlaneExchange, announced_bytes
from router.plane.proxied_messages import error_body
from router.plane.proxy_types import Dialect
from router.plane.relays import IS_CONTROL, PlaneProxy, PlaneRelay, broken_events
from router.plane.secured import Secured

logger = logging.getLogger(__name__)

CLIENT_HEADER = b"x-kvroute-client"
"""The client's address in a request for the application behind; a client's own header of this name
is dropped."""
_CONTROL_TIMES = (60.0, 600.0, 86_400.0)
"""In seconds. In a burst, requests wait to be taken. Pages follow the router for as long as they
are open."""
MAX_TURN_S = 0.02
"""The longest that one turn of the loop handles events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """Bounds of the core; see `Options` of core/plane/types.hpp."""

    head_bytes: int
    max_body_bytes: int
    max_held_bytes: int
    request_s: float
    client_stall_s: float
    keep_alive_s: float
    idle_s: float
    max_idle: int
    max_connections: int
    reserved_from: int
    second_share: float
    dropped: frozenset[bytes]
    prepared: tuple[tuple[bytes, int], ...] = ()
    prepares_all: bool = False
    prepared_with: frozenset[bytes] = frozenset()
    opened_with: frozenset[bytes] = frozenset()
    passes_429: bool = False
    long_prompt_tokens: int = 0
    route_path: bytes = b""
    select_path: bytes = b""
    reserve_path: bytes = b""
    asks_with_key: bool = False
    checks_hosts: bool = False
    trusted_proxies: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _Unread:
    """A request for the application, whose body is still coming."""

    client: tuple[str, int]
    bytes: int = 0
    """So many of it are held."""


class PromptPreparer(Protocol):
    """Reads the prompts of requests that the core holds."""

    def prepare(self, number: int, path: int, headers: list[Header], body: bytes) -> None:
        """Read a prompt, and answer `Plane.place` or `Plane.open`.

        Args:
            path: Its place among `PlaneOptions.prepared`.
            headers: Names in lower case; none where they do not matter.
        """

    def prepare_question(self, number: int, kind: int, headers: list[Header], body: bytes) -> None:
        """Do the same for a gateway's question.

        Args:
            kind: 0 asks where a request would go, 1 for a replica to send it to, 2 for the same
                with a reservation.
            headers: As for `prepare`.
        """

    def hand_over(self, number: int) -> Any:
        """Return the state that was made for a request, if any: it is opened."""

    def left(self, number: int) -> None:
        """The client has left before its request was placed."""


class PlaneListener(NamedTuple):
    """Callbacks for what the core does by itself."""

    on_refusal: Callable[[str], object]
    """Called with the reason why a connection was ended."""
    on_running: Callable[..., None]
    """Called with the number of a request that the core decided where it takes a while, and again
    at its first byte."""
    on_settled: Callable[..., None]
    """Called when such a request is over."""
    on_summed: Callable[..., None]
    """Called with the sum of usual ones, where many end in a moment."""
    sum_bounds: tuple[Sequence[float], ...] | None
    """The buckets for `Plane.sum_up`; None: each is reported."""
    on_left: Callable[[int], object]
    """Called for a request that ends without a record, and where a client has left."""
    on_handed_over: Callable[[int, FailedFirst], object]
    """Called when a replica did not serve such a request, which goes elsewhere or is opened."""
    on_looked_up: Callable[[str, float, float | None], object]
    """Called when a gateway's question where a request would go was answered: model, seconds, and
    those that its tokens took before, if Python made them."""
    on_reserved: Callable[..., None]
    """Called when a gateway's request was placed and booked: the number of its question, and the
    fields of `Plane`'s event. A reservation that is looked up is reported later."""
    on_reported: Callable[..., None]
    """Called with a gateway's report on one: the reservation, the kind, the body, the time."""
    on_second_attempt: Callable[[str], object]
    """Called with the outcome of an attempt beside one that is late."""
    on_long_prompt: Callable[[], object]
    """Called when a request with much to compute was sent."""


@dataclass(eq=False, repr=False)
class DataPlane:
    """The compiled data plane. It calls its handlers on one event loop."""

    handler: Handler
    """Serves requests for replicas, and gateways' questions."""
    proxy: PlaneProxy
    options: PlaneOptions
    control_path: str
    """The Unix socket of the application behind."""
    listener: PlaneListener
    """Receives what the core does by itself."""
    prepares: PromptPreparer
    hold: Callable[[int], object] = lambda _size: None
    """Called with so many more bytes that are held of bodies for the application, or less where it
    is negative; raises `Overloaded` where there is no room."""

    def __post_init__(self) -> None:
        self._exchanges: dict[int, PlaneExchange] = {}
        self._failed_first: dict[int, FailedFirst] = {}
        """The core's failed attempts, until their requests are opened."""
        self._controls: dict[int, _Unread] = {}
        """Requests for the application whose bodies are not whole."""
        self._pending: list[tuple[Any, ...]] = []
        """Events, the next one at the end."""
        self._plane: Plane | None = None
        self._handlers = self._handlers_by_kind()

    def _handlers_by_kind(self) -> dict[str, Callable[..., None]]:
        listener, to_relay = self.listener, self._to_relay
        return {
            "opened": self._opened,
            "prepare": self.prepares.prepare,
            "prepare_question": self.prepares.prepare_question,
            "body": self._body,
            "left": self._left,
            "lost": self._lost,
            "failed": partial(to_relay, PlaneRelay.on_failed),
            "not_now": partial(to_relay, PlaneRelay.on_not_now),
            "first_byte": partial(to_relay, PlaneRelay.on_first_byte),
            "progress": partial(to_relay, PlaneRelay.on_progress),
            "beginning": partial(to_relay, PlaneRelay.on_beginning),
            "ended": partial(to_relay, PlaneRelay.on_ended),
            "refused": _without_number(listener.on_refusal),
            "running": listener.on_running,
            "settled": listener.on_settled,
            "handed_over": self._handed_over,
            "overtaken": self._overtaken,
            "second_attempt": _without_number(listener.on_second_attempt),
            "looked_up": _without_number(listener.on_looked_up),
            "reserved": listener.on_reserved,
            "reported": listener.on_reported,
            "summed": listener.on_summed,
            "long_prompt": _without_number(listener.on_long_prompt),
        }

    @property
    def plane(self) -> Plane:
        """The core's plane, after `start`."""
        assert self._plane is not None
        return self._plane

    def start(self, listeners: Sequence[int], secured: Secured) -> None:
        """Accept clients from now on.

        Args:
            listeners: Listening sockets, one for each thread; the core closes them.
        """
        options = asdict(self.options) | {"broken_events": broken_events()}
        self._plane = Plane(options, list(listeners), *secured)
        if self.listener.sum_bounds is not None:
            self.plane.sum_up(*self.listener.sum_bounds)
        self.proxy.plane = self._plane
        asyncio.get_running_loop().add_reader(self.plane.fileno(), self._on_events)

    def give_up(self, origin: str, silent_s: float) -> None:
        """End the exchanges with a replica that is known not to respond.

        Args:
            silent_s: The least silence in mid-body.
        """
        if self._plane is not None:
            self._plane.give_up(origin, silent_s)
            self.proxy.give_up(origin)

    def counts(self) -> dict[str, int]:
        return {} if self._plane is None else self._plane.counts()

    def unread(self) -> int:
        """Return how many clients have not taken all of a response that is whole."""
        return 0 if self._plane is None else self._plane.unread()

    def cut_all(self) -> None:
        if self._plane is not None:
            self._plane.cut_all()

    async def close(self) -> None:
        """Stop the threads; requests under way are abandoned, and reported."""
        if self._plane is None:
            return
        asyncio.get_running_loop().remove_reader(self.plane.fileno())
        await asyncio.to_thread(self.plane.stop)
        while self._pending:
            self._handle(*self._pending.pop())
        for event in self.plane.take():
            self._handle(*event)
        for task in list(self.proxy.tasks):
            task.cancel()

    # --- events -----------------------------------------------------------------------------------

    def _on_events(self) -> None:
        """Handle as many events as one turn of the loop has time for; the rest in the next one.

        If a burst of a thousand requests were decided in one turn, neither a timer nor an event
        stream would have its own before the last of them.
        """
        plane, loop = self.plane, asyncio.get_running_loop()
        if not self._pending:
            self._pending = plane.take()
            self._pending.reverse()
        pending, until = self._pending, loop.time() + MAX_TURN_S
        plane.hold_back()
        try:
            while pending:
                self._handle(*pending.pop())
                if loop.time() >= until:
                    break
        finally:
            plane.wake()
            if pending:
                plane.ring()  # not `call_soon`, for which there may be no memory

    def _handle(self, kind: str, number: int, *what: Any) -> None:
        """Handle an event. An error in it ends its own request only."""
        try:
            self._handlers[kind](number, *what)
        except Exception as error:
            self.prepares.left(number)
            if not is_out_of_memory(error):
                logger.exception("an event of the data plane (%s) could not be served", kind)
                self.plane.cut(number)
                return
            self._refuse_without_memory(number)

    def _refuse_without_memory(self, number: int) -> None:
        self.plane.end_for_memory(number)  # which counts it
        if number not in self.proxy.relays:  # a relay gets its end as an event
            self._left(number)

    def _lost(self, number: int) -> None:
        """There was no memory for an event: what its request waits for may never come."""
        self.listener.on_refusal("overloaded")
        self.plane.end_for_memory(number)
        relay = self.proxy.relays.get(number)
        if relay is not None:
            relay.on_lost()
        self._left(number)

    def _opened(
        self,
        number: int,
        method: str,
        target: bytes,
        is_of_reserve: bool,
        headers: list[Header],
        host: str,
        port: int,
        body: bytes,
        is_whole: bool,
        was_prepared: bool,
        share: BodyShare | None,
    ) -> None:
        if share is not None:
            share.give_back()  # it is counted here
        exchange = PlaneExchange(
            self.plane, number, method, target, is_of_reserve, was_prepared, headers, (host, port)
        )
        opens = self.handler.opens(method, exchange.path, exchange.query)
        if opens is None:
            self._control(exchange, len(body), is_whole)
            return
        self._exchanges[number] = exchange
        exchange.begun = self.prepares.hand_over(number)
        exchange.failed_first = self._failed_first.pop(number, None)
        exchange.on_over = self._forget
        exchange.receive(body, is_whole)
        exchange.server = opens(exchange)
        exchange.server.proceed()

    def _body(self, number: int, piece: bytes, is_whole: bool) -> None:
        exchange = self._exchanges.get(number)
        if exchange is not None:
            exchange.receive(piece, is_whole)
            if exchange.server is not None:
                exchange.server.proceed()
                if exchange.more_body and not exchange.response_started:
                    exchange.ask_for_body()
        elif number in self._controls:
            self._read_control(number, len(piece), is_whole)

    def _left(self, number: int) -> None:
        self._end_control(number)
        self.prepares.left(number)
        self.listener.on_left(number)
        exchange = self._exchanges.get(number)
        if exchange is not None:
            exchange.is_gone = True
            if exchange.server is not None:
                exchange.server.client_left()
            if number not in self.proxy.relays:
                exchange.over()

    def _forget(self, number: int) -> None:
        self._exchanges.pop(number, None)

    # --- of requests that were sent on ------------------------------------------------------------

    def _handed_over(self, number: int, what: Sequence[Any]) -> None:
        self._failed_first[number] = failed = FailedFirst.of_core(what)
        self.listener.on_handed_over(number, failed)

    def _overtaken(self, number: int, what: Sequence[Any]) -> None:
        self.listener.on_handed_over(number, FailedFirst.of_core(what))

    def _to_relay(self, handler: Callable[..., None], number: int, *what: Any) -> None:
        relay = self.proxy.relays.get(number)
        if relay is not None:
            handler(relay, *what)

    # --- of requests for the application behind ---------------------------------------------------

    def _control(self, exchange: PlaneExchange, body_bytes: int, is_whole: bool) -> None:
        number = exchange.number
        self._controls[number] = _Unread(exchange.address)
        if not is_whole and announced_bytes(exchange.headers) > self.options.max_body_bytes:
            self._refuse_length(number)
        else:
            self._read_control(number, body_bytes, is_whole)

    def _read_control(self, number: int, body_bytes: int, is_whole: bool) -> None:
        """Count a piece, which the core holds. What is passed on is no longer counted: who reads it
        there does so."""
        unread = self._controls[number]
        if unread.bytes + body_bytes > self.options.max_body_bytes:
            self._refuse_length(number)
            return
        try:
            self.hold(body_bytes)
        except Overloaded as error:
            self._refuse(number, error)
            return
        unread.bytes += body_bytes
        if is_whole:
            self._end_control(number)
            self._pass_to_application(number, unread.client)
        else:
            self.plane.read_body(number)

    def _end_control(self, number: int) -> None:
        """Its body is whole, or will never be."""
        unread = self._controls.pop(number, None)
        if unread is not None:
            self.hold(-unread.bytes)

    def _refuse_length(self, number: int) -> None:
        error = BodyTooLarge(self.options.max_body_bytes)
        self.listener.on_refusal(error.code)
        self._refuse(number, error)

    def _refuse(self, number: int, error: RequestError) -> None:
        self._end_control(number)
        body = error_body(Dialect.OPENAI, str(error), error.type, error.code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers(),
        ]
        self.plane.respond(number, error.status, headers, body)

    def _pass_to_application(self, number: int, client: tuple[str, int]) -> None:
        address = f"{client[0]} {client[1]}".encode("latin-1")
        self.plane.forward(
            number,
            "control",
            (self.control_path,),
            0,
            "",
            b"",
            b"",
            (),
            ((CLIENT_HEADER, address),),
            (),
            None,
            _CONTROL_TIMES,
            IS_CONTROL,
            0,
        )


def _without_number(call: Callable[..., object]) -> Callable[..., None]:
    """Wrap the handler of an event that belongs to no request."""

    def handler(_number: int, *what: Any) -> None:
        call(*what)

    return handler
