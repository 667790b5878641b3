"""The HTTP endpoints for gateways that send requests themselves: `/select`, `/select_and_reserve`
and `/reservations`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Route
from starlette.types import Receive

from router.config.schema import RouterConfig
from router.doors.asks import Key, Question, request_id_in
from router.doors.desk import DecidedReservation, Desk
from router.doors.http.bodies import ClientLeft, decode_body, json_response, read_request
from router.doors.http.decision_views import selection_view
from router.doors.http.openapi import NOT_ROUTED, REFUSED_BODY, Access, described, sends, takes
from router.doors.http.question_fields import OWN_FIELDS, eligible
from router.doors.http.request_bodies import (
    EngineUsage,
    OutputReport,
    ReservationEnd,
    ReservationRequest,
    SelectionRequest,
)
from router.doors.http.route_views import SelectionView
from router.doors.http.views import StatusView
from router.doors.reservations import RESERVE_PATH, Outcome, Reservation, Reservations
from router.errors import (
    BadRequest,
    BodyTooLarge,
    KeyLimitReached,
    Overloaded,
    QueueFull,
    ReservationExists,
    UnknownReservation,
)
from router.plane.attempts import Failure
from router.prompt.endpoints import Endpoint
from router.routing.decision import Decision

MAX_REPORT_BYTES = 65_536
SELECT_PATH = "/select"
_EVERY_REQUEST = (RESERVE_PATH, "/reservations/{")
_NOTED = StatusView(status="ok")
_RESERVED = (
    *(*REFUSED_BODY, *NOT_ROUTED, ReservationExists()),
    Overloaded("holds 16384 reservations, its limit"),
    KeyLimitReached("600 requests per minute", 12),
    QueueFull("gemma-3", 1024, 7),
)
_REPORTED = (BadRequest("$.tokens", "-1", "must be 0 or more"), BodyTooLarge(MAX_REPORT_BYTES))


_Body = TypeVar("_Body", bound=msgspec.Struct)
_Result = TypeVar("_Result")


def add_selection(app: FastAPI, desk: Desk, config: RouterConfig, access: Access) -> None:
    """Add the endpoints.

    Args:
        access: Who may ask: the answers reveal what is cached.
    """
    doors = _SelectionEndpoints(desk, config)
    _add_selecting(app, doors, access)
    _add_reservations(app, doors, access)
    _add_reports(app, doors, access)
    _bypass_dependencies(app, access)


def _bypass_dependencies(app: FastAPI, access: Access) -> None:
    """Serve the questions of every request without FastAPI's dependencies, which take half of the
    time; errors are handled as all others."""
    for route in [each for each in app.routes if isinstance(each, APIRoute)]:
        if route.path.startswith(_EVERY_REQUEST):
            app.router.routes.insert(0, _quick(route, access))


def _quick(route: APIRoute, access: Access) -> Route:
    async def serve(request: Request) -> Response:
        request.scope["route"] = route
        await access.check(request)
        response: Response = await route.endpoint(request, **request.path_params)
        return response

    return Route(route.path, serve, methods=route.methods)


def _add_selecting(app: FastAPI, doors: _SelectionEndpoints, access: Access) -> None:
    asked = takes(
        SelectionRequest,
        description="Token ids, or the body of any endpoint with a prompt, as JSON.",
    )

    @app.post(
        SELECT_PATH,
        **described(
            "gateways",
            "Where should a gateway send this request? Nothing is booked",
            {200: sends(SelectionView, "The choice.")},
            access=access,
            errors=_RESERVED,
            requestBody=asked,
        ),
    )
    async def select(request: Request) -> Response:
        fields, ask = await doors.read(request, SelectionRequest)
        decision = await doors.desk.select(ask, fields.selection_id)
        to_set = _body_fields(decision, None, ask.caller)
        return json_response(selection_view(decision, None, fields.selection_id or "", to_set))

    @app.post(
        RESERVE_PATH,
        **described(
            "gateways",
            "The same, and it is booked until the gateway reports its end",
            {200: sends(SelectionView, "The choice, and the id of its reservation.")},
            access=access,
            errors=_RESERVED,
            requestBody=asked,
        ),
    )
    async def select_and_reserve(request: Request) -> Response:
        fields, ask = await doors.read(request, SelectionRequest)
        reservation = await doors.reserve(request, ask, fields.selection_id)
        return json_response(_reserved(reservation, ask.caller))


def _add_reservations(app: FastAPI, doors: _SelectionEndpoints, access: Access) -> None:
    @app.post(
        "/reservations",
        **described(
            "gateways",
            "Book a selection by its id, or a request that the gateway sends where it names",
            {201: sends(SelectionView, "What is booked.")},
            access=access,
            errors=(*_RESERVED, UnknownReservation("selection_id")),
            requestBody=takes(ReservationRequest, description="A selection, or a request."),
        ),
    )
    async def reserve(request: Request) -> Response:
        fields, ask = await doors.read(request, ReservationRequest)
        if fields.replica is None and fields.worker_id is None:
            if fields.selection_id is None:
                rule = "needs a selection_id, or a replica with the request that is sent there"
                raise BadRequest("$", "neither", rule)
            reservation = doors.desk.reserve_selected(fields.selection_id, ask.caller)
        else:
            reservation = await doors.reserve(request, ask, fields.selection_id)
        return json_response(_reserved(reservation, ask.caller), 201)


def _add_reports(app: FastAPI, doors: _SelectionEndpoints, access: Access) -> None:
    def describe(summary: str, *kinds: type[Any]) -> dict[str, Any]:
        operation: dict[str, Any] = {}
        if kinds:
            body = takes(*kinds, description="All of it may be left out.")
            operation["requestBody"] = {**body, "required": False}
        errors = (UnknownReservation(), *(_REPORTED if kinds else ()))
        answers = {200: sends(StatusView, "It is noted.")}
        return described("gateways", summary, answers, access=access, errors=errors, **operation)

    @app.post(
        "/reservations/{reservation_id}/prefill_complete",
        **describe("The first token of the response is there"),
    )
    async def prefill_complete(request: Request, reservation_id: str) -> Response:
        doors.get(request, reservation_id).prefill_complete()
        return json_response(_NOTED)

    @app.post(
        "/reservations/{reservation_id}/output_block",
        include_in_schema=False,
        dependencies=[Depends(access.check)],
    )
    @app.post(
        "/reservations/{reservation_id}/output",
        **describe("So much more of the response is there", OutputReport),
    )
    async def output(request: Request, reservation_id: str) -> Response:
        report = await doors.read_report(request, OutputReport)
        _note_output(doors.get(request, reservation_id), report, None)
        return json_response(_NOTED)

    @app.delete(
        "/reservations/{reservation_id}",
        **describe("The request is over", ReservationEnd),
    )
    async def end(request: Request, reservation_id: str) -> Response:
        report = await doors.read_report(request, ReservationEnd)
        _note_end(doors.get(request, reservation_id), report, None)
        return json_response(_NOTED)


def take_report(
    reservations: Reservations, _number: int, reservation_id: str, kind: str, body: bytes, at: float
) -> None:
    """Take over a gateway's report to the core on a reservation of the core.

    Args:
        reservation_id: The reservation may have ended meanwhile.
        kind: `first_token`, `output` or `end`.
        body: As received, without compression.
    """
    try:
        reservation = reservations.get(reservation_id, "")
    except UnknownReservation:
        return
    if kind == "first_token":
        reservation.prefill_complete(at)
    elif kind == "output":
        _note_output(reservation, _decoded(body, OutputReport), at)
    else:
        _note_end(reservation, _decoded(body, ReservationEnd), at)


def _note_output(reservation: Reservation, report: OutputReport, at: float | None) -> None:
    reservation.output(report.tokens, at)
    report_usage(reservation, report)


def _note_end(reservation: Reservation, report: ReservationEnd, at: float | None) -> None:
    if report.tokens:
        reservation.output(report.tokens, at)
    report_usage(reservation, report)
    failure = None if report.failure is None else Failure(report.failure)
    reservation.end(Outcome(report.outcome), report.status, failure, at)


@dataclass(slots=True, eq=False)
class _SelectionEndpoints:
    """The common part of the endpoints."""

    desk: Desk
    config: RouterConfig

    async def read(self, request: Request, kind: type[SelectionRequest]) -> tuple[Any, Question]:
        """The router's own fields of a question, and the question."""
        headers = dict(request.headers.raw)
        with self.desk.admission.buffer() as buffer:
            body = await read_request(request, self.config.server, buffer.add)
        fields: Any = decode_body(body, OWN_FIELDS[kind])
        ask = Question(
            endpoint=Endpoint.ROUTE,
            body=body,
            path=request.url.path,
            request_id=request_id_in(headers),
            headers=headers,
            dp_rank=fields.dp_rank,
            is_eligible=eligible(fields),
            caller=request.state.key,
        )
        return fields, ask

    async def reserve(
        self, request: Request, ask: Question, name: str | None
    ) -> DecidedReservation:
        """Reserve; until that is done, it is given up if the gateway leaves: nobody would end what
        it has not heard of, or tried to end before it was there."""
        return await _unless_left(request.receive, self.desk.reserve(ask, name))

    async def read_report(self, request: Request, kind: type[_Body]) -> _Body:
        body = await read_request(request, self.config.server, lambda _: None, MAX_REPORT_BYTES)
        return _decoded(body, kind)

    def get(self, request: Request, reservation_id: str) -> Reservation:
        """The caller's reservation of that id."""
        return self.desk.reservations.get(reservation_id, request.state.key.name)


