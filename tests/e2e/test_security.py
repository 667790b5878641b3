"""Attacks, with real sockets and a real browser: pages on other origins, rebound names, missing and
wrong keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.doors.http.access import WrongKeys
from router.errors import BadRequest
from router.prompt.body.salting import with_tenant_salt
from tests.support.browser import browser_page, needs_browser
from tests.support.engine_stub import Exchange, always, engines, prompt_ids
from tests.support.http_client import Answer, HttpClient, connect, request_bytes
from tests.support.router_process import (
    QUICK_HEALTH,
    RouterProcess,
    router_process,
)
from tests.support.waiting import eventually
from tests.support.warm_start import COMMAND, ROOT

CLIENT_KEY, OPERATOR_KEY = "client-key-sentinel-5c1d", "operator-key-sentinel-77b2"
SALT = "salt-sentinel-c2"
WRONG_KEYS = "kvroute_wrong_keys_total"
CLIENT = {"authorization": f"Bearer {CLIENT_KEY}"}
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}
JSON = {"content-type": "application/json"}
REPLICA = {"url": "http://127.0.0.1:9", "id": "planted"}
CHANGES = (
    ("POST", "/replicas"),
    ("DELETE", "/replicas/first"),
    ("POST", "/replicas/first/drain"),
    ("POST", "/replicas/first/undrain"),
)
OPERATION = ("/replicas", "/replicas/first", "/requests", "/overview", "/config")
FIRST = {"id": "first", "url": "http://127.0.0.1:9", "models": ["m"], "kv_events": []}


def own_address() -> str:
    """An address of this machine that other machines reach; from there, a connection is no
    loopback's."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))
        address: str = probe.getsockname()[0]
        if not address.startswith("127."):
            return address
    pytest.skip("this machine has no other address than loopback")


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    """As it comes: without keys, on loopback."""
    with router_process({"server": {"host_names": ["router"]}, "replicas": [FIRST]}) as process:
        yield process


@pytest.fixture(scope="module")
def exposed() -> Iterator[RouterProcess]:
    """Reached by others, with a key for clients only."""
    server = {"host": "0.0.0.0", "client_api_key": "${CLIENT_KEY}"}
    with router_process({"server": server, "replicas": [FIRST]}, {"CLIENT_KEY": CLIENT_KEY}) as it:
        yield it


async def ask_as(
    address: str, port: int, method: str, target: str, headers: dict[str, str]
) -> Answer:
    """Ask under *address*, which is the `Host` as well unless *headers* have one."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        client = HttpClient(reader, writer)
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [
            f"{name}: {value}" for name, value in ({"host": f"{address}:{port}"} | headers).items()
        ]
        await client.write("\r\n".join([*lines, "content-length: 2", "", "{}"]).encode())
        return await client.read_answer()
    finally:
        writer.close()


async def replica_states(router: RouterProcess) -> dict[str, str]:
    replicas = (await router.get("/replicas")).json["replicas"]
    return {replica["id"]: replica["state"] for replica in replicas}


# --- pages on other origins -----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=lambda headers: " ".join(*headers.items()),
)
async def test_a_page_on_another_origin_changes_nothing(
    router: RouterProcess, method: str, path: str, headers: dict[str, str]
) -> None:
    """It could add a replica that gets the next prompt, and drain the others."""
    before = await replica_states(router)
    refused = await ask_as("127.0.0.1", router.port, method, path, {**JSON, **headers})
    assert (refused.status, refused.error["code"]) == (403, "foreign_origin")
    assert (await replica_states(router)).keys() == before.keys()


@pytest.mark.parametrize("path", [path for method, path in CHANGES if method == "POST"])
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_what_a_page_may_send_unasked_changes_nothing(
    router: RouterProcess, path: str, content_type: str
) -> None:
    """Browsers send these types to any origin; for JSON they ask first. It also holds for browsers
    that send no `Origin`."""
    refused = await router.post(path, REPLICA, {"content-type": content_type})
    assert (refused.status, refused.error["code"]) == (415, "unsupported_media_type")
    assert "planted" not in await replica_states(router)


async def test_the_routers_own_page_and_commands_may_change_it(router: RouterProcess) -> None:
    """The checks are for others."""
    own = {"origin": f"http://127.0.0.1:{router.port}", "sec-fetch-site": "same-origin"}
    for headers in (JSON, {**JSON, **own}, {"content-type": "application/json; charset=utf-8"}):
        drained = await ask_as(
            "127.0.0.1", router.port, "POST", "/replicas/first/drain", dict(headers)
        )
        assert (drained.status, drained.json["state"]) == (200, "draining")
        assert (await router.post("/replicas/first/undrain")).status == 200


@contextlib.asynccontextmanager
async def page_elsewhere(html: str) -> AsyncIterator[str]:
    """Serve one page on another port, so on another origin; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + html.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@needs_browser
