"""How long does one match take, by prompt length and number of replicas?

Replica i of n holds the first (i + 1) / n of the prompt, in a full-attention and a sliding-window
group. The peer in the same run walks a group-blind index (block hash -> replicas) and gets the
hashes of the prompt for free.
"""

from __future__ import annotations

import argparse
from array import array
from functools import partial

from benchmarks.figures import (
    BLOCK_SIZE,
    block_hash,
    filled_index,
    median_seconds,
    prompt_tokens,
    report,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768, 131_072])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--max-blocks",
        type=int,
        default=3_000_000,
        help="leave out settings that hold more than this",
    )
    options = parser.parse_args()
    for count in options.tokens:
        for replicas in options.replicas:
            if count // BLOCK_SIZE * replicas <= options.max_blocks:
                _measure(count, replicas, options.repeats)


def _measure(count: int, replicas: int, repeats: int) -> None:
    tokens = prompt_tokens(count)
    unknown = array("I", prompt_tokens(count, seed=1))
    holders = _blind_holders(count // BLOCK_SIZE, replicas)
    theirs = median_seconds(lambda: _blind_match(holders, count // BLOCK_SIZE), repeats)
    index, packed = filled_index(replicas, tokens), array("I", tokens)
    known_s, list_s, unknown_s = (
        median_seconds(partial(index.match, prompt), repeats)
        for prompt in (packed, tokens, unknown)
    )
    report(
        "index_match",
        tokens=count,
        replicas=replicas,
        milliseconds=round(known_s * 1e3, 4),
        from_a_list_milliseconds=round(list_s * 1e3, 4),
        unknown_prompt_milliseconds=round(unknown_s * 1e3, 4),
        group_blind_milliseconds=round(theirs * 1e3, 3),
        ratio=round(known_s / theirs, 3),
    )


def _blind_holders(blocks: int, replicas: int) -> dict[int, set[int]]:
    return {
        block_hash(0, index): {
            replica for replica in range(replicas) if index < blocks * (replica + 1) // replicas
        }
        for index in range(blocks)
    }


def _blind_match(holders: dict[int, set[int]], blocks: int) -> dict[int, int]:
    found: dict[int, int] = {}
    alive: set[int] | None = None
    for index in range(blocks):
        here = holders.get(block_hash(0, index), set())
        alive = set(here) if alive is None else alive & here
        if not alive:
            break
        for replica in alive:
            found[replica] = (index + 1) * BLOCK_SIZE
    return found


if __name__ == "__main__":
    main()
