"""The engine's own metrics, from whatever a scrape returns."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from router.fleet.engine_load import EngineLoad, EngineRankLoad, parse_engine_load

# As vLLM 0.32 writes it, with one model and two data-parallel ranks.
VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } \\" model"} 3.0
vllm:num_requests_running{engine="1",model_name="a } \\" model"} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


def test_vllms_samples_are_summed_over_its_ranks_and_kept_for_each() -> None:
    """A server is chosen by all of them, one of its ranks by its own; the fullest cache is the one
    that hurts."""
    assert parse_engine_load(VLLM) == EngineLoad(
        running=5,
        waiting=1,
        kv_cache_usage=0.5,
        ranks=(EngineRankLoad(0, 3, 1), EngineRankLoad(1, 2, 0)),
    )


def test_sglang_names_a_rank_in_another_label() -> None:
    """A label that only ends like it is another, as is one in a model's name."""
    text = (
        b'sglang:num_running_reqs{model_name="m",dp_rank="1",tp_rank="0"} 8\n'
        b'sglang:num_running_reqs{model_name="dp_rank=7",dp_rank="0"} 4\n'
        b'sglang:num_running_reqs{other_dp_rank="5"} 2\n'
        b'sglang:num_queue_reqs{dp_rank="1"} 3\n'
    )
    load = parse_engine_load(text)
    assert load == EngineLoad(14, 3, None, (EngineRankLoad(0, 4, 0), EngineRankLoad(1, 8, 3)))


def test_older_vllm_and_sglang_name_them_differently() -> None:
    """Clusters are mixed while they are upgraded."""
    old = (
        b"vllm:num_requests_running 4\nvllm:num_requests_waiting 2\n"
        b"vllm:gpu_cache_usage_perc 0.75\n"
    )
    assert parse_engine_load(old) == EngineLoad(4, 2, 0.75)
    sglang = (
        b'sglang:num_running_reqs{model_name="m"} 8\nsglang:num_queue_reqs{model_name="m"} 4\n'
        b"sglang:token_usage 0.5\n"
    )
    assert parse_engine_load(sglang) == EngineLoad(8, 4, 0.5)


def test_the_size_of_the_cache_is_read_where_it_is_said() -> None:
    """It bounds what can be there; of several ranks the smallest counts."""
    running = b"vllm:num_requests_running 0\n"
    vllm = (
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1\n'
        b'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1\n'
    )
    load = parse_engine_load(running + vllm)
    assert load is not None
    assert (load.cache_blocks, load.cache_tokens) == (500, 8000)
    load = parse_engine_load(running + b'vllm:cache_config_info{num_gpu_blocks="512"} 1\n')
    assert load is not None
    assert (load.cache_blocks, load.cache_tokens) == (512, None)
    sglang = b'sglang:num_running_reqs 0\nsglang:max_total_num_tokens{model_name="m"} 471258.0\n'
    load = parse_engine_load(sglang)
    assert load is not None
    assert (load.cache_blocks, load.cache_tokens) == (None, 471_258)


def test_what_the_prometheus_client_writes_is_read() -> None:
    """vLLM uses that library, so its spelling is the one that counts."""
    registry = CollectorRegistry()
    running = Gauge(
        "vllm:num_requests_running", "Running.", ["model_name", "engine"], registry=registry
    )
    running.labels("org/model", "0").set(17)
    Gauge("vllm:num_requests_waiting", "Waiting.", registry=registry).set(1e5)
    assert parse_engine_load(generate_latest(registry)) == EngineLoad(17, 100_000, None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"# nothing here\n",
        b"vllm:num_requests_running\n",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running +Inf\n",
        b"vllm:num_requests_running -1\n",
        b"vllm:num_requests_running 1e300\n",
        b"vllm:num_requests_running five\n",
        b"vllm:num_requests_running_total 5\n",
        b" vllm:num_requests_running 5\n",
        b"vllm:num_requests_waiting 5\n",
    ],
)
def test_nonsense_is_no_load(text: bytes) -> None:
    """Better to know nothing of a replica than to believe it has -1 or infinitely many requests."""
    assert parse_engine_load(text) is None


def test_a_share_above_one_is_one() -> None:
    """Some engines count a little beyond their pool."""
    load = parse_engine_load(b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 7\n")
    assert load is not None
    assert load.kv_cache_usage == 1.0


@given(
    st.lists(
        st.sampled_from(
            [b"vllm:num_requests_running", b"{", b"}", b" ", b"\n", b"1", b'"', b"\xff"]
        ),
        max_size=40,
    )
)
def test_no_text_makes_it_fail(pieces: list[bytes]) -> None:
    """Metrics are text from the network."""
    load = parse_engine_load(b"".join(pieces))
    assert load is None or load.running >= 0


@pytest.mark.parametrize(
    "filler", [b"}", b"{", b" ", b"}\t", b"1", b"\nvllm:num_requests_running{"]
)
def test_the_largest_response_is_read_in_no_time(filler: bytes) -> None:
    """It is read on the event loop, where streams wait meanwhile; a slow pattern would be a way to
    stall the router."""
    text = b"vllm:num_requests_running{" + filler * (8 * 1024 * 1024 // len(filler))
    began = time.process_time()
    parse_engine_load(text)
    assert time.process_time() - began < 1.0
