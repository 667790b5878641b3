"""The simulation behind the figures: it is repeatable, loses nothing, and uses the real parts
correctly."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.simulation.floor import OneCacheForAll
from benchmarks.simulation.layouts import (
    TIME_MODEL,
    layout_names,
    replica_config,
    with_memory_tier,
)
from benchmarks.simulation.opponents import OPPONENTS
from benchmarks.simulation.opponents.base import Opponent
from benchmarks.simulation.outcome import Outcome, percentile, variation
from benchmarks.simulation.plans import Agents, Chats, ChatsBesideScans, Pause, Questions
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.routing import POLICIES, SimulatedRouter
from benchmarks.simulation.run import Setting, Simulation
from benchmarks.simulation.seen import SeenPrefixes
from benchmarks.simulation.sessions import Sessions
from benchmarks.simulation.situations import PLANS
from benchmarks.simulation.timeline import Timeline, TimelineError
from benchmarks.simulation.trace import RecordedTrace, TraceOptions, read_trace
from benchmarks.simulation.workload import arrival_times
from kvevents.events import BlockRemoved, BlockStored, CacheLayout, EventBatch
from kvevents.hashing import HashChain
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.publisher import announce
from kvroute_engine.core.requests import EngineRequest, SamplingParams, StepOutput
from kvroute_engine.demo.blind import GroupBlindIndex
from router.index.base import Hit, SourceId
from tests.support.loads import statistics_of

SMALL = partial(
    Chats,
    Pause(2.0),
    systems=2,
    documents=3,
    system_tokens=(300, 600),
    document_tokens=(800, 2500),
    turns=(1, 4),
    message_tokens=(20, 200),
    answer_tokens=(2, 90),
)
SERIAL_RATE = 0.02
"""In requests per second: each session ends before the next."""
BUSY_RATE = 20.0
SMALL_CACHE = 4600


@dataclass
class Simulated:
    """A finished simulation and its results."""

    simulation: Simulation
    workload: Sessions
    outcome: Outcome


def sessions(rate: float = BUSY_RATE, requests: int = 80, seed: int = 0) -> Sessions:
    return Sessions(SMALL(), rate, requests / rate, 1.0, seed)


def simulate(
    policy: str,
    layout: str = "gptoss",
    replicas: int = 3,
    rate: float = BUSY_RATE,
    cache_tokens: int = 2 * SMALL_CACHE,
    seed: int = 0,
    **changes: Any,
) -> Simulated:
    workload = sessions(rate)
    setting = Setting(policy, replicas, replica_config(layout, cache_tokens), seed=seed, **changes)
    simulation = Simulation(setting, workload)
    return Simulated(simulation, workload, simulation.run())


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


@pytest.mark.parametrize("policy", [*POLICIES, *OPPONENTS])
def test_every_request_finishes_once_with_all_its_tokens(policy: str) -> None:
    """Figures over requests that were lost or served twice would mean nothing."""
    records = simulate(policy).outcome.records
    assert len({record.request_id for record in records}) == len(records) > 20
    assert all(record.is_finished for record in records)
    assert all(2 <= len(record.answer) <= 90 for record in records)
    assert all(record.cached_tokens < record.prompt_tokens for record in records)


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
    (router,) = run.simulation.routers
    assert isinstance(router, SimulatedRouter)
    statistics = statistics_of(router.load)
    assert (statistics.in_flight, statistics.started, dict(statistics.replicas)) == (
        0,
        len(records),
        {},
    )


@pytest.mark.parametrize("policy", OPPONENTS)
def test_an_opponent_has_nothing_left_in_flight(policy: str) -> None:
    """A count that drifts would make its rule worse than it is."""
    (router,) = simulate(policy).simulation.routers
    assert isinstance(router, Opponent)
    for load in router.loads.values():
        assert (load.requests, load.queued_tokens, load.context_tokens) == (0, 0, 0)


@pytest.mark.parametrize("layout", layout_names())
def test_steps_at_one_stroke_change_neither_times_nor_events(layout: str) -> None:
    """They save most of the time of a sweep, and may change nothing."""
    cache, heard = 3 * SMALL_CACHE, list[list[tuple[str, EventBatch]]]()
    outcomes = []
    for single_steps in (True, False):
        setting = Setting("session", 2, replica_config(layout, cache), single_steps=single_steps)
        simulation, batches = Simulation(setting, sessions(3.0)), list[tuple[str, EventBatch]]()
        take = simulation.routers[0].take_batch

        def record(name: str, batch: EventBatch, take: Any = take, batches: Any = batches) -> None:
            if not isinstance(batch.events[0], CacheLayout):  # its publisher's id is drawn
                batches.append((name, batch))
            take(name, batch)

        simulation.routers[0].take_batch = record  # type: ignore[method-assign]
        outcomes.append(simulation.run())
        heard.append(batches)
    for single, stroke in zip(*(outcome.records for outcome in outcomes), strict=True):
        assert (single.answer, single.cached_tokens) == (stroke.answer, stroke.cached_tokens)
        assert stroke.first_s == pytest.approx(single.first_s)
        assert stroke.gaps_s == pytest.approx(single.gaps_s)
    assert outcomes[0].busy_s == pytest.approx(outcomes[1].busy_s)
    for (name, batch), (other_name, other) in zip(*heard, strict=True):
        assert (name, batch.events) == (other_name, other.events)
        assert batch.ts == pytest.approx(other.ts)


def test_two_routers_share_the_requests_and_hear_all_events() -> None:
    """Neither knows what the other has in flight, but both know what the caches hold."""
    run = simulate("prefix", routers=2)
    first, second = run.simulation.routers
    assert isinstance(first, SimulatedRouter)
    assert isinstance(second, SimulatedRouter)
    started = [statistics_of(router.load).started for router in (first, second)]
    assert sum(started) == len(run.outcome.records)
    assert abs(started[0] - started[1]) <= 1
    tokens = list(range(1000, 1300))
    assert first.index.match(tokens) == second.index.match(tokens)


def test_responses_do_not_depend_on_where_they_are_computed() -> None:
    """Conversations continue from their responses: all policies must get the same prompts."""
    answers = [
        {record.request_id: record.answer for record in simulate(policy).outcome.records}
        for policy in POLICIES
    ]
    # Which turns begin before the end depends on how long the earlier ones take.
    for other in answers:
        common = other.keys() & answers[0].keys()
        assert len(common) > 0.8 * len(answers[0])
        assert all(other[name] == answers[0][name] for name in common)


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

    def hear(outputs: Sequence[StepOutput], _step_s: float) -> None:
        heard.extend((output.request_id, timeline.now_s) for output in outputs)

    config = replica_config("full", SMALL_CACHE)
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
        if ", " not in policy  # told what to keep, an engine reuses more
    ]
    assert all(other == ttfts[0] for other in ttfts)


@pytest.mark.parametrize("layout", ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"])
def test_predictions_for_serial_requests_are_exact(layout: str) -> None:
    """Nothing changes between decision and admission, so the index must know every token that the
    engine will reuse."""
    outcome = simulate("prefix", layout, rate=SERIAL_RATE, cache_tokens=SMALL_CACHE).outcome
    assert not any(errors(outcome))
    assert any(record.cached_tokens for record in outcome.records)


def test_both_predictions_are_recorded() -> None:
    """What is cached now is not what will be cached when requests ahead have been computed."""
    records = simulate("least_delay").outcome.records
    looked_ahead = [one for one in records if one.expected_tokens != one.predicted_tokens]
    assert looked_ahead
    exact = [one for one in looked_ahead if one.expected_tokens == one.cached_tokens]
    assert len(exact) > len(looked_ahead) / 2
    figures = simulate("prefix").outcome.figures()
    assert figures["misexpected"] == figures["mispredicted"] > 0


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
    assert any(
        errors(simulate("group_blind", layout, rate=SERIAL_RATE, cache_tokens=SMALL_CACHE).outcome)
    )


def test_prefix_routing_reuses_more_than_round_robin() -> None:
    """A fifth more in this workload, which shares little; less would be chance."""
    reused = {
        policy: simulate(policy).outcome.figures()["reused_tokens"]
        for policy in ("prefix", "round_robin")
    }
    assert reused["prefix"] > 1.2 * reused["round_robin"]


def test_exact_hits_reuse_more_and_respond_sooner_than_group_blind_ones() -> None:
    """Where engines keep all windows: compared with the same policy over indexes that ignore
    groups, and with round robin."""
    found = {
        policy: _questions(policy, retention_interval=None)
        for policy in ("prefix", "group_blind", "round_robin")
    }
    for other in ("group_blind", "round_robin"):
        assert found["prefix"]["reused_tokens"] > 1.05 * found[other]["reused_tokens"]
        assert found["prefix"]["ttft_mean_ms"] < 0.95 * found[other]["ttft_mean_ms"]


def test_on_default_engines_it_is_what_they_are_told_to_keep_that_pays() -> None:
    """This is the headline: windows are kept where the router has seen, or expects, prompts to
    part. Without it exact knowledge must not lose to a blind index."""
    told, plain, blind = (
        _questions(policy, retention_interval=0)
        for policy in ("least_delay, learned", "least_delay", "group_blind_any_copy")
    )
    assert told["reused_tokens"] > 1.1 * blind["reused_tokens"]
    assert told["ttft_mean_ms"] < 0.8 * blind["ttft_mean_ms"]
    assert plain["ttft_mean_ms"] < 1.05 * blind["ttft_mean_ms"]


def _questions(policy: str, retention_interval: int | None) -> dict[str, float]:
    plan = Questions(documents=20, document_tokens=(800, 2500), answer_tokens=(2, 12))
    workload = Sessions(plan, 2.0, 120.0, 1.0, 0)
    replica = replace(replica_config("gptoss", 8000), retention_interval=retention_interval)
    return Simulation(Setting(policy, 3, replica), workload).run().figures()


def test_a_memory_tier_brings_back_what_the_gpu_lost() -> None:
    """The weight of tiers is tuned on it."""
    hits = []
    for gpu_shares in (0.0, 8.0):
        config = with_memory_tier(replica_config("gptoss", SMALL_CACHE), gpu_shares)
        outcome = Simulation(Setting("prefix", 2, config), sessions(SERIAL_RATE)).run()
        assert not any(errors(outcome))
        hits.append(outcome.figures()["reused_tokens"])
    assert hits[1] > hits[0]


# --- time -----------------------------------------------------------------------------------------


def test_decoding_is_nearly_flat_up_to_a_batch_of_32() -> None:
    """Policies that pile requests on one replica are punished only as much as on real engines."""
    alone, full = TIME_MODEL.decode_step_s(1), TIME_MODEL.decode_step_s(32)
    assert full < 1.15 * alone
    assert TIME_MODEL.decode_step_s(64) - full > 5 * (full - TIME_MODEL.decode_step_s(0))


def test_late_tokens_of_long_prompts_take_longer() -> None:
    """A hit at the end of an agent's context saves more than one at its beginning."""
    assert TIME_MODEL.prefill_s(0, 8000) == pytest.approx(1.0)
    assert TIME_MODEL.prefill_s(20_000, 28_000) == pytest.approx(1.0)
    assert TIME_MODEL.prefill_s(76_000, 84_000) == pytest.approx(2.0)
    assert TIME_MODEL.prefill_s(0, 50_000) == pytest.approx(
        TIME_MODEL.prefill_s(0, 31_000) + TIME_MODEL.prefill_s(31_000, 50_000)
    )


