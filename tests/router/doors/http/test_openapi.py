"""The OpenAPI document: complete, and true of what the endpoints send and take."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from router.config.replica import ReplicaConfig, read_replica
from router.config.schema import RouterConfig
from router.doors.http import request_bodies
from router.doors.http.request_bodies import (
    DetokenizeRequest,
    EmbeddingsToRoute,
    MessagesToRoute,
    OutputReport,
    ReservationEnd,
    ReservationRequest,
    SelectionRequest,
    TokenIdsRequest,
    TokenizeRequest,
)
from router.prompt.body.decoding import FIELD_NAMES
from router.prompt.body.requests import parse_request
from router.prompt.endpoints import PROMPT_ENDPOINTS, Endpoint
from router.serve.server import RouterApp
from router.serve.service import RouterService

REPLICA = {
    "url": "http://127.0.0.1:1",
    "id": "absent",
    "models": ["m"],
    "kv_events": [{"endpoint": "tcp://127.0.0.1:1"}],
}
KEYS = {"CLIENT_KEY": "client-key-sentinel", "OPERATOR_KEY": "operator-key-sentinel"}
LOCKED = "server: {client_api_key: '${CLIENT_KEY}', operator_api_key: '${OPERATOR_KEY}'}"
TEXT = ("text/", "application/x-ndjson")
SELECTION_PATHS = {
    "/select",
    "/select_and_reserve",
    "/reservations",
    "/reservations/{reservation_id}",
    "/reservations/{reservation_id}/prefill_complete",
    "/reservations/{reservation_id}/output",
}
OPEN_PATHS = {"/", "/healthz", "/readyz", "/health", "/ping", "/metrics"}
"""Nobody needs a key for these (for /metrics only where it is configured so)."""
OPERATOR_PATHS = {
    "/config",
    "/overview",
    "/history",
    "/requests",
    "/replicas",
    "/replicas/{replica_id}",
    "/replicas/{replica_id}/drain",
    "/replicas/{replica_id}/undrain",
    "/replicas/{replica_id}/recording",
    "/route",
    *SELECTION_PATHS,
}
"""Where clients have keys; without them, anyone may ask where to go."""
WITH_BODY = {
    "/route",
    *(endpoint.value for endpoint in PROMPT_ENDPOINTS),
    "/tokenize",
    "/detokenize",
    "/select",
    "/select_and_reserve",
    "/reservations",
    "/reservations/{reservation_id}/output",
}


def application(yaml: str = "") -> RouterApp:
    return RouterApp(RouterService(RouterConfig.from_yaml(yaml, KEYS)))


def client_of(app: RouterApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def document_of(yaml: str = "") -> dict[str, Any]:
    async with client_of(application(yaml)) as client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
        return found


@pytest_asyncio.fixture
async def document() -> dict[str, Any]:
    return await document_of()


@pytest_asyncio.fixture
async def router() -> AsyncIterator[httpx.AsyncClient]:
    """A router that runs, with one replica that is not there."""
    service = RouterService(RouterConfig())
    async with service.lifespan(), client_of(RouterApp(service)) as client:
        added = await client.post("/replicas", json=REPLICA)
        assert added.status_code == 201, added.text
        yield client


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def media_of(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every body that an operation takes or sends, with its content type."""
    yield from operation.get("requestBody", {}).get("content", {}).items()
    for response in operation["responses"].values():
        yield from response["content"].items()


def problems(document: dict[str, Any], schema: dict[str, Any], value: object) -> list[str]:
    """What is wrong with *value*, by a schema of the document."""
    whole = {**schema, "components": document["components"]}
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


# --- completeness ---------------------------------------------------------------------------------


