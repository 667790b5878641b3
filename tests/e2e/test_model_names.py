"""Clients ask for one name; replicas know the model by others, or have several versions of it. What
arrives there names what is there, and nothing else of the request has changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from tests.support.actual_hits import hits
from tests.support.engine_stub import EngineStub, Exchange, always
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process

AUDIO = "/v1/audio/transcriptions"
FORM = {"content-type": "multipart/form-data; boundary=XyZ"}
CANARY = {"x-model-version": "canary"}
SETTINGS = {
    "health": QUICK_HEALTH,
    "models": [{"name": "v1", "aliases": ["v1-fp8"]}, {"name": "v2"}],
    "versioned_models": [
        {
            "name": "chat",
            "versions": [{"model": "v1"}, {"model": "v2", "weight": 0, "label": "canary"}],
        }
    ],
}
IDS = list(range(1, 81))


async def stored(exchange: Exchange) -> None:
    await exchange.whole(json.dumps({"id": "resp_v2", "object": "response"}).encode())


class Versions:
    """A router in front of one replica for each version; the first calls its model by an alias."""

    def __init__(self, router: RouterProcess, old: EngineStub, new: EngineStub) -> None:
        self.router, self.old, self.new = router, old, new


@pytest.fixture
async def versions() -> AsyncIterator[Versions]:
    with router_process(SETTINGS) as router:
        old = EngineStub("v1-fp8", has_events=True, paths={AUDIO: always(b"{}")})
        new = EngineStub("v2", has_events=True, paths={AUDIO: always(b"{}")})
        async with old, new, router.serving(old, new):
            yield Versions(router, old, new)


async def test_what_arrives_names_the_model_that_is_there(versions: Versions) -> None:
    """By weight, by header, with its cache, as a form, and where a stored response is."""
    router, old, new = versions.router, versions.old, versions.new
    for stub in (old, new):
        stub.store(IDS)
        await router.until_applied(stub)

    body = b'{ "stream":false, "model" : "chat", "prompt": %b, "seed": 1.50 }' % (
        str([*IDS, 7]).encode()
    )
    for headers, stub in (({}, old), (CANARY, new)):
        found = await router.post("/v1/completions", body, headers)
        assert (found.status, found.headers["x-kv-replica"]) == (200, stub.name)
        assert (found.headers["x-kv-model"], hits(found)) == (stub.model, (80, 80))
        assert stub.requests[-1].body == body.replace(b"chat", stub.model.encode())
        assert stub.requests[-1].headers["content-length"] == str(len(stub.requests[-1].body))
    direct = await router.post("/v1/completions", {"model": "v2", "prompt": IDS})
    assert "x-kv-model" not in direct.headers

    form = b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--XyZ--\r\n'
    assert (await router.post(AUDIO, form % b"chat", {**FORM, **CANARY})).status == 200
    assert new.requests[-1].body == form % b"v2"
    assert (await router.post(AUDIO, form % b"v1", FORM)).status == 200
    assert old.requests[-1].body == form % b"v1-fp8"

    new.behaviour = stored
    asked = {"model": "chat", "input": "first"}
    first = await router.post("/v1/responses", asked, CANARY)
    assert first.headers["x-kv-replica"] == new.name
    next_turn = {**asked, "previous_response_id": "resp_v2"}
    second = await router.post("/v1/responses", next_turn)
    assert second.headers["x-kv-replica"] == new.name, "the other version knows nothing of it"
    assert new.requests[-1].json == {**next_turn, "model": "v2"}

    listed = {entry["id"] for entry in (await router.get("/v1/models")).json["data"]}
    assert listed == {"chat", "v1", "v1-fp8", "v2"}
    assert (await router.get("/v1/models/chat")).json["id"] == "chat"
    route = (await router.post("/route", {"model": "chat", "token_ids": IDS}, CANARY)).json
    assert (route["model"], route["replica"]) == ("v2", new.name)
    metrics = await router.metrics()
    chosen = "kvroute_versioned_requests_total"
    assert metrics.sum(chosen, requested="chat", model="v1") == 1
    assert metrics.sum(chosen, requested="chat", model="v2") == 4
    assert metrics.sum("kvroute_requests_total", model="v1") == 2