async def test_a_hostile_page_in_a_browser_neither_adds_nor_drains_a_replica(
    router: RouterProcess,
) -> None:
    """As it was done to an earlier version: `no-cors`, plain text, nobody asked."""
    script = """<script>
      const send = (path, method, type, body) => fetch("ROUTER" + path, {
        method, body, mode: type === "application/json" ? "cors" : "no-cors",
        headers: {"content-type": type}}).then(() => "sent", () => "stopped");
      const plan = async () => { const done = [];
        for (const type of ["text/plain", "application/json"]) {
          done.push(await send("/replicas", "POST", type,
            '{"id": "planted", "url": "http://127.0.0.1:9", "speed": 1000}'));
          done.push(await send("/replicas/first/drain", "POST", type));
        } document.title = done.join(); }; plan();
    </script>"""
    async with (
        page_elsewhere(script.replace("ROUTER", router.url)) as url,
        browser_page() as (
            page,
            _,
        ),
    ):
        await page.goto(url)
        await page.wait_for_function("document.title")
        assert await page.title() == "sent,sent,stopped,stopped"
    states = await replica_states(router)
    assert "planted" not in states
    assert states["first"] != "draining"


# --- names that were rebound ----------------------------------------------------------------------


@pytest.mark.parametrize("path", [*OPERATION, "/metrics", "/v1/models", "/route"])
async def test_a_name_that_is_not_the_routers_is_refused(router: RouterProcess, path: str) -> None:
    """A page whose own name suddenly resolves to this address is same-origin to the browser."""
    method = "POST" if path == "/route" else "GET"
    for host in ("evil.example", f"evil.example:{router.port}", "127.0.0.1.evil.example"):
        refused = await ask_as("127.0.0.1", router.port, method, path, {"host": host})
        assert (refused.status, refused.error["code"]) == (403, "foreign_host")
        assert "server.host_names" in refused.error["message"]


async def test_a_rebound_name_cannot_send_prompts(router: RouterProcess) -> None:
    """It would read the response as well."""
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = await ask_as("127.0.0.1", router.port, "POST", path, {"host": "evil.example"})
        assert (refused.status, refused.error["code"]) == (403, "foreign_host")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]:8000", "10.1.2.3:8000", "router", "ROUTER:80"]
)
async def test_addresses_localhost_and_configured_names_are_the_routers(
    router: RouterProcess, host: str
) -> None:
    """Nobody else can have them."""
    found = await ask_as("127.0.0.1", router.port, "GET", "/replicas", {"host": host})
    assert found.status == 200


async def test_probes_answer_under_any_name(router: RouterProcess) -> None:
    """Load balancers ask as they like, and there is nothing to learn."""
    for path in ("/healthz", "/readyz"):
        found = await ask_as("127.0.0.1", router.port, "GET", path, {"host": "balancer.example"})
        assert found.status in (200, 503)


async def test_who_has_a_key_may_use_any_name(exposed: RouterProcess) -> None:
    """A page cannot know the key, so gateways and proxies need no list of names."""
    headers = {"host": "llm.example.com", **CLIENT}
    found = await ask_as("127.0.0.1", exposed.port, "GET", "/v1/models", headers)
    assert found.status == 200


# --- without keys ---------------------------------------------------------------------------------


