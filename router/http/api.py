"""The router's own endpoints: the decision without the request, operation, metrics; described at
`/docs`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from router.config import RouterConfig, key_bytes, read_replica
from router.errors import BadRequest, MethodNotAllowed, RequestError, UnknownPath
from router.feed import Feed
from router.http.gateway import PROXIED_PATHS, ClientLeft, check_key, read_body
from router.http.live_page import add_page
from router.http.overview import overview_answer
from router.http.views import models_answer, replica_answer, request_answer, route_answer
from router.observability.metrics import CONTENT_TYPE, RouterMetrics
from router.observability.request_log import MAX_REQUESTS, RequestLog
from router.replicas import ReplicaRegistry, ReplicaView
from router.routing.admission import Admission
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.tokenizer_check import TokenizerCheck
from router.tokenize import Endpoint

MAX_OPERATOR_BODY_BYTES = 1_048_576
MSGPACK = "application/msgpack"
_MAX_NUMBER = 2**53 - 1
"""The largest that every JSON reader holds exactly."""
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack")


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts of a router that the endpoints read or change."""

    config: RouterConfig
    admission: Admission
    dispatcher: Dispatcher
    models: ModelSet
    registry: ReplicaRegistry
    feed: Feed
    tokenizer_check: TokenizerCheck
    request_log: RequestLog
    metrics: RouterMetrics
    render_metrics: Callable[[], Awaitable[bytes]]