# --- workloads and figures ------------------------------------------------------------------------


def test_a_turn_appends_to_everything_said_before_and_waits_its_pause() -> None:
    """Otherwise no turn would reuse the previous one, or each would come at once."""
    workload = Sessions(SMALL(turns=(2, 4)), 1.0, 100.0, 1.0, 0)
    first = next(arrival for arrival in workload.arrivals() if not arrival.turn)
    prompt = workload.prompt(first)
    following = workload.answered(first, [7, 8, 9], 5.0)
    assert following is not None
    assert (following.turn, following.session) == (1, first.session)
    assert following.at_s > 5.0
    assert workload.prompt(following)[: len(prompt) + 3] == [*prompt, 7, 8, 9]


def test_no_turn_begins_after_the_end() -> None:
    """The load must end at the same time for all policies."""
    workload = sessions(5.0)
    first = workload.arrivals()[-1]
    workload.prompt(first)
    assert workload.answered(first, [7], workload.ends_s + 1) is None


def test_texts_of_one_workload_share_no_token() -> None:
    """What was never sent must never be found."""
    workload = sessions(5.0)
    arrivals = workload.arrivals()
    messages = [set(workload.prompt(arrival)[-20:]) for arrival in arrivals]
    assert len(set().union(*messages)) == 20 * len(arrivals)


