"""The router's own endpoints: the decision without the request, operation, metrics; described at
`/docs`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import StreamingResponse

from router.config.replica import ReplicaConfig, read_replica
from router.config.schema import RouterConfig
from router.doors.asks import Key
from router.doors.http.access import Guard
from router.doors.http.bodies import JSON, MSGPACK, decode_json, json_response, read_request
from router.doors.http.decision_views import encoded, encoding_of, route_view
from router.doors.http.networks import Networks
from router.doors.http.openapi import (
    NOT_ROUTED,
    REFUSED_BODY,
    Access,
    described,
    document,
    sends,
    sends_text,
    takes,
)
from router.doors.http.overview import Overview, overview
from router.doors.http.replica_views import Fleet, ReplicaDetails, ReplicaList, replica_details
from router.doors.http.request_bodies import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsToRoute,
    MessagesToRoute,
    ResponsesRequest,
    TokenIdsRequest,
)
from router.doors.http.request_views import RequestsView, requests_view
from router.doors.http.route_views import RouteView
from router.doors.http.views import RemovedReplica, StatusView
from router.doors.reservations import Reservations
from router.doors.terms_reader import TermsReader
from router.errors import (
    BadRequest,
    BodyTooLarge,
    CaptureDisabled,
    ForeignHost,
    NotRecordable,
    ReplicaExists,
    UnknownPath,
    UnknownReplica,
)
from router.feed.taps import Tap
from router.fleet.types import ReplicaView
from router.index.base import SourceId
from router.prompt.endpoints import Endpoint
from router.telemetry.history import HistoryView
from router.telemetry.metrics import CONTENT_TYPE, OPENMETRICS_NAME, OPENMETRICS_TYPE
from router.telemetry.parts import RouterParts
from router.telemetry.request_log import MAX_REQUESTS

MAX_OPERATOR_BODY_BYTES = 1_048_576
_MAX_NUMBER = 2**53 - 1
"""The largest that every JSON reader holds exactly."""


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The router, and the parts between it and its clients."""

    router: RouterParts
    guard: Guard
    reservations: Reservations
    render_metrics: Callable[[bool], Awaitable[bytes]]
    """All metrics as text; with True in OpenMetrics' format, which has exemplars."""
    has_exemplars: bool
    """True if there are any."""

    def fleet(self) -> Fleet:
        """All replicas and their caches, now."""
        return self._fleet_of(self.router.registry.snapshot())

    def details(self, replica_id: str) -> ReplicaDetails:
        """One replica, now."""
        only = [view for view in self.router.registry.snapshot() if view.id == replica_id]
        return replica_details(self._fleet_of(only))[0]

    def overview(self) -> Overview:
        """The router at a glance, now."""
        router = self.router
        policy, under_way = router.config.policy.name, router.admission.under_way
        return overview(self.fleet(), router.request_log, policy, under_way)

    def _fleet_of(self, replicas: Sequence[ReplicaView]) -> Fleet:
        router = self.router
        return Fleet(
            replicas,
            router.models.index_statistics(),
            router.feed.statistics(),
            router.tokenizer_check.disagreements,
            trusts=router.repair.statistics(),
            approximate=None if router.approximate is None else router.approximate.statistics(),
            listeners=router.feed.listeners(),
            tokenizers=router.models.tokenizers(),
            shortages=router.shortages.present(),
            hint_tokens=sum(model.steering.statistics().hit_tokens for model in router.models),
        )


def new_api() -> FastAPI:
    """Make the application for all paths that are not proxied, still without a path."""
    return FastAPI(
        title="kvroute",
        version=version("kvroute"),
        summary="Exact prefix-cache routing for LLM inference engines.",
        generate_unique_id_function=_operation_id,
        default_response_class=Response,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )


def _operation_id(route: APIRoute) -> str:
    return route.name


# --- probes ---------------------------------------------------------------------------------------


