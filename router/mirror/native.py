"""The compiled mirror and estimates behind the interface of those in Python, which define what they
say.

The core knows caches and models by numbers, and each prompt as the index has it: all indexes must
be compiled ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from router._core import Estimate, EstimatedVisit, Estimates, LoadPrices, Visit
from router._core import Mirror as CoreMirror
from router.index import HashedPrompt, PrefixIndex, SourceId
from router.mirror.approximate import ApproximateCaches, ApproximateHit, ApproximateStatistics
from router.mirror.in_prefill import Coming
from router.mirror.loading import ByTier
from router.mirror.mirror import CacheOutlook, Mirror, MirrorStatistics, Outlook, Prefilling


class NativeMirror:
    """Follows what this router sends, as `Mirror` does."""

    def __init__(
        self,
        max_keys: int,
        clock: Callable[[], float],
        tier_prices: Mapping[str, float],
        other_price: float,
    ) -> None:
        """See `create_mirror`."""
        self._clock = clock
        first_number, prices = secrets.randbelow(1 << 48), list(tier_prices.items())
        self.core = CoreMirror(max_keys, clock, prices, other_price, first_number, Coming)
        self._caches: dict[SourceId, int] = {}
        self._sources: list[SourceId] = []
        """By number."""
        self._models: dict[str, int] = {}
        self._model_names: list[str] = []
        """By number."""
        self._told: dict[int, Prefilling] = {}
        self._heard: dict[Prefilling, int] = {}

    # --- what is sent -----------------------------------------------------------------------------

    def begin(
        self,
        model: str,
        index: PrefixIndex,
        source: SourceId,
        prompts: Sequence[HashedPrompt],
        prompt_tokens: int,
        uncached_tokens: int,
        hit_tokens: int = 0,
        speed: float = 1.0,
        loads: ByTier = (),
        junction_tokens: int = 0,
        keep: Sequence[int] = (),
    ) -> Visit:
        """See `Mirror.begin`."""
        return self.core.begin(
            self._model(model),
            index.shared,
            index.number_of(source),
            self.number_of(source),
            [prompt.hashed for prompt in prompts],
            index.computed_of(source, prompts),
            prompt_tokens,
            uncached_tokens,
            hit_tokens,
            speed,
            loads,
            junction_tokens,
            keep,
        )

    # --- what others are told, and tell -----------------------------------------------------------

    def prefilling(self) -> list[Prefilling]:
        """See `Mirror.prefilling`."""
        before, self._told = self._told, {}
        for number, queued_tokens, news in sorted(self.core.prefilling()):
            told = before.get(number)
            if told is None:
                assert news is not None, "who was told of it before has kept it"
                model, cache, tokens, keys = news
                name, source = self._model_names[model], self._sources[cache]
                told = Prefilling(number, name, source, tokens, 0, keys)
            told.queued_tokens = queued_tokens
            self._told[number] = told
        return list(self._told.values())

    def hear(self, others: Iterable[Prefilling]) -> None:
        """See `Mirror.hear`."""
        before, self._heard = self._heard, {}
        for each in dict.fromkeys(others):
            number = before.pop(each, None)
            if number is None:
                number = self.core.hear(self.number_of(each.source), each.tokens, each.keys)
            self._heard[each] = number
        for number in before.values():
            self.core.unhear(number)

    def forget(self, replica: str) -> None:
        """See `Mirror.forget`."""
        self.core.forget(self.numbers_of(replica))

    def ended(self, source: SourceId) -> Iterator[tuple[Sequence[int], float]]:
        """See `Mirror.ended`."""
        cache = self._caches.get(source)
        return iter(() if cache is None else self.core.ended(cache))

    def forget_model(self, model: str) -> None:
        """See `Mirror.forget_model`."""
        self.core.forget_model(self._model(model))

    # --- what a decision asks ---------------------------------------------------------------------

    def prefill_tokens_per_s(self, model: str) -> float:
        """See `Mirror.prefill_tokens_per_s`."""
        return self.core.prefill_tokens_per_s(self._model(model))

    def load_prices(self, source: SourceId) -> LoadPrices | None:
        """See `Mirror.load_prices`."""
        cache = self._caches.get(source)
        return None if cache is None else self.core.load_prices(cache)

    def reuse_probability(self, model: str, idle_s: float) -> float:
        """See `Mirror.reuse_probability`."""
        return self.core.reuse_probability(self._model(model), idle_s)

    def outlook(
        self,
        model: str,
        source: SourceId,
        capacity_blocks: int | None = None,
        now: float | None = None,
    ) -> CacheOutlook:
        """See `Mirror.outlook`."""
        now = self._clock() if now is None else now
        (progress,), (known,) = self.outlooks(model, [source], lambda _number: capacity_blocks, now)
        return CacheOutlook(progress, *known)

    def outlooks(
        self,
        model: str,
        sources: Sequence[SourceId],
        capacity_of: Callable[[int], int | None],
        now: float,
    ) -> tuple[list[float], list[Outlook]]:
        """See `Mirror.outlooks`."""
        return self.core.outlooks(self._model(model), sources, self._caches, capacity_of, now)

    def in_prefill(self, prompt: HashedPrompt, tokens: int = 0) -> dict[SourceId, Coming]:
        """See `Mirror.in_prefill`."""
        return self.core.in_prefill(prompt.hashed, tokens, self._sources)

    def expected(
        self,
        source: SourceId,
        prompt: HashedPrompt,
        prompt_tokens: int,
        hit_tokens: int,
        junction_tokens: int = 0,
    ) -> int:
        """See `Mirror.expected`."""
        cache = self._caches.get(source)
        if cache is None:
            return hit_tokens
        return self.core.expected(cache, prompt.hashed, prompt_tokens, hit_tokens, junction_tokens)

    def statistics(self) -> MirrorStatistics:
        """See `Mirror.statistics`."""
        return MirrorStatistics(*self.core.statistics())

    # --- numbers ----------------------------------------------------------------------------------

    def number_of(self, source: SourceId) -> int:
        """What names a cache in the core, for as long as the process lives."""
        number = self._caches.get(source)
        if number is None:
            number = self._caches[source] = len(self._sources)
            self._sources.append(source)
        return number

    def numbers_of(self, replica: str) -> list[int]:
        """Of all its ranks."""
        return [number for number, source in enumerate(self._sources) if source.replica == replica]

    def source_of(self, number: int) -> SourceId:
        """The cache that a number names."""
        return self._sources[number]

    def number_of_model(self, name: str) -> int:
        """By which the core knows a model."""
        return self._model(name)

    def _model(self, name: str) -> int:
        number = self._models.get(name)
        if number is None:
            number = self._models[name] = len(self._model_names)
            self._model_names.append(name)
        return number


class NativeApproximateCache:
    """One cache without events, as `ApproximateCache`."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self.eviction_age_s: Callable[[float], float | None] = estimate.eviction_age_s

    def hit(self, prompts: list[Sequence[int]], most_tokens: int) -> ApproximateHit:
        """See `ApproximateCache.hit`."""
        return ApproximateHit(*self._estimate.hit(prompts, most_tokens))