async def test_without_an_operator_key_only_this_machine_operates(exposed: RouterProcess) -> None:
    """Also where clients need a key: it is no operator's."""
    address = own_address()
    for method, path in (*CHANGES, *(("GET", path) for path in OPERATION)):
        for headers in ({}, CLIENT):
            refused = await ask_as(address, exposed.port, method, path, {**JSON, **headers})
            assert (refused.status, refused.error["code"]) == (403, "loopback_only"), path
    assert (await exposed.get("/replicas")).status == 200
    for path in ("/healthz", "/metrics"):
        assert (await ask_as(address, exposed.port, "GET", path, {})).status == 200


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
async def test_a_proxy_on_this_machine_does_not_make_others_local(
    exposed: RouterProcess, header: str
) -> None:
    """Its connections come from loopback, whoever asks."""
    refused = await exposed.get("/replicas", {header: "203.0.113.7"})
    assert (refused.status, refused.error["code"]) == (403, "loopback_only")


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
async def test_no_client_can_have_the_header_of_such_a_proxy_removed(
    exposed: RouterProcess, header: str
) -> None:
    """`Connection` lists what the next hop removes, and some proxies pass on their client's."""
    forwarded = {header: "203.0.113.7", "connection": f"keep-alive, {header.title()}"}
    refused = await exposed.get("/replicas", forwarded)
    assert (refused.status, refused.error["code"]) == (403, "loopback_only")


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "serve", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu-node"])
@pytest.mark.parametrize("check", [(), ("--check",)], ids=["serve", "check"])
def test_it_does_not_listen_beyond_this_machine_without_a_client_key(
    host: str, check: tuple[str, ...]
) -> None:
    """Everyone there could use the engines. The check says so before the start does."""
    done = serve("--host", host, "--port", "0", *check)
    assert done.returncode == 2
    assert "server.host" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_listens_everywhere_where_it_is_told_to_be_insecure(tmp_path: Path) -> None:
    """By the option, or by the file."""
    assert serve("--host", "0.0.0.0", "--insecure", "--check").returncode == 0
    path = tmp_path / "kvroute.yaml"
    path.write_text("server: {host: 0.0.0.0, insecure: true}")
    assert serve("--config", str(path), "--check").returncode == 0
    with router_process({"server": {"host": "0.0.0.0", "insecure": True}}) as process:
        assert process.port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    """A first try must not need a configuration."""
    assert serve("--host", host, "--check").returncode == 0


def test_metrics_cannot_need_a_key_that_is_not_there(tmp_path: Path) -> None:
    """They would be open, though the file says otherwise."""
    path = tmp_path / "kvroute.yaml"
    path.write_text("observability: {metrics_need_key: true}")
    done = serve("--config", str(path), "--check")
    assert done.returncode == 2
    assert "observability.metrics_need_key: true; server.operator_api_key must be" in done.stderr


# --- the page's key -------------------------------------------------------------------------------


@needs_browser
async def test_the_api_description_needs_nothing_from_elsewhere(router: RouterProcess) -> None:
    """The operator's key lies in storage that every script on this origin can read; and a router
    often stands where the internet is not."""
    async with browser_page() as (page, watch):
        await page.goto(f"{router.url}/docs")
        await page.locator(".opblock-summary").first.click()
        await page.get_by_text("It is.").first.wait_for()
        assert not watch.complaints
        assert all(address.startswith(router.url) for address in watch.addresses)


