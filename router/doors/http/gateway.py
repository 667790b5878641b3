"""The proxied paths: admit, read, decide, pass on."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any, Protocol

from msgspec.structs import replace

from router.config.schema import RouterConfig
from router.doors.asks import ANONYMOUS, Key, request_id_in, tenant_salt
from router.doors.http.access import KEY_HEADERS, Guard, check_one_content_type
from router.doors.http.access_log import AccessLine
from router.doors.http.bodies import (
    check_charset,
    check_form,
    form_field,
    is_form,
    is_object,
    with_form_field,
)
from router.doors.http.forwarding import Forwarding
from router.doors.proxied_paths import (
    ProxiedPath,
    ProxiedPaths,
    RoutedBy,
    dialect_of,
)
from router.doors.terms_reader import TermsReader
from router.errors import (
    BadRequest,
    BodyTooLarge,
    EnginesBusy,
    NoReplica,
    Overloaded,
    RequestError,
    is_out_of_memory,
)
from router.fleet.entrance import EngineOrder, Entrance
from router.fleet.limits import KeyUsage
from router.fleet.line import Waiter
from router.plane.exchanges import PlaneExchange, announced_bytes
from router.plane.proxied_messages import error_body
from router.plane.proxy_types import End
from router.plane.relays import PlaneProxy, PlaneRelay
from router.prompt.body.json_fields import check_int64
from router.prompt.body.owned_fields import PRIORITY_HEADER, strip_form
from router.routing.admission import Admission
from router.routing.deciding import Deciding
from router.routing.decision import Decision
from router.routing.terms import NO_HEADERS, Terms
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_observer import RequestObserver, RequestObservers
from router.telemetry.spans import RequestTrace, Tracer
from router.telemetry.trace_context import TRACEPARENT, TraceContext, read_context

logger = logging.getLogger(__name__)


class GatewayParts(Protocol):
    """The parts of a router that requests go through; see `RouterParts`."""

    config: RouterConfig
    admission: Admission
    entrance: Entrance | None
    metrics: RouterMetrics
    observers: RequestObservers
    proxy: PlaneProxy
    tracer: Tracer | None

    @property
    def dispatcher(self) -> Deciding: ...


class Gateway:
    """Serves the proxied paths."""

    def __init__(
        self, router: GatewayParts, guard: Guard, paths: ProxiedPaths, terms: TermsReader
    ) -> None:
        config = router.config
        self.router, self.server, self.guard, self.terms = router, config.server, guard, terms
        # The router's key is for the router only: replicas do not get to see it.
        keys = KEY_HEADERS if guard.needs_key("client") else ()
        self.forwarding = Forwarding(config.server, keys, config.owns_priority)
        self.engine_order = EngineOrder(config.overload)
        self.hands_over = config.prefill.handed_over_by == "router"
        self.logs_access = config.observability.access_log
        self._paths = paths
        self._open: set[asyncio.Task[Decision]] = set()

    def opens(self, method: str, path: str) -> Callable[[PlaneExchange], Passage] | None:
        """Return the server of a request; None if it does not go to a replica."""
        found = self._paths.find(path)
        # A HEAD request is a GET request whose response is sent without its body.
        if found is None or ("GET" if method == "HEAD" else method) not in found.methods:
            return None
        return functools.partial(Passage, self, found)

    def decide(
        self, path: ProxiedPath, body: bytes, terms: Terms, usage: KeyUsage | None = None
    ) -> Decision | Coroutine[Any, Any, Decision]:
        """Decide where a request goes: at once, or in a coroutine if it has to wait.

        Raises:
            RequestError: It is refused.
        """
        if path.routed_by is RoutedBy.RESPONSE:
            return self.router.dispatcher.dispatch_to_holder(path.response_id, body, terms)
        if path.endpoint is not None:
            return self.router.dispatcher.dispatch_now(path.endpoint, body, terms)
        if terms.salt is not None or (usage is not None and not usage.is_for_all_models):
            return self._decide_for_key(path, body, terms)
        return self._decide_by_load(path, body, terms)

    async def _decide_for_key(self, path: ProxiedPath, body: bytes, terms: Terms) -> Decision:
        """Decide for a key with restrictions: an engine must read the same in the body as the
        router."""
        content_type = terms.headers.get(b"content-type", b"")
        if is_form(content_type) and body.strip():
            await asyncio.to_thread(check_form, content_type, body, b"model")
        elif path.routed_by is RoutedBy.ANY and body.strip() and not is_object(body):
            # Python's JSON reads UTF-16 as well, so an engine might find a prompt in it.
            raise BadRequest("$", f"{len(body)} bytes", "with this key, it must be a JSON object")
        return await self._decide_by_load(path, body, terms)

    async def _decide_by_load(self, path: ProxiedPath, body: bytes, terms: Terms) -> Decision:
        content_type = terms.headers.get(b"content-type", b"")
        needs_model = path.routed_by is RoutedBy.LOAD
        by_load = self.router.dispatcher.dispatch_by_load
        if is_form(content_type):
            model = await asyncio.to_thread(form_field, content_type, body, b"model")
            rename = functools.partial(with_form_field, content_type, b"model")
            check_charset(content_type)
            body = await asyncio.to_thread(strip_form, body)
            return by_load(model, body, terms, needs_model=needs_model, rename=rename)
        if path.routed_by is RoutedBy.ANY and not is_object(body):
            return by_load(None, body, replace(terms, headers=NO_HEADERS), needs_model=False)
        return await self.router.dispatcher.dispatch(None, body, terms, needs_model=needs_model)

    def run(self, deciding: Coroutine[Any, Any, Decision]) -> asyncio.Task[Decision]:
        """Decide in a task, which is kept until its end."""
        task = asyncio.get_running_loop().create_task(deciding)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task


@dataclass(slots=True)
class Begun:
    """Holds what a request has from its beginning to its end, whoever serves it: its key, its place
    among the key's requests, its trace. The core's begin where its prompt is read."""

    usage: KeyUsage | None = None
    """The usage of its key, which counts it already."""
    has_spent: bool = False
    """True if its prompt's tokens are counted there."""
    context: TraceContext | None = None
    """The client's trace context."""
    trace: RequestTrace | None = None
    """Its trace, where the router has its own spans."""
    key: Key = ANONYMOUS
    """The client's."""
    version: tuple[str, str] | None = None
    """The client's name of the model, and the version that was chosen."""

    @property
    def trace_id(self) -> str | None:
        """The id of its trace, if it has one."""
        known = self.trace or self.context
        return None if known is None else known.trace_id

    def left(self) -> None:
        """The client has left, and its request is not served."""
        if self.usage is not None:
            self.usage.leave()
        if self.trace is not None:
            self.trace.end(None)


