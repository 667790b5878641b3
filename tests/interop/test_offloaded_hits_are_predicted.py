"""What vLLM's scheduler finds on the GPU and in its offloading tier, the index predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.recordings import ReplaySummary, replay
from tests.interop.record_offloading import record, variants


@pytest.mark.parametrize("name", [name for name in variants() if "_chunk4" in name])
def test_every_hit_of_the_connector_is_predicted(name: str, tmp_path: Path) -> None:
    """Another workload than the recorded ones'; the layout is learned."""
    path = tmp_path / f"{name}.jsonl.gz"
    layout, offloading, options = variants()[name]
    assert record(path, layout, offloading, **options | {"seed": 4711}) > 10
    summary = ReplaySummary(name, learn_layout=True)
    assert [each for each in replay(path, True, summary) if each.predicted != each.hit] == []
