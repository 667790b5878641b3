"""Alerts and dashboard use only names, labels and values that a running router has; read from a
real process at work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router import errors
from router.plane.proxy_types import End
from tests.deploy.files import (
    dashboard,
    expressions,
    panels,
    recordings,
    succeeds,
    tool,
    without_variables,
)
from tests.deploy.promql import Asked, asked_by
from tests.support.engine_stub import BLOCK, EngineStub, after, dying_after, refusing
from tests.support.model_files import write_tokenizer
from tests.support.router_process import RouterProcess, router_process
from tests.support.vllm_publisher import free_port
from tests.support.waiting import DEADLINE_S

MODEL = "deployed"
VALUES = {
    ("kvroute_request_ends_total", "end"): {end.value for end in End},
    ("kvroute_rejected_requests_total", "code"): {
        error.code for error in vars(errors).values() if hasattr(error, "code")
    },
    ("kvroute_requests_total", "status"): {"5.."},
    ("kvroute_queue_refusals_total", "reason"): {"full", "late", "timeout"},
    ("kvroute_time_to_first_byte_seconds_bucket", "le"): {"5.0"},
}
"""Values that the router of these tests is not brought to show: by metric and label."""
ADDED_BY_PROMETHEUS = {"job", "instance"}
OF_PROMETHEUS = {"up"}

OF_VLLM = {
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:prefix_cache_queries_total": {"model_name", "engine"},
    "vllm:prefix_cache_hits_total": {"model_name", "engine"},
    "vllm:time_to_first_token_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:inter_token_latency_seconds_bucket": {"model_name", "engine", "le"},
}
"""Names and labels of vLLM 0.32 and newer, and of our own engine, which has the same."""


# --- a router at work -----------------------------------------------------------------------------


async def serve_something(router: RouterProcess, stub: EngineStub, first: int) -> None:
    """One request of every kind that a metric counts."""
    prompt = [first * 1000 + place for place in range(BLOCK * 4 + 1)]
    stub.store(prompt)
    await router.until_applied(stub)
    usual = stub.behaviour
    completion = {"model": MODEL, "prompt": prompt, "stream": True}
    await router.post("/v1/completions", completion)
    await router.post("/v1/completions", {"model": MODEL, "prompt": "tokenised here"})
    stub.tokenizing = refusing("500 Internal Server Error")
    await router.post(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "no template"}]},
    )
    stub.tokenizing = None
    await router.post(
        "/v1/completions", {**completion, "vllm_xargs": {"kv_cache_report_mode": "full"}}
    )
    await router.post("/v1/completions", {"model": "nobody's", "prompt": [1]})
    stub.forget()
    await router.post("/v1/completions", completion)
    for trouble in (refusing("503 Service Unavailable"), dying_after(1)):
        stub.behaviour = trouble
        await router.post("/v1/completions", completion)
    stub.behaviour = usual


async def refuse_one(router: RouterProcess, stub: EngineStub) -> None:
    """A request whose time is over before there is room for it."""
    go, usual = asyncio.Event(), stub.behaviour
    stub.behaviour = after(go)
    held = asyncio.create_task(router.post("/v1/completions", {"model": MODEL, "prompt": [1]}))
    await router.until(
        lambda now: now.sum("kvroute_in_flight_requests") == 1, "one is at the replica"
    )
    hurried = {"x-request-timeout": "0.05"}
    late = await router.post("/v1/completions", {"model": MODEL, "prompt": [2]}, hurried)
    assert late.error["code"] == "queue_timeout"
    go.set()
    await held
    stub.behaviour = usual


def settings(directory: Path) -> dict[str, Any]:
    """A router that tokenises one model itself, and tolerates failures. Of a form that only the
    library with a token cache reads, whose panels must show something too."""
    write_tokenizer(directory / "model")
    file = directory / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFKC"}}))
    return {
        "models": [{"name": MODEL, "tokenizer": str(directory / "model")}],
        "health": {"interval_s": 0.25, "timeout_s": 0.25, "unhealthy_after": 1000},
        "overload": {"max_in_flight": 1},
        "board": {"url": "redis://127.0.0.1:1", "secret": "of-all"},  # nobody there
    }


@contextlib.asynccontextmanager
async def at_work(directory: Path) -> AsyncIterator[tuple[RouterProcess, EngineStub]]:
    """A router that has served requests, with a replica that works and one that is absent."""
    with router_process(settings(directory)) as router:
        async with EngineStub(MODEL, has_events=True) as stub, router.serving(stub, models=[MODEL]):
            await router.until(
                lambda now: "kvroute_tokenizer_disagreements{" in now.text,
                "the tokenizers were compared",
            )
            await refuse_one(router, stub)
            await router.post(
                "/replicas", {"url": "http://127.0.0.1:1", "id": "absent", "models": [MODEL]}
            )
            await serve_something(router, stub, 1)
            yield router, stub


async def scraped(directory: Path) -> str:
    async with at_work(directory) as (router, _):
        return (await router.metrics()).text


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The labels of every sample, by its name."""
    text = asyncio.run(scraped(tmp_path_factory.mktemp("router")))
    found: dict[str, list[dict[str, str]]] = {
        name: [dict.fromkeys(labels, "")] for name, labels in OF_VLLM.items()
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def labels_of(samples: dict[str, list[dict[str, str]]], metric: str) -> set[str]:
    if metric in recordings():
        return asked_by(recordings()[metric]).grouping
    return ADDED_BY_PROMETHEUS | {label for sample in samples.get(metric, []) for label in sample}


# --- names and labels -----------------------------------------------------------------------------


def test_an_expression_is_read_whole() -> None:
    """The tests below see only what this reads."""
    text = (
        'sum by (a, le) (rate(m_one{x="1", y=~"2|3"}[5m])) / 1e7 > 0.5 '
        "unless on (b) m:two == 0 or vector(0) * m_three"
    )
    matchers = (("m_one", "x", "1"), ("m_one", "y", "2"), ("m_one", "y", "3"))
    assert asked_by(text) == Asked(
        matchers, frozenset(("m_one", "m:two", "m_three")), frozenset(("a", "le", "b"))
    )


@pytest.mark.parametrize(
    ("place", "expression"), list(expressions()), ids=lambda value: value.partition("{")[0][:60]
)
def test_every_metric_and_label_exists(
    samples: dict[str, list[dict[str, str]]], place: str, expression: str
) -> None:
    """An alert on a name that no longer exists silently never fires."""
    asked = asked_by(expression)
    assert asked.metrics, place
    assert asked.metrics <= set(samples) | OF_PROMETHEUS | recordings().keys(), place
    for metric, label, _ in asked.matchers:
        assert label in labels_of(samples, metric), f"{place}: {metric} has no label {label}"
    assert asked.grouping <= set().union(
        *(labels_of(samples, metric) for metric in asked.metrics)
    ), place


@pytest.mark.parametrize(
    ("place", "expression"), list(expressions()), ids=lambda value: value.partition("{")[0][:60]
)
def test_every_value_of_a_label_exists(
    samples: dict[str, list[dict[str, str]]], place: str, expression: str
) -> None:
    """`state="suspicious"` would be valid PromQL."""
    for metric, label, value in asked_by(expression).matchers:
        if label in ADDED_BY_PROMETHEUS or value.startswith("$"):
            continue
        seen = {sample.get(label) for sample in samples[metric]}
        possible = seen | VALUES.get((metric, label), set())
        assert value in possible, f"{place}: {metric} never has {label}={value}"


def test_a_value_of_another_metric_does_not_exist(
    samples: dict[str, list[dict[str, str]]],
) -> None:
    """Guards the test above: it must see a mistake."""
    for expression in ('kvroute_source_state{state="healthy"}', 'kvroute_predictions{end="x"}'):
        with pytest.raises((AssertionError, KeyError)):
            test_every_value_of_a_label_exists(samples, "here", expression)


def test_legends_and_variables_name_labels_that_are_there(
    samples: dict[str, list[dict[str, str]]],
) -> None:
    """A legend with a label that no longer exists is blank."""
    for panel in panels():
        for target in panel["targets"]:
            there = set().union(
                *(labels_of(samples, metric) for metric in asked_by(target["expr"]).metrics)
            )
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= there, panel[
                "title"
            ]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["definition"]
            ).groups()  # type: ignore[union-attr]
            assert label in labels_of(samples, metric), variable["name"]


