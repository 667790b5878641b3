"""Records streams of an engine that offloads, in the format of `tests/conformance/streams`.

    .venv-interop/bin/python -m tests.interop.record_offloading DIRECTORY [NAME ...]

vLLM's own scheduler and connector serve a seeded workload: prompts that continue others, part from
them inside a chunk, or are a multiple of a chunk, in caches that are too small for all of them.
Every prompt is also a query, and its hit is what the connector then finds.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from kvevents.events import GroupSpec
from router.cli.recordings import Header, Query, RecordingWriter
from tests.interop import layouts
from tests.interop.layouts import Layout
from tests.interop.offloading_engine import Offloading, OffloadingEngine

LAYOUTS = {
    "full": layouts.layout(layouts.full()),
    "gptoss": layouts.layout(layouts.full(), layouts.window(128), retention_interval=0),
    "gemma": layouts.layout(layouts.window(64), layouts.window(64), layouts.full()),
    "two_windows": layouts.layout(layouts.full(), layouts.window(50), layouts.window(100)),
    "swa": layouts.layout(layouts.window(100)),
    "mamba": layouts.layout(layouts.mamba(), layouts.full()),
    "mixed": layouts.layout(layouts.full(32), layouts.window(50, 16)),
    "llama4": layouts.layout(layouts.full(), layouts.chunked(128)),
    "mixed3": layouts.layout(layouts.full(64), layouts.window(50), layouts.window(100, 32)),
    "drafter_in_full": layouts.layout(
        layouts.full(), layouts.window(128), eagle=(0,), retention_interval=0
    ),
    "drafter_in_window": layouts.layout(
        layouts.full(), layouts.window(64), eagle=(1,), retention_interval=0
    ),
    "drafter_by_itself": layouts.layout(
        layouts.full(),
        layouts.window(50),
        layouts.full(),
        eagle=(2,),
        retention_interval=0,
        own_spec=True,
    ),
    "drafter_beside_mamba": layouts.layout(layouts.full(), layouts.mamba(), eagle=(0,)),
}
CHUNKS = (1, 2, 4, 8)


@dataclass
class Workload:
    """Prompts over a small vocabulary, each from a few before it."""

    unit: int
    """Tokens of a chunk."""
    seed: int
    known: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def prompt(self) -> list[int]:
        """A new prompt, an old one again, or an old one's beginning with another end."""
        start: list[int] = []
        if self.known and self._random.random() < 0.85:
            start = self._random.choice(self.known[-14:])
            if self._random.random() < 0.6:
                start = start[: self.length(len(start))]
        tail = self.length(max(5 * self.unit, 160)) if self._random.random() < 0.6 else 0
        prompt = (start + self._tokens(tail or (not start and 40)))[:700]
        self.known.append(prompt)
        return prompt

    def length(self, limit: int) -> int:
        """A length from 1 to *limit*, often of whole blocks."""
        length = self._random.randint(1, max(1, limit))
        if self._random.random() < 0.5:
            step = self._random.choice((16, self.unit))
            length = max(1, length // step * step + self._random.choice((0, 0, 0, 1, -1)))
        return length

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(count)]

    def chance(self, share: float) -> bool:
        """True in *share* of the calls."""
        return self._random.random() < share


def record(path: Path, layout: Layout, offloading: Offloading, steps: int, seed: int) -> int:
    """Write one stream; returns how many of its queries have a hit.

    Args:
        path: The file.
        layout: Groups and sizes.
        offloading: The tier.
        steps: How many times prompts are served.
        seed: Of the workload.
    """
    largest = max(group.block_size for group in layout.groups)
    workload = Workload(offloading.blocks_per_chunk * largest, seed)
    gpu_blocks = 1 + 2 * layout.blocks_for(700)
    engine = OffloadingEngine(layout, gpu_blocks, offloading)
    hits = 0
    with RecordingWriter(path, header_of(path, layout)) as writer:
        for _ in range(steps):
            prompts = [workload.prompt() for _ in range(1 + workload.chance(0.2))]
            for prompt in prompts:
                hit = engine.hit(prompt)
                hits += hit > 0
                writer.query(Query(prompt, hit))
            engine.run(prompts, max_tokens=20 if workload.chance(0.2) else 1)
            if workload.chance(0.25):
                engine.reset()
            for frame in engine.frames:
                writer.frame(frame)
            engine.frames.clear()
    return hits


def header_of(path: Path, layout: Layout) -> Header:
    """What is known of the recorded engine.

    Args:
        path: Named after it.
        layout: Groups and sizes.
    """
    return Header(
        groups=[
            GroupSpec(
                group.kind.value, group.block_size, group.sliding_window, group.attention_chunk_size
            )
            for group in layout.groups
        ],
        hash_block_size=layout.hash_block_size,
        scheduler_block_size=layout.scheduler_block_size,
        eagle=layout.eagle if isinstance(layout.eagle, bool) else list(layout.eagle),
        name=path.name.split(".")[0],
        source="vllm 0.33.0 scheduler",
    )


def variants() -> dict[str, tuple[Layout, Offloading, dict[str, Any]]]:
    """Every stream by name: layout, tier, and the workload's options."""
    found = {}
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        for chunk in CHUNKS:
            for described in (True, False):
                cpu_chunks = max(4, layout.blocks_for(2400) // chunk)
                full_name = f"offload_{name}_chunk{chunk}{'_described' if described else ''}"
                found[full_name] = (
                    layout,
                    Offloading(chunk, cpu_chunks, described),
                    {"steps": 70, "seed": 10 * seed + chunk},
                )
    return found


def main(directory: Path, names: list[str]) -> None:
    """Record the named streams, or all."""
    for name, (layout, offloading, options) in variants().items():
        if not names or name in names:
            hits = record(directory / f"{name}.jsonl.gz", layout, offloading, **options)
            print(name, hits, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