class _Stage(Enum):
    """How far a request has come.

        stage      when more arrives, or its work is done         when its client leaves
        NEW        admitted: READING, with what is here already   OVER
        READING    whole: DECIDING                                OVER
        DECIDING   decided: SENT, or WAITING without room         (its relay sees it)
        WAITING    its turn: SENT                                 OVER
        SENT       the relay is over: OVER                        the relay ends: OVER

    From all before SENT, an error leads to OVER as well: the client gets it as its response.
    """

    NEW = "new"
    READING = "reading"
    DECIDING = "deciding"
    WAITING = "waiting"
    SENT = "sent"
    OVER = "over"


@dataclass(slots=True, eq=False, repr=False)
class Passage:
    """One request on its way through the gateway: a `Server`."""

    _gateway: Gateway
    _path: ProxiedPath
    _exchange: PlaneExchange
    _stage: _Stage = _Stage.NEW
    _is_admitted: bool = False
    _held_bytes: int = 0
    _body: list[bytes] = field(default_factory=list)
    _observer: RequestObserver | None = None
    _waiter: Waiter | None = None
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[Decision] | None = None
    _relay: PlaneRelay | None = None
    _headers: dict[bytes, bytes] = field(init=False)
    _request_id: bytes = field(init=False)
    _begun: Begun = field(init=False)
    _line: AccessLine | None = field(init=False)

    def __post_init__(self) -> None:
        gateway, exchange = self._gateway, self._exchange
        self._headers = dict(exchange.headers)
        self._request_id = request_id_in(self._headers).encode("latin-1")
        begun = self._begun = exchange.begun or Begun()
        if TRACEPARENT in self._headers:
            begun.context = read_context(exchange.headers)
        if gateway.router.tracer is not None and begun.trace is None:
            route = None if self._path.endpoint is None else self._path.endpoint.value
            begun.trace = gateway.router.tracer.begin(
                begun.context, exchange.method, exchange.path, route
            )
        self._line = AccessLine(exchange.scope) if gateway.logs_access else None

    # --- what happens to it -----------------------------------------------------------------------

    def proceed(self) -> None:
        """More of the request has arrived."""
        if self._stage is _Stage.NEW or self._stage is _Stage.READING:
            self._take(self._go_on)

    def client_left(self) -> None:
        """The client's connection is closed."""
        if self._relay is not None:
            self._relay.client_left()
        elif self._stage in (_Stage.NEW, _Stage.READING, _Stage.WAITING):
            self._gateway.router.observers.client_left()
            self._end_forgotten(End.CLIENT_LEFT.value, None)
            self._close()

    def cancel(self) -> None:
        """The router stops."""
        if self._relay is not None:
            self._relay.cancel()
        elif self._stage is not _Stage.OVER:
            if self._task is not None:
                self._task.cancel()
            self._close()

    def _take(self, step: Callable[[], None]) -> None:
        """Take a step; an error in it is the client's response."""
        try:
            step()
        except RequestError as error:
            self._refuse(error)
        except Exception as error:
            if is_out_of_memory(error):
                self._refuse(self._gateway.router.observers.out_of_memory())
                return
            logger.exception("a request could not be served")
            self._refuse(RequestError())

    # --- steps ------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._stage is _Stage.NEW:
            self._admit()
        self._read()

    def _admit(self) -> None:
        begun, key = self._begun, self._enter()
        begun.key = key
        if key.usage is not None and begun.usage is None:
            key.usage.enter()
            begun.usage = key.usage
        if tenant_salt(key, self._exchange.path) is not None or begun.usage is not None:
            check_one_content_type(self._exchange.headers)
        if PRIORITY_HEADER in self._headers:
            self._check_priority()
        max_bytes = self._gateway.server.max_body_bytes
        if self._exchange.more_body and announced_bytes(self._exchange.headers) > max_bytes:
            raise BodyTooLarge(max_bytes)
        self._stage = _Stage.READING

    def _check_priority(self) -> None:
        """Refuse a priority that engines answer with 500."""
        for name, value in self._exchange.headers:
            if name == PRIORITY_HEADER:
                check_int64(value.decode("latin-1"), PRIORITY_HEADER.decode())

    @property
    def _was_under_way(self) -> bool:
        """Return whether the core has sent it to a replica, which did not serve it."""
        return self._exchange.failed_first is not None

    def _enter(self) -> Key:
        """Check that there is room, and the client's key; return the key."""
        gateway = self._gateway
        if self._was_under_way:
            gateway.router.admission.readmit()
        else:
            gateway.router.admission.admit(came_before=self._exchange.was_prepared)
        self._is_admitted = True
        if self._exchange.is_of_reserve:
            raise Overloaded("is out of file descriptors")
        return gateway.guard.check("client", self._exchange.scope, self._headers)

    def _read(self) -> None:
        """Take the received part of the body; decide once it is whole."""
        gateway, exchange = self._gateway, self._exchange
        piece = exchange.take_body()
        if self._held_bytes + len(piece) > gateway.server.max_body_bytes:
            raise BodyTooLarge(gateway.server.max_body_bytes)
        gateway.router.admission.hold(len(piece), was_held=self._was_under_way)
        self._held_bytes += len(piece)
        self._body.append(piece)
        if not exchange.more_body:
            self._decide()
        elif self._timer is None:
            exchange.ask_for_body()
            self._timer = asyncio.get_running_loop().call_later(
                gateway.server.timeouts.client_body_s, self._take, self._too_slow
            )

    def _too_slow(self) -> None:
        timeout_s = self._gateway.server.timeouts.client_body_s
        raise BadRequest("body", "not complete", f"must arrive within {timeout_s:g} s")

    def _decide(self) -> None:
        self._stage = _Stage.DECIDING
        if self._timer is not None:
            self._timer.cancel()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._exchange.body = body  # the core has it too, and need not get a copy
        decision = self._dispatch(body)
        if isinstance(decision, Decision):
            self._send(decision)
        else:
            self._task = self._gateway.run(decision)
            self._task.add_done_callback(self._decided)

    def _dispatch(self, body: bytes) -> Decision | Coroutine[Any, Any, Decision]:
        begun = self._begun
        terms = self._gateway.terms.read(begun.key, self._headers, self._exchange.path)
        if begun.version is not None:
            terms = replace(terms, version=begun.version[1])
        return self._gateway.decide(self._path, body, terms, begun.usage)

    def _decided(self, task: asyncio.Task[Decision]) -> None:
        if self._stage is _Stage.OVER:
            return
        if task.cancelled():
            # Not by `cancel`, which is the end of the request: something it waited for was.
            self._refuse(RequestError("the router was interrupted as it chose a replica"))
            return
        self._take(lambda: self._send(task.result()))

    def _send(self, decision: Decision) -> None:
        gateway, begun, trace = self._gateway, self._begun, self._begun.trace
        if self._waiter is None:
            if trace is not None:
                trace.decided(decision.tokenization_s, decision.routing_s)
            if begun.usage is not None and not begun.has_spent:
                begun.usage.spend(decision.tokens)
        if gateway.router.entrance is not None and not self._may_start(
            gateway.router.entrance, decision
        ):
            return
        waited_s = self._waited_s  # what may refuse it comes before it is logged
        number_of = gateway.engine_order.numbers(self._headers, begun.key.priority, waited_s)
        try:
            observer = self._observer = self._observe(decision, waited_s)
        except NoReplica as error:
            failed = self._exchange.failed_first
            if failed is None or failed.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            raise EnginesBusy(decision.model_name, failed.retry_after_s or 1) from error
        self._stage = _Stage.SENT
        known = trace or begun.context
        trace_headers = () if known is None else known.headers()
        request = gateway.forwarding.request(
            self._exchange, decision, self._request_id, trace_headers
        )
        if begun.usage is not None:
            response_headers = request.response_headers + begun.usage.headers()
            request = replace(request, response_headers=response_headers)
        attempts = decision.attempts(
            gateway.guard.clients_see_hits, number_of, hands_over=gateway.hands_over
        )
        relay = gateway.router.proxy.start(
            attempts if trace is None else trace.plan(attempts),
            request,
            self._exchange,
            observer,
            self._close,
        )
        if not relay.is_over:
            self._relay = relay

    @property
    def _waited_s(self) -> float:
        """How long it has waited for room."""
        if self._waiter is None:
            return 0.0
        return self._gateway.router.observers.clock() - self._waiter.arrived

    def _observe(self, decision: Decision, waited_s: float) -> RequestObserver:
        observers, trace = self._gateway.router.observers, self._begun.trace
        request_id = self._request_id.decode("latin-1")
        observer = observers.observe(
            decision, self._exchange.path, request_id, self._begun.trace_id
        )
        observer.waited_s = waited_s
        if self._waiter is not None and trace is not None:
            trace.waited("queue", waited_s)
        if trace is not None:
            observer.record_in(trace)
        if self._line is not None:
            self._line.routed = observer.request
        return observer

    def _may_start(self, entrance: Entrance, decision: Decision) -> bool:
        """Return whether a replica has room for it. If not, it waits, and is sent when one has."""
        may_wait = decision.ranking or decision.may_wait
        if self._waiter is not None or not may_wait or self._exchange.is_gone:
            return True
        dispatcher = self._gateway.router.dispatcher
        waiter = entrance.waiter(decision.model_name, self._headers, *self._begun.key.in_line)
        waiter.lane, waiter.tokens = decision.lane, decision.uncached_tokens
        waiter.can_start = functools.partial(dispatcher.have_room, decision)
        waiter.start = lambda: self._take(lambda: self._send(dispatcher.redecide(decision)))
        waiter.refuse = self._refuse
        self._waiter, self._stage = waiter, _Stage.WAITING
        return entrance.room.enter(waiter, is_room=bool(decision.ranking))

    # --- the end ----------------------------------------------------------------------------------

    def _refuse(self, error: RequestError) -> None:
        """Respond with an error; with that for a wrong key after a while, if there are many."""
        self._leave()
        self._stage = _Stage.OVER
        wrong_keys = self._gateway.guard.wrong_keys
        delay_s = wrong_keys.hold(error, self._path.label, self._exchange.client)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._respond_late, error)
        else:
            self._respond(error)

    def _respond_late(self, error: RequestError) -> None:
        self._gateway.guard.wrong_keys.let_go()
        self._respond(error)

    def _count_refused(self, error: RequestError) -> None:
        self._gateway.router.observers.refused(error)

    def _respond(self, error: RequestError) -> None:
        self._count_refused(error)
        body = error_body(dialect_of(self._exchange.path), str(error), error.type, error.code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._request_id),
            *error.headers(),
        ]
        if self._line is not None:
            self._line.error = error.code
        if self._begun.trace is not None:
            self._begun.trace.error = error.code
        self._exchange.respond(error.status, headers, body)
        self._end_forgotten(error.code, error.status)
        self._close()

    def _end_forgotten(self, end: str, status: int | None) -> None:
        """Have the log show the end of one that the core had sent, and that is not sent again."""
        if self._was_under_way:
            log = self._gateway.router.observers.log
            log.end_forgotten(self._request_id.decode("latin-1"), end, status)

    def _close(self) -> None:
        """End it, in every case. The parts let go of each other: what refers to each other in a
        circle is left for the garbage collector."""
        self._stage = _Stage.OVER
        self._leave()
        self._relay = None
        if self._begun.trace is not None:
            self._begun.trace.end(self._exchange.status)
        if self._line is not None:
            line, self._line = self._line, None
            line.trace_id = self._begun.trace_id
            line.write(self._exchange.status, self._exchange.body_bytes, self._request_id)

    def _leave(self) -> None:
        """Make room for another request."""
        if self._timer is not None:
            self._timer.cancel()
        self._gateway.router.admission.hold(-self._held_bytes)
        self._held_bytes = 0
        if self._is_admitted:
            self._is_admitted = False
            self._gateway.router.admission.leave()
        if self._begun.usage is not None or self._waiter is not None:
            self._settle()
        self._observer = None

    def _settle(self) -> None:
        """Count the cost of its response, and let the next one have its room, or its place."""
        observer, usage, waiter = self._observer, self._begun.usage, self._waiter
        self._begun.usage = self._waiter = None
        tokens = None
        try:
            tokens = None if observer is None else observer.response_tokens()
        finally:
            if usage is not None:
                usage.leave(tokens or 0)
            if waiter is not None:
                entrance = self._gateway.router.entrance
                assert entrance is not None
                entrance.room.over(waiter, tokens)
