"""Follows every cache as this router drives it: requests in prefill, and ended ones in the order in
which their blocks will be evicted. Policies read its outlooks.

An engine evicts what was least recently used, by the end of the request that used it last. So the
order is known here. How far the eviction has come is not: it is read from the index, which shows
whether the oldest request's own part of its prompt could still be reused. That is done when a
request begins to respond or ends, and for the cache that was chosen, never for a decision; and only
if the cache has removed something since.

The compiled core does all of it (`core/mirror/`), and knows caches and models by numbers. Whoever
decides by the mirror has the same books.

Caches without events are estimated, by requests and responses. What was sent to a cache was stored
there, an engine evicts what was used longest ago, and responses report how much of their prompts
was cached. From that follows an estimate, over the keys that the mirror has of prefixes, one for
every `STEP` tokens. It is bounded by the capacity that the engine reports, or by less: as far as
reuse was seen to last. It stands in where a replica has no event stream, or where one has not been
whole for long. It begins with what this router sent there before, and ends when the stream is whole
again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router._core import Books, EstimatedVisit, Estimates, Visit
from router._core import Mirror as CoreMirror
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror_types import (
    ApproximateStatistics,
    ByTier,
    MirrorStatistics,
    Prefilling,
)
from router.index.prompt import HashedPrompt


class Mirror:
    """Follows the requests of this router, by its own clock.

    Memory: some 400 bytes for each 64 tokens of the prompts of requests that were the last to use
    something, most of it token ids, and 1,600 for each of these requests.
    """

    def __init__(
        self,
        max_keys: int = 1_048_576,
        tier_prices: Mapping[str, float] = MappingProxyType({}),
        other_price: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            max_keys: Bound for all caches together, in keys; the oldest requests of the cache that
                grows are forgotten first. A prompt counts for four more.
            tier_prices: The price of a token from a tier, by its name in upper case, in tokens to
                compute, until it is learned.
            other_price: The price of one from any other tier.
        """
        self._clock = clock
        # Numbers begin anywhere: others must not take a prompt of this process for one of another
        # process that had its name before.
        first_number, prices = secrets.randbelow(1 << 48), list(tier_prices.items())
        self.books = Books()
        """The books have the numbers of caches; `LoadTracker` takes them."""
        self.core = CoreMirror(self.books, max_keys, clock, prices, other_price, first_number)
        self._models: dict[str, int] = {}
        self._model_names: list[str] = []
        self._published: dict[int, Prefilling] = {}
        self._received: dict[Prefilling, int] = {}

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
        """A request is sent to a cache.

        Args:
            prompts: The request's, as far as known.
            hit_tokens: Those cached there now.
            loads: The part of the hit that comes from below the GPU.
            junction_tokens: Those behind the hit of which only full attention is there.
            keep: Lengths of the prompt at which the engine is asked to keep windows and states.
        """
        return self.core.begin(
            self.number_of_model(model),
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

    # --- what routers publish to each other -------------------------------------------------------

    def prefilling(self) -> list[Prefilling]:
        """Return the prompts being computed for this router that others should know of before
        events show them, the latest last. The same objects each time, updated.

        A short prompt that is computed at once is not among them: to publish and to receive it
        costs more than to compute it twice.
        """
        before, self._published = self._published, {}
        for number, queued_tokens, news in sorted(self.core.prefilling()):
            prefill = before.get(number)
            if prefill is None:
                assert news is not None, "without news it was published before"
                model, cache, tokens, keys = news
                name, source = self._model_names[model], self.source_of(cache)
                prefill = Prefilling(number, name, source, tokens, 0, keys)
            prefill.queued_tokens = queued_tokens
            self._published[number] = prefill
        return list(self._published.values())

    def take_others(self, others: Iterable[Prefilling]) -> None:
        """Replace the prompts being computed for others; the same object stands for the same
        prompt."""
        before, self._received = self._received, {}
        for each in dict.fromkeys(others):
            number = before.pop(each, None)
            if number is None:
                number = self.core.add_other(self.number_of(each.source), each.tokens, each.keys)
            self._received[each] = number
        for number in before.values():
            self.core.remove_other(number)

    def forget(self, replica: str) -> None:
        """Forget what is cached at a replica, at all its ranks: it restarted, failed, or was
        removed."""
        self.core.forget(self.numbers_of(replica))

    def forget_model(self, model: str) -> None:
        """Forget a model that no replica serves any more."""
        self.core.forget_model(self.number_of_model(model))

    # --- what a decision asks ---------------------------------------------------------------------

    def prefill_tokens_per_s(self, model: str) -> float:
        """Return the speed of a replica of this model whose own speed is 1."""
        return self.core.prefill_tokens_per_s(self.number_of_model(model))

    def eviction_cost(self, model: str, source: SourceId, capacity_blocks: int | None) -> float:
        """Return the probability that the block which a cache evicts next is used again.

        Args:
            source: The cache; an unknown one is idle and empty.
            capacity_blocks: Its size by the engine.
        """
        caches, capacities = [self.number_of(source)], [capacity_blocks]
        (outlook,) = self.core.outlooks(
            self.number_of_model(model), caches, capacities, self._clock()
        )
        _progress_tokens, _eviction_age_s, reuse_probability, *_ = outlook
        return reuse_probability

    def expected(
        self,
        source: SourceId,
        prompt: HashedPrompt,
        prompt_tokens: int,
        hit_tokens: int,
        junction_tokens: int = 0,
    ) -> int:
        """Return how many tokens of a prompt would be cached at its admission if it were sent now:
        requests in prefill there come first, store their prompts, and evict others.

        Args:
            junction_tokens: Those behind these of which only full attention is there.
        """
        return self.core.expected(
            self.number_of(source), prompt.hashed, prompt_tokens, hit_tokens, junction_tokens
        )

    def statistics(self) -> MirrorStatistics:
        return MirrorStatistics(*self.core.statistics())

    # --- numbers ----------------------------------------------------------------------------------

    def number_of(self, source: SourceId) -> int:
        """Return a cache's number in the core, for as long as the process lives."""
        return self.books.cache_id(*source)

    def numbers_of(self, replica: str) -> list[int]:
        return self.books.cache_ids_of(replica)

    def source_of(self, number: int) -> SourceId:
        return SourceId(*self.books.cache_of(number))

    def number_of_model(self, name: str) -> int:
        number = self._models.get(name)
        if number is None:
            number = self._models[name] = len(self._model_names)
            self._model_names.append(name)
        return number


# --- caches without events ------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class ApproximateCaches:
    """All caches that need an estimate. Belongs to one event loop."""

    lost_since: Callable[[SourceId], float | None]
    """Returns since when the events of a source have been incomplete, on *clock*; minus infinity
    without a stream; None: they are complete."""
    mirror: Mirror
    """Knows the requests sent before the events were lost."""
    after_s: float = 60.0
    """For how long they must have been incomplete."""
    cache_tokens: int = 262_144
    """Size of a cache where the engine does not report it."""
    max_keys: int = 1_048_576
    """Bound on the keys of all caches together."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        bounds = self.after_s, self.cache_tokens, self.max_keys
        self.core = Estimates(self.mirror.core, *bounds, self.clock)

    def visit(
        self, source: SourceId, prompts: Sequence[Sequence[int]], hit_tokens: int
    ) -> EstimatedVisit | None:
        """A request is sent to a cache; None if no estimate stands in for it.

        Args:
            prompts: The keys of each of its prompts, every `STEP` tokens.
            hit_tokens: Those predicted to be cached.
        """
        return self.core.visit(self.mirror.number_of(source), prompts, hit_tokens)

    def forget(self, replica: str) -> None:
        """Forget what is cached at a replica: it restarted, failed, or was removed."""
        self.core.forget(self.mirror.numbers_of(replica))

    def statistics(self) -> dict[SourceId, ApproximateStatistics]:
        """Return the state of the caches that an estimate stands in for now; those of others are
        dropped."""
        now, found = self.clock(), {}
        for number in self.core.caches():
            source = self.mirror.source_of(number)
            values: Any = self.core.statistics(number, self.lost_since(source), now)
            if values is not None:
                found[source] = ApproximateStatistics(*values)
        return found
