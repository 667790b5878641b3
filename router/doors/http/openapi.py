"""The OpenAPI document: schemas generated from the types that endpoints really send and read, the
keys, and the proxied paths that FastAPI never sees."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from kvevents.field_docs import field_docs
from router.config.replica import ReplicaConfig
from router.config.schema import RouterConfig
from router.doors.http import request_bodies, view_examples
from router.doors.http.access import Guard, Role
from router.doors.http.bodies import JSON
from router.doors.http.replica_views import ReplicaDetails
from router.doors.http.request_bodies import PROXIED, EngineResponse
from router.doors.http.views import AnthropicErrorView, ErrorView, View
from router.doors.proxied_paths import dialect_of
from router.errors import (
    BadRequest,
    BodyTooLarge,
    ForeignHost,
    ForeignOrigin,
    LoopbackOnly,
    NoReplica,
    NotJson,
    Overloaded,
    RequestError,
    ShuttingDown,
    Unauthorized,
    UnknownModel,
)
from router.plane.proxied_messages import error_body
from router.plane.proxy_types import Dialect
from router.telemetry.history import HistoryView

EVENT_STREAM = "text/event-stream"
_SCHEMAS, _EXAMPLES = "#/components/schemas/", "#/components/examples/"
_OUR_PACKAGES = ("router.", "kvevents.")

REFUSED_BODY = (
    BadRequest("$.prompt", "an object", "must be a string, a list of strings or token ids"),
    BodyTooLarge(64 * 1024 * 1024),
)
NOT_ROUTED = (
    UnknownModel("gemma-4"),
    NoReplica("gemma-3", "1 draining, 1 unhealthy"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """The key that an endpoint requires."""

    name: Role
    guard: Guard
    may_change: bool = True
    """True if the operator's endpoints change something, unless they are read."""

    async def check(self, request: Request) -> None:
        """Check the request as `Guard.check` does, and whether a foreign page wants to change
        something; a FastAPI dependency."""
        headers = dict(request.headers.raw)
        try:
            request.state.key = self.guard.check(self.name, request.scope, headers)
        except Unauthorized as error:
            await self._hold_back(error, request)
            raise
        if self.name == "operator" and self.may_change:
            self.guard.check_change(request.method, headers)

    async def _hold_back(self, error: RequestError, request: Request) -> None:
        address = "" if request.client is None else request.client.host
        delay_s = self.guard.wrong_keys.hold(error, request.scope["route"].path, address)
        if delay_s:
            try:
                await asyncio.sleep(delay_s)
            finally:
                self.guard.wrong_keys.let_go()

    def refusals(self) -> tuple[RequestError, ...]:
        """One example of every error about who may ask."""
        changes = self.name == "operator" and self.may_change
        changing = (ForeignOrigin(), NotJson()) if changes else ()
        if self.guard.needs_key(self.name):
            return changing
        if self.name == "operator":
            return ForeignHost("router.example"), LoopbackOnly(), *changing
        return (ForeignHost("router.example"),)

    @property
    def security(self) -> list[dict[str, list[str]]]:
        """The alternatives, as in OpenAPI: either header; or neither where no key is configured."""
        either: list[dict[str, list[str]]] = [
            {f"{self.name}Bearer": []},
            {f"{self.name}Header": []},
        ]
        return either if self.guard.needs_key(self.name) else [*either, {}]


# --- what an endpoint passes to FastAPI -----------------------------------------------------------


def described(
    tag: str,
    summary: str,
    responses: dict[int, dict[str, Any]],
    *,
    access: Access | None = None,
    errors: Sequence[RequestError] = (),
    **operation: Any,
) -> dict[str, Any]:
    """Arguments for FastAPI's decorators: an endpoint's description, and the check of its key.

    Args:
        responses: By status, from `sends`; the first one is the usual one.
        access: The key it requires; None: no key.
        errors: One example of every error it may respond with, besides a refused key.
        operation: More of the OpenAPI operation: `requestBody`, `parameters`.
    """
    if access is not None:
        operation["security"] = access.security
        errors = (*errors, Unauthorized(), *access.refusals())
    return {
        "tags": [tag],
        "summary": summary,
        "status_code": next(iter(responses)),
        "responses": {**responses, **_error_responses(errors)},
        "dependencies": [] if access is None else [Depends(access.check)],
        "openapi_extra": operation,
    }


def sends(
    kind: type[Any], description: str, content_types: Sequence[str] = (JSON,)
) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": _reference(kind)}
    if kind in view_examples.EXAMPLES:
        media["examples"] = {"example": {"$ref": _EXAMPLES + kind.__name__}}
    return {"description": description, "content": dict.fromkeys(content_types, media)}


