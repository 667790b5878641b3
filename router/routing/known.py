"""Holds the state that decisions read, and follows requests in the caches they are sent to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router._core import EstimatedVisit, Visit
from router.fleet.load import LoadTracker
from router.index.base import SourceId
from router.index.mirror import ApproximateCaches, Mirror
from router.index.mirror_types import WORTH_PUBLISHING
from router.index.prompt import HashedPrompt
from router.routing.question import Placement, RankQuestion
from router.routing.recent_prefixes import RecentPrefixes

RECENT_STEP = 64
"""Tokens between two keys in the memory of recent prefixes; the same for all prompts of a model."""


@dataclass(frozen=True, slots=True)
class Known:
    """Holds the state that decisions read."""

    load: LoadTracker
    """Counts what this router has in flight at each replica."""
    suspects: Collection[SourceId] = ()
    """The sources of which events were lost, so that their hits are doubtful; it changes with
    them."""
    recent: RecentPrefixes | None = None
    """Which prefixes were just sent where; None: what the mirror has in prefill."""
    mirror: Mirror | None = None
    """Follows every cache: what it is doing, and evicts next; its books are those of the load.
    None: that is not known."""
    approximate: ApproximateCaches | None = None
    """Estimates what caches hold without events, with the mirror; None: that is not estimated."""
    engine_load_stale_after_s: float = 10.0
    """Age from which an engine's own load no longer counts."""


@dataclass(slots=True, eq=False)
class CacheVisits:
    """Follows requests in the caches that they are sent to."""

    _known: Known
    _clock: Callable[[], float] = time.monotonic
    publish: Callable[[], None] | None = None
    """Publishes soon to other routers; called when a long prompt is sent."""

    def remember(self, prompts: Sequence[HashedPrompt], source: SourceId) -> None:
        """Count on the prefixes of *prompts* in a cache before its events report them."""
        if self._known.recent is not None:
            now = self._clock()
            for prompt in prompts:
                self._known.recent.remember(source, prompt.prefix_keys(RECENT_STEP), now)

    def visit(self, at: Placement) -> Visit | None:
        """A request is about to be sent to a cache: `remember` its prompts, and follow it there.

        Returns:
            The visit, which takes the request's first token and end; None without a mirror or a
            model, or where the engine chooses the cache.
        """
        question, candidate, source = at.question, at.candidate, at.source
        if source is None:
            return None
        self.remember(question.prompts, source)
        if self._known.mirror is None or question.index is None:
            return None
        if self.publish is not None and at.uncached_tokens >= WORTH_PUBLISHING:
            self.publish()
        return self._known.mirror.begin(
            question.request.model,
            question.index,
            source,
            question.prompts,
            question.prompt_tokens,
            at.uncached_tokens,
            candidate.cached_tokens,
            candidate.speed,
            candidate.by_tier,
            candidate.junction_tokens,
            at.keep,
        )

    def estimated_visit(self, at: Placement) -> EstimatedVisit | None:
        """The same for a cache without events; None for one with them."""
        approximate, source = self._known.approximate, at.source
        if approximate is None or source is None or not at.candidate.is_approximate:
            return None
        keys = [prompt.prefix_keys(RECENT_STEP) for prompt in at.question.prompts]
        return approximate.visit(source, keys, at.candidate.cached_tokens)

    def expected(self, question: RankQuestion, source: SourceId, hit: int) -> int:
        """How many tokens will be cached when the engine admits the request."""
        if self._known.mirror is None or len(question.prompts) != 1:
            return hit
        return self._known.mirror.expected(source, question.prompts[0], question.prompt_tokens, hit)

    def forget(self, replica_id: str) -> None:
        """Count no longer on what was sent to this replica, at any of its ranks."""
        if self._known.recent is not None:
            self._known.recent.forget(replica_id)
        if self._known.mirror is not None:
            self._known.mirror.forget(replica_id)
        if self._known.approximate is not None:
            self._known.approximate.forget(replica_id)

    def forget_model(self, model: str) -> None:
        """No replica serves this model any more."""
        if self._known.mirror is not None:
            self._known.mirror.forget_model(model)
