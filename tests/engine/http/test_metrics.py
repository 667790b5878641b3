"""The metrics under vLLM's names: labels, values, and what a router reads from them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvroute_engine.core.engine import EngineStatistics
from kvroute_engine.core.requests import FinishReason
from kvroute_engine.core.scheduler import SchedulerStatistics
from kvroute_engine.http.metrics import EngineCollector, RequestMetrics
from kvroute_engine.http.responses import ServedModel
from offload.block_pool import GroupPoolStatistics, PoolStatistics
from offload.cache_manager import CacheCounts, CacheStatistics
from router.fleet.engine_load import EngineLoad, parse_engine_load
from tests.engine.http.served import MODEL, serving
from tests.support.waiting import eventually

SERVED = ServedModel("m", 512, 4096, 16, 500, True, 0)
NOTHING = CacheStatistics(PoolStatistics(500, 500, ()), (), CacheCounts())
IDLE = EngineStatistics(0, SchedulerStatistics(0, 0, 0, 0, 0, ()), NOTHING, 0.0)
NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_success_total",
    "vllm:cache_config_info",
}


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (
            sample.name,
            sample.labels.get("finished_reason", sample.labels.get("le", "")),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_name_is_there_from_the_start_with_model_and_engine() -> None:
    """A dashboard must show 0, not nothing."""
    registry = CollectorRegistry()
    RequestMetrics(registry, "m", "3")
    registry.register(EngineCollector(SERVED, "3", lambda: IDLE))
    found = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    assert {sample.name for sample in found} >= NAMES
    assert {(sample.labels["model_name"], sample.labels["engine"]) for sample in found} == {
        ("m", "3")
    }
    (info,) = [sample for sample in found if sample.name == "vllm:cache_config_info"]
    assert info.labels == {
        "model_name": "m",
        "engine": "3",
        "block_size": "16",
        "num_gpu_blocks": "500",
        "enable_prefix_caching": "True",
    }


def test_every_count_is_under_its_name() -> None:
    """Two swapped counts would go unnoticed for long."""
    registry = CollectorRegistry()
    statistics = EngineStatistics(
        steps=8,
        scheduler=SchedulerStatistics(
            num_running=1,
            num_waiting=2,
            preemptions=5,
            prompt_tokens=6,
            generation_tokens=7,
            group_hit_tokens=(),
        ),
        cache=replace(
            NOTHING, counts=CacheCounts(queried_tokens=100, hit_tokens=60, external_tokens=30)
        ),
        kv_cache_usage=0.25,
        copies_in_flight=9,
    )
    registry.register(EngineCollector(SERVED, "0", lambda: statistics))
    found = {name.removeprefix("vllm:"): value for (name, _), value in samples(registry).items()}
    assert found == {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "external_prefix_cache_queries_total": 40,
        "external_prefix_cache_hits_total": 30,
        "num_preemptions_total": 5,
        "prompt_tokens_total": 6,
        "generation_tokens_total": 7,
        "cache_config_info": 1,
        "kvroute_engine_copies_in_flight": 9,
    }


def test_each_group_is_reported_with_its_evictions_by_cause() -> None:
    """vLLM has no such metrics; a sliding window is watched with them."""
    registry = CollectorRegistry()
    model = replace(SERVED, group_kinds=("full_attention", "sliding_window"))
    groups = (
        GroupPoolStatistics(cached=10, evicted=2, evicted_after_sliding=0),
        GroupPoolStatistics(cached=4, evicted=8, evicted_after_sliding=7),
    )
    statistics = replace(
        IDLE,
        scheduler=replace(IDLE.scheduler, group_hit_tokens=(96, 32)),
        cache=replace(NOTHING, pool=PoolStatistics(500, 500, groups)),
    )
    registry.register(EngineCollector(model, "0", lambda: statistics))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {
        (
            sample.name,
            sample.labels["group"],
            sample.labels["kind"],
            sample.labels.get("cause"),
        ): sample.value
        for family in families
        for sample in family.samples
        if "group" in sample.labels
    }
    assert found == {
        ("kvroute_engine_cached_blocks", "0", "full_attention", None): 10,
        ("kvroute_engine_cached_blocks", "1", "sliding_window", None): 4,
        ("kvroute_engine_evicted_blocks_total", "0", "full_attention", "window"): 0,
        ("kvroute_engine_evicted_blocks_total", "0", "full_attention", "pressure"): 2,
        ("kvroute_engine_evicted_blocks_total", "1", "sliding_window", "window"): 7,
        ("kvroute_engine_evicted_blocks_total", "1", "sliding_window", "pressure"): 1,
        ("kvroute_engine_group_hit_tokens_total", "0", "full_attention", None): 96,
        ("kvroute_engine_group_hit_tokens_total", "1", "sliding_window", None): 32,
    }


def test_latencies_are_in_their_histograms() -> None:
    """Tokens that came together share the gap."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m", "0")
    metrics.on_first_token(0.5)
    metrics.on_next_tokens(0.06, 3)
    metrics.on_end(2.0, FinishReason.LENGTH)
    found = samples(registry)
    assert found["vllm:time_to_first_token_seconds_sum", ""] == 0.5
    assert found["vllm:time_to_first_token_seconds_count", ""] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 3
    assert found["vllm:inter_token_latency_seconds_bucket", "0.025"] == 3
    assert found["vllm:inter_token_latency_seconds_bucket", "0.01"] == 0
    assert found["vllm:e2e_request_latency_seconds_sum", ""] == 2
    reasons = {
        reason: found["vllm:request_success_total", reason]
        for reason in ("length", "stop", "abort")
    }
    assert reasons == {"length": 1, "stop": 0, "abort": 0}


async def test_a_scrape_shows_requests_in_flight_without_waiting_for_the_engine() -> None:
    """Scraped while a step is held: the load that the router balances by must not be late."""
    async with serving("hello", settings={"max_num_seqs": 1}) as served:
        served.runner.may_go.clear()
        asked = [
            asyncio.ensure_future(served.post("/v1/completions", {"prompt": list(range(100))}))
        ]
        await eventually(lambda: served.runner.steps, "the engine is in its step")
        text = (await served.get("/metrics")).body
        held = parse_engine_load(text)
        assert held is not None
        assert held.running + held.waiting == 1
        served.runner.may_go.set()
        await asyncio.gather(*asked)
        await served.until_idle()
        now = await served.metrics()
        load = EngineLoad(0, 0, 0.0, cache_blocks=512, cache_tokens=8192)
        assert parse_engine_load(now.text.encode()) == load
        assert now.sum("vllm:prompt_tokens_total", model_name=MODEL, engine="0") == 100
        assert now.sum("vllm:generation_tokens_total") == 6
        assert now.sum("vllm:time_to_first_token_seconds_count") == 1
        assert now.sum("vllm:inter_token_latency_seconds_count") == 5
        assert now.sum("vllm:request_success_total", finished_reason="stop") == 1