class NativeApproximateCaches:
    """All caches that need an estimate, as `ApproximateCaches`."""

    def __init__(
        self,
        lost_since: Callable[[SourceId], float | None],
        mirror: NativeMirror,
        after_s: float,
        cache_tokens: int,
        max_keys: int,
        clock: Callable[[], float],
    ) -> None:
        """See `ApproximateCaches`."""
        self._lost_since = lost_since
        self._clock = clock
        self._mirror = mirror
        self._core = Estimates(mirror.core, after_s, cache_tokens, max_keys, clock)
        self.silent: set[SourceId] = set()
        """Caches of replicas that publish no events."""

    def stand_in(
        self, source: SourceId, cache_tokens: int | None, now: float
    ) -> NativeApproximateCache | None:
        """See `ApproximateCaches.stand_in`."""
        number, lost_since = self._mirror.number_of(source), self._lost_since(source)
        found = self._core.stand_in(number, lost_since, cache_tokens, now)
        return None if found is None else NativeApproximateCache(found)

    def visit(
        self, source: SourceId, prompts: list[Sequence[int]], hit_tokens: int
    ) -> EstimatedVisit | None:
        """See `ApproximateCaches.visit`."""
        return self._core.visit(self._mirror.number_of(source), prompts, hit_tokens)

    def forget(self, replica: str) -> None:
        """See `ApproximateCaches.forget`."""
        self._core.forget(self._mirror.numbers_of(replica))

    def statistics(self) -> dict[SourceId, ApproximateStatistics]:
        """See `ApproximateCaches.statistics`."""
        now, found = self._clock(), {}
        for number in self._core.caches():
            source = self._mirror.source_of(number)
            values: Any = self._core.statistics(number, self._lost_since(source), now)
            if values is not None:
                found[source] = ApproximateStatistics(*values)
        return found


def create_mirror(
    max_keys: int = 1_048_576,
    tier_prices: Mapping[str, float] = MappingProxyType({}),
    other_price: float = 0.1,
    clock: Callable[[], float] = time.monotonic,
) -> Mirror:
    """A mirror.

    Args:
        max_keys: See `Mirror`.
        tier_prices: Of a token from a tier, by its name in upper case, in tokens to compute, until
            it was learned.
        other_price: Of one from any other tier.
        clock: See `Mirror`.
    """
    return cast(Mirror, NativeMirror(max_keys, clock, tier_prices, other_price))


def create_approximate_caches(
    lost_since: Callable[[SourceId], float | None],
    mirror: Mirror,
    after_s: float,
    cache_tokens: int,
    max_keys: int,
    clock: Callable[[], float] = time.monotonic,
) -> ApproximateCaches:
    """Estimates, of the same kind as the mirror; see `ApproximateCaches`."""
    options = after_s, cache_tokens, max_keys, clock
    if isinstance(mirror, Mirror):
        return ApproximateCaches(lost_since, mirror, *options)
    return cast(ApproximateCaches, NativeApproximateCaches(lost_since, mirror, *options))