@pytest.mark.parametrize("name", PLANS)
def test_the_load_is_steady_and_has_the_rate_that_was_asked_for(name: str) -> None:
    """A rate means nothing if a workload draws another one."""
    plan, counts = PLANS[name](), list[int]()
    for seed in range(6):
        workload = Sessions(plan, 4.0, 600.0, 1.0, seed)
        ahead, count = list(workload.arrivals()), 0
        while ahead:
            arrival = ahead.pop()
            count += arrival.at_s > 150
            turns = workload._open[arrival.place].session.turns
            following = workload.answered(arrival, (), arrival.at_s)
            assert (following is None) or following.turn < len(turns)
            if following is not None:
                ahead.append(following)
        counts.append(count)
    assert sum(counts) / 6 == pytest.approx(450 * 4.0, rel=0.2)


def test_agents_are_long_loops_behind_shared_tool_prompts() -> None:
    """As recorded: a median of some 33 turns, contexts up to 80,000 tokens, pauses for reading."""
    random, plan = Random(1), Agents()
    drawn = [plan.session(random) for _ in range(300)]
    turns = [len(session.turns) for session in drawn]
    assert 27 <= statistics.median(turns) <= 39
    lengths = [
        len(session.head[0])
        + sum(turn.message_tokens + turn.answer_tokens for turn in session.turns)
        for session in drawn
    ]
    assert max(lengths) <= 80_000
    assert sum(length > 50_000 for length in lengths) > 30
    assert len({session.head for session in drawn}) == 4
    pauses = sorted(turn.pause_s for session in drawn for turn in session.turns[1:])
    assert 1 < statistics.median(pauses) < 4
    assert pauses[int(0.95 * len(pauses))] > 30


