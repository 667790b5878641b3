"""Caching, chunking, eviction, preemption and offloading change how an answer is computed, never
what it says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.engine.core.batch import SequenceChunk
from offload.engine.core.build import EngineConfig, build_engine
from offload.engine.core.engine import Engine
from offload.engine.core.requests import EngineRequest, SamplingParams
from offload.engine.model.torch_runner import TorchRunner
from offload.errors import CacheConfigError

PRESETS = ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"]
TOLERANCE = 2e-4
"""Largest difference of two logits: sums of float32 in another order. Logits are of the order of
1."""
OUTPUT_TOKENS = 12
STARVED = {"full": 28, "gemma": 140, "gptoss": 50, "llama4": 96, "mamba-hybrid": 36}
"""Blocks that hold one or two of the requests below at a time."""


@dataclass
class Answers:
    """What an engine said, and how sure it was."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By request and position."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    external_hits: int = 0


class Recorder:
    """A runner that keeps what the real one computed."""

    def __init__(self, runner: TorchRunner, answers: Answers) -> None:
        self._runner = runner
        self._answers = answers

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        tokens = self._runner.run(chunks)
        assert self._runner.last_logits is not None
        for chunk, logits in zip(chunks, self._runner.last_logits, strict=True):
            if chunk.is_last:
                self._answers.logits[chunk.request_id, chunk.stop] = logits
        return tokens


def prompts() -> list[list[int]]:
    """Beginnings shared at odd places, whole blocks, repetitions, and one that is longer than every
    window."""
    rng = random.Random(7)
    base = [rng.randrange(256) for _ in range(330)]
    found = [
        base[: rng.randrange(20, 300)] + [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        for _ in range(5)
    ]
    return [*found, base[:160], base[:160], base, [*base[:160], 5], found[0]]


def answers_of(config: EngineConfig, at_once: bool = True) -> Answers:
    """Every prompt's answer, all of them together or one after the other."""
    answers = Answers()
    engine = build_engine(config)
    assert isinstance(engine.runner, TorchRunner)
    engine.runner = Recorder(engine.runner, answers)
    for index, prompt in enumerate(prompts()):
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.add_request(EngineRequest(f"request-{index}", prompt, sampling))
        if not at_once:
            run(engine, answers)
    run(engine, answers)
    statistics = engine.statistics()
    answers.preemptions, answers.external_hits = (
        statistics.scheduler.preemptions,
        statistics.cache.counts.external_tokens,
    )
    engine.close()
    return answers


def run(engine: Engine, answers: Answers) -> None:
    while engine.has_work:
        for output in engine.step():
            answers.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            answers.cached_tokens[output.request_id] = output.num_cached_tokens


@pytest.fixture(scope="module", params=PRESETS)
def reference(request: pytest.FixtureRequest) -> tuple[EngineConfig, Answers]:
    """Without a cache, each prompt in one piece and alone."""
    config = EngineConfig(
        preset=request.param, num_blocks=2000, max_num_batched_tokens=2048, device="cpu"
    )
    return config, answers_of(replace(config, enable_caching=False), at_once=False)


def assert_same(answers: Answers, expected: Answers) -> None:
    assert answers.tokens == expected.tokens
    assert answers.logits.keys() == expected.logits.keys()
    differences = [
        float((answers.logits[key] - logits).abs().max()) for key, logits in expected.logits.items()
    ]
    assert max(differences) <= TOLERANCE


def test_the_reference_says_something(reference: tuple[EngineConfig, Answers]) -> None:
    """Answers that are all alike would hide every mistake."""
    _, expected = reference
    assert {len(tokens) for tokens in expected.tokens.values()} == {OUTPUT_TOKENS}
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) >= 7
    assert torch.stack(list(expected.logits.values())).std() > 0.3
    assert not any(expected.cached_tokens.values())


def test_with_a_cache(reference: tuple[EngineConfig, Answers]) -> None:
    """A hit's keys, values and states are those that would have been computed."""
    config, expected = reference
    answers = answers_of(config, at_once=False)
    assert_same(answers, expected)
    assert sum(count > 0 for count in answers.cached_tokens.values()) >= 6


def test_all_at_once(reference: tuple[EngineConfig, Answers]) -> None:
    """Neighbours in a batch do not see each other."""
    config, expected = reference
    assert_same(answers_of(config), expected)


@pytest.mark.parametrize("budget", [3, 16, 37, 100])
def test_prefill_in_chunks_of_any_size(
    reference: tuple[EngineConfig, Answers], budget: int
) -> None:
    """Where a prompt is cut must not show, inside a block or a chunk of attention."""
    config, expected = reference
    assert_same(answers_of(replace(config, max_num_batched_tokens=budget)), expected)


@pytest.mark.parametrize("interval", [None, 0])
def test_under_eviction_and_preemption(
    reference: tuple[EngineConfig, Answers], interval: int | None
) -> None:
    """Blocks are taken from cached prefixes and from running requests, which start again."""
    config, expected = reference
    interval = interval if config.preset not in ("full", "llama4") else None
    starved = replace(
        config,
        num_blocks=STARVED[config.preset],
        retention_interval=interval,
        max_num_batched_tokens=64,
    )
    answers = answers_of(starved)
    assert_same(answers, expected)
    assert answers.preemptions > 0


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_from_lower_tiers_and_back(
    reference: tuple[EngineConfig, Answers], tiers: str, tmp_path: Path
) -> None:
    """What was evicted comes back from memory or disk as it was, each group with what its hit
    needs."""
    config, expected = reference
    starved = replace(
        config,
        num_blocks=STARVED[config.preset],
        cpu_blocks={"memory": 600, "disk": 0, "both": 40}[tiers],
        disk_directory=None if tiers == "memory" else tmp_path,
    )
    answers = answers_of(starved, at_once=False)
    assert_same(answers, expected)
    assert answers.external_hits > 0


def test_a_directory_serves_the_next_process(
    reference: tuple[EngineConfig, Answers], tmp_path: Path
) -> None:
    """The weights are the same, so the blocks are."""
    config, expected = reference
    on_disk = replace(config, disk_directory=tmp_path)
    answers_of(on_disk, at_once=False)
    again = answers_of(on_disk, at_once=False)
    assert_same(again, expected)
    assert again.cached_tokens["request-0"] > 0


@pytest.mark.parametrize("change", [{"vocab_size": 600}, {"seed": 1}, {"block_size": 8}])
def test_a_directory_of_other_weights_is_refused(change: dict[str, int], tmp_path: Path) -> None:
    """A token's block has the same name whatever computed it; served to another model, it would
    decide what that says."""
    config = EngineConfig(
        preset="full", vocab_size=512, num_blocks=100, disk_directory=tmp_path, device="cpu"
    )
    build_engine(config).close()
    build_engine(replace(config, max_model_len=1024)).close()
    with pytest.raises(CacheConfigError, match="identity"):
        build_engine(replace(config, **change))


def test_drawn_tokens_do_not_depend_on_neighbours_or_cuts() -> None:
    """A seed is a promise."""
    said = []
    for budget in (5, 64, 512):
        engine = build_engine(
            EngineConfig(
                preset="gemma", num_blocks=800, max_num_batched_tokens=budget, device="cpu"
            )
        )
        answers = Answers()
        for index, prompt in enumerate(prompts()[:4]):
            sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=index, ignore_eos=True)
            engine.add_request(EngineRequest(f"request-{index}", prompt, sampling))
        run(engine, answers)
        engine.close()
        said.append(answers.tokens)
    assert said[0] == said[1] == said[2]
    assert len({tuple(tokens) for tokens in said[0].values()}) == 4