def create_api(
    parts: ApiParts, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    """Make the application for all paths that are not proxied.

    Args:
        parts: What the endpoints read or change.
        lifespan: Entered at the server's start, left at its end.
    """
    app = FastAPI(
        title="kvroute",
        summary="Exact prefix-cache routing for LLM inference engines.",
        lifespan=lifespan,
    )
    _add_error_answers(app, parts)
    _add_probes(app, parts)
    _add_routing(app, parts)
    _add_operation(app, parts)
    _add_overview(app, parts)
    add_page(app)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


# --- probes ---------------------------------------------------------------------------------------


def _add_probes(app: FastAPI, parts: ApiParts) -> None:
    @app.get("/healthz", tags=["operation"], summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"], summary="Some replica can take requests")
    async def readyz(response: Response) -> dict[str, str]:
        obstacle = parts.admission.why_not_ready(parts.registry.replicas())
        response.status_code = 503 if obstacle else 200
        return {"status": "not ready", "reason": obstacle} if obstacle else {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["operation"],
        summary="Prometheus metrics",
        dependencies=[Depends(_scraper(parts))],
    )
    async def metrics() -> Response:
        return Response(await parts.render_metrics(), media_type=CONTENT_TYPE)


# --- routing --------------------------------------------------------------------------------------


def _add_routing(app: FastAPI, parts: ApiParts) -> None:
    @app.post(
        "/route",
        tags=["routing"],
        summary="Where would this request go? Nothing is sent.",
        description="The body of any proxied endpoint, or `{model, token_ids, lora_name?, cache_salt?}`; JSON or msgpack.",
        dependencies=[Depends(_client(parts))],
        openapi_extra=_body_schema("A request, or token ids"),
    )
    async def route(request: Request) -> Response:
        body = await _body(
            request,
            parts.config.server.max_body_bytes,
            parts.config.server.timeouts.client_body_s,
        )
        session = request.headers.get(parts.config.policy.session_header)
        decision = await parts.dispatcher.dispatch(
            Endpoint.ROUTE, body, session, _encoding(request)
        )
        parts.metrics.decided(decision.model.name, decision.tokenization_s, decision.routing_s)
        decision.require_replica()
        return _answer(request, route_answer(decision))

    @app.get(
        "/v1/models",
        tags=["routing"],
        summary="Models and adapters",
        dependencies=[Depends(_client(parts))],
    )
    async def models() -> Response:
        return _json(
            models_answer(
                parts.models.names(),
                parts.models.served_names(
                    replica for replica in parts.registry.replicas() if replica.is_healthy
                ),
            )
        )


# --- operation ------------------------------------------------------------------------------------


def _add_operation(app: FastAPI, parts: ApiParts) -> None:
    operator = [Depends(_operator(parts))]

    @app.get(
        "/replicas",
        tags=["operation"],
        summary="Every replica: health, load, event streams",
        dependencies=operator,
    )
    async def replicas() -> Response:
        return _json({"replicas": _replicas(parts, parts.registry.snapshot())})

    @app.get(
        "/replicas/{replica_id}", tags=["operation"], summary="One replica", dependencies=operator
    )
    async def replica(replica_id: str) -> Response:
        return _json(_replica(parts, parts.registry.get(replica_id).id))

    @app.post(
        "/replicas",
        tags=["operation"],
        summary="Add a replica; only its `url` is needed where it tells the rest",
        status_code=201,
        dependencies=operator,
        openapi_extra=_body_schema(
            "A replica as in the configuration: url, id, models, kv_events, ..."
        ),
    )
    async def add(request: Request) -> Response:
        body = await _body(
            request, MAX_OPERATOR_BODY_BYTES, parts.config.server.timeouts.client_body_s
        )
        added = parts.registry.add(read_replica(_decode_json(body)))
        return _json(_replica(parts, added.id), 201)

    @app.delete(
        "/replicas/{replica_id}",
        tags=["operation"],
        summary="Forget a replica",
        dependencies=operator,
    )
    async def remove(replica_id: str) -> Response:
        parts.registry.remove(replica_id)
        return _json({"removed": replica_id})

    @app.post(
        "/replicas/{replica_id}/drain",
        tags=["operation"],
        summary="Send it nothing new",
        dependencies=operator,
    )
    async def drain(replica_id: str) -> Response:
        return _json(_replica(parts, parts.registry.drain(replica_id).id))

    @app.post(
        "/replicas/{replica_id}/undrain",
        tags=["operation"],
        summary="Send it requests again",
        dependencies=operator,
    )
    async def undrain(replica_id: str) -> Response:
        return _json(_replica(parts, parts.registry.undrain(replica_id).id))

    @app.get(
        "/config",
        tags=["operation"],
        summary="The configuration, secrets masked",
        dependencies=operator,
    )
    async def config() -> Response:
        return _json(parts.config.to_public_dict())


def _replica(parts: ApiParts, replica_id: str) -> dict[str, Any]:
    return _replicas(parts, [view for view in parts.registry.snapshot() if view.id == replica_id])[
        0
    ]


def _replicas(parts: ApiParts, views: Iterable[ReplicaView]) -> list[dict[str, Any]]:
    # Once for all of them: for each one anew, 256 replicas would hold up every stream for a second.
    statistics, feeds = parts.models.index_statistics(), parts.feed.statistics()
    return [replica_answer(view, statistics, feeds) for view in views]


# --- what goes on ---------------------------------------------------------------------------------


def _add_overview(app: FastAPI, parts: ApiParts) -> None:
    operator = [Depends(_operator(parts))]

    @app.get(
        "/overview",
        tags=["operation"],
        summary="The last minute, and every replica in brief",
        dependencies=operator,
    )
    async def overview() -> Response:
        return _json(
            overview_answer(
                parts.config.policy.name,
                parts.admission.under_way,
                parts.request_log,
                parts.registry.snapshot(),
                parts.models.index_statistics(),
                parts.feed.statistics(),
                parts.tokenizer_check.disagreements,
            )
        )

    @app.get(
        "/requests",
        tags=["operation"],
        summary="The requests routed last, with prediction, truth and reason; the latest first",
        dependencies=operator,
        openapi_extra=_query_schema(
            after="Only what changed after this change",
            limit=f"At most so many, up to {MAX_REQUESTS}",
        ),
    )
    async def requests(request: Request) -> Response:
        log = parts.request_log
        found = log.since(
            _number(request, "after", 0, _MAX_NUMBER),
            _number(request, "limit", MAX_REQUESTS, MAX_REQUESTS),
        )
        answers = [request_answer(routed) for routed in found]
        return _json(
            {
                "started_at": round(log.started_at, 3),
                "change": log.last_change,
                "requests": answers,
            }
        )


def _number(request: Request, name: str, default: int, most: int) -> int:
    """A number of the query."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= 16 and int(given) <= most):
        raise BadRequest(name, repr(given[:40]), f"must be a whole number from 0 to {most}")
    return int(given)


# --- keys, bodies, answers ------------------------------------------------------------------------


def _client(parts: ApiParts) -> Callable[[Request], Awaitable[None]]:
    key = key_bytes(parts.config.server.client_api_key)

    async def check(request: Request) -> None:
        check_key(dict(request.headers.raw), key)

    return check


def _operator(parts: ApiParts) -> Callable[[Request], Awaitable[None]]:
    key = key_bytes(parts.config.server.operator_api_key)

    async def check(request: Request) -> None:
        check_key(dict(request.headers.raw), key)

    return check


def _scraper(parts: ApiParts) -> Callable[[Request], Awaitable[None]]:
    needs_key = parts.config.observability.metrics_need_key
    key = key_bytes(parts.config.server.operator_api_key) if needs_key else None

    async def check(request: Request) -> None:
        check_key(dict(request.headers.raw), key)

    return check


async def _body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    return await read_body(dict(request.headers.raw), request.receive, limit_bytes, timeout_s)


def _decode_json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("$", f"{len(body)} bytes", "must be JSON") from None


def _encoding(request: Request) -> Literal["json", "msgpack"]:
    return (
        "msgpack"
        if request.headers.get("content-type", "").split(";")[0].strip() in _MSGPACK_NAMES
        else "json"
    )


def _answer(request: Request, value: Any) -> Response:
    """In msgpack for those who ask for it, or who sent it and do not say."""
    accepted = request.headers.get("accept", "*/*")
    if any(name in accepted for name in _MSGPACK_NAMES) or (
        "json" not in accepted and _encoding(request) == "msgpack"
    ):
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)
    return _json(value)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


# --- errors ---------------------------------------------------------------------------------------


def _add_error_answers(app: FastAPI, parts: ApiParts) -> None:
    """Every error in the one shape, and on the books."""

    async def answer(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        parts.metrics.bad_requests.labels(error.code).inc()
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return _json(error.openai(), error.status, headers)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.url.path in PROXIED_PATHS:
            return await answer(request, MethodNotAllowed("POST"))
        if error.status_code == 405:
            return await answer(
                request, MethodNotAllowed((error.headers or {}).get("Allow", "other methods"))
            )
        return await answer(request, UnknownPath())

    async def answer_nobody(_request: Request, _error: Exception) -> Response:
        parts.metrics.bad_requests.labels("client_gone").inc()
        return Response(status_code=400)

    app.add_exception_handler(RequestError, answer)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(ClientLeft, answer_nobody)


# --- the description ------------------------------------------------------------------------------


def _body_schema(description: str) -> dict[str, Any]:
    content = {"schema": {"type": "object"}}
    return {
        "requestBody": {
            "required": True,
            "description": description,
            "content": {"application/json": content},
        }
    }


def _query_schema(**descriptions: str) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 0}
    named = descriptions.items()
    return {
        "parameters": [
            {"name": name, "in": "query", "description": text, "schema": schema}
            for name, text in named
        ]
    }


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, with the proxied paths that FastAPI never sees."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        for path in sorted(PROXIED_PATHS):
            app.openapi_schema["paths"][path] = {"post": _proxied(path)}
    return app.openapi_schema


def _proxied(path: str) -> dict[str, Any]:
    headers = {
        "x-kv-replica": "The replica that answered",
        "x-kv-hit-tokens": "Prompt tokens predicted to be cached there",
        "x-request-id": "The client's, or a new one",
    }
    described = {
        name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()
    }
    return {
        "tags": ["proxy"],
        "summary": f"{path}, streamed through to a replica",
        "description": "The body goes to the replica as it came; see the engine's own documentation.",
        **_body_schema("As the engine takes it"),
        "responses": {
            "200": {"description": "The replica's answer, byte for byte", "headers": described}
        },
    }
