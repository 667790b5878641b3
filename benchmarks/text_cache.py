"""How much memory does the cache of tokenised text take, against its bound?

Conversations grow turn by turn, each turn after all before it, as chats do: most look-ups hit, old
segments are renewed, and what no conversation uses any more goes. The cache is filled several times
over; then the growth of the process is compared with the bound.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from array import array
from pathlib import Path

from benchmarks.figures import report
from router.prompt.local.cache import SegmentCache

MIB = 1024 * 1024
_ALPHABETS = {"ascii": "abcdefgh ", "latin": "abcdéfgh ", "cjk": "日本語中文字 "}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bound-mib", type=int, default=16, help="of the cache")
    parser.add_argument("--chars", type=int, nargs="+", default=[400, 4000], help="a turn")
    parser.add_argument("--chars-per-token", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8, help="of a conversation")
    parser.add_argument("--at-once", type=int, default=1500, help="conversations")
    parser.add_argument("--fills", type=int, default=3, help="how many times the bound is put in")
    parser.add_argument("--alphabet", choices=sorted(_ALPHABETS), default="ascii")
    options = parser.parse_args()
    for chars in options.chars:
        report("text_cache", chars=chars, alphabet=options.alphabet, **in_a_child(options, chars))


def in_a_child(options: argparse.Namespace, chars: int) -> dict[str, float]:
    """Measure in a process of its own, so that nothing is left of the measurement before."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        grown, held = _growth(options, chars)
        os.write(writer, f"{grown} {held}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        grown, held = map(int, result.read().split())
    os.waitpid(child, 0)
    bound = options.bound_mib * MIB
    return {
        "bound_mib": options.bound_mib,
        "counted_mib": round(held / MIB, 1),
        "rss_mib": round(grown / MIB, 1),
        "rss_per_bound": round(grown / bound, 3),
    }


def _growth(options: argparse.Namespace, chars: int) -> tuple[int, int]:
    """Return the bytes that the process grew by, and those that the cache counts."""
    cache, rng = SegmentCache(options.bound_mib * MIB), random.Random(1)
    letters = _ALPHABETS[options.alphabet]
    gc.collect()
    before, written, number = _rss_bytes(), 0, 0
    conversations: list[list[tuple[int, int]]] = [[] for _ in range(options.at_once)]
    while written < options.fills * options.bound_mib * MIB:
        turns = rng.choice(conversations)
        if len(turns) == options.turns:
            turns.clear()
        number += 1
        turns.append((number, rng.randint(chars // 2, chars * 3 // 2)))
        # As a request does: each text is a string of its own, whoever else has an equal one.
        keys = [(None, _text(letters, seed, length)) for seed, length in turns]
        for key, found in zip(keys, cache.get_all([*keys]), strict=True):
            if found is None:
                ids = array("I", range(len(key[1]) // options.chars_per_token))
                cache.put(key, ids)
                written += len(key[1]) + 4 * len(ids)
    gc.collect()
    return _rss_bytes() - before, cache.statistics().held_bytes


def _text(letters: str, seed: int, length: int) -> str:
    head = f"<|im_start|>{seed} "
    return head + letters * (length // len(letters))


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