def sends_text(description: str, content_type: str) -> dict[str, Any]:
    """A response that is text.

    Args:
        content_type: Its type; parameters are left out.
    """
    return {
        "description": description,
        "content": {content_type.partition(";")[0]: {"schema": {"type": "string"}}},
    }


def takes(
    *kinds: type[Any], description: str, content_types: Sequence[str] = (JSON,)
) -> dict[str, Any]:
    references = [_reference(kind) for kind in kinds]
    names = [name for kind in kinds for name in request_bodies.EXAMPLES[kind]]
    media = {
        "schema": references[0] if len(references) == 1 else {"anyOf": references},
        "examples": {name: {"$ref": _EXAMPLES + name} for name in names},
    }
    return {
        "required": True,
        "description": description,
        "content": dict.fromkeys(content_types, media),
    }


def _reference(kind: type[Any]) -> dict[str, str]:
    names = {ReplicaConfig: "ReplicaConfig-Input"}
    return {"$ref": _SCHEMAS + names.get(kind, kind.__name__)}


def _error_responses(
    errors: Iterable[RequestError], dialect: Dialect = Dialect.OPENAI
) -> dict[int, dict[str, Any]]:
    """Return error responses by status; the examples are real errors, by their codes."""
    form = AnthropicErrorView if dialect is Dialect.ANTHROPIC else ErrorView
    found: dict[int, dict[str, Any]] = {}
    for error in errors:
        summary = " ".join((type(error).__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."
        response = found.setdefault(error.status, {"description": "", "content": {}})
        response["description"] = f"{response['description']} {summary}".strip()
        media = response["content"].setdefault(JSON, {"schema": _reference(form), "examples": {}})
        body = error_body(dialect, str(error), error.type, error.code)
        media["examples"][error.code] = {"value": msgspec.json.decode(body)}
        for name, value in error.headers():
            header = {"schema": {"type": "string"}, "example": value.decode()}
            response.setdefault("headers", {})[name.decode()] = header
    return found


# --- the document ---------------------------------------------------------------------------------


def document(app: FastAPI, client: Access) -> dict[str, Any]:
    """The OpenAPI document of the whole router, those paths apart that its operator added.

    Args:
        app: With all endpoints that are not proxied.
    """
    found = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    for methods in found["paths"].values():
        for operation in methods.values():
            # FastAPI adds its own validation error wherever a path has a parameter; any string is
            # a valid id here.
            operation["responses"].pop("422", None)
    for path in sorted(PROXIED):
        found["paths"][path] = {"post": _proxied(path, client)}
    for method, path, summary in _PASSED_ON:
        methods = found["paths"].setdefault(path, {})
        methods[method] = _passed_on(method, path, summary, client)
    found["components"] = {
        "schemas": _schemas(),
        "examples": _examples(),
        "securitySchemes": _security_schemes(),
    }
    return found


_PASSED_ON = (
    ("post", "/v1/messages/count_tokens", "Anthropic's count of tokens"),
    ("post", "/v1/chat/completions/render", "vLLM's token ids of a chat"),
    ("post", "/v1/completions/render", "vLLM's token ids of a completion"),
    ("post", "/v1/responses/render", "vLLM's token ids of a response's input"),
    ("post", "/v1/messages/render", "vLLM's token ids of messages"),
    ("post", "/v1/rerank", "Documents ranked by a query"),
    ("post", "/v2/rerank", "Documents ranked by a query"),
    ("post", "/rerank", "Documents ranked by a query"),
    ("post", "/v1/score", "Pairs of texts scored"),
    ("post", "/score", "Pairs of texts scored"),
    ("post", "/v1/audio/{operation}", "OpenAI's audio: `transcriptions`, `translations`, `speech`"),
    ("get", "/version", "The version of some replica's engine"),
    ("get", "/v1/responses/{response_id}", "A stored response, from the replica that has it"),
    ("delete", "/v1/responses/{response_id}", "Delete it there"),
    ("post", "/v1/responses/{response_id}/cancel", "Cancel it there"),
    ("get", "/v1/responses/{response_id}/input_items", "What it was asked"),
)
"""Method, path and summary of what goes to a replica without a look at its prompt."""
_PROXY_HEADERS = {
    "x-kv-replica": "The replica that responded.",
    "x-kv-hit-tokens": "Prompt tokens predicted to be cached there.",
    "x-kv-model": "What the model is called there, where the client called it otherwise.",
    "x-kv-hit-approximate": "`true` where that is an estimate, without events of the replica.",
    "x-request-id": "The client's, or a new one.",
}


def _proxied(path: str, client: Access) -> dict[str, Any]:
    body, what = PROXIED[path]
    operation = _operation(
        path,
        client,
        (*REFUSED_BODY, *NOT_ROUTED, Unauthorized(), *client.refusals()),
        summary=f"{what}, streamed through to a replica",
        description="The body goes to the replica unchanged, fields unknown here included; "
        "the engine's own documentation has all of them. The schema lists what the router reads.",
        operationId=path.strip("/").replace("/", "_"),
        requestBody=takes(body, description=f"As in {what}."),
    )
    success = operation["responses"]["200"]
    success["headers"] = {
        name: {"description": text, "schema": {"type": "string"}}
        for name, text in _PROXY_HEADERS.items()
    }
    if "stream" in body.__struct_fields__:
        success["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
    return operation


def _passed_on(method: str, path: str, summary: str, client: Access) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    refused = (BodyTooLarge(64 * 1024 * 1024), *NOT_ROUTED) if method == "post" else NOT_ROUTED[1:]
    return _operation(
        path,
        client,
        (*refused, Unauthorized()),
        summary=summary,
        description="Passed on by load, or to the replica that has the response.",
        operationId=f"{method}_{re.sub('[^a-z0-9]+', '_', path).strip('_')}",
        parameters=[
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
    )


def _operation(
    path: str, client: Access, errors: Iterable[RequestError], **described: Any
) -> dict[str, Any]:
    """An operation that goes to a replica.

    Args:
        errors: One example of every error it may respond with, besides those of a busy router.
    """
    busy = Overloaded("has its limit of 4096 requests under way"), ShuttingDown()
    responses = _error_responses((*errors, *busy), dialect_of(path))
    media = {JSON: {"schema": _reference(EngineResponse)}}
    return {
        "tags": ["proxy"],
        **described,
        "responses": {
            "200": {"description": "The replica's response, byte for byte.", "content": media},
            **{str(status): response for status, response in responses.items()},
        },
        "security": client.security,
    }


def _security_schemes() -> dict[str, Any]:
    schemes = {}
    for name, setting in (
        ("client", "server.client_api_key"),
        ("operator", "server.operator_api_key"),
    ):
        text = f"The {name}'s key, `{setting}` of the configuration."
        schemes[f"{name}Bearer"] = {"type": "http", "scheme": "bearer", "description": text}
        schemes[f"{name}Header"] = {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": f"{text} As Anthropic's SDKs send it.",
        }
    return schemes


# --- examples and schemas -------------------------------------------------------------------------


def _examples() -> dict[str, dict[str, Any]]:
    """Return the examples of bodies by their names, and of responses by their types.

    The paths only refer to them: from examples inside a path, FastAPI would drop every null.
    """
    bodies = {
        name: body for named in request_bodies.EXAMPLES.values() for name, body in named.items()
    }
    responses = {kind.__name__: value for kind, value in view_examples.EXAMPLES.items()}
    return {
        name: {"value": msgspec.to_builtins(value)}
        for name, value in {**bodies, **responses}.items()
    }


def _schemas() -> dict[str, Any]:
    """Return the schemas of everything that is sent or read: msgspec's, and pydantic's of the
    configuration."""
    bodies = [kind for kind in request_bodies.EXAMPLES if kind is not ReplicaConfig]
    kinds = [*View.__subclasses__(), HistoryView, ReplicaDetails, EngineResponse, *bodies]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    _, configuration = models_json_schema(
        [(ReplicaConfig, "validation"), (RouterConfig, "serialization")],
        ref_template=_SCHEMAS + "{model}",
    )
    schemas |= configuration["$defs"]
    classes = _classes_in([*kinds, ReplicaConfig, RouterConfig])
    for name, schema in schemas.items():
        kind = classes.get(name.partition("-")[0])  # pydantic's: "ReplicaConfig-Input"
        for field, text in field_docs(kind).items() if kind else ():
            schema["properties"][field]["description"] = text
    return schemas


def _classes_in(kinds: Iterable[Any]) -> dict[str, type]:
    """Our own classes that some field of *kinds* mentions, by name; they themselves included."""
    found: dict[str, type] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        is_ours = isinstance(kind, type) and kind.__module__.startswith(_OUR_PACKAGES)
        if is_ours and not issubclass(kind, Enum) and kind.__name__ not in found:
            found[kind.__name__] = kind
            waiting += get_type_hints(kind).values()
    return found
