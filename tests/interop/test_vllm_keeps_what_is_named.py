"""The plug-in `kvroute-vllm` in vLLM's own scheduler: what a request names is kept, and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from kvevents.layout import GroupKind, KVCacheGroup
from kvroute_vllm import retention
from kvroute_vllm.plugin import register
from offload.request import RetentionHints
from router.cli.recordings import ReplaySummary, replay
from tests.interop import layouts
from tests.interop.cache import CachedBlock, FirstStep
from tests.interop.hinted_engine import PROMPT_TOKENS, HintedEngine
from tests.interop.layouts import Layout
from tests.interop.our_cache import OurCache
from tests.interop.plugging import UNPATCHED, skip_unknown_drafters, unplug_later
from tests.interop.record_hinted import LAYOUTS, record, traffic
from tests.kvroute_vllm.test_hints import HOSTILE_FLAGS, HOSTILE_LENGTHS

PROMPT = list(range(1, PROMPT_TOKENS + 1))
ANOTHER_END = [9_999] * 60
NAMED = [322, 600]
TOO_LONG_FOR_VLLM = 10**5000
"""Requests with such a number are refused before they reach the scheduler."""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What vLLM calls; what it does is undone after the test."""
    unplug_later(monkeypatch)
    return register


@pytest.fixture
def plugged(plugin: Callable[[], None]) -> None:
    plugin()


def kept_for(layout: Layout, group: int, hit: int) -> range:
    """Blocks of a group, by index, that a hit of that length needs. With a drafter in the group the
    block behind the hit is looked up as well."""
    spec = layout.groups[group]
    is_drafter = layout.eagle is True or (layout.eagle is not False and group in layout.eagle)
    end = hit // spec.block_size
    if spec.kind is GroupKind.MAMBA:
        return range(end - 1, end)
    end += is_drafter
    return range(max(end - spec.window_blocks(int(is_drafter)), 0), end)


def blocks_named(layout: Layout, engine: HintedEngine, boundaries: list[int]) -> set[CachedBlock]:
    hashes = engine.block_hashes(PROMPT)
    dropped = layout.scheduler_block_size if layout.eagle else 0
    named = set()
    for boundary in boundaries:
        hit = boundary // layout.scheduler_block_size * layout.scheduler_block_size - dropped
        for group, spec in enumerate(layout.groups):
            if hit > 0 and spec.kind is not GroupKind.FULL:
                named |= {
                    CachedBlock(group, hash_at(hashes, layout, spec, index))
                    for index in kept_for(layout, group, hit)
                }
    return named


def hash_at(hashes: list[bytes], layout: Layout, spec: KVCacheGroup, index: int) -> bytes:
    return hashes[(index + 1) * spec.block_size // layout.hash_block_size - 1]


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("name", LAYOUTS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, PROMPT_TOKENS - 1), min_size=1, max_size=8, unique=True))
def test_what_is_named_is_kept_and_only_that(name: str, boundaries: list[int]) -> None:
    """A window more is a window less for somebody else."""
    layout = LAYOUTS[name]
    plain, hinted = HintedEngine(layout), HintedEngine(layout)
    plain.run(PROMPT)
    hinted.run(PROMPT, kvroute_keep=boundaries)
    assert hinted.cached() == plain.cached() | blocks_named(layout, hinted, boundaries)


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("name", LAYOUTS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, PROMPT_TOKENS - 1), min_size=1, max_size=8, unique=True))
def test_our_own_cache_keeps_the_same(name: str, boundaries: list[int]) -> None:
    """The router tells both the same, and counts on the same of both."""
    layout = LAYOUTS[name]
    skip_unknown_drafters(layout)
    hinted = HintedEngine(layout)
    hinted.run(PROMPT, kvroute_keep=boundaries)
    assert kept_by_ours(layout, boundaries) == sparse(layout, hinted.cached())