def _decoded(body: bytes, kind: type[_Body]) -> _Body:
    return decode_body(body, kind) if body.strip() else kind()


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run *work* until it is done or the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _reserved(reservation: DecidedReservation, caller: Key) -> SelectionView:
    decision, attempt = reservation.decision, reservation.attempt
    fields = _body_fields(decision, attempt.body, caller)
    view = selection_view(decision, attempt, reservation.id, fields)
    # Asked anew, it would count the reservation itself as being computed there.
    expected = reservation.expected_tokens
    return view if expected is None else msgspec.structs.replace(view, expected_tokens=expected)


def _body_fields(decision: Decision, sent: bytes | None, caller: Key) -> dict[str, Any]:
    """Return the fields to set in the body, where the router's key salts it or the replica gets
    hints in it."""
    fields: dict[str, Any] = {}
    if sent is not None:
        before = msgspec.json.decode(decision.asked.body, type=dict[str, msgspec.Raw])
        after = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
        fields = {name: value for name, value in after.items() if before.get(name) != value}
    if caller.cache_salt is not None and decision.asked.spec is not None:
        fields["cache_salt"] = decision.asked.spec.cache_salt
    return fields


def report_usage(reservation: Reservation, report: OutputReport) -> None:
    """Record the engine's usage from a gateway's report."""
    usage = report.usage
    if usage is None and report.cached_tokens is not None:
        usage = EngineUsage(
            prompt_tokens=reservation.observer.request.prompt_tokens,
            prompt_tokens_details={"cached_tokens": report.cached_tokens},
        )
    if usage is not None:
        reservation.report(msgspec.json.encode({"usage": usage}))