async def test_no_script_from_elsewhere_may_run_on_a_page(router: RouterProcess) -> None:
    """Nor may a page be framed, or send anything to another place."""
    for path in ("/", "/docs"):
        policy = (await router.get(path)).headers["content-security-policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert "http" not in policy


def test_swagger_ui_is_the_one_that_was_published() -> None:
    """What was vendored is known by its digest: 5.35.0 of `swagger-ui-dist`, without the references
    to source maps."""
    folder = ROOT / "router/static/swagger-ui"
    digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert digests["swagger-ui-bundle.js"].startswith("e6a898692f2d768e807c3ba4626068a6")
    assert digests["swagger-ui.css"].startswith("a6a4cf68f069eb89984d5d43644e6a81")
    assert {"LICENSE", "NOTICE"} <= digests.keys()


# --- keys -----------------------------------------------------------------------------------------


def several_keys(directory: Path) -> dict[str, Any]:
    (directory / "b.key").write_text(f"{CLIENT_KEY}-b\n")
    return {
        "server": {
            "client_api_key": CLIENT_KEY,
            "client_api_keys": [
                {"name": "team-a", "key": "${TEAM_A}", "cache_salt": SALT},
                {"name": "team-b", "key": f"${{file:{directory}/b.key}}"},
            ],
            "operator_api_keys": [{"name": "on-call", "key": OPERATOR_KEY}],
            "wrong_key_delay_s": 0.3,
        }
    }


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    config = several_keys(tmp_path_factory.mktemp("keys"))
    with router_process(config, {"TEAM_A": f"{CLIENT_KEY}-a"}) as process:
        yield process


async def test_each_holder_has_a_key_of_his_own(locked: RouterProcess) -> None:
    """So one can be changed without the others; keys come from the environment, or from files."""
    for key in (CLIENT_KEY, f"{CLIENT_KEY}-a", f"{CLIENT_KEY}-b"):
        found = await locked.get("/v1/models", {"authorization": f"Bearer {key}"})
        assert found.status == 200, key
    assert (await locked.get("/replicas", OPERATOR)).status == 200
    shown = (await locked.get("/config", OPERATOR)).body.decode()
    assert CLIENT_KEY not in shown
    assert SALT not in shown


async def test_wrong_keys_are_counted_logged_without_the_key_and_slowed_down(
    locked: RouterProcess,
) -> None:
    """Whoever guesses gets one attempt for each delay, and is seen. Right keys do not wait."""
    wrong = {"authorization": "Bearer wrong-key-sentinel-1f"}
    before = await locked.metrics()
    started = time.monotonic()
    for _ in range(12):
        assert (await locked.get("/v1/models", wrong)).status == 401
    slow_s = time.monotonic() - started
    assert (await locked.post("/v1/completions", {"prompt": [1]}, wrong)).status == 401
    assert (await locked.get("/requests", wrong)).status == 401
    assert slow_s > 1.0
    after = await locked.metrics()
    overtaken = False
    while not overtaken:
        waiting = asyncio.create_task(locked.get("/v1/models", wrong))
        assert (await locked.get("/v1/models", CLIENT)).status == 200
        assert (await locked.get("/v1/models")).status == 401
        overtaken = not waiting.done()
        assert (await waiting).status == 401
    counted = {
        endpoint: after.sum(WRONG_KEYS, endpoint=endpoint)
        - before.sum(WRONG_KEYS, endpoint=endpoint)
        for endpoint in ("/v1/models", "/v1/completions", "/requests")
    }
    assert counted == {"/v1/models": 12, "/v1/completions": 1, "/requests": 1}
    assert "wrong key for /v1/models from 127.0.0.1" in locked.log()
    assert "wrong-key-sentinel" not in locked.log()


def test_what_is_kept_of_wrong_keys_is_bounded() -> None:
    """An attacker has more addresses than the router has memory."""
    counted: list[str] = []
    keys = WrongKeys(1.0, counted.append, clock=lambda: 0.0)
    delays = [keys.add("x", "192.0.2.1") for _ in range(12)]
    assert delays[:6] == [0, 0, 0, 0, 0, 0.1]
    assert delays[-1] == max(delays) == 1.0
    for number in range(5000):
        keys.add("x", str(number))
    assert len(keys._attempts) <= 1024
    assert len(counted) == 5012


async def test_a_stored_response_belongs_to_the_key_that_made_it(locked: RouterProcess) -> None:
    """It holds the prompt. Others cannot tell it from one that does not exist, in whatever way they
    ask, nor put one of theirs in its place."""
    a, b = ({"authorization": f"Bearer {CLIENT_KEY}-{name}"} for name in "ab")
    async with engines(1) as (stub,):
        stub.behaviour = _stores_responses
        added = await locked.post("/replicas", {"url": stub.url, "models": [stub.model]}, OPERATOR)
        await locked.until(lambda now: now.sum("kvroute_replica_state", state="healthy"), "healthy")
        mine = {"model": stub.model, "input": "x", "request_id": "resp_chosen"}
        name = (await locked.post("/v1/responses", mine, a)).json["id"]
        assert name != "resp_chosen"
        next_one = {**mine, "previous_response_id": name}
        for ask in (
            lambda key, name: locked.get(f"/v1/responses/{name}", key),
            lambda key, name: locked.post(f"/v1/responses/{name}/cancel", b"", key),
            lambda key, name: locked.delete(f"/v1/responses/{name}", key),
            lambda key, name: locked.post(
                "/v1/responses", {**next_one, "previous_response_id": name}, key
            ),
        ):
            before = len(stub.requests)
            others, made_up = await ask(b, name), await ask(b, "resp_" + "0" * 64)
            assert (others.status, others.error) == (404, made_up.error)
            assert others.error["code"] == "response_not_found"
            assert len(stub.requests) == before, "no engine is asked"
            assert (await ask(a, name)).status == 200
        await locked.delete(f"/replicas/{added.json['id']}", OPERATOR)


async def _stores_responses(exchange: Exchange) -> None:
    """Takes the id that the router gives, as engines do, and has each response for ever."""
    name = exchange.request.json["request_id"]
    body = json.dumps({"id": name, "object": "response", "output": []}).encode()
    for path in ("", "/cancel"):
        exchange.stub.paths[f"/v1/responses/{name}{path}"] = always(body)
    await exchange.whole(body)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "[{name: a, key: x}, {name: a, key: y}]",
            "server.client_api_keys[1].name: 'a'; client_api_keys[0] has it already",
        ),
        (
            "[{name: a, key: sk-twice}, {name: b, key: sk-twice}]",
            "server.client_api_keys[1].key: not shown; client_api_keys[0] has it already",
        ),
        (
            "[{name: a, key: '${file:missing.key}'}]",
            "server.client_api_keys[0].key: ${file:missing.key}; cannot be read: "
            "No such file or directory",
        ),
    ],
)
def test_keys_that_cannot_be_told_apart_or_read_are_refused(
    tmp_path: Path, keys: str, expected: str
) -> None:
    """The start says so, and shows no key."""
    path = tmp_path / "kvroute.yaml"
    path.write_text(f"server: {{client_api_keys: {keys}}}")
    done = serve("--config", str(path), "--check")
    assert done.returncode == 2
    assert expected in done.stderr
    assert "sk-twice" not in done.stderr