def kept_by_ours(layout: Layout, boundaries: list[int]) -> set[CachedBlock]:
    """In steps of the smallest length at which a state can be kept."""
    step = layout.scheduler_block_size
    cache = OurCache(
        layout, 1 + 2 * layout.blocks_for(PROMPT_TOKENS), step, bytes(kv_cache_utils.NONE_HASH)
    )
    cache.add("a", PROMPT, None, RetentionHints(tuple(sorted(boundaries))))
    assert cache.admit("a", FirstStep(step))
    for end in range(step, PROMPT_TOKENS, step):
        cache.set_computed("a", end)
        assert cache.extend("a", min(step, PROMPT_TOKENS - end), 0)
    return sparse(layout, cache.cached())


def sparse(layout: Layout, blocks: set[CachedBlock]) -> set[CachedBlock]:
    """Those of windows and states; of a coarse block of full attention vLLM also keeps a part."""
    kinds = [group.kind for group in layout.groups]
    return {block for block in blocks if kinds[block.group] is not GroupKind.FULL}


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prompt_that_parts_there_hits_what_was_named(name: str) -> None:
    """This is what it is for: without hints the same prompts hit nothing."""
    layout = LAYOUTS[name]
    step = layout.scheduler_block_size
    plain, hinted = HintedEngine(layout), HintedEngine(layout)
    plain.run(PROMPT)
    hinted.run(PROMPT, kvroute_keep=NAMED)
    for boundary in NAMED:
        prompt = PROMPT[:boundary] + ANOTHER_END
        assert plain.hit(prompt) == 0
        assert hinted.hit(prompt) == boundary // step * step - (step if layout.eagle else 0)


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("prompt_tokens", [PROMPT_TOKENS, 640])
def test_the_next_turn_hits_the_response(name: str, prompt_tokens: int) -> None:
    """A session that goes on asks for the end of the response, which is known only when it has
    come."""
    layout = LAYOUTS[name]
    step = layout.scheduler_block_size
    plain, hinted = HintedEngine(layout), HintedEngine(layout)
    prompt = PROMPT[:prompt_tokens]
    for engine, hints in ((plain, {}), (hinted, {"kvroute_keep_end": True})):
        engine.run(prompt, max_tokens=100, **hints)
    computed = [*prompt, *[7] * 99]
    hit = len(computed) // step * step - (step if layout.eagle else 0)
    assert hinted.hit([*computed, *ANOTHER_END]) == hit
    assert plain.hit([*computed, *ANOTHER_END]) <= prompt_tokens


