"""Asks the compiled index and mirror what no decision asks of them from Python, and writes an index
as bytes and back.

The oracle's own classes answer the same questions by methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from router._core import Estimate, LoadPrices
from router.feed.snapshot_records import FrameWriter, read_frames
from router.index.base import NO_HIT, Hit, SourceId
from router.index.index import PrefixIndex
from router.index.mirror import ApproximateCaches, Mirror
from router.index.prompt import Computed, HashedPrompt

# --- one source of an index -----------------------------------------------------------------------


def match_source(index: PrefixIndex, prompt: HashedPrompt, source: SourceId) -> Hit:
    """Match like `match_prompt`, for one source; no hit where it is unknown."""
    slot = index.slots.get(source)
    if slot is None:
        return NO_HIT
    return index.core.match_source(prompt.hashed, slot, _computed(index, prompt, source))


def match_tier(index: PrefixIndex, prompt: HashedPrompt, source: SourceId, tier: str) -> int:
    """Return how many tokens of a prompt an empty cache could load from one lower tier of a source,
    in its units and by the hit rule. The source's other tiers do not count.

    Args:
        source: 0 where it is unknown.
        tier: Its name in events, in upper case.
    """
    slot = index.slots.get(source)
    if slot is None:
        return 0
    return index.core.match_tier(prompt.hashed, slot, tier, _computed(index, prompt, source))


def _computed(index: PrefixIndex, prompt: HashedPrompt, source: SourceId) -> list[Computed]:
    if len(prompt.hashed) < 2:
        return []
    return [each for found in index.computed_of(source, [prompt]) for each in found]


def blocks_held(index: PrefixIndex, source: SourceId) -> int:
    """Distinct (group, block) that a source holds on its GPU; 0 where it is unknown."""
    slot = index.slots.get(source)
    return 0 if slot is None else index.core.blocks_held(slot)


def removals(index: PrefixIndex, source: SourceId) -> int:
    """Blocks that a source removed from its GPU since it was added or cleared, or reported the loss
    of all; 0 where it is unknown."""
    slot = index.slots.get(source)
    return 0 if slot is None else index.core.removals(slot)


def token_columns(
    hits: Mapping[SourceId, Hit], sources: list[SourceId]
) -> tuple[list[int], list[int], list[int]]:
    """The `gpu_cached_tokens`, the `cached_tokens` and the junction of several sources, 0 for
    unknown ones.

    The junction is the tokens behind `gpu_cached_tokens` whose full attention is on the GPU, and
    whose window or state is gone: computed there once more, they are a hit for later prompts. 0
    where a cache has no full attention.

    Args:
        hits: From `match_prompt` of either index, or sums of such, which have no junctions.
    """
    columns = getattr(hits, "columns", None)
    if columns is not None:
        found: tuple[list[int], list[int], list[int]] = columns(sources)
        return found
    of_sources = [hits.get(source, NO_HIT) for source in sources]
    gpu = [hit.gpu_cached_tokens for hit in of_sources]
    return gpu, [hit.cached_tokens for hit in of_sources], [0] * len(sources)


# --- a whole index as bytes -----------------------------------------------------------------------


class Exported(Protocol):
    """An index of either implementation, as far as its records go."""

    def export(self) -> Iterator[bytes]: ...

    def restore(self, records: Iterable[bytes | memoryview]) -> None: ...


def dump(index: Exported) -> Iterator[bytes]:
    """The state of an index in the frames of a snapshot, in pieces to be written one after the
    other. Each source is as it is when its piece is made."""
    writer = FrameWriter()
    yield writer.head
    for record in index.export():
        yield writer.framed(record)
        yield record
    yield writer.framed(b"")


def load(data: bytes, index: Exported) -> None:
    """Restore an index of the same implementation from the pieces of `dump`.

    Raises:
        DumpError: The bytes are not a whole, undamaged dump of this version and implementation.
            The index is as before.
    """
    index.restore(read_frames(memoryview(data)))


# --- a mirror -------------------------------------------------------------------------------------


class Coming(NamedTuple):
    """Tokens of a prompt that a cache will have, before events show them."""

    tokens: int
    """Tokens of the hit."""
    run: int
    """Tokens that full attention will have, at least as many: beyond the hit it is a junction."""


def in_prefill(mirror: Mirror, prompt: HashedPrompt, tokens: int = 0) -> dict[SourceId, Coming]:
    """Return the tokens of a prompt that each cache is computing for another one now.

    Args:
        tokens: Its length; 0 if it is unknown, then tokens behind the last key never count.
    """
    found = mirror.core.in_prefill(prompt.hashed, tokens)
    return {mirror.source_of(cache): Coming(*coming) for cache, *coming in found}


class CacheOutlook(NamedTuple):
    """Holds a cache's state for a new request, besides its hit."""

    progress_tokens: float = 0.0
    """Uncached tokens in prefill there that are computed by now."""
    eviction_age_s: float | None = None
    """How long the block evicted next has been idle; None while it evicts nothing."""
    reuse_probability: float = 0.0
    """The probability that the block evicted next is used again."""
    uncached_tokens_per_s: float = 0.0
    """Prompt tokens it got to compute lately, per second."""
    arrivals_per_s: float = 0.0
    """Requests sent to it lately, per second."""
    refill: float = 1.0
    """The cost of bringing back what it evicts, relative to computing it."""