async def test_no_body_is_without_a_schema(document: dict[str, Any]) -> None:
    """`{}` and a bare `object` say nothing to whoever generates a client."""
    for name, operation in operations(document):
        assert operation["responses"], name
        for status, response in operation["responses"].items():
            assert response["description"].strip(" ."), f"{name} {status}"
            assert response["content"], f"{name} {status}"
        for content_type, media in media_of(operation):
            schema = media["schema"]
            is_text = schema == {"type": "string"} and content_type.startswith(TEXT)
            assert is_text or "$ref" in schema or "anyOf" in schema, f"{name} {content_type}"


async def test_what_takes_a_body_says_what_it_takes(document: dict[str, Any]) -> None:
    """With an example for each form."""
    taking = {
        name: operation for name, operation in operations(document) if "requestBody" in operation
    }
    assert set(taking) == {
        *(f"POST {path}" for path in (*WITH_BODY, "/replicas")),
        "DELETE /reservations/{reservation_id}",
    }
    for name, operation in taking.items():
        for media in operation["requestBody"]["content"].values():
            assert media["examples"], name


async def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    """A type that is sent and not listed would leave a hole."""
    text = json.dumps(document)
    for reference in set(text.split('"$ref": "#/')[1:]):
        value: Any = document
        for part in reference.partition('"')[0].split("/"):
            value = value[part]
        assert value


async def test_every_schema_is_a_valid_one(document: dict[str, Any]) -> None:
    """Tools refuse the whole document for one that is not."""
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


async def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    """Generated clients take them for the names of their methods."""
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


async def test_fields_are_described_by_the_strings_under_them(document: dict[str, Any]) -> None:
    """Also inherited ones; written once, for who reads the code and who reads the document."""
    schemas = document["components"]["schemas"]
    for schema, fields in (
        ("HitView", {"suspect"}),
        ("ReplicaConfig-Input", {"speed", "url"}),
        ("HealthConfig", {"path"}),
        ("LastMinute", {"failed", "cached_share"}),
    ):
        properties = schemas[schema]["properties"]
        assert fields <= {name for name in properties if properties[name].get("description")}


# --- keys -----------------------------------------------------------------------------------------


async def test_every_endpoint_says_whose_key_it_wants() -> None:
    """In either header; the schemes are defined."""
    document = await document_of(LOCKED)
    schemes = document["components"]["securitySchemes"]
    for name, operation in operations(document):
        path = name.split()[1]
        role = "operator" if path in OPERATOR_PATHS else "client"
        either = [{f"{role}Bearer": []}, {f"{role}Header": []}]
        assert operation.get("security") == (None if path in OPEN_PATHS else either), name
        assert set(schemes) >= {f"{role}Bearer", f"{role}Header"}
        assert ("401" in operation["responses"]) is (path not in OPEN_PATHS), name


async def test_a_router_without_keys_wants_none(document: dict[str, Any]) -> None:
    """As OpenAPI says it: an empty alternative."""
    for name, operation in operations(document):
        assert {} in operation.get("security", [{}]), name


@pytest.mark.parametrize("path", sorted(OPERATOR_PATHS))
async def test_what_is_documented_as_the_operators_is_refused_without_the_key(path: str) -> None:
    """The document and the check must not drift apart."""
    app = application(LOCKED)
    methods = (await document_of(LOCKED))["paths"][path]
    async with client_of(app) as client:
        for method in methods:
            found = await client.request(method.upper(), path.replace("{replica_id}", "x"))
            assert found.status_code == 401, method
            key = {"x-api-key": KEYS["OPERATOR_KEY"]}
            found = await client.request(
                method.upper(), path.replace("{replica_id}", "x"), headers=key
            )
            assert found.status_code != 401, method


# --- truth ----------------------------------------------------------------------------------------


async def test_every_example_fits_its_schema(document: dict[str, Any]) -> None:
    """Of requests, responses and errors; people copy them."""
    seen = set()
    for name, operation in operations(document):
        for _, media in media_of(operation):
            for title, example in media.get("examples", {}).items():
                named = example.get("$ref", "").rpartition("/")[2]
                value = (
                    document["components"]["examples"][named]["value"]
                    if named
                    else example["value"]
                )
                assert problems(document, media["schema"], value) == [], f"{name}: {title}"
                seen.add(title)
    assert seen >= {"replica-in-full", "chat", "token-ids", "invalid_value", "no_replica"}