# --- what caches tell -----------------------------------------------------------------------------


async def test_clients_with_keys_are_not_told_what_is_cached(locked: RouterProcess) -> None:
    """To the token, it would tell them what others have asked."""
    async with engines(1) as (stub,):
        added = await locked.post("/replicas", {"url": stub.url, "models": [stub.model]}, OPERATOR)
        assert added.status == 201
        body = {"model": stub.model, "prompt": [1, 2, 3]}
        await locked.until(lambda now: now.sum("kvroute_replica_state", state="healthy"), "healthy")
        found = await locked.post("/v1/completions", body, CLIENT)
        assert found.status == 200
        assert "x-kv-replica" in found.headers
        assert "x-kv-hit-tokens" not in found.headers
        assert (await locked.post("/route", body, CLIENT)).status == 401
        assert (await locked.post("/route?explain=true", body, OPERATOR)).json["ranking"]
        await locked.delete(f"/replicas/{added.json['id']}", OPERATOR)


async def test_a_tenants_prompts_carry_the_salt_of_its_key(locked: RouterProcess) -> None:
    """The engine then reuses blocks of that tenant only, whatever salt a client sends."""
    async with engines(1) as (stub,):
        added = await locked.post("/replicas", {"url": stub.url, "models": [stub.model]}, OPERATOR)
        await locked.until(lambda now: now.sum("kvroute_replica_state", state="healthy"), "healthy")
        salts: dict[tuple[str, str | None], str | None] = {}
        for name in ("-a", "-b"):
            for own in (None, "x", SALT):
                body = {"model": stub.model, "prompt": [1]}
                body |= {} if own is None else {"cache_salt": own}
                key = {"authorization": f"Bearer {CLIENT_KEY}{name}"}
                assert (await locked.post("/v1/completions", body, key)).status == 200
                salts[name, own] = json.loads(stub.requests[-1].body).get("cache_salt")
        assert [salts["-b", own] for own in (None, "x", SALT)] == [None, "x", SALT]
        assert len(set(salts.values())) == 6
        assert SALT not in (salts["-a", None], salts["-a", "x"], salts["-a", SALT])
        await locked.delete(f"/replicas/{added.json['id']}", OPERATOR)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_router_behind_this_one_says_of_its_caches_is_not_passed_on(
    locked: RouterProcess, stream: bool
) -> None:
    """A replica may be another kvroute, which takes this one for a client that may be told."""
    told = b"x-kv-hit-tokens: 64\r\nX-KV-Future: 1\r\nx-kv-replica: inner\r\n"

    async def behave(exchange: Exchange) -> None:
        kind = b"text/event-stream" if stream else b"application/json"
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: %b\r\n" % kind
        await exchange.send(head + told + b"x-other: 1\r\n\r\n{}")

    async with engines(1, behaviour=behave) as (stub,):
        added = await locked.post("/replicas", {"url": stub.url, "models": [stub.model]}, OPERATOR)
        await locked.until(lambda now: now.sum("kvroute_replica_state", state="healthy"), "healthy")
        body = {"model": stub.model, "prompt": [1, 2, 3], "stream": stream}
        found = await locked.post("/v1/completions", body, CLIENT)
        assert found.headers["x-other"] == "1"
        ours = {name: text for name, text in found.headers.items() if name.startswith("x-kv-")}
        assert ours == {"x-kv-replica": added.json["id"]}
        await locked.delete(f"/replicas/{added.json['id']}", OPERATOR)


@pytest.fixture(scope="module")
def telling() -> Iterator[RouterProcess]:
    """Clients with salts, who are told what is cached; and paths of the operator's choice."""
    keys = [{"name": "a", "key": CLIENT_KEY, "cache_salt": SALT}]
    keys += [{"name": "b", "key": f"{CLIENT_KEY}-b"}]
    server = {"client_api_keys": keys, "clients_see_hits": True}
    with router_process({"server": {**server, "extra_paths": ["/pooling", "/generate"]}}) as it:
        yield it


