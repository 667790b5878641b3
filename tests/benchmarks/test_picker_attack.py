"""An endpoint picker under attack stays within its bounds, at a size that takes seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from benchmarks.picker_attack import RESET, Bounds, attacked
from tests.support.engine_stub import EngineStub
from tests.support.router_process import RouterProcess, router_process

STREAMS = 500
BOUNDS = Bounds(body_bytes=1 << 20, buffered_bytes=32 << 20, body_s=3.0, idle_s=3.0)
MEMORY_MB = 400
"""Bodies of 32 MB, what gRPC has read ahead, and what the process keeps of both."""
UNFINISHED_MB = STREAMS * BOUNDS.body_bytes >> 20
"""gRPC holds a message that is not complete, which counts nowhere: one a stream."""


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process(BOUNDS.config()) as process:
        yield process


@pytest.fixture
async def stub(router: RouterProcess) -> AsyncIterator[EngineStub]:
    async with EngineStub("attacked") as stub, router.serving(stub):
        yield stub


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("silent", {"400"}),
        ("beginning", {"400"}),
        ("endless", {"400", "413", "503"}),  # 400: an attacker on a busy machine is slow
        ("idle", {"sent on, closed"}),
        ("left", {"sent on"}),
        ("large", {"400", "503", RESET}),
    ],
)
async def test_hundreds_of_hostile_streams_cost_a_bounded_amount(
    router: RouterProcess, stub: EngineStub, name: str, told: set[str]
) -> None:
    """All are told why or ended, honest gateways are served meanwhile, nothing stays booked."""
    found: dict[str, Any] = await attacked(router, stub, name, STREAMS, BOUNDS)
    assert set(found["told"]) <= told, found
    assert sum(found["told"].values()) == STREAMS
    most_mb = found["mb_before"] + MEMORY_MB + (UNFINISHED_MB if name == "large" else 0)
    assert found["mb_highest"] < most_mb, found
    assert found["files_after"] <= found["files_before"] + 8, found
    assert found["honest"].get("sent on", 0) > 0, found
    assert set(found["honest"]) <= {"sent on", "503"}, found
    router.check_log()
