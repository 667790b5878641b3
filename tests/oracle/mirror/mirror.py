"""Every cache as this router drives it: requests in prefill, ended ones in the order in which their
blocks will be evicted, and what that says to a policy.

An engine evicts what was least recently used, by the end of the request that used it last. So the
order is known here. How far the eviction has come is not: it is read from the index, by asking
whether the oldest request's own part of its prompt could still be reused. That is done when a
request begins to respond or ends, and for the cache that was chosen, never for a decision; and only
if the cache has removed something since.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from kvevents.layout import GroupKind
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from router.index.mirror_types import (
    STEP,
    WORTH_PUBLISHING,
    ByTier,
    MirrorStatistics,
    Prefilling,
)
from router.index.prompt import HashedPrompt
from router.policies import Outlook
from router.routing.fading import FadingRatio
from tests.oracle.mirror.eviction import EvictionOrder, Forecast
from tests.oracle.mirror.in_prefill import InPrefill, coming_of
from tests.oracle.mirror.layout import UNKNOWN, Layout, layout_of
from tests.oracle.mirror.loading import LoadPrices
from tests.oracle.mirror.ownership import Ownership, Taken, Use
from tests.oracle.mirror.traffic import FadingRate, ModelTraffic
from tests.support.index import CacheOutlook, Coming, blocks_held, match_source, removals

FADE_S = 30.0
"""How long what was sent to a cache counts in its rates."""


_NOTHING: Outlook = (None, 0.0, 0.0, 0.0, 1.0)


@dataclass(eq=False, slots=True)
class _Cache:
    """One cache."""

    source: SourceId
    index: PrefixIndex
    since: float
    work: FadingRate
    arrivals: FadingRate
    prices: LoadPrices
    refill: FadingRatio = field(default_factory=lambda: FadingRatio(1.0, 256.0, 64))
    """What bringing evicted tokens back costs, over what computing them costs."""
    speed: float = 1.0
    content: Ownership = field(default_factory=Ownership)
    prefilling: dict[Visit, None] = field(default_factory=dict)
    """In the order of their arrival."""
    first: Visit | None = None
    """The first of these."""
    first_since: float = 0.0
    """Since when it has been the first."""
    capacity_blocks: int | None = None
    most_blocks: int = 0
    """That were ever seen there at once."""
    removals: int = 0
    """When the oldest request was looked at last."""
    had_content: bool = False
    """It holds what was there before the first request."""
    order: EvictionOrder = field(default_factory=EvictionOrder)
    """Of what requests have given back."""
    decoding: int = 0
    """Requests in decode."""
    decoding_tokens: int = 0
    """Of their prompts."""
    recomputed_tokens: int = 0
    """Of these, those that full attention had already."""
    outlook: Outlook | None = None
    """The last one that was given; None: something has happened since."""
    outlook_until: float = 0.0
    layout: Layout = UNKNOWN
    looks: int = 0


class Visit:
    """One request at one cache, from its sending to its end. Every step may be repeated, or left
    out."""

    __slots__ = (
        "_cache",
        "_mirror",
        "found",
        "is_decoding",
        "kept",
        "keys",
        "known_until",
        "loads",
        "model",
        "most_progress",
        "number",
        "prompt",
        "reuse",
        "started_at",
        "tokens",
        "told",
        "uncached_tokens",
        "uses",
    )

    def __init__(
        self,
        mirror: ReferenceMirror,
        model: ModelTraffic,
        cache: _Cache,
        prompts: Sequence[HashedPrompt],
        tokens: int,
        uncached_tokens: int,
        loads: ByTier,
        found: Coming,
        now: float,
    ) -> None:
        self._mirror: ReferenceMirror | None = mirror
        self.model = model
        self.number = 0
        """Among those of its mirror."""
        self._cache = cache
        self.started_at = now
        self.tokens = tokens
        self.uncached_tokens = uncached_tokens
        self.loads = loads
        """What is loaded for it from below the GPU."""
        self.most_progress = uncached_tokens * mirror.MAX_PROGRESS
        """As the first one in prefill, the most of its tokens that may count as computed."""
        self.prompt = prompts[0] if len(prompts) == 1 else None
        self.keys: Sequence[int] = () if self.prompt is None else self.prompt.prefix_keys(STEP)
        self.found = found
        """Of the prompt, what will be cached when the engine admits it."""
        self.kept: Sequence[int] = ()
        """Lengths of its prompt at which the engine will keep windows and states, besides those at
        its end."""
        self.is_decoding = False
        self.known_until = math.inf
        """When its prompt no longer counts as being computed."""
        self.told: Prefilling | None = None
        """What others are told of it."""
        self.uses = []
        for prompt in prompts:
            use, taken = cache.content.begin(prompt.prefix_keys(STEP))
            use.prompt = prompt
            self.note_taken(use, taken)
            self.uses.append(use)
        self.reuse = [model.began(use.keys, now) for use in self.uses]

    @property
    def expected_tokens(self) -> int:
        """Of the prompt, those that will be cached when the engine admits it."""
        return self.found.tokens

    def note_taken(self, use: Use, taken: Sequence[Taken]) -> None:
        """One of its prompts took over keys from others, some of which it computes again.

        Args:
            use: The prompt's.
            taken: From the start of the prompt.
        """
        is_known = self.prompt is not None
        hit_keys = -(-self.found.tokens // STEP) if is_known else len(use.keys)
        self._cache.order.take(taken, hit_keys, self._cache.layout.held_blocks_per_key)

    def first_token(self, is_timed: bool = True) -> None:
        """Its prefill is done.

        Args:
            is_timed: Whether just now.
        """
        if self._mirror is not None:
            self._mirror.end_prefill(self, self._cache, self.model, is_timed)

    def ended(self, was_served: bool = True) -> None:
        """It is over.

        Args:
            was_served: Whether the engine may have computed it.
        """
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            mirror.end(self, self._cache, self.model, was_served)


class ReferenceMirror:
    """Follows what this router sends. The caller passes no time: the clock is given once.

    Memory: some 400 bytes for each 64 tokens of the prompts of requests that were the last to use
    something, most of it token ids, and 1,600 for each of these requests.
    """

    MAX_PROGRESS = 0.95
    """Of the first prompt in prefill, the largest share that may count as computed."""
    FULL = 0.9
    """From here on a cache is taken for full."""
    EMPTIED = 0.75
    """Below this share of what it once held it evicts nothing, though it did."""
    OUTLOOK_S = 0.05
    """How long what was said of a cache holds while nothing begins or ends there."""
    SOON_S = 0.02
    """A short prompt that is computed within this time is not told to others."""
    EVENTS_S = 0.25
    """After a prompt's first token, until events have told of its blocks for sure."""

    def __init__(
        self,
        max_keys: int = 1_048_576,
        clock: Callable[[], float] = time.monotonic,
        load_price: Callable[[str], float] = lambda _tier: 0.1,
    ) -> None:
        """
        Args:
            max_keys: Bound on what is kept for all caches together, in keys (`Ownership.size`); the
                oldest requests of the cache that grows are forgotten first.
            clock: A monotonic clock, in seconds.
            load_price: Of a token from a tier, in tokens to compute, until it was learned.
        """
        self._max_keys = max_keys
        self._clock = clock
        self._load_price = load_price
        self._caches: dict[SourceId, _Cache] = {}
        self._models: dict[str, ModelTraffic] = {}
        self._own: InPrefill[Visit, _Cache] = InPrefill(lambda cache: cache.layout)
        """What is computed for requests of this router, or has just been."""
        self._others: InPrefill[Prefilling, SourceId] = InPrefill(self._layout)
        """What is computed for others."""
        self._heard: dict[Prefilling, None] = {}
        """All of these, to tell which are new and which have gone."""
        self._is_sparse = False
        """Whether some cache keeps windows or states only at boundaries."""
        self._computed: deque[Visit] = deque()
        """Those that have just done so."""
        self._last_number = secrets.randbelow(1 << 48)
        """Begins anywhere: others must not take a prompt of this process for one of another process
        that had its name before."""

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
            model: Its base model.
            index: The model's.
            source: The cache.
            prompts: The request's, as far as they are known.
            prompt_tokens: Of all of them.
            uncached_tokens: Of these, those that have to be computed there.
            hit_tokens: Of these, those that are cached there now.
            speed: Of the replica, relative to others.
            loads: What of the hit comes from below the GPU.
            junction_tokens: Behind the hit, those of which only full attention is there.
            keep: Lengths of the prompt at which the engine is told to keep windows and states.
        """
        now = self._clock()
        cache = self._cache(source, index, now)
        found = Coming(hit_tokens, hit_tokens + junction_tokens)
        if len(prompts) == 1:
            found = self._at_admission(cache, prompts[0], prompt_tokens, found)
        cache.speed = speed
        cache.work.add(uncached_tokens, now)
        cache.arrivals.add(1.0, now)
        cache.outlook = None
        traffic = self._model(model)
        visit = Visit(
            self, traffic, cache, prompts, prompt_tokens, uncached_tokens, loads, found, now
        )
        visit.kept = _kept(cache.layout, found, keep)
        _hold(cache, visit)
        self._last_number += 1
        visit.number = self._last_number
        self._enter_prefill(visit, cache, now)
        return visit

    def end_prefill(self, visit: Visit, cache: _Cache, model: ModelTraffic, is_timed: bool) -> None:
        """A visit's first token came.

        Args:
            visit: Of `begin`.
            cache: Where it is.
            model: Of the request.
        """
        if visit not in cache.prefilling:
            return
        now = self._clock()
        if cache.first is visit:
            seconds = (now - cache.first_since) * cache.speed
            if not visit.loads:
                model.prefilled(visit.uncached_tokens, seconds, is_timed)
            elif is_timed and cache.first_since == visit.started_at:
                # Else part of it passed behind another one.
                cost = seconds * model.prefill_tokens_per_s - visit.uncached_tokens
                cache.prices.loaded(visit.loads, cost)
        self._leave_prefill(visit, cache, True, now)
        visit.is_decoding = True
        _count_decoding(cache, visit, 1)
        _leave(cache, visit, visit.kept, 0)
        self._look_at_oldest(cache)

    def end(self, visit: Visit, cache: _Cache, model: ModelTraffic, was_served: bool) -> None:
        """A visit is over.

        Args:
            visit: Of `begin`.
            cache: Where it was.
            model: Of the request.
            was_served: Whether its prompt may be cached there now.
        """
        now = self._clock()
        self._leave_prefill(visit, cache, was_served, now)
        if visit.is_decoding:
            _count_decoding(cache, visit, -1)
        for use in visit.uses:
            if was_served:
                self._give_back(cache, visit, use, now)
            else:
                cache.content.drop(use)
        for use in visit.reuse:
            model.ended(use, now)
        self._look_at_oldest(cache)
        self._fit(cache)

    # --- what others are told, and tell -----------------------------------------------------------

    def prefilling(self) -> list[Prefilling]:
        """What is being computed for requests of this router, as far as others should know of it
        before its events tell them, the latest last. The same objects each time, brought up to
        date.

        A short prompt that is computed at once is not among it: to tell and to hear of it costs
        more than to compute it twice.
        """
        now = self._clock()
        self._forget_computed(now)
        names = {id(model): name for name, model in self._models.items()}
        found = []
        for visit, cache in self._own:
            told, is_queued = visit.told, visit in cache.prefilling
            if told is None:
                is_long = visit.uncached_tokens >= WORTH_PUBLISHING
                is_slow = is_queued and now - visit.started_at >= self.SOON_S
                name = names.get(id(visit.model))
                if name is None or not (is_long or (is_slow and visit.uncached_tokens >= STEP)):
                    continue
                told = visit.told = Prefilling(
                    visit.number, name, cache.source, visit.tokens, 0, visit.keys
                )
            told.queued_tokens = visit.uncached_tokens if is_queued else 0
            found.append(told)
        found.sort(key=attrgetter("number"))
        return found

    def take_others(self, others: Iterable[Prefilling]) -> None:
        """Take over what is being computed for others, in place of what was; the same object
        stands for the same prompt."""
        before, self._heard = self._heard, dict.fromkeys(others)
        for gone in before.keys() - self._heard.keys():
            self._others.remove(gone)
        for new in self._heard.keys() - before.keys():
            self._others.add(new, new.source)

    def forget(self, replica: str) -> None:
        """Forget what is cached at a replica, at all its ranks: it restarted, failed, or was
        removed."""
        for source in [source for source in self._caches if source.replica == replica]:
            del self._caches[source]

    def ended(self, source: SourceId) -> Iterator[tuple[Sequence[int], float]]:
        """The requests that were the last to use something of a cache, by the time of their end,
        earliest first: the keys of each, and that time."""
        cache = self._caches.get(source)
        for use in cache.content.ended() if cache is not None else ():
            yield use.keys, use.ended_at or 0.0

    def forget_model(self, model: str) -> None:
        """No replica serves this model any more."""
        self._models.pop(model, None)

    # --- what a decision asks ---------------------------------------------------------------------

    def prefill_tokens_per_s(self, model: str) -> float:
        """Of a replica of this model at speed 1."""
        return self._model(model).prefill_tokens_per_s

    def load_prices(self, source: SourceId) -> LoadPrices | None:
        """What loading costs at a cache; None where nothing was sent to it yet."""
        cache = self._caches.get(source)
        return None if cache is None else cache.prices

    def reuse_probability(self, model: str, idle_s: float) -> float:
        """How probable it is that something will be used again.

        Args:
            model: Whose requests use it.
            idle_s: For how long nobody has.
        """
        return self._model(model).reuse_probability(idle_s)

    def outlook(
        self,
        model: str,
        source: SourceId,
        capacity_blocks: int | None = None,
        now: float | None = None,
    ) -> CacheOutlook:
        """What a new request would find at a cache.

        Args:
            model: Of the request.
            source: The cache; an unknown one is idle and empty.
            capacity_blocks: What the engine says of its size.
            now: On the mirror's clock, where the caller knows it.
        """
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
        """The same of many caches, without a name for each value: progress, and the rest.

        Args:
            model: Of the request.
            sources: The caches.
            capacity_of: What the engine says of the size of cache i.
            now: On the mirror's clock.
        """
        caches, traffic = self._caches, self._model(model)
        tokens_per_s, known_until = traffic.prefill_tokens_per_s, now + self.OUTLOOK_S
        progress: list[float] = []
        found: list[Outlook] = []
        for source in sources:
            cache = caches.get(source)
            if cache is None:
                progress.append(0.0)
                found.append(_NOTHING)
                continue
            known = cache.outlook
            if known is None or now > cache.outlook_until:
                cache.capacity_blocks = capacity_of(len(found))
                known = cache.outlook = self._look(traffic, cache, now)
                cache.outlook_until = known_until
            found.append(known)
            first = cache.first
            if first is None:
                progress.append(0.0)
                continue
            rate = tokens_per_s if first.model is traffic else first.model.prefill_tokens_per_s
            done, most = (now - cache.first_since) * rate * cache.speed, first.most_progress
            progress.append(done if done < most else most)
        return progress, found

    def _look(self, model: ModelTraffic, cache: _Cache, now: float) -> Outlook:
        age = self._eviction_age_s(cache, now)
        reuse = 0.0 if age is None else model.reuse_probability(age)
        rates = cache.work.per_s(now), cache.arrivals.per_s(now)
        return age, reuse, *rates, cache.refill.value

    def in_prefill(self, prompt: HashedPrompt, tokens: int = 0) -> dict[SourceId, Coming]:
        """What each cache is computing of a prompt for another one now.

        Args:
            prompt: One that is to be sent.
            tokens: Its length; 0 if it is unknown, so that what is behind the last key never
                counts.
        """
        self._forget_computed(self._clock())
        if not prompt.prefix_keys(STEP):
            return {}
        found = {
            cache.source: shared
            for cache, shared in self._own.shared(prompt, tokens, self._is_sparse).items()
            if self._caches.get(cache.source) is cache  # else its replica has failed since
        }
        if self._heard:
            for source, shared in self._others.shared(prompt, tokens, self._is_sparse).items():
                known = found.get(source, shared)
                found[source] = Coming(max(known.tokens, shared.tokens), max(known.run, shared.run))
        return found

    def expected(
        self,
        source: SourceId,
        prompt: HashedPrompt,
        prompt_tokens: int,
        hit_tokens: int,
        junction_tokens: int = 0,
    ) -> int:
        """How many tokens of a prompt will be cached when the engine admits it, if it were sent
        now: those in prefill there come first. They store their prompts, and evict others.

        Args:
            source: The cache.
            prompt: One that is to be sent.
            prompt_tokens: Its length.
            hit_tokens: That are cached now.
            junction_tokens: Behind these, those of which only full attention is there.
        """
        cache = self._caches.get(source)
        if cache is None:
            return hit_tokens
        now = Coming(hit_tokens, hit_tokens + junction_tokens)
        return self._at_admission(cache, prompt, prompt_tokens, now).tokens

    def _at_admission(
        self, cache: _Cache, prompt: HashedPrompt, prompt_tokens: int, now: Coming
    ) -> Coming:
        """What an engine will find of a prompt, and of its full attention.

        Args:
            cache: Where it is sent.
            prompt: The prompt.
            prompt_tokens: Its length.
            now: What is there now.
        """
        keys, layout = prompt.prefix_keys(STEP), cache.layout
        if layout is UNKNOWN:
            layout = self._look_at_layout(cache)
        if not keys or not cache.prefilling or (layout is UNKNOWN and _is_followed(cache)):
            return now
        self._forget_evicted(cache)
        evicted, evicted_before = self._foresee_evictions(cache)
        tokens, run = _left_of(cache, prompt, now, evicted) if now.run else now
        for visit in reversed(cache.prefilling):
            # A window that has moved on within a prompt is the first to go.
            is_kept = not layout.has_gaps or evicted - evicted_before[visit] < _evictable(cache)
            if is_kept and visit.keys and visit.keys[0] == keys[0]:
                found = coming_of(prompt, prompt_tokens, visit, layout)
                tokens, run = max(tokens, found.tokens), max(run, found.run)
        return Coming(tokens, max(run, tokens))

    def _foresee_evictions(self, cache: _Cache) -> tuple[float, dict[Visit, float]]:
        """How many blocks will have been evicted when the next request is admitted, and when each
        of those in prefill has been computed; where windows are kept densely, when it is begun."""
        forecast, found, may_have_begun = Forecast(cache.layout, _free_blocks(cache)), {}, True
        for visit in cache.prefilling:
            done = visit.found.tokens
            if may_have_begun and visit.prompt is not None:
                run = _full_run(cache, visit.prompt)
                may_have_begun = run > visit.found.run
                done = max(run, done) if may_have_begun else done
            boundaries = sorted({*visit.kept, *cache.layout.boundaries_of(visit.tokens)})
            kept = cache.layout.tail_blocks(boundaries, visit.found.tokens)
            before = forecast.evicted
            forecast.compute(visit.tokens - done, sum(blocks for _, blocks in kept))
            found[visit] = forecast.evicted if cache.layout.is_sparse else before
        return forecast.evicted, found

    def statistics(self) -> MirrorStatistics:
        """Sizes."""
        return MirrorStatistics(
            len(self._caches),
            sum(len(cache.content) for cache in self._caches.values()),
            sum(cache.content.requests for cache in self._caches.values()),
            sum(cache.content.size for cache in self._caches.values()),
        )

    # --- steps ------------------------------------------------------------------------------------

    def _model(self, name: str) -> ModelTraffic:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = ModelTraffic(self._max_keys // 4)
        return model

    def _cache(self, source: SourceId, index: PrefixIndex, now: float) -> _Cache:
        cache = self._caches.get(source)
        if cache is None or cache.index is not index:
            rates = FadingRate(FADE_S, now), FadingRate(FADE_S, now)
            cache = _Cache(source, index, now, *rates, LoadPrices(self._load_price))
            self._caches[source] = cache
            cache.removals = removals(index, source)
            cache.had_content = blocks_held(index, source) > 0
        return cache

    def _enter_prefill(self, visit: Visit, cache: _Cache, now: float) -> None:
        if cache.first is None:
            cache.first, cache.first_since = visit, now
        cache.prefilling[visit] = None
        self._forget_computed(now)
        if visit.keys:
            self._own.add(visit, cache)

    def _leave_prefill(self, visit: Visit, cache: _Cache, is_computed: bool, now: float) -> None:
        if visit not in cache.prefilling:
            return
        del cache.prefilling[visit]
        if cache.first is visit:
            cache.first, cache.first_since = next(iter(cache.prefilling), None), now
        if visit.keys and not is_computed:
            self._own.remove(visit)
        elif visit.keys:
            visit.known_until = now + self.EVENTS_S
            self._computed.append(visit)

    def _forget_computed(self, now: float) -> None:
        while self._computed and self._computed[0].known_until <= now:
            self._own.remove(self._computed.popleft())

    def _layout(self, source: SourceId) -> Layout:
        cache = self._caches.get(source)
        return UNKNOWN if cache is None else cache.layout

    def _eviction_age_s(self, cache: _Cache, now: float) -> float | None:
        held = blocks_held(cache.index, cache.source)
        if removals(cache.index, cache.source):
            is_full = held >= cache.most_blocks * self.EMPTIED
        else:
            capacity = cache.capacity_blocks
            is_full = capacity is not None and held >= capacity * self.FULL
        if not is_full:
            return None
        if cache.had_content:
            return now - cache.since
        oldest = cache.content.oldest()
        return 0.0 if oldest is None or oldest.ended_at is None else now - oldest.ended_at

    def _give_back(self, cache: _Cache, visit: Visit, use: Use, now: float) -> None:
        """One of a visit's prompts is used no more: what it holds can be evicted."""
        layout, before = cache.layout, max(visit.kept, default=0)
        ends = layout.boundaries_of(visit.tokens)
        use.rest = visit.tokens / STEP - len(use.keys) if visit.prompt is not None else 0.0
        if layout.windows_first:
            _leave(cache, visit, ends, before)
        visit.note_taken(use, cache.content.end(use, now))
        cache.order.end(use, layout.held_blocks_per_key)
        if not layout.windows_first:
            _leave(cache, visit, ends, before)

    def _look_at_layout(self, cache: _Cache) -> Layout:
        cache.layout = layout_of(cache.index, cache.source)
        self._is_sparse |= cache.layout.is_sparse
        return cache.layout

    def _look_at_oldest(self, cache: _Cache) -> None:
        """Learn what has happened since the last look."""
        cache.outlook = None
        cache.looks += 1
        # Soon after the start, and now and then: what it keeps shows only in what it has stored.
        if cache.looks % 256 == 0 or cache.looks & (cache.looks - 1) == 0:
            self._look_at_layout(cache)
        cache.most_blocks = max(cache.most_blocks, blocks_held(cache.index, cache.source))
        self._forget_evicted(cache)

    def _forget_evicted(self, cache: _Cache) -> None:
        """Forget what has been evicted since the last look."""
        removed = removals(cache.index, cache.source)
        if removed == cache.removals:
            return
        if removed < cache.removals:  # it was cleared, and may have been another process's
            cache.content.clear()
            cache.order.clear()
            cache.had_content = False
        cache.removals = removed
        while (oldest := cache.content.oldest()) is not None and not _is_left(cache, oldest):
            self._drop(cache, oldest)
            cache.had_content = False
        cache.order.fit(cache.capacity_blocks or cache.most_blocks)

    def _drop(self, cache: _Cache, oldest: Use) -> None:
        cache.order.gone(oldest)
        cache.content.drop(oldest)

    def _fit(self, cache: _Cache) -> None:
        """Hold this cache to its share of the memory."""
        most = self._max_keys // len(self._caches) if self._caches else 0
        while cache.content.size > most and (oldest := cache.content.oldest()) is not None:
            self._drop(cache, oldest)