async def test_a_tenant_is_told_the_route_of_its_own_salted_prompt(telling: RouterProcess) -> None:
    """To anybody else, and to the tenant under another salt, it says that nothing is cached."""
    other = {"authorization": f"Bearer {CLIENT_KEY}-b"}
    msgpack = {**CLIENT, "content-type": "application/msgpack", "accept": "application/json"}
    async with engines(1, has_events=True) as (stub,), telling.serving(stub):
        ids = prompt_ids(64, 3)
        body = {"model": stub.model, "prompt": [*ids, 7]}
        assert (await telling.post("/v1/completions", body, CLIENT)).status == 200
        stub.store(ids, stub.requests[-1].json["cache_salt"])
        await telling.until_applied(stub)

        async def told(body: object, headers: dict[str, str]) -> Any:
            route = (await telling.post("/route", body, headers)).json
            return route["hit"]["gpu_cached_tokens"]

        assert await told(body, CLIENT) == 64
        assert await told(msgspec.msgpack.encode(body), msgpack) == 64
        assert await told({"model": stub.model, "token_ids": [*ids, 7]}, CLIENT) == 64
        assert await told(body, other) == 0
        assert await told({**body, "cache_salt": "mine"}, CLIENT) == 0
        found = await telling.post("/v1/completions", body, CLIENT)
        assert found.headers["x-kv-hit-tokens"] == "64"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", ("cache_salt",)),
        ("/v1/score", ("cache_salt",)),
        ("/pooling", ("cache_salt",)),
        ("/generate", ("cache_salt", "extra_key")),
        ("/tokenize", ()),
    ],
)
async def test_prompts_that_are_not_looked_at_carry_the_salt_as_well(
    telling: RouterProcess, path: str, fields: tuple[str, ...]
) -> None:
    """They fill the same cache. SGLang reads `extra_key` on its own endpoint; who only tokenises
    needs no salt."""
    async with engines(1) as (stub,), telling.serving(stub, models=["m"]):
        stub.paths[path] = always(b"{}")

        async def sent(body: dict[str, Any]) -> dict[str, Any]:
            raw = b"\xef\xbb\xbf" + json.dumps({"model": "m", **body}).encode()
            assert (await telling.post(path, raw, CLIENT)).status == 200
            found: dict[str, Any] = stub.requests[-1].json
            assert {**found, "model": "m", **body} == found | body
            return {name: found.get(name) for name in ("cache_salt", "extra_key")}

        plain = await sent({})
        assert tuple(name for name, salt in plain.items() if salt) == fields
        for name in fields:
            own = await sent({name: "x"})
            assert own[name] not in ("x", plain[name], SALT)
            several = await sent({name: ["x", "y"]})
            assert several[name][0] == own[name] != several[name][1]


@pytest.mark.parametrize(
    "body",
    [b'[{"prompt": "p"}]', '{"prompt": "p"}'.encode("utf-16"), b'"p"', b'{"cache_salt": ""}', b"{"],
)
async def test_what_cannot_be_salted_does_not_pass(telling: RouterProcess, body: bytes) -> None:
    """An engine may read it all the same: Python's JSON takes UTF-16."""
    async with engines(1) as (stub,), telling.serving(stub):
        stub.paths["/pooling"] = always(b"{}")
        refused = await telling.post("/pooling", body, CLIENT)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        assert stub.requests == []


@pytest.mark.parametrize("body", [b'{"prompt": "p"}', '{"prompt": "p"}'.encode("utf-16")])
async def test_json_that_is_called_a_form_does_not_pass_without_a_salt(
    telling: RouterProcess, body: bytes
) -> None:
    """Of two content types an engine may take the other one, and some engines look at none."""
    form = {**CLIENT, "content-type": "multipart/form-data; boundary=x"}
    async with engines(1) as (stub,), telling.serving(stub):
        stub.paths["/pooling"] = always(b"{}")
        refused = await telling.post("/pooling", body, form)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")
        assert stub.requests == []
        assert (await telling.post("/pooling", b"\r\n--x--\r\n", form)).status == 200


