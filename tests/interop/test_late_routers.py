"""Routers that start late read the whole ring of vLLM's own publisher."""

from __future__ import annotations

import pytest

from benchmarks.late_routers import Ring, follow_late


@pytest.mark.parametrize("replay_hwm", [1000, None], ids=["before 0.33", "as it is"])
@pytest.mark.parametrize(("batches", "tokens"), [(4000, 320), (2500, 8192)])
@pytest.mark.timeout(600)
async def test_ten_late_routers_are_live_and_whole(
    batches: int, tokens: int, replay_hwm: int | None
) -> None:
    """3,812 of 4,000 batches came, 2,361 of 2,500 of long prompts, and the source was suspect from
    then on: the publisher drops what is not taken as fast as it is sent."""
    outcomes = await follow_late(Ring(batches, tokens, replay_hwm), routers=10, limit_s=240)
    assert [outcome for outcome in outcomes if not outcome.is_whole] == []
