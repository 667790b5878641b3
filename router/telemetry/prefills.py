"""Follows a request's prompt in the caches that will hold it: at the replica of the response, and
at the one that computes the prompt."""

from __future__ import annotations

from router.fleet.load import LoadTracker
from router.policies import Candidate
from router.routing.decision import Decision
from router.routing.planner import RoutePlanner, uncached_tokens


class Prefill:
    """A prompt that another replica computes than the one its request is sent to: booked there
    until the response begins, since its end is not reported.

    Args:
        planner: Follows it in the cache there.
        load: Counts it there.
        prefiller: The replica that computes it.
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
            visit = planner.visit(decision.question, replica.cache, prefiller)
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
        """End it; a second call changes nothing."""
        self._in_flight.ended()
        if self._approximate is not None:
            self._approximate.ended(None)
            self._approximate = None
