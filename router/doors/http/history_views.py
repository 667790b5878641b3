"""The last hour, of the router and of replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from router.doors.http.views import View
from router.telemetry.history import STEP_S, Hour


class HourView(View, frozen=True, kw_only=True):
    """The last hour, a value for each step, the oldest first; the last step still runs. Null where
    there was nothing to measure."""

    requests_per_s: list[float | None]
    reused_share: list[float | None]
    """The share of prompt tokens that engines reported as cached."""
    first_byte_s: list[float | None]
    """The time to first byte that nine of ten responses kept."""
    mispredicted_share: list[float | None]
    """The share of the predictions that could be compared."""
    gpu_blocks: list[float | None]
    """Blocks held at the end of the step, over all groups."""
    removed_blocks: list[int]
    """Blocks that left the GPUs in this time, by KV cache group: evicted, or slid out of a
    window."""


class HistoryView(View, frozen=True, kw_only=True):
    """The last hour of the router, and of the replicas that were asked for."""

    now: float
    """Unix time."""
    step_s: float
    router: HourView
    replicas: dict[str, HourView]


def history_view(hours: Mapping[str | None, Hour]) -> HistoryView:
    """The last hour: of the router, under None, and of some replicas."""
    return HistoryView(
        now=round(time.time(), 3),
        step_s=STEP_S,
        router=_hour(hours[None]),
        replicas={name: _hour(hour) for name, hour in hours.items() if name is not None},
    )


def _hour(hour: Hour) -> HourView:
    steps = {
        name: [None if math.isnan(value) else round(value, 4) for value in values]
        for name, values in hour.values.items()
    }
    return HourView(**steps, removed_blocks=hour.removed_blocks)
