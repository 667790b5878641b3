"""Follows a request's prompt in the caches that hold it in the end: where the request is sent, and
where another replica computes it."""

from __future__ import annotations

from collections.abc import Sequence

from router._core import Visit
from router.fleet.load import LoadTracker
from router.index import SourceId
from router.policies import Candidate
from router.routing.decision import Decision
from router.routing.planner import RoutePlanner, uncached_tokens


class Prefill:
    """A prompt that another replica computes than the one its request is sent to: booked there
    until the response begins, since nobody says when it is done.

    Args:
        planner: Follows it in the cache there.
        load: Counts it there.
        prefiller: Who computes it.
    """

    __slots__ = ("_approximate", "_in_flight", "prefiller")

    def __init__(
        self, planner: RoutePlanner, load: LoadTracker, decision: Decision, prefiller: Candidate
    ) -> None:
        self.prefiller = prefiller
        tokens, replica = decision.prompt_tokens, decision.prefilling(prefiller)
        uncached = uncached_tokens(tokens, prefiller)
        visit = self._approximate = None
        if not replica.has_ranks:  # else its engine chooses the cache
            visit = visit_of(planner, decision, replica.cache, prefiller, uncached)
            if prefiller.is_approximate:
                visit_estimated = planner.approximate_visit
                self._approximate = visit_estimated(decision.prompts, replica.cache, prefiller)
        self._in_flight = load.started(replica.id, uncached, tokens, visit=visit)

    def computed(self) -> None:
        """The response has begun."""
        self._in_flight.first_token()
        if self._approximate is not None:
            self._approximate.first_token()
        self.ended()

    def ended(self) -> None:
        """It is over, whatever became of it; a second call changes nothing."""
        self._in_flight.ended()
        if self._approximate is not None:
            self._approximate.ended(None)
            self._approximate = None


def visit_of(
    planner: RoutePlanner,
    decision: Decision,
    source: SourceId,
    candidate: Candidate,
    uncached: int,
    keep: Sequence[int] = (),
) -> Visit | None:
    """Let the planner know that a request is sent to a cache.

    Args:
        candidate: That it is, as it was ranked.
        uncached: Prompt tokens to compute there.
        keep: Lengths of the prompt at which the engine is told to keep windows and states.
    """
    planner.remember(decision.prompts, source)
    if decision.model is None:
        return None
    return planner.visit(
        decision.model.name,
        decision.model.index,
        decision.prompts,
        source,
        decision.prompt_tokens,
        candidate,
        keep,
        uncached,
    )
