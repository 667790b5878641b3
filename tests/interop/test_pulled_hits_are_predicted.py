"""What another engine could pull from vLLM's tier in memory, the index says of that tier alone."""

from __future__ import annotations

import pytest

from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.interop.offloading_engine import OffloadingEngine
from tests.interop.record_offloading import Workload, variants
from tests.support.index import match_tier

HOLDER = SourceId("holder")


@pytest.mark.parametrize(
    "name", [name for name in variants() if "_chunk2" in name or "_chunk4_described" in name]
)
def test_what_a_tier_gives_an_empty_engine_is_predicted(name: str) -> None:
    """vLLM's `p2p` tier asks a peer's memory by the lookup with which the peer's own connector asks
    it when nothing is on the GPU. So the GPU is emptied, and the index, which is not told, has to
    leave it out."""
    layout, offloading, _ = variants()[name]
    largest = max(group.block_size for group in layout.groups)
    workload = Workload(offloading.blocks_per_chunk * largest, 815)
    engine = OffloadingEngine(layout, 1 + 2 * layout.blocks_for(700), offloading)
    index = PrefixIndex()
    # Events do not tell of chunked attention.
    index.add(HOLDER, LayoutHints(groups=tuple(layout.groups), eagle=layout.eagle))
    pulled = 0
    for _ in range(40):
        engine.run([workload.prompt() for _ in range(3)])
        for frame in engine.frames:
            index.apply(HOLDER, frame)
        engine.frames.clear()
        asked = [*workload.known[-6:], *([*known, 1, 2, 3] for known in workload.known[-6:])]
        predicted = [match_tier(index, index.prepare(prompt), HOLDER, "CPU") for prompt in asked]
        engine.reset()
        assert predicted == [engine.hit(prompt) for prompt in asked]
        pulled += sum(predicted)
    assert pulled > 0
