"""A plug-in gets what the core found, and is held to the rules of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given

from router.errors import PolicyError
from router.policies import (
    Candidate,
    Order,
    OrdersStandings,
    PlugIn,
    Ranked,
    RouteRequest,
    Standings,
    make_policy,
)
from router.policies.policies import BUILT_IN
from tests.oracle.scoring.standings import standings_of
from tests.router.policies.candidates import candidate_lists


class Longest:
    """A plug-in that ranks candidates."""

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        ordered = sorted(candidates, key=lambda each: -each.gpu_cached_tokens)
        return [Ranked(each, place, "by its hit") for place, each in enumerate(ordered)]


class LongestOfStandings(Longest):
    """The same without objects."""

    needs_outlook = False

    def order(self, request: RouteRequest, standings: Standings) -> Order:
        costs = [-float(tokens) for tokens in standings.gpu_cached_tokens]
        return Order(costs, lambda number: number, lambda _each, _cost, _place: "by its hit")


@given(candidates=candidate_lists())
def test_a_plug_in_chooses_the_same_with_and_without_objects(candidates: list[Candidate]) -> None:
    """The second way is there to make it faster, not different."""
    request, found = RouteRequest(model="m", prompt_tokens=1000), []
    for policy in (Longest(), LongestOfStandings()):
        ranking = PlugIn(policy).rank(request, standings_of(candidates))
        found.append([(entry.candidate, entry.reason) for entry in ranking])
    assert found[0] == found[1]


def test_only_a_policy_that_looks_at_outlooks_gets_them() -> None:
    """They take as long as all the rest. A plug-in that ranks candidates may look at anything."""
    built_in = {name: make_policy(name) for name in BUILT_IN}
    assert [name for name, policy in built_in.items() if policy.needs_outlook] == ["least_delay"]
    assert PlugIn(Longest()).needs_outlook
    assert not PlugIn(LongestOfStandings()).needs_outlook
    assert isinstance(LongestOfStandings(), OrdersStandings)


@pytest.mark.parametrize(
    "costs", [[1.0], [1.0, float("nan")], [1.0, float("inf")], [1.0, 2.0, 3.0]]
)
def test_a_plug_in_that_orders_wrongly_is_caught(costs: list[float]) -> None:
    """A lost candidate would show only when a request has nowhere left to be retried."""

    class Wrong(Longest):
        needs_outlook = False

        def order(self, request: RouteRequest, standings: Standings) -> Order:
            return Order(costs, lambda number: number, lambda _each, _cost, _place: "")

    both = [Candidate(replica_id="a"), Candidate(replica_id="b")]
    with pytest.raises(PolicyError, match=r"Wrong: \d costs with the sum .* for 2 candidates"):
        PlugIn(Wrong()).rank(RouteRequest(model="m", prompt_tokens=1), standings_of(both))


def test_a_ranking_is_a_sequence_of_places() -> None:
    """Retries, explanations and the log read it as they always did."""
    candidates = [Candidate(replica_id=f"r{n}", gpu_cached_tokens=n) for n in range(4)]
    ranking = PlugIn(LongestOfStandings()).rank(
        RouteRequest(model="m", prompt_tokens=10), standings_of(candidates)
    )
    assert [entry.candidate.replica_id for entry in ranking] == ["r3", "r2", "r1", "r0"]
    assert ranking[-1].candidate == candidates[0]
    assert [entry.candidate for entry in ranking[1:3]] == [candidates[2], candidates[1]]
    assert len(ranking) == 4
    assert ranking[0] is ranking[0]
    with pytest.raises(IndexError):
        ranking[4]
