"""One random workload through vLLM's `KVCacheManager` and ours: every result, every cached block
and every refusal is the same.

Our router predicts the caches of vLLM, and our manager can replace its own, so "nearly the same" is
wrong.
"""

from __future__ import annotations

import zlib

import pytest

from tests.interop import layouts
from tests.interop.layouts import Layout
from tests.interop.lockstep import Lockstep
from tests.interop.our_cache import OurCache
from tests.interop.vllm_cache import VllmCache
from tests.interop.workload import Pressure, Workload

AMPLE = Pressure(sequences=400.0, resets=0.02)
PRESSURES = {
    "starved": Pressure(sequences=0.4),
    "tight": Pressure(sequences=0.8),
    "holes": Pressure(sequences=1.2, evictions=0.2),
    "roomy": Pressure(sequences=3.0),
    "ample": AMPLE,
    "lower tier": Pressure(sequences=1.2, external=0.4),
}

NUM_STEPS = 150


def workload(
    layout: Layout, pressure: Pressure, seed: int, partial_tails: bool = False
) -> Workload:
    longest = Workload.max_prompt_scheduler_blocks * layout.scheduler_block_size
    num_blocks = 2 + int(layout.blocks_for(longest) * pressure.sequences)
    max_in_flight_tokens = Workload.max_step_scheduler_blocks * layout.scheduler_block_size
    theirs = VllmCache(layout, num_blocks, max_in_flight_tokens, partial_tails)
    mine = OurCache(layout, num_blocks, max_in_flight_tokens, theirs.none_hash)
    return Workload(Lockstep(theirs, mine, same_entries=not partial_tails), layout, pressure, seed)


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("name", layouts.ALL)
def test_every_result_and_every_cached_block_is_the_same(name: str, pressure: str) -> None:
    """Hits of new and of random prompts, refusals, cached (group, hash) pairs and free blocks,
    after every operation."""
    run = workload(
        layouts.ALL[name], PRESSURES[pressure], seed=zlib.crc32(f"{name} {pressure}".encode())
    )
    for _ in range(NUM_STEPS):
        run.step()
    assert run.hits or pressure not in ("roomy", "ample"), (
        "there is much to compare where there is room"
    )
    assert run.refusals or pressure != "starved" or name == "chunk_16", (
        "a chunk of one block gives back all but one"
    )


@pytest.mark.parametrize(
    "name", [name for name, layout in layouts.ALL.items() if layout.has_coarse_groups]
)
def test_vllms_entries_for_half_full_blocks_change_no_hit(name: str) -> None:
    """vLLM caches a half-full block of coarse full attention; as long as nothing is evicted, only
    its map may show that."""
    run = workload(layouts.ALL[name], AMPLE, seed=zlib.crc32(name.encode()), partial_tails=True)
    for _ in range(NUM_STEPS):
        run.step()
    assert run.hits
