"""Records streams of an engine with the plug-in, in the format of `tests/conformance/streams`.

    .venv-interop/bin/python -m tests.interop.record_hinted DIRECTORY [NAME ...]

vLLM's own scheduler serves a seeded workload in a cache that is too small for it; two of three
requests name what to keep. Every prompt is also a query, and its hit is what the scheduler's cache
then finds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from kvroute_vllm.plugin import register
from router.cli.recordings import Query, RecordingWriter
from tests.interop import layouts
from tests.interop.hinted_engine import HintedEngine
from tests.interop.layouts import Layout
from tests.interop.record_offloading import Workload, header_of

LAYOUTS = {
    "gptoss": layouts.layout(layouts.full(), layouts.window(128), retention_interval=0),
    "gemma": layouts.layout(
        layouts.window(64), layouts.window(64), layouts.full(), retention_interval=0
    ),
    "windows_alone": layouts.layout(layouts.window(33), layouts.window(100), retention_interval=0),
    "mamba": layouts.layout(layouts.full(), layouts.mamba(), retention_interval=0),
    "mixed": layouts.layout(layouts.full(64), layouts.window(50), retention_interval=0),
    "drafter_in_full": layouts.layout(
        layouts.full(), layouts.window(128), eagle=(0,), retention_interval=0
    ),
    "drafter_in_window": layouts.layout(
        layouts.full(), layouts.window(64), eagle=(1,), retention_interval=0
    ),
    "drafter_beside_mamba": layouts.layout(
        layouts.full(), layouts.mamba(), eagle=(0,), retention_interval=0
    ),
}


def hints_for(workload: Workload, prompt: list[int]) -> dict[str, Any]:
    """Up to three places in the prompt, and sometimes the end of the response."""
    if not workload.chance(0.67):
        return {}
    places = [workload.length(len(prompt)) for _ in range(1 + workload.chance(0.5) * 2)]
    return {"kvroute_keep": places, "kvroute_keep_end": workload.chance(0.3)}


def traffic(layout: Layout, seed: int, steps: int, hints: bool = True) -> Iterator[HintedEngine]:
    """Serve the workload; yields the engine after each step.

    Args:
        layout: Groups and sizes.
        seed: Of the workload.
        steps: How many times prompts are served.
        hints: Whether requests name what to keep.
    """
    workload = Workload(layout.scheduler_block_size, seed)
    engine = HintedEngine(layout)
    for _ in range(steps):
        prompts = [workload.prompt() for _ in range(1 + workload.chance(0.2))]
        extra_args = hints_for(workload, prompts[0])
        for prompt in prompts:
            engine.ask(prompt)
        max_tokens = 40 if workload.chance(0.3) else 1
        engine.run(*prompts, max_tokens=max_tokens, **(extra_args if hints else {}))
        yield engine


def record(path: Path, layout: Layout, steps: int, seed: int) -> int:
    """Write one stream; returns how many of its queries have a hit.

    Args:
        path: The file.
        layout: Groups and sizes.
        steps: How many times prompts are served.
        seed: Of the workload.
    """
    hits = 0
    with RecordingWriter(path, header_of(path, layout)) as writer:
        for engine in traffic(layout, seed, steps):
            for prompt, hit in engine.asked:
                hits += hit > 0
                writer.query(Query(prompt, hit))
            engine.asked.clear()
            for frame in engine.take():
                writer.frame(frame)
    return hits


def main() -> None:
    directory, *names = sys.argv[1:]
    register()
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        if not names or name in names:
            path = Path(directory) / f"hints_{name}.jsonl.gz"
            print(path, record(path, layout, 120, seed), "queries with hits")


if __name__ == "__main__":
    main()