@pytest.mark.usefixtures("plugged")
def test_a_prompt_in_chunks_keeps_a_window_across_their_border() -> None:
    """Chunks of 128 tokens here: the window of 136 needs blocks of two."""
    hinted = HintedEngine(layouts.layout(layouts.full(), layouts.window(128), retention_interval=0))
    hinted.run(PROMPT, list(range(5_000, 5_500)), kvroute_keep=[136])
    assert hinted.hit(PROMPT[:136] + ANOTHER_END) == 128


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_hints_not_a_byte_of_the_events_differs(
    name: str, plugin: Callable[[], None]
) -> None:
    """Whoever installs the plug-in and sends nothing has the vLLM that there was before."""
    layout = LAYOUTS[name]
    before = [frame for engine in traffic(layout, 5, 60, hints=False) for frame in engine.take()]
    assert SingleTypeKVCacheManager.cache_blocks is UNPATCHED
    plugin()
    assert SingleTypeKVCacheManager.cache_blocks is not UNPATCHED
    after = [frame for engine in traffic(layout, 5, 60, hints=False) for frame in engine.take()]
    assert before == after
    assert len(before) > 30


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("learn_layout", [False, True], ids=["header", "learned"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_router_predicts_every_hit_to_the_token(
    name: str, learn_layout: bool, tmp_path: Path
) -> None:
    """Random traffic in a cache that is too small, two of three requests with hints."""
    skip_unknown_drafters(LAYOUTS[name])
    path = tmp_path / "stream.jsonl"
    assert record(path, LAYOUTS[name], 80, seed=3) > 20
    summary = ReplaySummary(path.name, learn_layout)
    predictions = list(replay(path, learn_layout, summary))
    assert [each for each in predictions if each.predicted != each.hit] == []
    assert summary.malformed == 0


# --- what is refused ------------------------------------------------------------------------------


class Log(logging.Handler):
    """The plug-in's lines: vLLM's loggers do not pass on what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("vllm.plugins.kvroute")
    logger.addHandler(log)
    logger.setLevel(logging.WARNING)  # before 0.31 it takes over that of vLLM's, ERROR here
    yield log
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(log)


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize(
    "hints",
    [
        *({"kvroute_keep": value} for value in HOSTILE_LENGTHS if value != [-TOO_LONG_FOR_VLLM]),
        *({"kvroute_keep_end": value} for value in HOSTILE_FLAGS if value != TOO_LONG_FOR_VLLM),
        {"kvroute_keep": [-(2**63)]},
        {"kvroute_keep_end": 2**64 - 1},
    ],
    ids=str,
)
def test_hostile_hints_change_nothing(hints: dict[str, Any]) -> None:
    """An exception in the scheduler ends the engine for everybody."""
    layout = LAYOUTS["gptoss"]
    plain, hinted = HintedEngine(layout), HintedEngine(layout)
    plain.run(PROMPT)
    ignored = retention.refusals.count
    hinted.run(PROMPT, **hints)
    assert hinted.cached() == plain.cached()
    assert retention.refusals.count == ignored + 1


@pytest.mark.usefixtures("plugged")
def test_ignored_hints_are_counted_in_few_lines(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client can send a million of them."""
    monkeypatch.setattr(retention, "refusals", retention._Refusals())
    engine = HintedEngine(LAYOUTS["gptoss"])
    for _ in range(12):
        engine.run(PROMPT[:40], kvroute_keep=[-1])
    assert ["(1 so far)" in line or "(10 so far)" in line for line in log.lines] == [True] * 2


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "dev"])
def test_an_unknown_version_stays_as_it_is(
    version: str,
    plugin: Callable[[], None],
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine runs on, and one line says why it takes no hints."""
    monkeypatch.setattr(vllm, "__version__", version)
    plugin()
    assert SingleTypeKVCacheManager.cache_blocks is UNPATCHED
    (line,) = log.lines
    assert line.startswith("kvroute: this vLLM stays as it is: its version is " + version)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (SingleTypeKVCacheManager, "cache_blocks"),
        (Scheduler, "_mamba_block_aligned_split"),
    ],
)
def test_an_unknown_signature_stays_as_it_is(
    owner: Any,
    method: str,
    plugin: Callable[[], None],
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork may have another one under a version that is known. Nothing is patched by halves."""

    def changed(self: Any, request: Any, something_new: int) -> None: ...

    monkeypatch.setattr(owner, method, changed)
    before = SingleTypeKVCacheManager.cache_blocks, Scheduler._mamba_block_aligned_split
    plugin()
    assert before == (SingleTypeKVCacheManager.cache_blocks, Scheduler._mamba_block_aligned_split)
    assert [line for line in log.lines if "takes no hints" in line and "changed(" in line]


@pytest.mark.usefixtures("plugged")
def test_a_second_load_changes_nothing() -> None:
    """vLLM loads plug-ins in several places, and says that they must bear it."""
    before = SingleTypeKVCacheManager.cache_blocks, Scheduler.__init__
    register()
    assert before == (SingleTypeKVCacheManager.cache_blocks, Scheduler.__init__)


# --- on the wire ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        CompletionRequest(prompt="a", vllm_xargs={"kvroute_keep": [640], "kvroute_keep_end": True}),
        ChatCompletionRequest(
            messages=[{"role": "user", "content": "a"}],
            vllm_xargs={"kvroute_keep": [640], "kvroute_keep_end": True},
        ),
    ],
    ids=["completion", "chat"],
)
def test_hints_in_a_body_reach_the_sampling_parameters(body: Any) -> None:
    """`vllm_xargs` takes text, numbers, and lists of them."""
    parameters = body.to_sampling_params(16, {})
    assert parameters.extra_args["kvroute_keep"] == [640]
    assert retention.read_hints(parameters.extra_args, 700) == retention.KeepHints((640,), True)