@pytest.fixture(scope="module")
def limited() -> Iterator[RouterProcess]:
    """A key for one model of an engine that has another one as well."""
    keys = [{"name": "a", "key": CLIENT_KEY, "models": ["m"], "requests_per_minute": 1000}]
    server = {"client_api_keys": keys, "clients_see_hits": True, "extra_paths": ["/pooling"]}
    models = [{"name": "m", "lora_adapters": ["other"]}]
    with router_process({"server": server, "models": models}) as it:
        yield it


def form_naming(*models: str) -> bytes:
    head = '--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n'
    return "".join([*(f"{head}{model}\r\n" for model in models), "--x--\r\n"]).encode()


FORM = "multipart/form-data; boundary=x"
OTHER = {"model": "other", "prompt": "p"}


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        ("/v1/completions", OTHER, "application/json"),
        ("/v1/completions", b'{"model": "m", "prompt": "p", "mod\\u0065l": "other"}', "x/y"),
        ("/route", OTHER, "application/json"),
        ("/route", msgspec.msgpack.encode(OTHER), "application/msgpack"),
        ("/route?explain=true", OTHER, "application/json"),
        ("/tokenize", OTHER, "application/json"),
        ("/v1/rerank", b'{"model": "other"}', FORM),
        ("/pooling", OTHER, "application/json"),
        ("/pooling", '{"model": "other"}'.encode("utf-16"), "application/json"),
        ("/pooling", b'[{"model": "other"}]', "application/json"),
        ("/v1/audio/transcriptions", form_naming("other"), FORM),
        ("/v1/audio/transcriptions", form_naming("m", "other"), FORM),
        ("/v1/audio/transcriptions", form_naming("m"), f"{FORM}; boundary=y"),
        ("/v1/audio/transcriptions", form_naming("m"), f"{FORM}\r\ncontent-type: {FORM}"),
    ],
)
async def test_a_key_gets_nothing_done_for_a_model_that_it_is_not_for(
    limited: RouterProcess, path: str, body: object, content_type: str
) -> None:
    """Not by a body that the engine may read in another way than the router, nor by asking where it
    would go; nothing of it reaches a replica, where prompts are tokenised."""
    async with engines(1) as (stub,), limited.serving(stub, models=["m", "other"]):
        for known in (path, "/tokenize"):
            stub.paths[known] = always(b"{}")
        refused = await limited.post(path, body, {**CLIENT, "content-type": content_type})
        assert refused.status in (400, 403), refused
        assert stub.requests == []


async def test_questions_count_as_requests_of_a_key(limited: RouterProcess) -> None:
    """Explained or not, they cost the router as much."""
    async with engines(1) as (stub,), limited.serving(stub, models=["m"]):
        body = {"model": "m", "prompt": [1]}
        before = (await limited.metrics()).sum("kvroute_key_requests_total", key="a")
        for path in ("/route", "/route?explain=true"):
            assert (await limited.post(path, body, CLIENT)).status == 200
        now = await limited.metrics()
        assert now.sum("kvroute_key_requests_total", key="a") - before == 2
        assert now.sum("kvroute_key_in_flight", key="a") == 0


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (b'{"prompt": "p"}', None),
        (b" {} \n", None),
        (b'{"cache_salt": "a", "prompt": "}"}', "a"),
        (b'{"c\\u0061che_salt": "a"}', "a"),
        (b'{"cache_salt": "b", "cache_salt": "a"}', "a"),
    ],
)
def test_a_salted_body_is_read_with_the_salt_and_nothing_else_changed(
    body: bytes, own: str | None
) -> None:
    """Of equal names the last counts, as for engines; some refuse a name that is there twice."""
    salted = json.loads(with_tenant_salt(body, b"tenant"))
    assert with_tenant_salt(body, b"tenant").count(b"cache_salt") == 1
    fields = {name: value for name, value in json.loads(body).items() if name != "cache_salt"}
    assert {name: value for name, value in salted.items() if name != "cache_salt"} == fields
    alone = {"cache_salt": own} if own else {}
    same = json.loads(with_tenant_salt(json.dumps(alone).encode(), b"tenant"))
    other = json.loads(with_tenant_salt(json.dumps(alone).encode(), b"another"))
    assert salted["cache_salt"] == same["cache_salt"] != other["cache_salt"]


@pytest.mark.parametrize("body", [b"[1]", b"{", b"", b'{"cache_salt": ""}', b'{"cache_salt": 3}'])
def test_a_body_that_takes_no_salt_is_refused(body: bytes) -> None:
    """The client hears what is wrong with it; an engine might take no salt for none."""
    with pytest.raises(BadRequest):
        with_tenant_salt(body, b"tenant")


