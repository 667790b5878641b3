"""How many requests replicas can serve without reuse: the unit of request rates."""

from __future__ import annotations

from benchmarks.simulation.workload import WorkloadSize
from offload.engine.core.time_model import TimeModel


def cold_requests_per_s(size: WorkloadSize, replicas: int, time_model: TimeModel) -> float:
    """Requests of the workload's mean lengths that *replicas* serve without reuse, not counting the
    overhead of steps."""
    prefill_s = size.prompt_tokens / time_model.prefill_tokens_per_s
    decode_s = size.answer_tokens / time_model.decode_tokens_per_s
    return size.requests * replicas / (prefill_s + decode_s) / time_model.slowdown