def outlook(
    mirror: Mirror,
    model: str,
    source: SourceId,
    capacity_blocks: int | None = None,
    now: float | None = None,
) -> CacheOutlook:
    """Return the outlook of a cache for a new request.

    Args:
        source: The cache; an unknown one is idle and empty.
        capacity_blocks: Its size by the engine.
        now: On the mirror's clock; None: the time now.
    """
    number, caches = mirror.number_of_model(model), [mirror.number_of(source)]
    now = mirror._clock() if now is None else now
    (known,) = mirror.core.outlooks(number, caches, [capacity_blocks], now)
    return CacheOutlook(*known)


def load_prices(mirror: Mirror, source: SourceId) -> LoadPrices | None:
    """Return the costs of loading at a cache; None where nothing was sent to it yet."""
    return mirror.core.load_prices(mirror.number_of(source))


def reuse_probability(mirror: Mirror, model: str, idle_s: float) -> float:
    """Return the probability that a prefix will be used again."""
    return mirror.core.reuse_probability(mirror.number_of_model(model), idle_s)


def ended(mirror: Mirror, source: SourceId) -> list[tuple[list[int], float]]:
    """The requests that were the last to use something of a cache, by the time of their end,
    earliest first: the keys of each, and that time."""
    return mirror.core.ended(mirror.number_of(source))


# --- estimates of caches without events -----------------------------------------------------------


class ApproximateHit(NamedTuple):
    """Holds the tokens of a prompt that a cache may hold."""

    tokens: int
    trust: float
    """The share of the tokens that were promised there lately that was cached."""


class EstimatedCache:
    """The estimate of one cache."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self.eviction_age_s = estimate.eviction_age_s

    def hit(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> ApproximateHit:
        """Return the tokens of a request's prompts that it may hold.

        Args:
            prompts: The keys of each, every `STEP` tokens.
            most_tokens: Tokens of all prompts that a hit may cover.
        """
        return ApproximateHit(*self._estimate.hit(prompts, most_tokens))


class AskedCaches(ApproximateCaches):
    """Caches whose estimates can be asked for, as a decision in the core does."""

    def stand_in(
        self, source: SourceId, cache_tokens: int | None, now: float
    ) -> EstimatedCache | None:
        """The estimate that stands in for a cache's events; None where they are complete, or not
        missing for long.

        Args:
            cache_tokens: Its size by the engine; None: not reported.
        """
        number, lost_since = self.mirror.number_of(source), self.lost_since(source)
        found = self.core.stand_in(number, lost_since, cache_tokens, now)
        return None if found is None else EstimatedCache(found)