def add_probes(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    is_alive = sends(StatusView, "It is.")
    ready, not_ready = sends(StatusView, "Yes."), sends(StatusView, "No, with the reason.")

    @app.get("/healthz", **described("operation", "Is the process alive?", {200: is_alive}))
    async def healthz() -> Response:
        return json_response(StatusView(status="ok"))

    is_ready = {200: ready, 503: not_ready}
    as_engines = described("operation", "The same, as engines name it", is_ready)

    @app.post("/ping", include_in_schema=False, name="post_ping")
    @app.get("/ping", name="ping", **as_engines)
    @app.get("/health", name="health", **as_engines)
    @app.get("/readyz", **described("operation", "Can some replica take requests?", is_ready))
    async def readyz() -> Response:
        reason = parts.router.readiness.why_not_ready()
        if reason:
            return json_response(StatusView(status="not ready", reason=reason), 503)
        return json_response(StatusView(status="ready"))

    scraper = operator if parts.router.config.observability.metrics_need_key else None
    text = sends_text("Every metric, in Prometheus's text format.", CONTENT_TYPE)

    @app.get(
        "/metrics",
        **described(
            "operation",
            "Prometheus metrics",
            {200: text},
            access=scraper,
            errors=(ForeignHost("router.example"),),
        ),
    )
    async def metrics(request: Request) -> Response:
        if scraper is None:
            parts.guard.check_host(dict(request.headers.raw))
        accepted = request.headers.get("accept", "")
        has_exemplars = parts.has_exemplars and OPENMETRICS_NAME in accepted
        content = await parts.render_metrics(has_exemplars)
        return Response(content, media_type=OPENMETRICS_TYPE if has_exemplars else CONTENT_TYPE)


# --- routing --------------------------------------------------------------------------------------


_ROUTABLE = takes(
    *(TokenIdsRequest, ChatRequest, CompletionRequest),
    *(ResponsesRequest, MessagesToRoute, EmbeddingsToRoute),
    description="Token ids, or the body of any endpoint with a prompt.",
    content_types=(JSON, MSGPACK),
)


_EXPLAIN = {
    "name": "explain",
    "in": "query",
    "description": "Whether to show all that is known: the ranking with what each group of each "
    "replica holds, who cannot take the request, and the prompts. Without it, the choice only.",
    "schema": {"type": "boolean", "default": False},
}


def add_route(app: FastAPI, parts: ApiParts, reader: TermsReader, sees_hits: Access) -> None:
    @app.post(
        "/route",
        **described(
            "routing",
            "Where would this request go, and why? Nothing is sent.",
            {200: sends(RouteView, "The choice; explained if asked for.", (JSON, MSGPACK))},
            access=sees_hits,
            errors=(*REFUSED_BODY, *NOT_ROUTED),
            requestBody=_ROUTABLE,
            parameters=[_EXPLAIN],
        ),
    )
    async def route(request: Request) -> Response:
        # Without a query, `RouteQuestions` answers.
        explains = _flag(request, "explain")
        headers = dict(request.headers.raw)
        key: Key = request.state.key
        counted = nullcontext() if key.usage is None else key.usage.counted()
        with counted, parts.router.admission.buffer() as buffer:
            content = await read_request(request, parts.router.config.server, buffer.add)
            terms = reader.read(key, headers, "/route")
            decision = await parts.router.dispatcher.dispatch(
                Endpoint.ROUTE, content, terms, encoding_of(headers)
            )
        parts.router.metrics.decided(
            decision.model_name, decision.tokenization_s, decision.routing_s
        )
        decision.require_replica()
        content_type, body = encoded(route_view(decision, explains), headers)
        return Response(body, media_type=content_type)


# --- replicas -------------------------------------------------------------------------------------


_ONE = {200: sends(ReplicaDetails, "The replica.")}
_UNKNOWN = UnknownReplica("replica-9")


def add_operation(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    """Add what operators see and change."""
    _add_replicas(app, parts, operator)
    _add_adding(app, parts, operator)
    _add_draining(app, parts, operator)
    _add_insight(app, parts, operator)
    _add_history(app, parts, operator)
    _add_recording(app, parts, operator)
    _add_snapshot(app, parts)


def _add_replicas(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    describe = functools.partial(described, "operation", access=operator)
    everything = {200: sends(ReplicaList, "All of them.")}
    removed = {200: sends(RemovedReplica, "It is removed; the requests it has go on.")}

    @app.get("/replicas", **describe("Every replica: health, load, event streams", everything))
    async def replicas() -> Response:
        return json_response(ReplicaList(replicas=replica_details(parts.fleet())))

    @app.get("/replicas/{replica_id}", **describe("One replica", _ONE, errors=(_UNKNOWN,)))
    async def replica(replica_id: str) -> Response:
        return json_response(parts.details(parts.router.registry.get(replica_id).id))

    @app.delete(
        "/replicas/{replica_id}", **describe("Remove a replica", removed, errors=(_UNKNOWN,))
    )
    async def remove_replica(replica_id: str) -> Response:
        parts.router.registry.remove(replica_id)
        return json_response(RemovedReplica(removed=replica_id))


def _add_draining(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    describe = functools.partial(described, "operation", access=operator, errors=(_UNKNOWN,))

    @app.post("/replicas/{replica_id}/drain", **describe("Send it nothing new", _ONE))
    async def drain_replica(replica_id: str) -> Response:
        return json_response(parts.details(parts.router.registry.drain(replica_id).id))

    @app.post("/replicas/{replica_id}/undrain", **describe("Send it requests again", _ONE))
    async def undrain_replica(replica_id: str) -> Response:
        return json_response(parts.details(parts.router.registry.undrain(replica_id).id))


def _add_adding(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    networks = Networks(parts.router.config.server.replica_networks)
    refused = (
        BadRequest("$.sped", "unknown key", "did you mean speed?"),
        BodyTooLarge(MAX_OPERATOR_BODY_BYTES),
        ReplicaExists("$.url", "http://10.0.0.7:8000", "replica-7"),
    )

    @app.post(
        "/replicas",
        **described(
            "operation",
            "Add a replica; only its `url` is needed where it reports the rest",
            {201: sends(ReplicaDetails, "The replica, before its first health check.")},
            access=operator,
            errors=refused,
            requestBody=takes(ReplicaConfig, description="As in the configuration's `replicas`."),
        ),
    )
    async def add_replica(request: Request) -> Response:
        with parts.router.admission.buffer() as buffer:
            content = await read_request(
                request, parts.router.config.server, buffer.add, MAX_OPERATOR_BODY_BYTES
            )
        wanted = read_replica(decode_json(content))
        await networks.check_replica(wanted)
        added = parts.router.registry.add(wanted, networks.__contains__)
        return json_response(parts.details(added.id), 201)


# --- insight --------------------------------------------------------------------------------------


def _add_insight(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    describe = functools.partial(described, "operation", access=operator)

    @app.get(
        "/overview",
        **describe(
            "What is wrong, the last minute, and every replica in brief",
            {200: sends(Overview, "The router at a glance.")},
        ),
    )
    async def overview_of_all() -> Response:
        return json_response(parts.overview())

    @app.get(
        "/requests",
        **describe(
            "The requests routed last: prediction, report, reason; the latest change first",
            {200: sends(RequestsView, "At most *limit* requests.")},
            errors=(
                BadRequest("after", "'-1'", f"must be a whole number from 0 to {_MAX_NUMBER}"),
            ),
            parameters=[
                _parameter("after", "Only what changed after this change", 0, _MAX_NUMBER),
                _parameter("limit", "At most this many", MAX_REQUESTS, MAX_REQUESTS),
            ],
        ),
    )
    async def requests(request: Request) -> Response:
        after = _number(request, "after", 0, _MAX_NUMBER)
        limit = _number(request, "limit", MAX_REQUESTS, MAX_REQUESTS)
        parts.reservations.show_some()
        return json_response(requests_view(parts.router.request_log, after, limit))

    @app.get(
        "/config",
        **describe(
            "The configuration, secrets masked",
            {200: sends(RouterConfig, "As it was last taken over, with all defaults.")},
        ),
    )
    async def config() -> Response:
        return json_response(parts.router.config.to_public_dict())


_MAX_HISTORIES = 16
_REPLICAS_ASKED_FOR = {
    "name": "replica",
    "in": "query",
    "description": "The id of a replica; may be repeated",
    "schema": {"type": "array", "items": {"type": "string"}},
}


def _add_history(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    rule = f"at most {_MAX_HISTORIES} at a time"

    @app.get(
        "/history",
        **described(
            "operation",
            "The last hour in steps of half a minute",
            {200: sends(HistoryView, "Of the router, and of each replica asked for.")},
            access=operator,
            errors=(BadRequest("replica", "17 times", rule),),
            parameters=[_REPLICAS_ASKED_FOR],
        ),
    )
    async def history(request: Request) -> Response:
        ids = request.query_params.getlist("replica")
        if len(ids) > _MAX_HISTORIES:
            raise BadRequest("replica", f"{len(ids)} times", rule)
        return json_response(parts.router.history.view(ids))


_RECORDING = "application/x-ndjson"
_BYTES = "application/octet-stream"
_QUIET_S = 1.0
_MAX_RANK = 1023


def _add_recording(app: FastAPI, parts: ApiParts, operator: Access) -> None:
    lines = sends_text("The recording, line by line, for as long as it is read.", _RECORDING)
    not_followed = NotRecordable("replica-0 has no event stream of rank 0")

    @app.get(
        "/replicas/{replica_id}/recording",
        **described(
            "operation",
            "Record one cache: its state, then its batches and the prompts sent there, as token "
            "ids, with what the engine reports of each",
            {200: lines},
            access=operator,
            errors=(CaptureDisabled(), _UNKNOWN, not_followed),
            parameters=[_parameter("dp_rank", "The data-parallel rank", 0, _MAX_RANK)],
        ),
    )
    async def recording(request: Request, replica_id: str) -> Response:
        if not parts.router.config.observability.allow_capture:
            raise CaptureDisabled
        rank = _number(request, "dp_rank", 0, _MAX_RANK)
        tap = parts.router.feed.record(SourceId(parts.router.registry.get(replica_id).id, rank))
        return StreamingResponse(_lines(parts, tap), media_type=_RECORDING)


async def _lines(parts: ApiParts, tap: Tap) -> AsyncIterator[bytes]:
    try:
        async for line in tap.lines(_QUIET_S):
            if parts.router.admission.is_shutting_down:
                tap.end("the router is shutting down")
            yield line
    finally:
        parts.router.feed.taps.close(tap)


def _add_snapshot(app: FastAPI, parts: ApiParts) -> None:
    """Add the path at which a router that starts gets this one's index of all caches."""
    peer = Depends(Access("peer", parts.guard).check)

    @app.get("/snapshot", include_in_schema=False, dependencies=[peer])
    async def snapshot() -> Response:
        if parts.router.sender is None:
            raise UnknownPath
        return StreamingResponse(parts.router.sender.open(), media_type=_BYTES)


def _parameter(name: str, description: str, default: int, most: int) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 0, "maximum": most, "default": default}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _number(request: Request, name: str, default: int, most: int) -> int:
    """Read a number of the query."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= 16 and int(given) <= most):
        raise BadRequest(name, repr(given[:40]), f"must be a whole number from 0 to {most}")
    return int(given)


def _flag(request: Request, name: str) -> bool:
    """Read a flag of the query."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise BadRequest(name, repr(given[:40]), "must be true or false")
    return given == "true"


# --- the description ------------------------------------------------------------------------------


def add_description(app: FastAPI, client: Access) -> None:
    """Serve the OpenAPI document, for which no key is needed."""

    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(app, client))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Made once, in a thread: it takes longer than other streams should wait.
        return Response(await asyncio.to_thread(encoded), media_type=JSON)
