"""The live page: its endpoints over plain HTTP, and the page itself in a browser, on a real router
with real stub replicas."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from router.telemetry.request_log import MAX_REQUESTS
from tests.support.browser import Watch, browser_page, needs_browser
from tests.support.engine_stub import (
    TOPIC,
    EngineStub,
    Exchange,
    begun_until,
    engines,
    hang_up,
    prompt_ids,
    unique,
)
from tests.support.http_client import Answer, connect
from tests.support.hybrid_stub import HybridStub
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

CLIENT_KEY = "client-key-sentinel-2f90"
OPERATOR_KEY = "operator-key-sentinel-81cd"
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}
OPEN = {"health": QUICK_HEALTH}
LOCKED = {
    "health": QUICK_HEALTH,
    "server": {"client_api_key": "${CLIENT_KEY}", "operator_api_key": "${OPERATOR_KEY}"},
}
KEYS = {"CLIENT_KEY": CLIENT_KEY, "OPERATOR_KEY": OPERATOR_KEY}

STATIC = sorted(path.name for path in (Path(__file__).parents[2] / "router/static").glob("*.*"))


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(OPEN) as process:
        yield process


@pytest.fixture(scope="module")
def locked() -> Iterator[RouterProcess]:
    with router_process(LOCKED, KEYS) as process:
        yield process


async def complete(router: RouterProcess, model: str, ids: list[int], **fields: object) -> Answer:
    return await router.post("/v1/completions", {"model": model, "prompt": ids, **fields})


# --- the endpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATIC)
async def test_every_file_has_its_type_and_the_security_policy(
    locked: RouterProcess, name: str
) -> None:
    """No key is needed, since it holds no data; a browser must not take it for another type."""
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    answer = await locked.get(f"/static/{name}")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


async def test_the_page_is_at_the_root_and_loads_nothing_from_elsewhere(
    router: RouterProcess,
) -> None:
    """It must work where only the router can be reached; inline code would not run under its
    policy."""
    answer = await router.get("/")
    text = answer.body.decode()
    assert answer.status == 200
    assert answer.body == (await router.get("/static/index.html")).body
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)
    assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", text)


@pytest.mark.parametrize(
    "path",
    ["/static/", "/static/../page.py", "/static/%2e%2e/page.py", "/static/page.py", "/static/a/b"],
)
async def test_no_other_file_is_served(router: RouterProcess, path: str) -> None:
    """Only files that were loaded at the start are served."""
    answer = await router.get(path)
    assert answer.status == 404
    assert answer.error["code"] == "path_not_found"


@pytest.mark.parametrize("path", ["/requests", "/overview"])
async def test_only_the_operator_sees_requests_and_replicas(
    locked: RouterProcess, path: str
) -> None:
    """Names of replicas, models and requests are not for clients."""
    for headers in ({}, {"authorization": f"Bearer {CLIENT_KEY}"}):
        assert (await locked.get(path, headers)).status == 401
    assert (await locked.get(path, OPERATOR)).status == 200


@pytest.mark.parametrize(
    "query",
    [
        "after=-1",
        "after=x",
        "after=1.5",
        "after=%D9%A1",
        f"after={2**53}",
        f"limit={MAX_REQUESTS + 1}",
        "limit=",
    ],
)
async def test_an_invalid_query_is_refused(router: RouterProcess, query: str) -> None:
    """The error has the place and the rule, as everywhere."""
    answer = await router.get(f"/requests?{query}")
    assert answer.status == 400
    assert answer.error["message"].startswith(query.partition("=")[0])
    assert "must be a whole number from 0 to" in answer.error["message"]


async def test_a_request_is_logged_with_prediction_report_and_reason(
    router: RouterProcess,
) -> None:
    """It has everything that the page shows, and nothing of the prompt."""
    async with HybridStub(unique("model")) as stub, router.serving(stub):
        ids = prompt_ids(80, 71)
        stub.store(ids)
        await router.until_applied(stub)
        before = (await router.get("/requests")).json["change"]
        await router.post(
            "/v1/completions",
            {"model": stub.model, "prompt": [*ids, 7]},
            {"x-request-id": "mine", "x-session-id": "secret-session"},
        )
        answer = await router.get(f"/requests?after={before}")
        (request,) = answer.json["requests"]
        assert request["request_id"] == "mine"
        assert (request["replica"], request["model"], request["path"]) == (
            stub.name,
            stub.model,
            "/v1/completions",
        )
        assert request["predicted"] == {
            "gpu_cached_tokens": 80,
            "cached_tokens": 80,
            "by_tier": {},
            "suspect": False,
            "approximate": False,
            "pull_from": None,
        }
        assert (request["prompt_tokens"], request["actual"], request["verdict"]) == (
            81,
            80,
            "exact",
        )
        assert (request["status"], request["end"], request["attempts"], request["failed"]) == (
            200,
            "completed",
            1,
            False,
        )
        assert request["first_byte_ms"] <= request["total_ms"]
        assert "80 of 81 tokens cached" in request["reason"]
        assert b"7100001" not in answer.body
        assert b"secret-session" not in answer.body


async def test_a_retried_request_shows_the_replica_that_responded(
    router: RouterProcess,
) -> None:
    """The prediction that counts is for that replica."""
    async with engines(2, has_events=True) as stubs, router.serving(*stubs):
        holder, other = stubs
        ids = prompt_ids(160, 72)
        holder.store(ids)
        await router.until_applied(holder)
        holder.behaviour = hang_up
        before = (await router.get("/requests")).json["change"]
        assert (await complete(router, holder.model, [*ids, 7])).status == 200
        (request,) = (await router.get(f"/requests?after={before}")).json["requests"]
        # One more where the first met a kept connection.
        assert request["attempts"] in (2, 3)
        assert (request["replica"], request["last_failure"]) == (
            other.name,
            "closed",
        )
        assert request["predicted"]["cached_tokens"] == request["actual"] == 0


async def test_a_request_that_no_replica_could_take_is_logged_with_its_503() -> None:
    """Clients see a 503, and this is where the operator looks for it."""
    with router_process(OPEN) as router:  # of its own: what failed before may leave the minute now
        async with engines(1, has_events=True) as (stub,), router.serving(stub):
            await router.post(f"/replicas/{stub.name}/drain")
            assert (await router.get("/overview")).json["minute"]["failed"] == 0
            assert (await complete(router, stub.model, [1, 2, 3])).status == 503
            (request,) = (await router.get("/requests")).json["requests"]
            shown = request["replica"], request["status"], request["end"]
            assert shown == (None, 503, "no_replica")
            assert request["failed"]
            assert (await router.get("/overview")).json["minute"]["failed"] == 1


async def test_a_request_shows_while_it_runs(router: RouterProcess) -> None:
    """The one that hangs is the one an operator looks for."""
    async with engines(1, has_events=True) as (stub,), router.serving(stub):
        gate = asyncio.Event()
        stub.behaviour = begun_until(gate)
        before = (await router.get("/requests")).json["change"]
        running = asyncio.create_task(complete(router, stub.model, prompt_ids(20, 73), stream=True))
        while not (found := (await router.get(f"/requests?after={before}")).json["requests"]):
            await asyncio.sleep(0.01)
        assert (found[0]["end"], found[0]["status"], found[0]["replica"]) == (None, None, stub.name)
        while (await router.get(f"/requests?after={before}")).json["requests"][0][
            "first_byte_ms"
        ] is None:
            await asyncio.sleep(0.01)
        assert (await router.get("/overview")).json["under_way"] == 1
        gate.set()
        await running
        (request,) = (await router.get(f"/requests?after={before}")).json["requests"]
        assert (request["number"], request["end"]) == (found[0]["number"], "completed")


async def test_the_request_log_stays_bounded_under_traffic(router: RouterProcess) -> None:
    """A response is as large as the bound, not as the traffic."""
    async with (
        engines(1, has_events=True) as (stub,),
        router.serving(stub),
        connect(router.port) as client,
    ):
        answer = (await router.get("/requests")).json
        enough = answer["change"] + 3 * MAX_REQUESTS
        while answer["change"] < enough:
            body = {"model": stub.model, "prompt": [1, 2]}
            assert (await client.ask("POST", "/v1/completions", body)).status == 200
            answer = (await router.get("/requests?limit=1")).json
        answer = (await router.get("/requests")).json
        assert len(answer["requests"]) == MAX_REQUESTS
        assert len((await router.get("/requests?limit=5")).json["requests"]) == 5
        assert (await router.get(f"/requests?after={answer['change']}")).json["requests"] == []


async def test_the_overview_counts_blocks_by_group_and_tier(router: RouterProcess) -> None:
    """These are the bars of the page."""
    async with HybridStub(unique("model")) as stub, router.serving(stub):
        ids, gone = prompt_ids(64, 74), prompt_ids(32, 75)
        stub.store(ids)
        stub.store(gone)
        stub.offload(gone)
        await router.until_applied(stub)
        (replica,) = [
            each
            for each in (await router.get("/overview")).json["replicas"]
            if each["id"] == stub.name
        ]
        blocks = {"GPU": 4, "CPU": 2}
        both = {"blocks": blocks, "block_size": 16}
        full = {"number": 0, "label": "full", "kind": "full_attention", "reach": None}
        window = {"number": 1, "label": "window 64", "kind": "sliding_window", "reach": 64}
        assert replica["groups"] == [{**full, **both}, {**window, **both}]
        assert [source["state"] for source in replica["sources"]] == ["live"]
        assert (replica["state"], replica["serves"], replica["url"]) == ("healthy", 1, stub.url)


# --- the page in a browser ------------------------------------------------------------------------


class Fleet(EngineStub):
    """Any number of replicas in one stub, each under its own path."""

    async def serve(self, exchange: Exchange) -> None:
        path = "/" + exchange.request.target.split("/", 2)[2]
        exchange.request = replace(exchange.request, target=path)
        await super().serve(exchange)


def row_of(page: Page, stub: EngineStub):  # type: ignore[no-untyped-def]
    return page.locator(f'.replica[data-replica="{stub.name}"]')


def settled_complaints(watch: Watch) -> list[str]:
    return [text for text in watch.complaints if "ERR_CONNECTION_REFUSED" not in text]


@needs_browser
async def test_the_page_shows_replicas_and_requests_without_a_complaint(
    router: RouterProcess,
) -> None:
    """Bars of every group and tier, the stream, the totals; no script error, no policy violation,
    nothing loaded from elsewhere."""
    async with (
        HybridStub(unique("model")) as stub,
        router.serving(stub),
        browser_page() as (page, watch),
    ):
        ids = prompt_ids(64, 81)
        stub.store(ids)
        await router.until_applied(stub)
        await page.goto(router.url)
        await expect(page.locator("#connection")).to_have_text("live")
        row = row_of(page, stub)
        await expect(row.locator(".word")).to_have_text("live")
        await expect(row.locator(".group")).to_have_text(["full", "window 64"])
        await expect(row.locator(".blocks")).to_have_text(["4", "4"])
        await complete(router, stub.model, [*ids, 7])
        request = page.locator("#request-list li").first
        await expect(request.locator(".where")).to_have_text(stub.name)
        await expect(request.locator(".verdict")).to_have_text("exact")
        await expect(request.locator(".hit-text")).to_have_text("64 / 65")
        await expect(request.locator(".reason")).to_contain_text("64 of 65 tokens cached")
        await expect(page.locator("#total-replicas .figure")).to_have_text("1 / 1")
        await expect(page.locator("#headline .text")).to_have_text("All replicas are well.")
        assert watch.complaints == []
        assert {address.startswith(router.url) for address in watch.addresses} == {True}


@needs_browser
async def test_blocks_grow_and_move_to_the_tier_they_went_to(router: RouterProcess) -> None:
    """The table changes without a reload."""
    async with (
        HybridStub(unique("model")) as stub,
        router.serving(stub),
        browser_page() as (page, _),
    ):
        await page.goto(router.url)
        row = row_of(page, stub)
        ids = prompt_ids(96, 82)
        stub.store(ids)
        await expect(row.locator(".blocks")).to_have_text(["6", "6"])
        stub.offload(ids)
        await expect(page.locator(".cache-head span")).to_have_text(["Blocks held", "GPU", "CPU"])
        await expect(row.locator(".blocks")).to_have_text(["0", "6", "0", "6"])
        stub.store(ids)
        stub.slide_on(ids)
        await expect(row.locator(".blocks")).to_have_text(["6", "6", "0", "6"])


@pytest.mark.parametrize("path", ["/history", "/history?replica=nobody"])
async def test_the_last_hour_has_a_step_that_runs(locked: RouterProcess, path: str) -> None:
    """Of the router, and of the replicas that are asked for and there; for the operator only."""
    assert (await locked.get(path)).status == 401
    found = (await locked.get(path, OPERATOR)).json
    assert found["step_s"] == 30
    assert found["replicas"] == {}
    assert (
        len({len(values) for name, values in found["router"].items() if "removed" not in name}) == 1
    )
    refused = await locked.get("/history?" + "replica=x&" * 17, OPERATOR)
    assert refused.status == 400
    assert "at most 16 at a time" in refused.error["message"]


@needs_browser
async def test_no_hour_is_asked_for_of_a_replica_that_is_gone(router: RouterProcess) -> None:
    """The router gives 16 at a time: pods that had gone took the place of those whose rows were
    opened later, which showed none."""
    async with HybridStub(unique("model")) as stub, browser_page() as (page, watch):
        async with router.serving(stub):
            await page.goto(router.url)
            await row_of(page, stub).locator(".open").click()
            await expect(row_of(page, stub).locator(".chart")).to_have_count(5)
        async with page.expect_request(
            lambda request: "history?" in request.url and stub.name not in request.url
        ):
            pass
        assert watch.complaints == []


@needs_browser
async def test_an_open_row_shows_its_hour_and_drains_its_replica(router: RouterProcess) -> None:
    """An operator takes a replica out of rotation where it is seen that it must go. What the window
    has left behind is not shown as lost."""
    async with (
        HybridStub(unique("model")) as stub,
        router.serving(stub),
        browser_page() as (page, watch),
    ):
        ids = prompt_ids(96, 85)
        stub.store(ids)
        await router.until_applied(stub)
        await page.goto(router.url)
        row = row_of(page, stub)
        await expect(row.locator(".insight")).to_be_hidden()
        await row.locator(".open").click()
        charts = row.locator(".chart")
        await expect(charts).to_have_count(5)
        deadline = time.monotonic() + DEADLINE_S
        while await charts.nth(1).locator(".value").text_content() != "99 %":
            await complete(router, stub.model, [*ids, 7])  # the step now may have had none yet
            assert time.monotonic() < deadline
        await expect(charts.nth(4).locator(".line")).to_have_attribute("d", re.compile("^M"))
        stub.slide_on(ids)
        fills = row.locator(".fills .text")
        await expect(fills.nth(0)).to_have_text("96 tokens held")
        await expect(fills.nth(1)).to_have_text(
            "0 tokens held, 96 slid out, 96 slid out or evicted in the last hour"
        )
        stub.evict(ids)
        await expect(fills.nth(0)).to_have_text("0 tokens held, 96 evicted in the last hour")
        await expect(row.locator(".fills .gone").nth(0)).to_have_attribute(
            "style", re.compile("width: 100%")
        )
        await expect(row.locator(".lost")).to_contain_text("12 blocks left the GPU")
        await row.locator(".drain").click()
        await expect(row.locator(".state")).to_contain_text("draining")
        assert (await router.replica(stub.name))["state"] == "draining"
        await row.locator(".drain").click()
        await expect(row.locator(".drain")).to_have_text("Drain")
        assert (await router.replica(stub.name))["state"] == "healthy"
        await expect(page.locator("#hour-charts .chart")).to_have_count(5)
        assert watch.complaints == []


@needs_browser
async def test_what_is_wrong_stands_out_with_its_reason(router: RouterProcess) -> None:
    """At 3 a.m. the first line must say which replica and why, and lead there."""
    async with (
        engines(3, has_events=True) as stubs,
        router.serving(*stubs),
        browser_page() as (page, _),
    ):
        await page.goto(router.url)
        await expect(page.locator("#headline")).to_have_attribute("data-level", "good")
        sick, drained, _ = stubs
        sick.health_status = "500 Internal Server Error"
        await router.post(f"/replicas/{drained.name}/drain")
        await expect(row_of(page, sick)).to_have_attribute("data-level", "bad")
        await expect(row_of(page, drained)).to_have_attribute("data-level", "warn")
        await expect(row_of(page, sick).locator(".problems")).to_contain_text(
            "GET /health returned 500"
        )
        await expect(page.locator("#headline .text")).to_contain_text(
            f"2 replicas have problems: {sick.name} unhealthy"
        )
        await expect(page.locator("#total-replicas .figure")).to_have_text("1 / 3")
        await page.click("#headline")
        await expect(page.locator(".replica .id")).to_have_text([sick.name, drained.name])


@needs_browser
async def test_a_stream_that_lost_events_for_good_stands_out(router: RouterProcess) -> None:
    """Its hits are doubtful; without a replay endpoint nothing restores the events."""
    async with HybridStub(unique("model")) as stub, browser_page() as (page, _):
        stub.store(prompt_ids(64, 87))
        source = {"endpoint": stub.event_endpoint, "topic": TOPIC}
        await router.post("/replicas", {"url": stub.url, "id": stub.name, "kv_events": [source]})
        await page.goto(router.url)
        row = row_of(page, stub)
        await expect(row.locator(".word")).to_have_text("suspect")
        await expect(row).to_have_attribute("data-level", "bad")
        await expect(row.locator(".problems")).to_have_text(
            "events were lost for good: its hits are discounted"
        )
        await expect(page.locator("#total-feeds")).to_have_attribute("data-level", "bad")
        await router.delete(f"/replicas/{stub.name}")


@needs_browser
async def test_a_misprediction_stands_out(router: RouterProcess) -> None:
    """It is the sign of a wrong seed, block size or tokenizer."""
    async with (
        engines(1, has_events=True) as (stub,),
        router.serving(stub),
        browser_page() as (page, _),
    ):
        ids = prompt_ids(64, 83)
        stub.store(ids)
        await router.until_applied(stub)
        stub.forget()
        await page.goto(router.url)
        await complete(router, stub.model, [*ids, 7])
        await complete(router, stub.model, prompt_ids(20, 84))
        wrong = page.locator('#request-list li[data-level="bad"]').first
        await expect(wrong.locator(".verdict")).to_have_text("over 64")
        await page.check("#requests-wrong")
        await expect(page.locator("#request-list .where").first).to_have_text(stub.name)
        await expect(page.locator("#request-list .verdict").first).to_have_text("over 64")
        await wrong.locator(".request").click()
        await expect(wrong.locator(".more")).to_contain_text(
            "64 on the GPU, 0 offloaded, of 65 tokens"
        )


@needs_browser
async def test_names_from_outside_are_text_and_nothing_else(router: RouterProcess) -> None:
    """A model name, a request id or an error of a replica must not inject anything into the
    page."""
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    async with (
        EngineStub(f"{evil}{unique('m')}", has_events=True) as stub,
        router.serving(stub),
        browser_page() as (page, watch),
    ):
        await page.goto(router.url)
        await router.post(
            "/v1/completions", {"model": stub.model, "prompt": [1, 2, 3]}, {"x-request-id": evil}
        )
        request = page.locator("#request-list li").first
        await expect(request.locator(".where")).to_have_text(stub.name)
        await request.locator(".request").click()
        await expect(request.locator(".more")).to_contain_text(evil)
        assert await page.locator("main img, main script").count() == 0
        assert watch.complaints == []


@needs_browser
async def test_the_prompt_box_explains_a_route(router: RouterProcess) -> None:
    """Where it would go, what each group allows, which replicas are left out; and nothing is
    sent."""
    model = unique("model")
    async with (
        HybridStub(model) as holder,
        HybridStub(model) as other,
        router.serving(holder, other),
    ):
        text = "All work and no play makes Jack a dull boy. " * 4
        holder.store(list(text.encode()))
        await router.until_applied(holder)
        async with browser_page() as (page, watch):
            await page.goto(router.url)
            await page.fill("#route-model", model)
            await page.select_option("#route-kind", "prompt")
            await page.fill("#route-prompt", text)
            await page.click("#route-ask")
            await expect(page.locator("#route-summary")).to_have_text(
                f"It would go to {holder.name}. 160 of its 176 tokens are cached there on the GPU; "
                "16 would be computed."
            )
            await expect(page.locator("#route-notes")).to_contain_text(
                "full (group 0) 160, window (group 1) 160"
            )
            await expect(page.locator("#route-table tbody .name")).to_have_text(
                [holder.name, other.name]
            )
            await page.select_option("#route-kind", "body")
            await page.fill(
                "#route-prompt", json.dumps({"model": model, "token_ids": list(text.encode())[:64]})
            )
            await page.click("#route-ask")
            await expect(page.locator("#route-summary")).to_contain_text(
                "48 of its 64 tokens are cached there"
            )
            await page.fill("#route-prompt", "{")
            await page.click("#route-ask")
            await expect(page.locator("#route-state")).to_have_attribute("data-level", "bad")
            assert [text for text in watch.complaints if "400" not in text] == []
        assert {request.path for stub in (holder, other) for request in stub.requests} <= {
            "/tokenize"
        }


@needs_browser
async def test_the_page_asks_for_the_key_once_and_keeps_it_in_the_tab(
    locked: RouterProcess,
) -> None:
    """Never in the address, never on disk; after a wrong one it asks again, and to explain a route
    it does not."""
    async with browser_page() as (page, watch):
        await page.goto(locked.url)
        await page.fill("#key-input", "wrong")
        await page.click('#key-form button[value="keep"]')
        await expect(page.locator("#key-text")).to_contain_text("refused that key")
        await page.fill("#key-input", OPERATOR_KEY)
        await page.click('#key-form button[value="keep"]')
        await expect(page.locator("#connection")).to_have_text("live")
        await page.reload()
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#key-dialog")).to_be_hidden()
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
        await page.fill("#route-model", "none")
        await page.fill("#route-prompt", "x")
        await page.click("#route-ask")
        await expect(page.locator("#route-state")).to_contain_text("no replica serves 'none'")
        assert not any("key-sentinel" in address for address in watch.addresses)


@needs_browser
async def test_without_a_key_the_page_says_that_it_is_locked_and_offers_to_enter_one(
    locked: RouterProcess,
) -> None:
    """A dialog that reopened every second could not be dismissed."""
    async with browser_page() as (page, _):
        await page.goto(locked.url)
        await page.click('#key-form button[value="cancel"]')
        await expect(page.locator("#connection")).to_have_text("locked")
        await page.click("#give-key")
        await page.fill("#key-input", OPERATOR_KEY)
        await page.click('#key-form button[value="keep"]')
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#give-key")).to_be_hidden()


@needs_browser
async def test_the_page_survives_a_restart_of_the_router() -> None:
    """It says since when it is disconnected, and continues by itself with the new process, whose
    counts start from 0."""
    async with engines(1, has_events=True) as (stub,), browser_page() as (page, watch):
        at_port = {**OPEN, "server": {"port": free_port()}}
        with router_process(at_port) as first:
            async with first.serving(stub):
                await page.goto(first.url)
                for _ in range(3):
                    await complete(first, stub.model, [1, 2, 3])
                await expect(page.locator("#request-list li")).to_have_count(3)
        await expect(page.locator("#connection")).to_have_text(
            re.compile(r"^not connected since \d\d:\d\d:\d\d \(\d+ s\)$")
        )
        await expect(page.locator("body")).to_have_class(re.compile("stale"))
        with router_process(at_port) as second:
            assert second.port == first.port
            await expect(page.locator("#connection")).to_have_text("live")
            await expect(page.locator("body")).not_to_have_class(re.compile("stale"))
            await expect(page.locator("#request-list li")).to_have_count(0)
            async with second.serving(stub):
                await complete(second, stub.model, [1, 2, 3])
                await expect(page.locator("#request-list li")).to_have_count(1)
        assert settled_complaints(watch) == []


@needs_browser
async def test_many_replicas_are_paged_and_their_rows_keep_their_height(
    router: RouterProcess,
) -> None:
    """A table that grows without end, or moves while one reads, is useless with a large fleet."""
    async with Fleet(unique("model")) as stub, AsyncExitStack() as cleanup:
        ids = [f"{stub.name}-{number}" for number in range(48)]
        for name in ids:
            answer = await router.post(
                "/replicas", {"url": f"{stub.url}/{name}", "id": name, "kv_events": []}
            )
            assert answer.status == 201, answer
            cleanup.push_async_callback(router.delete, f"/replicas/{name}")
        async with browser_page() as (page, _):
            await page.goto(router.url)
            await expect(page.locator("#total-replicas .figure")).to_have_text("48 / 48")
            await expect(page.locator("#replicas-page")).to_have_text("1–12 of 48")
            await expect(page.locator(".replica")).to_have_count(12)
            await page.click("#replicas-on")
            await expect(page.locator("#replicas-page")).to_have_text("13–24 of 48")
            await expect(page.locator(".replica .id")).to_have_text(ids[12:24])
            before = await page.locator("#replica-table").bounding_box()
            for _ in range(3):
                async with page.expect_response(re.compile("/overview$")):
                    pass
            assert await page.locator("#replica-table").bounding_box() == before
            await page.fill("#replicas-search", ids[40])
            await expect(page.locator(".replica .id")).to_have_text([ids[40]])


@needs_browser
async def test_a_paused_list_stays_still_and_counts_what_is_new(router: RouterProcess) -> None:
    """Whoever reads a line must not have to chase it."""
    async with (
        engines(1, has_events=True) as (stub,),
        router.serving(stub),
        browser_page() as (page, _),
    ):
        await page.goto(router.url)
        await page.fill("#requests-search", stub.name)
        await complete(router, stub.model, [1, 2, 3])
        await expect(page.locator("#request-list li")).to_have_count(1)
        await page.click("#requests-pause")
        await complete(router, stub.model, [1, 2, 3])
        await complete(router, stub.model, [1, 2, 3])
        await expect(page.locator("#requests-pause")).to_have_text("Resume (2 new)")
        assert await page.locator("#request-list li").count() == 1
        await page.click("#requests-pause")
        await expect(page.locator("#request-list li")).to_have_count(3)


@needs_browser
@pytest.mark.parametrize("width", [380, 760, 1024, 1440])
async def test_the_page_fits_its_window(router: RouterProcess, width: int) -> None:
    """It is also read on a phone, without scrolling sideways."""
    async with (
        HybridStub(unique("model")) as stub,
        router.serving(stub),
        browser_page(width) as (page, _),
    ):
        stub.store(prompt_ids(64, 85))
        await complete(router, stub.model, prompt_ids(20, 86))
        await page.goto(router.url)
        await expect(page.locator("#request-list li").first).to_be_visible()
        await expect(row_of(page, stub).locator(".blocks").first).to_have_text("4")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


_CUT_OFF = """() => [
  ...[...document.querySelectorAll(".request.head span, #replica-table thead th")]
    .filter((cell) => cell.clientWidth && cell.scrollWidth > cell.clientWidth)
    .map((cell) => cell.textContent),
  ...[...document.querySelectorAll("input[type=search]")].filter((input) => {
    input.value = input.placeholder;
    const isCutOff = input.scrollWidth > input.clientWidth;
    input.value = "";
    return isCutOff;
  }).map((input) => input.placeholder),
]"""
"""Texts of headers and search fields that their boxes do not hold."""


@needs_browser
@pytest.mark.parametrize("width", [380, 800, 1024, 1200, 1440])
async def test_no_header_and_no_hint_of_a_field_is_cut_off(
    router: RouterProcess, width: int
) -> None:
    """`repo...` and `replica, model, reque` leave a reader guessing."""
    async with (
        HybridStub(unique("model")) as stub,
        router.serving(stub),
        browser_page(width) as (page, _),
    ):
        await complete(router, stub.model, prompt_ids(20, 87))
        await page.goto(router.url)
        await expect(page.locator("#request-list li").first).to_be_visible()
        assert await page.evaluate(_CUT_OFF) == []


@needs_browser
async def test_a_phone_has_the_links_to_each_section(router: RouterProcess) -> None:
    """Explaining a route is below all replicas and requests there."""
    async with browser_page(width=380) as (page, _):
        await page.goto(router.url)
        # What comes first on the page moves the rest down when it arrives.
        await expect(page.locator('#headline[data-level="wait"]')).to_have_count(0)
        await page.click("nav >> text=Explain a route")
        await expect(page.locator("#route h2")).to_be_in_viewport()


@needs_browser
async def test_names_with_one_beginning_stay_apart(router: RouterProcess) -> None:
    """Cut at its end, every name of a fleet reads `gpu-node-w...`."""
    names = [f"gpu-node-with-a-long-name.models.svc.cluster.local:{8000 + n}" for n in range(2)]
    for number, name in enumerate(names):
        body = {"url": f"http://127.0.0.1:{1 + number}", "id": name}
        assert (await router.post("/replicas", body)).status == 201
    async with browser_page(width=1000) as (page, _):
        await page.goto(router.url)
        for name in names:
            cell = page.locator(f'[data-replica="{name}"] .id')
            await expect(cell).to_have_text(name)
            whole, tail = await cell.bounding_box(), await cell.locator(".tail").bounding_box()
            assert whole is not None
            assert tail is not None
            assert tail["x"] + tail["width"] <= whole["x"] + whole["width"] + 1
            assert name.endswith(await cell.locator(".tail").inner_text())
    for name in names:
        await router.delete(f"/replicas/{name}")


@needs_browser
async def test_a_router_without_replicas_is_not_shown_as_broken() -> None:
    """It has just been installed."""
    with router_process(OPEN) as empty:
        async with browser_page() as (page, _):
            await page.goto(empty.url)
            card = page.locator("#total-replicas")
            await expect(card.locator(".detail")).to_have_text("none yet")
            assert await card.get_attribute("data-level") != "bad"
