"""The simulation behind the figures: it is repeatable, loses nothing, and uses the real parts
correctly."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.conversations import ConversationOptions, Conversations
from benchmarks.simulation.layouts import replica_config, with_memory_tier
from benchmarks.simulation.outcome import Outcome, percentile, variation
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import POLICIES
from benchmarks.simulation.run import Setting, Simulation
from benchmarks.simulation.timeline import Timeline, TimelineError
from benchmarks.simulation.trace import RecordedTrace, TraceOptions, read_trace
from benchmarks.simulation.workload import Workload
from kvevents.events import BlockRemoved, BlockStored, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from offload.engine.core.requests import EngineRequest, SamplingParams, StepOutput
from router.demo.blind import GroupBlindIndex
from router.index import Hit, SourceId

SMALL = ConversationOptions(
    conversations=12,
    systems=2,
    system_tokens=(300, 600),
    documents=3,
    document_tokens=(800, 2500),
    turns=(1, 4),
    message_tokens=(20, 200),
    answer_tokens=(2, 12),
)
SERIAL_RATE = 0.02
"""In requests per second: each ends long before the next."""
BUSY_RATE = 30.0


@dataclass
class Simulated:
    """A finished simulation and its results."""

    simulation: Simulation
    outcome: Outcome


def simulate(
    policy: str,
    layout: str = "gptoss",
    replicas: int = 3,
    rate: float = BUSY_RATE,
    cache: float = 0.4,
    seed: int = 0,
) -> Simulated:
    workload: Workload = Conversations(SMALL, rate)
    setting = Setting(
        policy, replicas, replica_config(layout, workload.size, replicas, cache), seed=seed
    )
    simulation = Simulation(setting, workload)
    return Simulated(simulation, simulation.run())


def errors(outcome: Outcome) -> list[int]:
    """Predicted minus actual tokens of every request."""
    return [record.predicted_tokens - record.cached_tokens for record in outcome.records]


# --- the simulation itself ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["prefix", "random"])
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    """A comparison of policies must not depend on chance."""
    assert simulate(policy).outcome == simulate(policy).outcome


def test_another_seed_draws_other_replicas() -> None:
    """Otherwise the seed would have no effect."""
    assert simulate("random").outcome != simulate("random", seed=1).outcome


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_finishes_once_with_all_its_tokens(policy: str) -> None:
    """Figures over requests that were lost or served twice would mean nothing."""
    run = simulate(policy)
    size = Conversations(SMALL, BUSY_RATE).size
    records = run.outcome.records
    assert len({record.request_id for record in records}) == len(records) == size.requests
    assert all(record.is_finished for record in records)
    assert sum(record.prompt_tokens for record in records) == size.prompt_tokens
    assert sum(len(record.answer) for record in records) == size.answer_tokens


@pytest.mark.parametrize("policy", ["prefix", "group_blind"])
def test_engines_and_the_router_count_the_same_work(policy: str) -> None:
    """The engines report the same tokens and hits as the records, and the router has nothing left
    in flight."""
    run = simulate(policy)
    engines = [replica.engine.statistics() for replica in run.simulation.replicas.values()]
    records = run.outcome.records
    assert sum(engine.scheduler.prompt_tokens for engine in engines) == sum(
        record.prompt_tokens for record in records
    )
    assert sum(engine.scheduler.generation_tokens for engine in engines) == sum(
        len(record.answer) for record in records
    )
    if not run.outcome.preemptions:
        assert sum(engine.cache.counts.hit_tokens for engine in engines) == sum(
            record.cached_tokens for record in records
        )
    statistics = run.simulation.router.load.statistics()
    assert (statistics.in_flight, statistics.started, dict(statistics.replicas)) == (
        0,
        len(records),
        {},
    )


def test_responses_do_not_depend_on_where_they_are_computed() -> None:
    """Conversations continue from their responses: all policies must get the same prompts."""
    answers = [
        {record.request_id: record.answer for record in simulate(policy).outcome.records}
        for policy in POLICIES
    ]
    assert all(other == answers[0] for other in answers)


def test_time_goes_forward_in_every_request() -> None:
    """First tokens before arrivals, or tokens before earlier ones, would make latencies
    meaningless."""
    for record in simulate("prefix").outcome.records:
        assert record.arrived_s < record.first_s <= record.last_s
        assert all(gap > 0 for gap in record.gaps_s)
        assert record.first_s + sum(record.gaps_s) == pytest.approx(record.last_s)


def test_no_replica_is_busy_longer_than_the_simulation() -> None:
    """An engine that steps twice at a time would serve more than it can."""
    run = simulate("least_loaded")
    assert max(run.outcome.busy_s.values()) <= run.simulation.timeline.now_s


def test_a_request_waits_for_the_step_under_way() -> None:
    """Otherwise an engine would do two steps at a time, and serve more than it can."""
    timeline, heard = Timeline(), list[tuple[str, float]]()
    workload = Conversations(SMALL, 1.0)

    def hear(outputs: Sequence[StepOutput]) -> None:
        heard.extend((output.request_id, timeline.now_s) for output in outputs)

    config = replica_config("full", workload.size, 1, 1.0)
    replica = SimulatedReplica("only", config, timeline, 0.0, lambda _id, _batch: None, hear)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    timeline.at(0.0, lambda: replica.add(EngineRequest("first", [1] * 1000, once)))
    timeline.at(0.01, lambda: replica.add(EngineRequest("second", [2] * 1000, once)))
    timeline.run()
    step_s = replica.busy_s / 2
    assert [name for name, _ in heard] == ["first", "second"]
    assert [time_s for _, time_s in heard] == pytest.approx([step_s, 2 * step_s])
    assert step_s > 0.01


def test_a_timeline_refuses_the_past() -> None:
    """A plan in the past is an error that would make the figures wrong."""
    timeline = Timeline()
    timeline.at(2.0, lambda: None)
    timeline.run()
    with pytest.raises(TimelineError, match=r"1\.0 s: it is 2\.0 s already"):
        timeline.at(1.0, lambda: None)


def test_a_timeline_keeps_the_order_of_times_and_then_of_plans() -> None:
    """Events that reach the index at the same moment must do so in the order in which they were
    published."""
    timeline, happened = Timeline(), list[str]()
    for time_s, name in ((2.0, "late"), (1.0, "early"), (1.0, "second")):
        timeline.at(time_s, lambda name=name: happened.append(name))  # type: ignore[misc]
    timeline.run()
    assert happened == ["early", "second", "late"]


# --- what it shows --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [SERIAL_RATE, BUSY_RATE])
def test_with_one_replica_all_policies_are_the_same(rate: float) -> None:
    """There is no choice: a difference would be an error in the simulation."""
    ttfts = [
        [record.ttft_s for record in simulate(policy, replicas=1, rate=rate).outcome.records]
        for policy in POLICIES
    ]
    assert all(other == ttfts[0] for other in ttfts)


@pytest.mark.parametrize("layout", ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"])
def test_predictions_for_serial_requests_are_exact(layout: str) -> None:
    """Nothing changes between decision and admission, so the index must know every token that the
    engine will reuse."""
    outcome = simulate("prefix", layout, rate=SERIAL_RATE, cache=0.2).outcome
    assert not any(errors(outcome))
    assert any(record.cached_tokens for record in outcome.records)


def test_the_group_blind_index_is_right_on_full_attention() -> None:
    """There are no groups to ignore, and the peer must be a fair one."""
    assert not any(errors(simulate("group_blind", "full", rate=SERIAL_RATE).outcome))


def test_the_group_blind_index_leaves_the_last_token_to_compute() -> None:
    """An engine always computes it; a hit of the whole prompt would count as mispredicted."""
    chain, tokens, source = HashChain.from_seed(), list(range(64)), SourceId("a")
    layout = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 16)])
    stored = BlockStored([*chain.block_hashes(tokens, 16)], None, tokens, "GPU", 0)
    index = GroupBlindIndex()
    index.apply(source, EventBatch(0.0, [announce(layout, chain), stored]))
    assert index.match(tokens) == {source: Hit(48, 48)}
    assert index.match([*tokens, 64]) == {source: Hit(64, 64)}
    index.apply(source, EventBatch(0.0, [BlockRemoved([stored.block_hashes[1]], "GPU", 0)]))
    assert index.match(tokens) == {source: Hit(16, 16)}


@pytest.mark.parametrize("layout", ["gemma", "gptoss", "mamba-hybrid"])
def test_the_group_blind_index_is_wrong_on_hybrid_layouts(layout: str) -> None:
    """That is what knowing the groups is for."""
    assert any(errors(simulate("group_blind", layout, rate=SERIAL_RATE, cache=0.2).outcome))


def test_prefix_routing_reuses_more_than_round_robin() -> None:
    """It must gain at least this much."""
    reused = {
        policy: simulate(policy).outcome.figures()["reused_tokens"]
        for policy in ("prefix", "round_robin")
    }
    assert reused["prefix"] > reused["round_robin"]


def test_exact_hits_reuse_more_and_respond_sooner_than_group_blind_ones() -> None:
    """This is the headline: compared with the same policy over an index that ignores groups, and
    with round robin."""
    found = {}
    for policy in ("prefix", "group_blind", "round_robin"):
        workload = Conversations(replace(SMALL, conversations=60, documents=8), 2.0)
        setting = Setting(policy, 3, replica_config("gptoss", workload.size, 3, 0.15))
        found[policy] = Simulation(setting, workload).run().figures()
    for other in ("group_blind", "round_robin"):
        assert found["prefix"]["reused_tokens"] > 1.05 * found[other]["reused_tokens"]
        assert found["prefix"]["ttft_mean_ms"] < 0.95 * found[other]["ttft_mean_ms"]


def test_a_memory_tier_brings_back_what_the_gpu_lost() -> None:
    """The weight of tiers is tuned on it."""
    hits = []
    for gpu_shares in (0.0, 8.0):
        workload = Conversations(SMALL, SERIAL_RATE)
        config = with_memory_tier(replica_config("gptoss", workload.size, 2, 0.1), gpu_shares)
        outcome = Simulation(Setting("prefix", 2, config), workload).run()
        assert not any(errors(outcome))
        hits.append(outcome.figures()["reused_tokens"])
    assert hits[1] > hits[0]


# --- workloads and figures ------------------------------------------------------------------------


def test_another_rate_is_the_same_workload_faster() -> None:
    """Curves over the rate must compare only the rate."""
    slow, fast = Conversations(SMALL, 1.0), Conversations(SMALL, 4.0)
    assert slow.size == fast.size
    for before, after in zip(slow.arrivals(), fast.arrivals(), strict=True):
        assert after.at_s == pytest.approx(before.at_s / 4)
        assert slow.prompt(before) == fast.prompt(after)


def test_a_turn_appends_to_everything_said_before() -> None:
    """Otherwise no turn would reuse the previous one."""
    workload = Conversations(SMALL, 1.0)
    first = next(arrival for arrival in workload.arrivals() if _turns(workload, arrival.place) > 1)
    prompt = workload.prompt(first)
    following = workload.answered(first, [7, 8, 9], 5.0)
    assert following is not None
    assert following.at_s > 5.0
    assert workload.prompt(following)[: len(prompt) + 3] == [*prompt, 7, 8, 9]


def _turns(workload: Conversations, place: int) -> int:
    return len(workload._conversations[place].messages)


TRACE: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [0, 2]},
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {
        "timestamp": 1000,
        "input_length": 9000,
        "output_length": 5,
        "hash_ids": list(range(100, 118)),
    },
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recorded_trace_is_expanded_as_its_format_says(tmp_path: Path, name: str) -> None:
    """Equal leading ids are equal leading tokens, the last block is cut, long prompts are left out,
    the rate is scaled."""
    path, lines = tmp_path / name, "\n".join(map(json.dumps, TRACE)) + "\n"
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    options = TraceOptions(requests=10, longest_prompt=8000, answer_share=0.1)
    trace = RecordedTrace(read_trace(path, options), options, requests_per_s=0.5)
    first, second = trace.arrivals()
    assert (first.at_s, second.at_s) == (0.0, 2.0)
    assert (first.answer_tokens, second.answer_tokens) == (1, 2)
    assert first.session != second.session
    prompts = [trace.prompt(arrival) for arrival in (first, second)]
    assert [len(prompt) for prompt in prompts] == [1000, 700]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:700] != prompts[1][512:]
    assert (trace.size.requests, trace.size.prompt_tokens, trace.size.distinct_tokens) == (
        2,
        1700,
        3 * 512,
    )


def test_percentiles_are_values_that_occurred() -> None:
    """The p99 of a few requests is the slowest one, not an interpolated value."""
    values = [float(value) for value in range(1, 11)]
    assert [percentile(values, percent) for percent in (1, 50, 90, 99, 100)] == [1, 5, 9, 10, 10]
    assert percentile([], 50) == 0
    assert all(
        before <= after
        for before, after in pairwise(percentile(values, percent) for percent in range(101))
    )


def test_variation_is_relative_to_the_mean() -> None:
    """Imbalance must not depend on how long a simulation lasts."""
    assert variation([3.0, 3.0]) == 0
    assert variation([1.0, 3.0]) == variation([10.0, 30.0]) == 0.5
    assert variation([0.0, 0.0]) == 0