def test_documents_are_longer_than_any_window_and_scans_come_once() -> None:
    """Windows that slid on are what a blind index misjudges; scans are what nobody should keep."""
    random = Random(1)
    questions = [Questions().session(random) for _ in range(100)]
    assert all(len(session.head[0]) >= 6000 for session in questions)
    assert len({session.head for session in questions}) < 80
    mixed = [ChatsBesideScans(Pause(30.0)).session(random) for _ in range(400)]
    scans = [session for session in mixed if not session.head]
    assert 200 < len(scans) < 280
    assert all(len(session.turns) == 1 for session in scans)


@pytest.mark.parametrize("variation", [1.0, 2.0, 4.0])
def test_gaps_between_arrivals_vary_as_asked(variation: float) -> None:
    """Bursts are what makes queues, and an idle replica the wrong choice."""
    times = arrival_times(Random(3), 10.0, 4000.0, variation)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1)
    assert max(times) <= 4000.0


def test_what_somebody_computed_is_known_up_to_a_mark() -> None:
    """The time that no policy can avoid is the time for what nobody ever computed."""
    seen, tokens = SeenPrefixes(), list(range(1000, 1100))
    assert seen.add(tokens) == 0
    assert seen.add(tokens) == 96
    assert seen.add([*tokens[:70], *range(5000, 5100)]) == 64
    assert seen.add([1, *tokens[1:31], 2]) == 0


def test_a_request_alone_on_an_idle_replica_avoids_nothing() -> None:
    """A single cold request is computed as fast as it can be."""
    workload = Sessions(SMALL(turns=(1, 1), documents=40), SERIAL_RATE, 500.0, 1.0, 0)
    setting = Setting("prefix", 1, replica_config("full", 100_000))
    for record in Simulation(setting, workload).run().records:
        assert record.ttft_s == pytest.approx(record.alone_s, abs=0.02)


def test_one_cache_for_all_holds_as_much_as_all_caches_and_evicts_the_oldest() -> None:
    """The figure below which no router can go must be right."""
    texts = [list(range(start, start + 640)) for start in (10_000, 20_000, 30_000)]

    def played(groups: int) -> list[float]:
        floor = OneCacheForAll(640, groups, 2, lambda cached, length: float(length - cached))
        return [
            floor.ttft_s(texts[number], 10_000.0 * place)
            for place, number in enumerate((0, 1, 0, 2, 0, 1, 1))
        ]

    # Two texts fit: the third drives out the second, which was used before the first.
    assert played(1) == [640, 640, 1, 640, 1, 640, 1]
    # With a group of windows, what those have left behind goes first.
    assert played(2) == [640, 640, 1, 640, 1, 1, 1]


def test_one_cache_for_all_has_as_many_queues_as_replicas() -> None:
    """Work that nobody has computed takes its time, and waits for its turn."""
    floor = OneCacheForAll(10_000, 1, 2, lambda cached, length: float(length - cached))
    texts = [list(range(start, start + 64)) for start in (10_000, 20_000, 30_000)]
    assert [floor.ttft_s(text, 0.0) for text in texts] == [64, 64, 128]
    assert floor.ttft_s(texts[0], 1000.0) == 1


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
    later = TraceOptions(requests=10, longest_prompt=8000, skipped=1)
    assert [row["input_length"] for row in read_trace(path, later)] == [700]
    trace = RecordedTrace(read_trace(path, options), options, requests_per_s=0.5)
    first, second = trace.arrivals()
    assert (first.at_s, second.at_s) == (0.0, 2.0)
    assert (first.answer_tokens, second.answer_tokens) == (1, 2)
    assert first.session != second.session
    prompts = [trace.prompt(arrival) for arrival in (first, second)]
    assert [len(prompt) for prompt in prompts] == [1000, 700]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:700] != prompts[1][512:]
    assert (trace.size.prompt_tokens, trace.size.longest_tokens) == (850, 1001)
    assert trace.ends_s == 2.0


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
