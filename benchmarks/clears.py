"""How long does it hold up the event loop when a whole fleet is cleared at once?

    python -m benchmarks.clears --sources 64 --blocks 16384

Every source holds blocks that no other has. Each is cleared by one event, and what that leaves is
taken away in slices, as the feed does in its turns. Slices are in processor time.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.figures import BLOCK_SIZE, processor_seconds, prompt_tokens, report
from kvevents.codec import encode
from kvevents.events import AllBlocksCleared, BlockStored, EventBatch
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints

_BATCH_BLOCKS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=16_384, help="of each source")
    options = parser.parse_args()
    index = PrefixIndex()
    sources = [SourceId(f"replica-{number}") for number in range(options.sources)]
    for number, source in enumerate(sources):
        _fill(index, source, number, options.blocks)
    clear = encode(EventBatch(0.0, [AllBlocksCleared()]))
    clears_ms = []
    for source in sources:
        began = time.perf_counter()
        index.apply(source, clear)
        clears_ms.append((time.perf_counter() - began) * 1e3)
    slices_ms = []
    has_more = True

    def tidy() -> None:
        nonlocal has_more
        has_more = index.tidy()

    while has_more:
        slices_ms.append(processor_seconds(tidy) * 1e3)
    report(
        "clears",
        sources=options.sources,
        blocks=options.blocks,
        longest_clear_ms=round(max(clears_ms), 3),
        slices=len(slices_ms),
        mean_slice_ms=round(sum(slices_ms) / len(slices_ms), 2),
        longest_slice_ms=round(max(slices_ms), 2),
    )


def _fill(index: PrefixIndex, source: SourceId, number: int, blocks: int) -> None:
    index.add(source, LayoutHints(hash_seeds=()))
    tokens = prompt_tokens(_BATCH_BLOCKS * BLOCK_SIZE, number)
    first = number * blocks + 1
    for at in range(first, first + blocks, _BATCH_BLOCKS):
        hashes = list(range(at, min(at + _BATCH_BLOCKS, first + blocks)))
        parent = at - 1 if at > first else None
        stored = BlockStored(hashes, parent, tokens[: len(hashes) * BLOCK_SIZE], "GPU", 0)
        index.apply(source, encode(EventBatch(0.0, [stored])))


if __name__ == "__main__":
    main()