PROXIED_BODIES = {
    body: Endpoint(path)
    for path, (body, _) in request_bodies.PROXIED.items()
    if body not in (TokenizeRequest, DetokenizeRequest)
}
FORMS = PROXIED_BODIES | {
    TokenIdsRequest: Endpoint.ROUTE,
    MessagesToRoute: Endpoint.ROUTE,
    EmbeddingsToRoute: Endpoint.ROUTE,
    SelectionRequest: Endpoint.ROUTE,
}


def test_every_example_of_a_body_is_one_that_the_router_reads() -> None:
    """The schemas describe another module's work."""
    for kind, named in request_bodies.EXAMPLES.items():
        for name, body in named.items():
            if kind is ReplicaConfig:
                assert read_replica(body).url == body["url"], name
            elif kind in FORMS:
                assert parse_request(FORMS[kind], json.dumps(body).encode()).prompts, name
    assert set(request_bodies.EXAMPLES) == {
        *FORMS,
        ReplicaConfig,
        TokenizeRequest,
        DetokenizeRequest,
        ReservationRequest,
        OutputReport,
        ReservationEnd,
    }


def test_every_field_that_is_described_is_read() -> None:
    """Fields that no form names are skipped, and a prompt without them is another one."""
    for body, endpoint in PROXIED_BODIES.items():
        skipped = {*body.__struct_fields__} - {*FIELD_NAMES, "max_tokens"}
        assert not skipped, f"{endpoint}: {skipped} must be in its `fields` (prompt/endpoints.py)"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/v1/models"),
        ("GET", "/replicas"),
        ("GET", "/replicas/absent"),
        ("GET", "/replicas/nobody"),
        ("POST", "/replicas/absent/drain"),
        ("POST", "/replicas/absent/undrain"),
        ("POST", "/replicas"),
        ("POST", "/route"),
        ("GET", "/overview"),
        ("GET", "/requests"),
        ("GET", "/requests?limit=x"),
        ("GET", "/config"),
        ("DELETE", "/replicas/absent"),
    ],
)
async def test_what_is_sent_fits_the_schema_and_has_no_other_field(
    router: httpx.AsyncClient, method: str, path: str
) -> None:
    """Of a running router; a field that is sent and not described helps nobody."""
    document = (await router.get("/openapi.json")).json()
    body = {"model": "m", "token_ids": [1, 2]} if path == "/route" else REPLICA
    found = await router.request(method, path, json=body if method == "POST" else None)
    template = (
        path.partition("?")[0].replace("absent", "{replica_id}").replace("nobody", "{replica_id}")
    )
    described = document["paths"][template][method.lower()]["responses"][str(found.status_code)]
    schema = described["content"]["application/json"]["schema"]
    assert problems(document, schema, found.json()) == []
    name = schema["$ref"].rpartition("/")[2]
    assert set(found.json()) <= set(document["components"]["schemas"][name]["properties"])


async def test_a_key_of_the_configuration_is_neither_sent_nor_an_example() -> None:
    """`api_key` is write-only."""
    service = RouterService(RouterConfig())
    async with service.lifespan(), client_of(RouterApp(service)) as client:
        await client.post("/replicas", json={**REPLICA, "api_key": "replica-key-sentinel"})
        for path in ("/replicas", "/config", "/overview", "/openapi.json"):
            assert "sentinel" not in (await client.get(path)).text
        document = (await client.get("/openapi.json")).json()
        schema = document["components"]["schemas"]["ReplicaConfig-Input"]["properties"]["api_key"]
        assert msgspec.json.encode(schema).count(b'"writeOnly":true') == 1