# --- what a cache holds, and how long -------------------------------------------------------------


def _left_of(cache: _Cache, prompt: HashedPrompt, now: Coming, evicted_blocks: float) -> Coming:
    """What is left of what a cache has of a prompt when it has evicted so many blocks."""
    if evicted_blocks <= 0:
        return now
    layout, keys = cache.layout, prompt.prefix_keys(STEP)
    unit, run = layout.hit_tokens, now.run
    evicted = cache.order.first(evicted_blocks, layout.held_blocks_per_key)
    for start, end, use in cache.content.segments(keys[: -(-run // STEP)]):
        gone = evicted.keys.get(use.number, 0.0)
        left = int((len(use.keys) + use.rest - gone) * STEP)
        if gone and left < min(end * STEP, run):
            is_all_lost = layout.has_gaps and not layout.is_sparse
            run = (start * STEP if is_all_lost else max(left, start * STEP)) // unit * unit
            break
    tokens = min(now.tokens, run)
    if layout.is_sparse:
        tokens = _whole_boundary(cache, prompt, tokens, now.tokens <= run, evicted.boundaries)
    return Coming(tokens, run)


def _whole_boundary(
    cache: _Cache, prompt: HashedPrompt, most_tokens: int, is_one: bool, evicted: Set[int]
) -> int:
    """The longest length of a prompt at which windows and states are whole after an eviction.

    Args:
        cache: Where.
        prompt: The prompt.
        most_tokens: No longer one.
        is_one: Whether a hit ends there now.
        evicted: Boundaries that are lost, and with them what they share with later ones.
    """
    unit = cache.layout.hit_tokens
    keys, tail = prompt.prefix_keys(unit), max(cache.layout.longest_tail // unit, 1)
    for count in range(most_tokens // unit, 0, -1):
        is_one = is_one or keys[count - 1] in cache.order
        if is_one and evicted.isdisjoint(keys[max(count - tail, 0) : count]):
            return count * unit
        is_one = False
    return 0


def _free_blocks(cache: _Cache) -> float:
    """Blocks that hold nothing, about: a request's last block in each group is not full."""
    capacity = cache.capacity_blocks
    if capacity is None:
        if not removals(cache.index, cache.source):
            return math.inf
        capacity = cache.most_blocks
    held, layout = blocks_held(cache.index, cache.source), cache.layout
    copies = cache.order.copied_keys * layout.held_blocks_per_key
    copies += cache.recomputed_tokens / STEP * layout.full_blocks_per_key
    return max(capacity - held - copies - cache.decoding * layout.groups, 0.0)


def _is_followed(cache: _Cache) -> bool:
    """Whether its events are followed. Until the first one says where hits end and of which groups
    they are, what is being computed there promises nothing: with windows or states it was wrong
    twice as often as right, with full attention about as often."""
    return cache.index.holds(cache.source)


def _evictable(cache: _Cache) -> float:
    """Blocks that no running request needs, about: those in full attention are needed."""
    running = cache.decoding_tokens / STEP * cache.layout.full_blocks_per_key
    return (cache.capacity_blocks or cache.most_blocks) - running


def _full_run(cache: _Cache, prompt: HashedPrompt) -> int:
    """How much of a prompt is there in full attention; of a cache without, the hit."""
    found = match_source(cache.index, prompt, cache.source).gpu_cached_tokens
    if not cache.layout.is_sparse:
        return found
    hits = cache.index.explain(prompt, cache.source)
    full = [hit.tokens for hit in hits if hit.kind == GroupKind.FULL.value]
    return min(full, default=found)


def _is_left(cache: _Cache, oldest: Use) -> bool:
    """Whether something is left of what a request owns; learn what became of what is not."""
    if oldest.prompt is None:
        return False
    run = _full_run(cache, oldest.prompt)
    if run >= (oldest.owned_from + 1) * STEP:  # what lies before its first own key is shared
        if run < len(oldest.keys) * STEP:
            oldest.rest = run / STEP - len(oldest.keys)
            cache.order.weigh(oldest, cache.layout.held_blocks_per_key)
        return True
    _note_refill(cache, oldest, match_source(cache.index, oldest.prompt, cache.source))
    return False


def _count_decoding(cache: _Cache, visit: Visit, sign: int) -> None:
    """A request begins to decode, or ends."""
    cache.decoding += sign
    cache.decoding_tokens += sign * visit.tokens
    cache.recomputed_tokens += sign * (visit.found.run - visit.found.tokens)


def _hold(cache: _Cache, visit: Visit) -> None:
    """A request uses the windows and states at the end of its hit."""
    layout = cache.layout
    if layout.is_sparse and visit.prompt is not None:
        keys, end = visit.prompt.prefix_keys(layout.hit_tokens), visit.found.tokens
        first = max(end - max(layout.longest_tail, layout.hit_tokens), 0)
        for key in keys[first // layout.hit_tokens : end // layout.hit_tokens]:
            cache.order.hold(key)


def _leave(cache: _Cache, visit: Visit, boundaries: Sequence[int], before: int) -> None:
    """A request has moved on from what is kept before *boundaries* and not before *before*."""
    layout = cache.layout
    if layout.is_sparse and visit.prompt is not None:
        keys = visit.prompt.prefix_keys(layout.hit_tokens)
        for end, blocks in layout.tail_blocks(boundaries, before):
            if 0 < end // layout.hit_tokens <= len(keys):
                cache.order.leave(keys[end // layout.hit_tokens - 1], blocks)


def _kept(layout: Layout, found: Coming, keep: Sequence[int]) -> tuple[int, ...]:
    """Boundaries of a prompt besides its end.

    Args:
        layout: Of the cache.
        found: What the engine finds there.
        keep: What it is told to keep.
    """
    if not layout.is_sparse:
        return ()
    ends = {length // layout.hit_tokens * layout.hit_tokens for length in keep}
    return tuple(sorted({*ends, *found}))


def _note_refill(cache: _Cache, gone: Use, hit: Hit) -> None:
    """Learn, from what the GPU has given up of a request, what is left of it below."""
    start, end = gone.owned_from * STEP, len(gone.keys) * STEP
    kept = max(min(hit.cached_tokens, end) - start, 0)
    # What costs more to load than to compute is as good as lost.
    price = min(cache.prices.mean(hit.by_tier), 1.0)
    cache.refill.add(end - start - kept * (1.0 - price), end - start)
