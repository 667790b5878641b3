"""Scheduling on engines without tensors: what a step computes, who waits, and who is preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, FinishReason, SamplingParams, StepOutput
from kvroute_engine.core.serving_order import SchedulingPolicy
from kvroute_engine.core.time_model import TimeModel, VirtualClock
from offload.base import Direction, TransferResult
from offload.errors import CacheConfigError, EngineRequestError

PRESETS = ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"]
STARVED = {"full": 40, "gemma": 150, "gptoss": 70, "llama4": 110, "mamba-hybrid": 40}
"""Blocks for a few requests at a time."""


class Watch:
    """A runner that keeps what a step computed."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self.chunks: list[SequenceChunk] = []

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        self.chunks = list(chunks)
        return self._runner.run(chunks)


def engine_of(preset: str = "full", **settings: object) -> tuple[Engine, Watch, VirtualClock]:
    clock = VirtualClock()
    engine = build_engine(replace(EngineConfig(preset=preset, simulate=True), **settings), clock)  # type: ignore[arg-type]
    engine.runner = watch = Watch(engine)
    return engine, watch, clock


def request(
    name: str, prompt: int | list[int], output: int = 8, **sampling: object
) -> EngineRequest:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return EngineRequest(
        name, tokens, SamplingParams(max_tokens=output, ignore_eos=True, **sampling)
    )  # type: ignore[arg-type]


def finish(engine: Engine, limit: int = 20_000) -> dict[str, list[StepOutput]]:
    """Step until nothing is left to do."""
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        limit -= 1
        assert limit, "the engine does not come to an end"
    return outputs


def said(outputs: dict[str, list[StepOutput]]) -> dict[str, list[int]]:
    return {
        name: [token for step in steps for token in step.new_token_ids]
        for name, steps in outputs.items()
    }


def work(seed: str, count: int) -> list[EngineRequest]:
    """Requests that share beginnings."""
    rng = random.Random(seed)
    bases = [[rng.randrange(256) for _ in range(300)] for _ in range(3)]
    found = []
    for index in range(count):
        prompt = rng.choice(bases)[: rng.randrange(1, 250)] + [
            rng.randrange(256) for _ in range(rng.randrange(0, 40))
        ]
        found.append(request(f"request-{index}", prompt, rng.randrange(1, 40), seed=index))
    return found


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tiers", [0, 300])
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_response_does_not_depend_on_what_else_runs(
    preset: str, tiers: int, policy: SchedulingPolicy
) -> None:
    """Under pressure, with preemptions, loads and arrivals at any time; every block is freed."""
    alone = {}
    for asked in work(preset, 40):
        engine, _, _ = engine_of(preset, num_blocks=2000)
        engine.add_request(asked)
        alone |= said(finish(engine))
    engine, _, _ = engine_of(
        preset,
        num_blocks=STARVED[preset],
        max_num_batched_tokens=100,
        cpu_blocks=tiers,
        scheduling_policy=policy,
    )
    rng, outputs = random.Random(preset), {}
    for asked in work(preset, 40):
        engine.add_request(replace(asked, priority=rng.randrange(3)))
        for _ in range(rng.randrange(6)):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    for name, steps in finish(engine).items():
        outputs.setdefault(name, []).extend(steps)
    assert said(outputs) == alone
    assert all(steps[-1].finish_reason is FinishReason.LENGTH for steps in outputs.values())
    assert engine.cache.pool.num_free_blocks == engine.cache.config.num_blocks - 1
    statistics = engine.statistics()
    assert (statistics.scheduler.num_running, statistics.scheduler.num_waiting) == (0, 0)
    assert statistics.kv_cache_usage == 0.0
    assert statistics.scheduler.preemptions > 0 or preset == "mamba-hybrid"
    assert bool(statistics.cache.counts.external_tokens) is bool(tiers)


def test_a_step_keeps_its_budget_and_serves_running_requests_first() -> None:
    """A long prompt must not hold up responses that have begun."""
    engine, watch, _ = engine_of(max_num_batched_tokens=50)
    engine.add_request(request("short", 20, 20))
    engine.step()
    engine.add_request(request("long", list(range(100, 220)), 20))
    sizes = []
    for _ in range(4):
        engine.step()
        sizes.append([(chunk.request_id, len(chunk.token_ids)) for chunk in watch.chunks])
    assert sizes == [
        [("short", 1), ("long", 49)],
        [("short", 1), ("long", 49)],
        [("short", 1), ("long", 22)],
        [("short", 1), ("long", 1)],
    ]


