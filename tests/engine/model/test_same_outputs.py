"""Caching, chunking, eviction, preemption and offloading never change an output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, SamplingParams
from kvroute_engine.model.torch_runner import TorchRunner
from offload.errors import CacheConfigError

PRESETS = ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"]
TOLERANCE = 2e-4
"""Largest difference of two logits: sums of float32 in another order. Logits are of the order of
1."""
OUTPUT_TOKENS = 12
STARVED = {"full": 28, "gemma": 140, "gptoss": 50, "llama4": 96, "mamba-hybrid": 36}
"""Blocks that hold one or two of the requests below at a time."""


@dataclass
class Outputs:
    """What an engine generated, with the logits."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By request and position."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    external_hits: int = 0


class Recorder:
    """A runner that keeps what the real one computed."""

    def __init__(self, runner: TorchRunner, outputs: Outputs) -> None:
        self._runner = runner
        self._outputs = outputs

    def run(self, chunks: Sequence[SequenceChunk]) -> list[int | None]:
        tokens = self._runner.run(chunks)
        assert self._runner.last_logits is not None
        for chunk, logits in zip(chunks, self._runner.last_logits, strict=True):
            if chunk.is_last:
                self._outputs.logits[chunk.request_id, chunk.stop] = logits
        return tokens


def prompts() -> list[list[int]]:
    """Prefixes shared at odd lengths, whole blocks, repetitions; one exceeds every window."""
    rng = random.Random(7)
    base = [rng.randrange(256) for _ in range(330)]
    found = [
        base[: rng.randrange(20, 300)] + [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        for _ in range(5)
    ]
    return [*found, base[:160], base[:160], base, [*base[:160], 5], found[0]]


def outputs_of(config: EngineConfig, at_once: bool = True) -> Outputs:
    """The output for every prompt, all prompts together or one after the other."""
    outputs = Outputs()
    engine = build_engine(config)
    assert isinstance(engine.runner, TorchRunner)
    engine.runner = Recorder(engine.runner, outputs)
    for index, prompt in enumerate(prompts()):
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.add_request(EngineRequest(f"request-{index}", prompt, sampling))
        if not at_once:
            run(engine, outputs)
    run(engine, outputs)
    statistics = engine.statistics()
    outputs.preemptions, outputs.external_hits = (
        statistics.scheduler.preemptions,
        statistics.cache.counts.external_tokens,
    )
    engine.close()
    return outputs


def run(engine: Engine, outputs: Outputs) -> None:
    while engine.has_work:
        for output in engine.step():
            outputs.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            outputs.cached_tokens[output.request_id] = output.num_cached_tokens


@pytest.fixture(scope="module", params=PRESETS)
def reference(request: pytest.FixtureRequest) -> tuple[EngineConfig, Outputs]:
    """Without a cache, each prompt by itself and in one piece."""
    config = EngineConfig(
        preset=request.param, num_blocks=2000, max_num_batched_tokens=2048, device="cpu"
    )
    return config, outputs_of(replace(config, enable_caching=False), at_once=False)


def assert_same(outputs: Outputs, expected: Outputs) -> None:
    assert outputs.tokens == expected.tokens
    assert outputs.logits.keys() == expected.logits.keys()
    differences = [
        float((outputs.logits[key] - logits).abs().max()) for key, logits in expected.logits.items()
    ]
    assert max(differences) <= TOLERANCE


def test_the_reference_has_different_outputs(reference: tuple[EngineConfig, Outputs]) -> None:
    """Equal outputs would hide every mistake."""
    _, expected = reference
    assert {len(tokens) for tokens in expected.tokens.values()} == {OUTPUT_TOKENS}
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) >= 7
    assert torch.stack(list(expected.logits.values())).std() > 0.3
    assert not any(expected.cached_tokens.values())


def test_with_a_cache(reference: tuple[EngineConfig, Outputs]) -> None:
    """A hit's keys, values and states are those that would have been computed."""
    config, expected = reference
    outputs = outputs_of(config, at_once=False)
    assert_same(outputs, expected)
    assert sum(count > 0 for count in outputs.cached_tokens.values()) >= 6


def test_all_at_once(reference: tuple[EngineConfig, Outputs]) -> None:
    """Sequences of a batch do not see each other."""
    config, expected = reference
    assert_same(outputs_of(config), expected)


