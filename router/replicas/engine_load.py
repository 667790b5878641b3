"""What an engine's own metrics say about its load: the few gauges that matter, read from Prometheus
text.

Names by engine: vLLM's `vllm:*` (older versions say `gpu_cache_usage_perc` for
`kv_cache_usage_perc`), SGLang's `sglang:*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")

MAX_REQUESTS = 10_000_000
"""A larger value is taken for nonsense, as is NaN."""

# One sample a line: name, perhaps labels, value, perhaps a time. The labels do not matter.
_NAMES = b"|".join((*_RUNNING, *_WAITING, *_USAGE))
_SAMPLE = re.compile(rb"^(%b)(?:\{[^\n]*\})?[ \t]+([^ \t\r\n]{1,32})" % _NAMES, re.MULTILINE)


class EngineLoad(msgspec.Struct, frozen=True):
    """Load as the engine counts it, over all its data-parallel ranks."""

    running: int
    waiting: int
    kv_cache_usage: float | None
    """Share of KV blocks that running requests hold, of the fullest rank; None if it is not
    reported."""


def parse_engine_load(text: bytes) -> EngineLoad | None:
    """Read an engine's metrics; None if they have no count of running requests. Never raises."""
    values: dict[bytes, list[float]] = {}
    for name, value in _samples(text):
        values.setdefault(name, []).append(value)
    running = _first(values, _RUNNING)
    if not running:
        return None
    usage = _first(values, _USAGE)
    waiting = _first(values, _WAITING)
    return EngineLoad(int(sum(running)), int(sum(waiting)), min(max(usage), 1.0) if usage else None)


def _samples(text: bytes) -> Iterator[tuple[bytes, float]]:
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match[2])
        except ValueError:
            continue
        if 0 <= value <= MAX_REQUESTS:
            yield match[1], value


def _first(values: dict[bytes, list[float]], names: tuple[bytes, ...]) -> list[float]:
    """The samples of the first name that has any."""
    return next((values[name] for name in names if name in values), [])