def test_no_more_requests_run_than_are_allowed() -> None:
    """Each takes a slot in the batch."""
    engine, watch, _ = engine_of(max_num_seqs=2)
    for name in "abc":
        engine.add_request(request(name, [ord(name)] * 20, 3))
    engine.step()
    assert [chunk.request_id for chunk in watch.chunks] == ["a", "b"]
    now = engine.statistics().scheduler
    assert (now.num_running, now.num_waiting) == (2, 1)
    assert len(finish(engine)) == 3


def test_the_newest_request_is_preempted_and_repeats_no_token() -> None:
    """A preempted request starts again from its prompt and the tokens it had generated."""
    engine, _, _ = engine_of(num_blocks=14, enable_caching=False)
    for name, first in (("a", 0), ("b", 1000)):
        engine.add_request(request(name, [first + index for index in range(60)], 60))
    outputs = finish(engine)
    assert engine.statistics().scheduler.preemptions > 0
    assert {name: len(tokens) for name, tokens in said(outputs).items()} == {"a": 60, "b": 60}
    assert [steps[-1].finish_reason for steps in outputs.values()] == [FinishReason.LENGTH] * 2


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A preempted request finds its own blocks, and must not report them as a hit."""
    engine, _, _ = engine_of(num_blocks=14)
    for name, first in (("a", 0), ("b", 1000)):
        engine.add_request(request(name, [first + index for index in range(60)], 60))
    outputs = finish(engine)
    assert engine.statistics().scheduler.preemptions > 0
    assert {step.num_cached_tokens for steps in outputs.values() for step in steps} == {0}


def test_states_end_with_blocks_and_where_prompts_diverge() -> None:
    """Anywhere else a state is useless to a later request."""
    engine, watch, _ = engine_of("mamba-hybrid", num_blocks=400, max_num_batched_tokens=1000)
    ends = []
    for name, prompt in (
        ("a", list(range(100))),
        ("b", [*range(70), *range(500, 540)]),
        ("c", [*range(70), *range(600, 640)]),
    ):
        engine.add_request(request(name, prompt, 1))
        while engine.has_work:
            engine.step()
            ends.append((name, *((chunk.start, chunk.stop) for chunk in watch.chunks)))
    # a: up to its last whole block, then the rest. b finds no state of a to resume at, but the end
    # of their shared prefix, and leaves a state there; c resumes at it.
    assert ends == [
        ("a", (0, 96)),
        ("a", (96, 100)),
        ("b", (0, 64)),
        ("b", (64, 96)),
        ("b", (96, 110)),
        ("c", (64, 96)),
        ("c", (96, 110)),
    ]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_only_those_that_want_the_same_blocks_wait_for_a_load(policy: SchedulingPolicy) -> None:
    """It may take long, as a pull from an engine that died does."""
    slow = TimeModel(transfer_bytes_per_s=1e5)
    engine, watch, _ = engine_of(
        num_blocks=80, cpu_blocks=500, time_model=slow, scheduling_policy=policy
    )
    prompt = list(range(100))
    engine.add_request(request("first", prompt, 1))
    finish(engine)
    engine.cache.evict_blocks(range(1, 80))
    for name in ("loads", "the same"):
        engine.add_request(request(name, prompt, 1))
    engine.step()
    engine.add_request(request("another", list(range(200, 350)), 1))
    engine.step()
    assert [chunk.request_id for chunk in watch.chunks] == ["another"]
    outputs = finish(engine)
    assert list(outputs) == ["loads", "the same"]
    assert outputs["the same"][0].num_cached_tokens == 96


def test_a_request_waits_for_its_load_while_others_run() -> None:
    """A copy takes longer than a step."""
    slow = TimeModel(transfer_bytes_per_s=1e5)
    engine, watch, _ = engine_of(num_blocks=60, cpu_blocks=500, time_model=slow)
    prompt = list(range(100))
    engine.add_request(request("first", prompt, 1))
    finish(engine)
    engine.cache.evict_blocks(range(1, 60))
    engine.add_request(request("again", prompt, 4))
    engine.add_request(request("other", list(range(300, 330)), 4))
    engine.step()
    assert [chunk.request_id for chunk in watch.chunks] == ["other"]
    now = engine.statistics().scheduler
    assert (now.num_running, now.num_waiting) == (1, 1)
    outputs = finish(engine)
    assert list(outputs) == ["other", "again"]
    assert outputs["again"][0].num_cached_tokens == 96
    assert engine.statistics().cache.counts.external_tokens == 96


def test_a_failed_load_after_a_preemption_changes_nothing_about_the_first_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request would find its own blocks, and report them as cached."""
    engine, _, _ = engine_of(num_blocks=20, cpu_blocks=500)
    worker = engine.tiers[0].worker
    get_finished = worker.get_finished
    failed: list[int] = []

    def fail_loads() -> list[TransferResult]:
        found = get_finished()
        loads = [each.job_id for each in found if each.direction is Direction.LOAD]
        failed.extend(loads)
        return [replace(each, success=each.job_id not in loads) for each in found]

    monkeypatch.setattr(worker, "get_finished", fail_loads)
    engine.add_request(request("a", [1] * 100, 100))
    engine.add_request(request("b", [2] * 100, 100))
    outputs = finish(engine)
    assert engine.statistics().scheduler.preemptions == 1
    assert len(failed) == 1
    assert {output.num_cached_tokens for output in outputs["b"]} == {0}


