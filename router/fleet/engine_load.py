"""Reads an engine's load from its own metrics: the few gauges that matter, from Prometheus text.

Names by engine: vLLM's `vllm:*` (older versions have `gpu_cache_usage_perc` for
`kv_cache_usage_perc`), SGLang's `sglang:*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from kvevents.field_docs import gauge

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")

_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_BLOCKS = re.compile(rb'\bnum_gpu_blocks="([0-9]{1,9})"')
_BLOCK_SIZE = re.compile(rb'\bblock_size="([0-9]{1,6})"')
_TOKENS = re.compile(
    rb"^sglang:max_total_num_tokens(?:\{[^\n]*\})?[ \t]+([0-9]{1,12})(?:\.0)?\b", re.MULTILINE
)

MAX_REQUESTS = 10_000_000
"""A larger value is ignored, as is NaN."""

# One sample a line: name, perhaps labels, value, perhaps a time.
_NAMES = b"|".join((*_RUNNING, *_WAITING, *_USAGE))
_SAMPLE = re.compile(rb"^(%b)(\{[^\n]*\})?[ \t]+([^ \t\r\n]{1,32})" % _NAMES, re.MULTILINE)
# vLLM's label and SGLang's; no other label matters.
_RANK = re.compile(rb'[{,](?:engine|dp_rank)="([0-9]{1,5})"')


class EngineRankLoad(msgspec.Struct, frozen=True):
    """Load of one data-parallel rank."""

    dp_rank: int
    running: int
    waiting: int

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self.running + self.waiting


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load as the engine counts it, over all its data-parallel ranks."""

    running: Annotated[int, gauge("kvroute_engine_running_requests")]
    """Requests that run at a replica, by the engine's own gauge; 0 if that has not been read
    for `health.engine_load_stale_after_s`."""
    waiting: Annotated[int, gauge("kvroute_engine_waiting_requests")]
    """Requests that wait at a replica, by the engine's own gauge; 0 if that has not been read
    for `health.engine_load_stale_after_s`."""
    kv_cache_usage: Annotated[float | None, gauge("kvroute_engine_cache_usage")]
    """Share of a replica's KV blocks that running requests hold, by the engine's own gauge; missing
    where it reports none. Of several ranks, that of the fullest one."""
    ranks: tuple[EngineRankLoad, ...] = ()
    """Each rank, in order; empty where there is one, or ranks are not distinguished."""
    cache_blocks: int | None = None
    """KV blocks on the GPU, of the smallest rank; None if it is not reported."""
    cache_tokens: int | None = None
    """Tokens that fit into them, where one block is one of all layers; None if it is not
    reported."""

    @property
    def dp_ranks(self) -> list[int]:
        return [rank.dp_rank for rank in self.ranks]


class _GaugeSample(NamedTuple):
    dp_rank: int | None
    value: float


def parse_engine_load(text: bytes) -> EngineLoad | None:
    """Read an engine's metrics; None if they have no count of running requests. Never raises."""
    samples: dict[bytes, list[_GaugeSample]] = {}
    for name, sample in _samples(text):
        samples.setdefault(name, []).append(sample)
    running, waiting = _first(samples, _RUNNING), _first(samples, _WAITING)
    if not running:
        return None
    usage = [sample.value for sample in _first(samples, _USAGE)]
    blocks, tokens = _cache_sizes(text)
    return EngineLoad(
        int(sum(sample.value for sample in running)),
        int(sum(sample.value for sample in waiting)),
        min(max(usage), 1.0) if usage else None,
        tuple(_ranks(_by_rank(running), _by_rank(waiting))),
        blocks,
        tokens,
    )


def _cache_sizes(text: bytes) -> tuple[int | None, int | None]:
    """Blocks and tokens of the smallest rank's cache."""
    blocks, tokens = [], [int(match[1]) for match in _TOKENS.finditer(text)]
    for config in _CACHE.finditer(text):
        count, size = _BLOCKS.search(config[1]), _BLOCK_SIZE.search(config[1])
        if count is not None:
            blocks.append(int(count[1]))
            tokens += [int(count[1]) * int(size[1])] if size is not None else []
    return min(blocks, default=None), min(tokens, default=None)


def _samples(text: bytes) -> Iterator[tuple[bytes, _GaugeSample]]:
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match[3])
        except ValueError:
            continue
        if 0 <= value <= MAX_REQUESTS:
            rank = _RANK.search(match[2] or b"")
            yield match[1], _GaugeSample(None if rank is None else int(rank[1]), value)


def _first(
    samples: dict[bytes, list[_GaugeSample]], names: tuple[bytes, ...]
) -> list[_GaugeSample]:
    """The samples of the first name that has any."""
    return next((samples[name] for name in names if name in samples), [])


def _by_rank(samples: list[_GaugeSample]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for dp_rank, value in samples:
        if dp_rank is not None:
            sums[dp_rank] = sums.get(dp_rank, 0) + int(value)
    return sums


def _ranks(running: dict[int, int], waiting: dict[int, int]) -> Iterator[EngineRankLoad]:
    for dp_rank in sorted(running) if len(running) > 1 else ():
        yield EngineRankLoad(dp_rank, running[dp_rank], waiting.get(dp_rank, 0))