# --- where requests go ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "8.8.8.8", "[::ffff:169.254.169.254]", "[fe80::1]", "0.0.0.0"]
)
async def test_replicas_cannot_be_added_in_foreign_networks(
    router: RouterProcess, host: str
) -> None:
    """The router would ask there for whoever may add a replica, and hand back the response."""
    refused = await router.post("/replicas", {"url": f"http://{host}:80", "id": "planted"})
    assert refused.status == 400
    assert "must lie in server.replica_networks" in refused.error["message"]
    assert "planted" not in await replica_states(router)


@pytest.fixture(scope="module")
def confined() -> Iterator[RouterProcess]:
    """Replicas may be added at one address only."""
    server = {"replica_networks": ["127.0.0.1/32"]}
    with router_process({"server": server, "health": QUICK_HEALTH}) as process:
        yield process


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
@pytest.mark.parametrize("host", ["127.0.0.2", "169.254.169.254", "[fe80::1]"])
async def test_event_streams_of_added_replicas_cannot_lie_in_foreign_networks(
    confined: RouterProcess, host: str, name: str
) -> None:
    """The router would connect there as well."""
    source = {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://127.0.0.1:1"}
    source |= {name: f"tcp://{host}:80"}
    replica = {"url": "http://127.0.0.1:9", "id": "planted", "kv_events": [source]}
    refused = await confined.post("/replicas", replica)
    assert refused.status == 400
    assert f"$.kv_events[0].{name}" in refused.error["message"]
    assert "must lie in server.replica_networks" in refused.error["message"]
    assert await replica_states(confined) == {}


async def test_what_an_added_replica_reports_of_its_streams_is_checked_when_connected_to(
    confined: RouterProcess,
) -> None:
    """It is the replica that says where they are, whenever it is asked."""
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        elsewhere.setblocking(False)
        address = f"tcp://127.0.0.2:{elsewhere.getsockname()[1]}"
        async with engines(1, has_events=True) as (stub,):
            stub._kv_addresses = (address, address)
            added = await confined.post("/replicas", {"url": stub.url, "id": stub.name})
            assert added.status == 201
            await eventually(lambda: f"{address}: 127.0.0.2 lies" in confined.log(), "it says so")
            with pytest.raises(BlockingIOError):
                elsewhere.accept()
            assert (await confined.replica(stub.name))["state"] == "healthy"
            await confined.delete(f"/replicas/{stub.name}")


async def test_what_clients_say_of_their_address_is_not_passed_on(locked: RouterProcess) -> None:
    """Engines may log it, or limit by it. A client's `Connection` is about its own hop only, and
    takes away nothing that the router says."""
    async with engines(1) as (stub,):
        added = await locked.post("/replicas", {"url": stub.url, "models": [stub.model]}, OPERATOR)
        await locked.until(lambda now: now.sum("kvroute_replica_state", state="healthy"), "healthy")
        said = {"x-forwarded-for": "203.0.113.7", "x-real-ip": "203.0.113.7", "forwarded": "for=x"}
        said["connection"] = "close, X-Forwarded-For, x-forwarded-proto, x-request-id"
        body = {"model": stub.model, "prompt": [1]}
        assert (await locked.post("/v1/completions", body, {**CLIENT, **said})).status == 200
        headers = stub.requests[-1].headers
        assert (headers["x-forwarded-for"], headers["x-forwarded-proto"]) == ("127.0.0.1", "http")
        assert "x-request-id" in headers
        assert not {"x-real-ip", "forwarded"} & set(headers)
        await locked.delete(f"/replicas/{added.json['id']}", OPERATOR)


async def test_every_line_of_a_trusted_proxys_chain_is_passed_on() -> None:
    """A proxy may add its own line instead of a comma; the lines together are the chain."""
    with router_process({"server": {"trusted_proxies": ["127.0.0.0/8"]}}) as trusting:
        async with engines(1) as (stub,), trusting.serving(stub):
            body = json.dumps({"model": stub.model, "prompt": [1]}).encode()
            request = request_bytes(
                "POST", "/v1/completions", body, {"x-forwarded-for": "203.0.113.7"}
            )
            head, _, rest = request.partition(b"\r\n\r\n")
            request = head + b"\r\nx-forwarded-for: 10.0.0.1, 10.0.0.2\r\n\r\n" + rest
            async with connect(trusting.port) as client:
                await client.write(request)
                assert await client.read_head() == 200
            chain = stub.requests[-1].headers["x-forwarded-for"]
            assert chain == "203.0.113.7, 10.0.0.1, 10.0.0.2, 127.0.0.1"
