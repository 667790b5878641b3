"""What does the cache manager cost an engine's scheduler, by layout and prompt length, compared
with vLLM's own in the same run?

- `allocate_cache_free`: a prompt that misses is looked up, gets blocks in prefill chunks, is cached
  and freed, in a pool full of older prompts, so that every new block evicts one. With events, these
  are taken after every request.
- `hit_lookup`: a prompt that is cached but for its last token is looked up.

Run it in the environment of `make interop`, which has vLLM; elsewhere it prints only our figures.
Hashing is not included: requests bring their hashes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.figures import prompt_tokens, report
from kvevents.hashing import HashChain
from offload.request import CacheRequest, RequestHasher
from tests.interop import our_cache
from tests.interop.layouts import Layout, chunked, full, layout, mamba, window

try:
    from tests.interop import vllm_cache
except ImportError:  # only the environment of `make interop` has vLLM
    vllm_cache = None  # type: ignore[assignment, unused-ignore]

LAYOUTS = {
    "full": layout(full()),
    "full_window": layout(full(), window(128)),
    "full_five_windows": layout(full(), *[window(1024)] * 5),
    "full_chunk": layout(full(), chunked(8192)),
    "full_three_mambas": layout(full(256), *[mamba(256)] * 3),
    "mixed_sizes": layout(full(64), window(1024)),
}
PREFILL_TOKENS = 8192
HELD_PROMPTS = 2
"""The pool holds so many prompts. One more than that take turns, so each finds its blocks
evicted."""


class Peer(Protocol):
    """One manager and its requests."""

    def request(self, name: str, token_ids: Sequence[int]) -> Any: ...

    def prefill(self, request: Any) -> None: ...

    def look_up(self, request: Any) -> int: ...


class Ours:
    def __init__(self, layout: Layout, num_blocks: int, events: bool) -> None:
        self._manager = our_cache.build_manager(layout, num_blocks, PREFILL_TOKENS, events)
        self._hasher = RequestHasher(HashChain.from_seed("sha256"), layout.hash_block_size)
        self._events = events

    def request(self, name: str, token_ids: Sequence[int]) -> CacheRequest:
        return CacheRequest(name, token_ids, self._hasher)

    def prefill(self, request: CacheRequest) -> None:
        manager, end = self._manager, request.num_tokens
        computed = manager.get_computed_blocks(request)
        done = computed.num_tokens
        manager.start_step()
        assert (
            manager.allocate_slots(request, min(PREFILL_TOKENS, end - done), computed) is not None
        )
        done = request.num_computed_tokens = done + min(PREFILL_TOKENS, end - done)
        while done < end:
            manager.start_step()
            assert manager.allocate_slots(request, min(PREFILL_TOKENS, end - done)) is not None
            done = request.num_computed_tokens = done + min(PREFILL_TOKENS, end - done)
        manager.free(request.request_id)
        request.num_computed_tokens = 0
        if self._events:
            manager.take_events()

    def look_up(self, request: CacheRequest) -> int:
        return self._manager.get_computed_blocks(request).num_tokens


class Theirs:
    def __init__(self, layout: Layout, num_blocks: int, events: bool) -> None:
        cache = vllm_cache.VllmCache(layout, num_blocks, PREFILL_TOKENS, events=events)
        self._manager, self._hasher = cache.manager, cache.hasher
        self._events = events

    def request(self, name: str, token_ids: Sequence[int]) -> Any:
        return vllm_cache.build_request(name, list(token_ids), self._hasher)

    def prefill(self, request: Any) -> None:
        manager, end = self._manager, request.num_tokens
        blocks, done, _ = manager.get_computed_blocks(request)
        manager.new_step_starts()
        assert (
            manager.allocate_slots(request, min(PREFILL_TOKENS, end - done), done, blocks)
            is not None
        )
        done = request.num_computed_tokens = done + min(PREFILL_TOKENS, end - done)
        while done < end:
            manager.new_step_starts()
            assert manager.allocate_slots(request, min(PREFILL_TOKENS, end - done)) is not None
            done = request.num_computed_tokens = done + min(PREFILL_TOKENS, end - done)
        manager.free(request)
        request.num_computed_tokens = 0
        if self._events:
            manager.take_events()

    def look_up(self, request: Any) -> int:
        return int(self._manager.get_computed_blocks(request)[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768, 131_072])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure and manager")
    options = parser.parse_args()
    for name in options.layouts:
        for tokens in options.tokens:
            for events in (False, True):
                _measure_allocation(name, tokens, events, options.seconds)
            _measure_lookup(name, tokens, options.seconds)


def _measure_allocation(name: str, tokens: int, events: bool, seconds: float) -> None:
    actions = [_prefills(peer, tokens) for peer in _peers(LAYOUTS[name], tokens, events)]
    _report(
        "allocate_cache_free",
        _medians(actions, seconds),
        HELD_PROMPTS + 1,
        layout=name,
        tokens=tokens,
        events=events,
    )


def _measure_lookup(name: str, tokens: int, seconds: float) -> None:
    actions = [_lookups(peer, tokens) for peer in _peers(LAYOUTS[name], tokens, events=False)]
    _report("hit_lookup", _medians(actions, seconds), 1, layout=name, tokens=tokens)


def _peers(layout: Layout, tokens: int, events: bool) -> list[Peer]:
    num_blocks = 1 + HELD_PROMPTS * layout.blocks_for(tokens + 1)
    kinds: list[Callable[[Layout, int, bool], Peer]] = (
        [Ours] if vllm_cache is None else [Ours, Theirs]
    )
    return [kind(layout, num_blocks, events) for kind in kinds]


def _prefills(peer: Peer, tokens: int) -> Callable[[], None]:
    requests = [
        peer.request(f"r{seed}", prompt_tokens(tokens, seed)) for seed in range(HELD_PROMPTS + 1)
    ]

    def run() -> None:
        for request in requests:
            peer.prefill(request)

    return run


def _lookups(peer: Peer, tokens: int) -> Callable[[], None]:
    peer.prefill(peer.request("first", prompt_tokens(tokens)))
    request = peer.request("longer", [*prompt_tokens(tokens), 1])
    assert peer.look_up(request) == tokens, "the whole prompt is cached"

    def run() -> None:
        peer.look_up(request)

    return run


def _medians(actions: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Return the median time of each; they take turns, so that other load on the machine affects
    all of them."""
    # Engines freeze objects that live as long as they do: the garbage collector then skips the
    # blocks of both managers.
    gc.collect()
    gc.freeze()
    for action in actions:
        action()
    times: list[list[float]] = [[] for _ in actions]
    while len(times[0]) < 3 or sum(times[0]) < seconds:
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    gc.unfreeze()
    return [statistics.median(taken) for taken in times]


def _report(question: str, seconds: Sequence[float], operations: int, **setting: Any) -> None:
    rates = [operations / value for value in seconds]
    figures: dict[str, Any] = {"per_second": round(rates[0], 1)}
    if len(rates) > 1:
        figures |= {"vllm_per_second": round(rates[1], 1), "ratio": round(rates[0] / rates[1], 2)}
    report(f"peer_cache_manager.{question}", **setting, **figures)


if __name__ == "__main__":
    main()
