"""Everything that goes to a replica without a look at a prompt: stored responses to the replica
that has them, other endpoints by load; and what probes ask of the router itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.engine_stub import Behaviour, EngineStub, Exchange, always, engines, sending
from tests.support.http_client import ask, connect
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

CONFIG = {
    "server": {"extra_paths": ["/pooling", "/custom/*"], "client_api_key": "${CLIENT_KEY}"},
    "health": QUICK_HEALTH,
}
KEY = {"authorization": "Bearer client-key"}
FORM = {"content-type": "multipart/form-data; boundary=XyZ"}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(CONFIG, {"CLIENT_KEY": "client-key"}) as process:
        yield process


def naming(response_id: str) -> Behaviour:
    """A response of /v1/responses under this id."""
    body = {"id": response_id, "object": "response", "output": []}
    return always(json.dumps(body).encode())


def streaming_id(response_id: str) -> Behaviour:
    """The same as a stream whose first event is cut in the middle of the id."""
    event = (
        b'event: response.created\ndata: {"response":{"id":"%b","object":"response"},'
        b'"sequence_number":0,"type":"response.created"}\n\n' % response_id.encode()
    )
    return sending(event[:60], event[60:])


def has(stub: EngineStub, response_id: str) -> None:
    """The engine has this response from now on."""
    for path in ("", "/cancel"):
        stub.paths[f"/v1/responses/{response_id}{path}"] = naming(response_id)


async def served_by(exchange: Exchange) -> None:
    """Says who responds."""
    await exchange.whole(exchange.stub.name.encode(), content_type="text/plain")


# --- stored responses -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_about_a_stored_response_goes_to_the_replica_that_has_it(
    router: RouterProcess, stream: bool
) -> None:
    """Every other replica says that there is none."""
    async with engines(3) as stubs, router.serving(*stubs):
        holders: dict[str, EngineStub] = {}
        for index in range(6):
            response_id = f"resp_{stream}{index}"
            for stub in stubs:
                stub.behaviour = streaming_id(response_id) if stream else naming(response_id)
            body = {"model": stubs[0].model, "input": f"{index} " * 40, "stream": stream}
            created = await router.post("/v1/responses", body, KEY)
            holders[response_id] = next(
                stub for stub in stubs if stub.name == created.headers["x-kv-replica"]
            )
        assert len({stub.name for stub in holders.values()}) > 1, "the test needs several holders"
        for stub in stubs:
            stub.requests.clear()
            stub.behaviour = naming(f"resp_{stream}_next")
        for response_id, holder in holders.items():
            has(holder, response_id)
            for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
                target = f"/v1/responses/{response_id}{path}"
                found = await ask(router.port, method, target, b"", KEY)
                assert (found.status, found.headers["x-kv-replica"]) == (200, holder.name), target
            body = {
                "model": holder.model,
                "input": "go on",
                "previous_response_id": response_id,
            }
            found = await router.post("/v1/responses", body, KEY)
            assert found.headers["x-kv-replica"] == holder.name
        assert all(
            request.headers.get("authorization") is None
            for stub in stubs
            for request in stub.requests
        )


async def test_a_response_that_the_router_has_not_seen_is_looked_for(
    router: RouterProcess,
) -> None:
    """Another router passed it on, or this one before its restart."""
    async with engines(3) as stubs, router.serving(*stubs):
        has(stubs[2], "resp_unseen")
        for _ in range(2):
            found = await router.get("/v1/responses/resp_unseen", KEY)
            assert (found.status, found.headers["x-kv-replica"]) == (200, stubs[2].name)
        lost = await router.get("/v1/responses/resp_nobodys", KEY)
        assert lost.status == 404, "the engine says so"
        assert "no such path" in lost.json["error"]["message"]


async def test_a_response_whose_replica_is_away_is_not_asked_of_another_one(
    router: RouterProcess,
) -> None:
    """404 would be final, and it may come back."""
    async with engines(2) as stubs, router.serving(*stubs):
        for stub in stubs:
            stub.behaviour = naming("resp_away")
        created = await router.post("/v1/responses", {"model": stubs[0].model, "input": "x"}, KEY)
        holder = next(stub for stub in stubs if stub.name == created.headers["x-kv-replica"])
        await holder.stop()
        found = await router.get("/v1/responses/resp_away", KEY)
        assert found.status in (502, 503)
        assert "retry-after" in found.headers


# --- by load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/v1/audio/speech"),
        *("/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render"),
        *("/v1/messages/count_tokens", "/pooling", "/custom/any/path"),
    ],
)
async def test_other_endpoints_go_to_a_replica_of_the_model(
    router: RouterProcess, path: str
) -> None:
    """As they are; of a path that the operator configured nothing is known but that."""
    async with (
        engines(1, paths={path: served_by}) as others,
        engines(2, paths={path: served_by}) as stubs,
        router.serving(*others, *stubs),
    ):
        body = {"model": stubs[0].model, "query": "q", "documents": ["a"]}
        found = await router.post(f"{path}?a=1", body, KEY)
        assert found.status == 200
        assert found.body.decode() in [stub.name for stub in stubs]
        (request,) = [request for stub in stubs for request in stub.requests]
        assert (request.target, request.json) == (f"{path}?a=1", body)
        refused = await router.post(path, {"model": "nobody's"}, KEY)
        assert refused.status == 404
        assert (await router.post(path, body)).status == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audio/../../sleep"),
        ("POST", "/v1/audio/%2e%2e%2fsleep"),
        ("POST", "/custom/x/.%2E/sleep"),
        ("POST", "/custom/."),
        ("GET", "/v1/responses/.."),
        ("POST", "/v1/responses/../cancel"),
    ],
)
async def test_a_path_that_climbs_out_of_its_prefix_goes_nowhere(
    router: RouterProcess, method: str, path: str
) -> None:
    """A server in front of an engine may resolve it to an endpoint that is not for clients."""
    async with engines(1) as (stub,), router.serving(stub):
        refused = await ask(router.port, method, path, b"{}", KEY)
        assert (refused.status, refused.error["code"]) == (404, "path_not_found")
        assert stub.requests == []


async def test_audio_goes_by_the_model_in_its_form(router: RouterProcess) -> None:
    """The form arrives as it was sent, whatever lies before the field."""
    path = "/v1/audio/transcriptions"
    async with (
        engines(1) as others,
        engines(1, paths={path: served_by}) as (stub,),
        router.serving(*others, stub),
    ):
        audio = bytes(range(256)) * 2048
        body = (
            b'--XyZ\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
            b"content-type: audio/wav\r\n\r\n" + audio + b"\r\n"
            b'--XyZ\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
            + stub.model.encode()
            + b"\r\n--XyZ--\r\n"
        )
        found = await router.post(path, body, {**KEY, **FORM})
        assert (found.status, found.body.decode()) == (200, stub.name)
        assert stub.requests[0].body == body
        none = await router.post(path, b"--XyZ--\r\n", {**KEY, **FORM})
        assert (none.status, none.error["code"]) == (404, "model_not_found")


async def test_an_audio_form_names_nothing_that_the_router_owns(router: RouterProcess) -> None:
    """VLLM reads `vllm_xargs` from forms as well: a client's report mode would have it announce
    blocks that do not exist."""
    path = "/v1/audio/transcriptions"
    async with engines(1, paths={path: served_by}) as (stub,), router.serving(stub):
        part = b'--XyZ\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        model = part % (b"model", stub.model.encode())
        for name in (b"kv_cache_report_mode", b"k\\u0076_cache\\u005Freport_mode"):
            field = part % (b"vllm_xargs", b'{"a": 1, "%b": "full"}' % name)
            found = await router.post(path, field + model + b"--XyZ--\r\n", {**KEY, **FORM})
            assert found.status == 200
            other = part % (b"vllm_xargs", b'{"a": 1, "not_for_clients": "full"}')
            assert stub.requests[-1].body == other + model + b"--XyZ--\r\n"
        for charset, status in (("UTF-8", 200), ("utf-7", 400)):
            named = {"content-type": f"multipart/form-data; boundary=XyZ; charset={charset}"}
            found = await router.post(path, model + b"--XyZ--\r\n", {**KEY, **named})
            assert found.status == status


async def test_what_names_no_model_may_go_to_any_replica(router: RouterProcess) -> None:
    """The engine's version is everyone's."""
    version = always(b'{"version": "0.32.0"}')
    paths = {"/version": version, "/pooling": version}
    async with (
        engines(1, paths=paths) as first,
        engines(1, paths=paths) as second,
        router.serving(*first, *second),
    ):
        found = await router.get("/version", KEY)
        assert (found.status, found.json) == (200, {"version": "0.32.0"})
        for method, body in (("GET", b""), ("PUT", b"not JSON"), ("DELETE", b"")):
            found = await ask(router.port, method, "/pooling", body, KEY)
            assert found.status == 200, method
        assert {"GET", "PUT", "DELETE"} <= {
            request.method for stub in (*first, *second) for request in stub.requests
        }


# --- models ---------------------------------------------------------------------------------------


async def test_models_keep_what_engines_say_of_them(router: RouterProcess) -> None:
    """Clients size their context by it; of several lengths only the least fits everywhere."""
    details = {"max_model_len": 4096, "owned_by": "vllm", "permission": [{"id": "p"}]}
    model = "org/model-with-details"
    async with (
        engines(1, model, model_details=details) as first,
        engines(1, model, model_details={**details, "max_model_len": 2048}) as second,
        router.serving(*first, *second),
    ):
        listed = (await router.get("/v1/models", KEY)).json["data"]
        (entry,) = [entry for entry in listed if entry["id"] == model]
        assert {name: entry[name] for name in details} == {**details, "max_model_len": 2048}
        one = await router.get(f"/v1/models/{model}", KEY)
        assert (one.status, one.json["id"], one.json["owned_by"]) == (200, model, "vllm")
        none = await router.get("/v1/models/nobody/s", KEY)
        assert (none.status, none.error["code"]) == (404, "model_not_found")


# --- probes and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_meant_for_an_engine_get_an_answer(router: RouterProcess, path: str) -> None:
    """What watched an engine watches the router as it is; without a key, as there."""
    assert (await router.get(path)).status == 503
    async with engines(1) as stubs, router.serving(*stubs):
        assert (await router.get(path)).status == 200


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/v1/models"])
async def test_a_head_request_gets_what_a_get_request_would(
    router: RouterProcess, path: str
) -> None:
    """Uptime monitors and load balancers probe so."""
    async with connect(router.port) as client:
        for _ in range(2):
            await client.send("HEAD", path, b"", KEY)
            assert await client.read_head() == 200
        assert (await client.ask("GET", "/healthz")).status == 200, "no body was in the way"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/replicas", "GET, HEAD, OPTIONS, POST"),
        ("/v1/completions", "OPTIONS, POST"),
        ("/pooling", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
    ],
)
async def test_options_says_which_methods_a_path_takes(
    router: RouterProcess, path: str, allowed: str
) -> None:
    """Also those that bypass FastAPI."""
    found = await ask(router.port, "OPTIONS", path)
    assert (found.status, found.headers["allow"]) == (204, allowed)


async def test_nothing_redirects(router: RouterProcess) -> None:
    """Least of all to the host that a client names."""
    for path in ("/metrics/", "/healthz/", "/replicas/", "/v1/models/"):
        async with connect(router.port) as client:
            head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1.evil.example\r\n"
            await client.write(f"{head}authorization: {KEY['authorization']}\r\n\r\n".encode())
            found = await client.read_answer()
        assert found.status >= 400, path
        assert "location" not in found.headers


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", "/v1/messages", b"{}", "authentication_error"),
        ("GET", "/v1/messages", b"", "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"", "not_found_error"),
        ("POST", "/v1/messages/count_tokens", b'{"model": "x"}', "not_found_error"),
    ],
)
async def test_errors_on_anthropics_paths_have_anthropics_form(
    router: RouterProcess, method: str, path: str, body: bytes, kind: str
) -> None:
    """Its SDKs look at `type` first."""
    headers = {} if kind == "authentication_error" else KEY
    async with engines(1) as stubs, router.serving(*stubs):
        found = await ask(router.port, method, path, body, headers)
    assert found.status >= 400
    assert (found.json["type"], found.json["error"]["type"]) == ("error", kind)