def test_a_request_whose_load_failed_counts_its_own_hits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is admitted a second time, and reports that as its first."""
    engine, _, _ = engine_of(num_blocks=60, cpu_blocks=500)
    engine.add_request(request("first", 100))
    finish(engine)
    engine.cache.evict_blocks(range(3, 60))
    worker = engine.tiers[0].worker
    get_finished = worker.get_finished

    def fail_loads() -> list[TransferResult]:
        found = get_finished()
        return [replace(each, success=each.direction is not Direction.LOAD) for each in found]

    engine.add_request(request("again", 100))
    with monkeypatch.context() as patched:
        patched.setattr(worker, "get_finished", fail_loads)
        outputs = finish(engine)
    assert outputs["again"][0].num_cached_tokens == 32
    assert engine.statistics().cache.counts.requests == 3
    assert engine.statistics().scheduler.group_hit_tokens == (32,)
    engine.cache.evict_blocks(range(1, 60))
    engine.add_request(request("loaded", 100))
    assert finish(engine)["loaded"][0].num_cached_tokens == 96
    assert engine.statistics().scheduler.group_hit_tokens == (32,), "the GPU's groups held nothing"


def test_waiting_requests_go_by_their_priority_and_running_ones_are_not_held_up() -> None:
    """As in vLLM: the lowest number first, equal ones as they arrived."""
    engine, watch, _ = engine_of(
        max_num_batched_tokens=50, scheduling_policy=SchedulingPolicy.PRIORITY
    )
    engine.add_request(request("running", 120, 1))
    engine.step()
    for name, priority in (("c", 5), ("b", 0), ("d", 5), ("a", -1)):
        engine.add_request(replace(request(name, [ord(name)] * 20, 1), priority=priority))
    steps = []
    while engine.has_work:
        engine.step()
        steps.append([(chunk.request_id, len(chunk.token_ids)) for chunk in watch.chunks])
    assert steps == [
        [("running", 50)],
        [("running", 20), ("a", 20), ("b", 10)],
        [("b", 10), ("c", 20), ("d", 20)],
    ]


def test_the_request_of_the_highest_priority_number_gives_up_its_blocks() -> None:
    """The last one admitted may be the most urgent."""
    engine, _, _ = engine_of(
        num_blocks=14, enable_caching=False, scheduling_policy=SchedulingPolicy.PRIORITY
    )
    for name, first, priority in (("late", 0, 7), ("urgent", 1000, 1)):
        prompt = [first + index for index in range(60)]
        engine.add_request(replace(request(name, prompt, 60), priority=priority))
        engine.step()
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert engine.statistics().scheduler.preemptions > 0
    assert ended == ["urgent", "late"]


def test_a_short_prompt_overtakes_a_long_one_that_has_begun() -> None:
    """A response in decode comes before both; what the step has left goes to the long one."""
    engine, watch, _ = engine_of(
        max_num_batched_tokens=50, scheduling_policy=SchedulingPolicy.SHORTEST
    )
    engine.add_request(request("response", 20, 4))
    engine.step()
    engine.add_request(request("long", list(range(100, 220)), 1))
    engine.step()
    engine.add_request(request("short", list(range(300, 330)), 1))
    engine.step()
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in watch.chunks] == [
        ("response", 1),
        ("long", 19),
        ("short", 30),
    ]


def test_what_the_cache_holds_makes_a_long_prompt_short() -> None:
    """The order goes by what is left to compute; a hit that comes while a prompt waits counts."""
    engine, _, _ = engine_of(
        max_num_batched_tokens=64, max_num_seqs=1, scheduling_policy=SchedulingPolicy.SHORTEST
    )
    document = list(range(128))
    engine.add_request(request("document", document, 3))
    engine.step()
    engine.add_request(request("cold", list(range(300, 350)), 1))
    engine.add_request(request("question", [*document, 7, 8, 9], 1))
    order = list(finish(engine))
    assert order == ["document", "question", "cold"]


@pytest.mark.parametrize("length", [200, 600])
def test_a_long_prompt_is_overtaken_for_ten_times_its_length_at_most(length: int) -> None:
    """Without ageing it would wait for as long as shorter ones come."""
    engine, watch, _ = engine_of(
        max_num_batched_tokens=50,
        num_blocks=400,
        enable_caching=False,
        scheduling_policy=SchedulingPolicy.SHORTEST,
    )
    engine.add_request(request("long", [1] * length, 1))
    computed, before = 0, None
    for number in range(1000):
        engine.add_request(request(f"short-{number}", [2] * 50, 1))
        engine.step()
        computed += sum(len(chunk.token_ids) for chunk in watch.chunks)
        if before is None and watch.chunks[0].request_id == "long":
            before = computed
        if not any(chunk.request_id == "long" for chunk in watch.chunks) and before:
            break
    assert before is not None
    # A short prompt is ahead until the long one has aged by the difference.
    assert 10 * (length - 50) <= before <= 10 * length + 50


def test_an_aborted_request_leaves_nothing() -> None:
    """Clients leave while they wait, load or run."""
    engine, _, _ = engine_of(num_blocks=40, max_num_seqs=1)
    for name in "ab":
        engine.add_request(request(name, [ord(name)] * 100, 50))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    engine.abort("nobody")
    assert not engine.has_work
    assert engine.cache.pool.num_free_blocks == 39


@pytest.mark.parametrize(
    ("prompt", "output", "message"),
    [
        (0, 5, "prompt: 0 tokens must be 1 to 623"),
        (5000, 5, "prompt: 5000 tokens must be 1 to 623"),
        (700, 5, "prompt: 700 tokens must be 1 to 623"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    prompt: int, output: int, message: str
) -> None:
    """It would wait for ever, and all requests behind it."""
    engine, _, _ = engine_of(num_blocks=40)
    with pytest.raises(EngineRequestError, match=message):
        engine.add_request(request("a", prompt, output))
    assert not engine.has_work


def test_an_id_in_use_is_refused() -> None:
    """Two requests would share a block table."""
    engine, _, _ = engine_of()
    engine.add_request(request("a", 10))
    with pytest.raises(EngineRequestError, match="request_id 'a': in use"):
        engine.add_request(request("a", 10))
    finish(engine)
    engine.add_request(request("a", 10))


def test_stop_tokens_end_a_response() -> None:
    """The stop token itself is part of the output."""
    engine, _, _ = engine_of()
    engine.add_request(request("a", 10, 8))
    tokens = said(finish(engine))["a"]
    place = next(index for index in range(2, 8) if tokens[index] not in tokens[:index])
    engine.add_request(request("b", 10, 8, stop_token_ids=[tokens[place]]))
    outputs = finish(engine)
    assert said(outputs)["b"] == tokens[: place + 1]
    assert outputs["b"][-1].finish_reason is FinishReason.STOP


def test_a_step_takes_the_time_of_the_time_model() -> None:
    """Prefill and decode have their own rates, and a step has a fixed cost."""
    rates = TimeModel(prefill_tokens_per_s=1000, decode_tokens_per_s=100, step_overhead_s=0.5)
    engine, _, clock = engine_of(time_model=rates)
    engine.add_request(request("a", 200, 3))
    engine.step()
    assert clock.now_s() == pytest.approx(0.5 + 0.2)
    engine.step()
    assert clock.now_s() == pytest.approx(0.7 + 0.5 + 0.01)


@pytest.mark.parametrize(
    "field",
    [
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "transfer_bytes_per_s",
        "pull_bytes_per_s",
        "slowdown",
    ],
)
def test_a_rate_of_zero_is_refused(field: str) -> None:
    """A step would take for ever."""
    with pytest.raises(CacheConfigError, match=f"{field} 0 must be above 0"):
        TimeModel(**{field: 0})


def test_a_reset_forgets_every_tier_and_does_not_wait() -> None:
    """After new weights, a block of the old ones would be wrong."""
    engine, _, _ = engine_of(num_blocks=60, cpu_blocks=100)
    engine.add_request(request("a", 100, 4))
    engine.step()
    assert not engine.reset_prefix_cache()
    finish(engine)
    assert engine.reset_prefix_cache()
    engine.add_request(request("b", 100, 4))
    assert finish(engine)["b"][0].num_cached_tokens == 0


def test_each_group_s_own_hits_are_counted_once_per_request() -> None:
    """They show what full attention still held and the sliding window did not."""
    engine, _, _ = engine_of("gptoss", num_blocks=60, max_model_len=2048)
    first = request("first", 320)
    for sent in (first, request("other", [*range(1000, 1320)]), request("again", 320)):
        engine.add_request(sent)
        finish(engine)
    now = engine.statistics()
    full, window = now.scheduler.group_hit_tokens
    assert now.cache.counts.hit_tokens == min(full, window)
    assert full > window
    engine, _, _ = engine_of("full")
    for name in ("first", "again"):
        engine.add_request(request(name, 100))
        finish(engine)
    assert engine.statistics().scheduler.group_hit_tokens == (96,)