# --- a real Prometheus ----------------------------------------------------------------------------


async def test_every_panel_of_the_router_shows_something(tmp_path: Path) -> None:
    """All names may exist and a query still find nothing: a join on the wrong labels, a division by
    an absent series."""
    binary, port = tool("prometheus", "prometheus"), free_port()
    async with at_work(tmp_path) as (router, stub):
        server = await started(binary, tmp_path, router.port, port)
        try:
            await until_all_show(router, stub, port)
        finally:
            server.terminate()
            await server.wait()


async def started(
    binary: str, directory: Path, router_port: int, port: int
) -> asyncio.subprocess.Process:
    """A Prometheus that scrapes the router every half second."""
    job = {"job_name": "kvroute", "static_configs": [{"targets": [f"127.0.0.1:{router_port}"]}]}
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [job],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    return await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )


def router_expressions() -> dict[str, str]:
    """The queries of the router's panels, by place."""
    return {
        place: text
        for place, text in expressions()
        if place.startswith("panel") and "vllm:" not in text
    }


async def until_all_show(router: RouterProcess, stub: EngineStub, port: int) -> None:
    """Keep the router working until each panel has shown something."""
    deadline = time.monotonic() + DEADLINE_S
    empty, work = router_expressions(), itertools.count(2)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as prometheus:
        while empty:
            await serve_something(router, stub, next(work))
            empty = {
                place: text for place, text in empty.items() if not await shows(prometheus, text)
            }
            assert time.monotonic() < deadline, f"nothing to see: {sorted(empty)}"


async def shows(prometheus: httpx.AsyncClient, expression: str) -> bool:
    """Whether Prometheus finds anything; once it is up, it must accept the query."""
    try:
        answer = await prometheus.get(
            "/api/v1/query", params={"query": without_variables(expression)}
        )
    except httpx.TransportError:
        return False
    if answer.status_code == 503:  # it is still starting
        return False
    assert answer.status_code == 200, (expression, answer.text)
    return bool(answer.json()["data"]["result"])


def test_promtool_understands_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """Grafana shows an error only when someone opens the panel, which is too late."""
    promtool = tool("promtool", "prometheus")
    texts = [without_variables(text) for place, text in expressions() if place.startswith("panel")]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    succeeds(promtool, "check", "rules", str(tmp_path / "rules.yml"))