@pytest.mark.parametrize("budget", [3, 16, 37, 100])
def test_prefill_in_chunks_of_any_size(
    reference: tuple[EngineConfig, Outputs], budget: int
) -> None:
    """The cuts of a prompt must not show, inside a block or a chunk of attention."""
    config, expected = reference
    assert_same(outputs_of(replace(config, max_num_batched_tokens=budget)), expected)


@pytest.mark.parametrize("interval", [None, 0])
def test_under_eviction_and_preemption(
    reference: tuple[EngineConfig, Outputs], interval: int | None
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
    outputs = outputs_of(starved)
    assert_same(outputs, expected)
    assert outputs.preemptions > 0


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_from_lower_tiers_and_back(
    reference: tuple[EngineConfig, Outputs], tiers: str, tmp_path: Path
) -> None:
    """Evicted blocks return unchanged from memory or disk, each group with what its hit needs."""
    config, expected = reference
    starved = replace(
        config,
        num_blocks=STARVED[config.preset],
        cpu_blocks={"memory": 600, "disk": 0, "both": 40}[tiers],
        disk_directory=None if tiers == "memory" else tmp_path,
    )
    outputs = outputs_of(starved, at_once=False)
    assert_same(outputs, expected)
    assert outputs.external_hits > 0


def test_a_directory_serves_the_next_process(
    reference: tuple[EngineConfig, Outputs], tmp_path: Path
) -> None:
    """The weights are the same, so the blocks are."""
    config, expected = reference
    on_disk = replace(config, disk_directory=tmp_path)
    outputs_of(on_disk, at_once=False)
    again = outputs_of(on_disk, at_once=False)
    assert_same(again, expected)
    assert again.cached_tokens["request-0"] > 0


@pytest.mark.parametrize("change", [{"vocab_size": 600}, {"seed": 1}, {"block_size": 8}])
def test_a_directory_of_other_weights_is_refused(change: dict[str, int], tmp_path: Path) -> None:
    """Blocks of other weights have the same hashes, and would change the output."""
    config = EngineConfig(
        preset="full", vocab_size=512, num_blocks=100, disk_directory=tmp_path, device="cpu"
    )
    build_engine(config).close()
    build_engine(replace(config, max_model_len=1024)).close()
    with pytest.raises(CacheConfigError, match="identity"):
        build_engine(replace(config, **change))


@pytest.mark.parametrize("place", ["file", "file/below", "locked"])
def test_a_directory_that_cannot_be_used_is_refused(place: str, tmp_path: Path) -> None:
    """With its name and the system's reason, and no traceback."""
    (tmp_path / "file").touch()
    config = EngineConfig(preset="full", num_blocks=100, device="cpu")
    build_engine(replace(config, disk_directory=tmp_path / "locked")).close()
    (tmp_path / "locked/lock").unlink()
    (tmp_path / "locked/lock").mkdir()
    with pytest.raises(CacheConfigError, match=f"fs tier: directory .*{place}: [A-Z]"):
        build_engine(replace(config, disk_directory=tmp_path / place))


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_chunks() -> None:
    """A seed is a promise."""
    sampled = []
    for budget in (5, 64, 512):
        engine = build_engine(
            EngineConfig(
                preset="gemma", num_blocks=800, max_num_batched_tokens=budget, device="cpu"
            )
        )
        outputs = Outputs()
        for index, prompt in enumerate(prompts()[:4]):
            sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=index, ignore_eos=True)
            engine.add_request(EngineRequest(f"request-{index}", prompt, sampling))
        run(engine, outputs)
        engine.close()
        sampled.append(outputs.tokens)
    assert sampled[0] == sampled[1] == sampled[2]
    assert len({tuple(tokens) for tokens in sampled[0].values()}) == 4


@pytest.mark.parametrize("temperature", [1e-3, 1e-39, 5e-324])
def test_the_lowest_temperatures_end_no_engine(temperature: float) -> None:
    """Probabilities that overflow would fail the step, and with it all other requests."""
    engine = build_engine(EngineConfig(preset="full", num_blocks=100, device="cpu"))
    sampling = SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True)
    engine.add_request(EngineRequest("a", [1, 2, 3], sampling))
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.close()
    assert len(outputs) == 4
