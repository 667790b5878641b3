"""A plug-in decides by what the core has found, and keeps nobody from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from router.errors import PolicyError
from router.fleet.load import InFlight, LoadTracker
from router.index.mirror import Mirror
from router.policies import (
    LEAST_DELAY,
    Candidate,
    Order,
    Policy,
    Ranked,
    RouteRequest,
    Standings,
    make_policy,
)
from router.routing.planner import Known, RoutePlanner
from router.routing.question import RankQuestion
from router.routing.recent_prefixes import RecentPrefixes
from tests.router.routing.test_planner import IDS, Planning, replica
from tests.support.loads import in_flight, statistics_of

BUSIEST = "by its requests"


class Busiest:
    """Ranks candidates: the one with the most requests first."""

    def __init__(self) -> None:
        self.asked: list[RouteRequest] = []

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        self.asked.append(request)
        ordered = sorted(candidates, key=lambda each: -each.load.requests)
        return [Ranked(each, place, BUSIEST) for place, each in enumerate(ordered)]


class BusiestOfColumns(Busiest):
    """The same by columns; it also chooses among ranks where it looks at outlooks."""

    def __init__(self, needs_outlook: bool) -> None:
        super().__init__()
        self.needs_outlook = needs_outlook
        self.sizes: list[int] = []

    def order(self, request: RouteRequest, standings: Standings) -> Order:
        self.asked.append(request)
        self.sizes.append(len(standings))
        costs = [-float(standings.requests(number)) for number in range(len(standings))]
        return Order(costs, lambda number: number, lambda _each, _cost, _place: BUSIEST)


def planning_by(policy: Policy, mirror: Mirror | None = None) -> Planning:
    planning = Planning(mirror=mirror)
    planning.planner = RoutePlanner(
        policy,
        Known(planning.load, planning.suspects, RecentPrefixes(planning.load.books), mirror),
        clock=lambda: 0.0,
    )
    return planning


@pytest.mark.parametrize("policy", [Busiest(), BusiestOfColumns(False), BusiestOfColumns(True)])
def test_a_plug_in_is_told_of_hits_and_load_and_says_who_comes_first(policy: Policy) -> None:
    """However it wants to be asked."""
    planning = planning_by(policy)
    planning.store(replica("r0").cache, IDS)
    prompts = planning.prompts([*IDS, 0])
    with in_flight(planning.load, "r1", 70, 900):
        ranking = planning.rank(prompts, *(replica(f"r{number}") for number in range(3)))
        found = {each.candidate.replica_id: each.candidate for each in ranking}
    assert [each.candidate.replica_id for each in ranking] == ["r1", "r0", "r2"]
    assert [each.reason for each in ranking] == [BUSIEST] * 3
    assert found["r0"].gpu_cached_tokens == 256
    assert found["r1"].load.queued_prefill_tokens == 70
    assert found["r2"] == Candidate(replica_id="r2")


def test_a_plug_in_gets_no_replica_that_cannot_take_the_request() -> None:
    """Those are named with their obstacles."""
    policy = Busiest()
    planning, shut = planning_by(policy), replica("r1")
    shut.draining = True
    question = RankQuestion(RouteRequest(model="m", prompt_tokens=9), planning.index)
    ranking, excluded = planning.planner.rank(question, [replica("r0"), shut])
    assert [each.candidate.replica_id for each in ranking] == ["r0"]
    assert [(each.replica_id, each.obstacle) for each in excluded] == [("r1", "draining")]
    assert planning.planner.rank(question, [shut])[0] == ()
    assert len(policy.asked) == 1, "nobody is left to be ranked"


def test_a_plug_in_that_looks_at_caches_is_told_how_fast_prompts_are_computed() -> None:
    """And by which keys prompts are alike, as `least_delay` is."""
    policy, mirror = BusiestOfColumns(True), Mirror(clock=lambda: 0.0)
    planning = planning_by(policy, mirror)
    prompts = planning.prompts(IDS)
    planning.rank(prompts, replica())
    (asked,) = policy.asked
    assert asked.prefill_tokens_per_s == mirror.prefill_tokens_per_s("m")
    assert list(asked.keys) == list(prompts[0].prefix_keys(64))


@pytest.mark.parametrize(("needs_outlook", "sizes", "rank"), [(True, [3, 1], 1), (False, [1], 0)])
def test_a_plug_in_chooses_among_ranks_if_it_looks_at_caches(
    needs_outlook: bool, sizes: list[int], rank: int
) -> None:
    """Elsewhere the wait decides, as it does for turns and sessions."""
    policy = BusiestOfColumns(needs_outlook)
    planning = planning_by(policy)
    flights = [planning.load.started("r0", 900, 900, number) for number in (1, 1, 2)]
    found = planning.only(planning.prompts(IDS), replica(ranks=3))
    assert (found.dp_rank, policy.sizes) == (rank, sizes)
    assert found.load.prefilling_requests == (2 if rank else 0)
    assert len(flights) == 3


def test_a_plug_in_s_mistake_about_ranks_is_its_own() -> None:
    """It reaches whoever asked, and the next decision finds everything as it was."""

    class Wrong(BusiestOfColumns):
        def order(self, request: RouteRequest, standings: Standings) -> Order:
            if self.needs_outlook:
                return Order([1.0], lambda number: number, lambda *_: "")
            return super().order(request, standings)

    policy = Wrong(True)
    planning = planning_by(policy)
    with pytest.raises(PolicyError, match="Wrong: 1 costs"):
        planning.only([], replica(ranks=2))
    policy.needs_outlook = False
    assert planning.only([], replica()).replica_id == "r0"


def test_a_plug_in_may_let_go_of_a_request_while_it_chooses_among_ranks() -> None:
    """Python frees what it likes when it likes: who then took the books would wait for itself."""

    class Forgetful(BusiestOfColumns):
        held: ClassVar[list[InFlight]] = []

        def order(self, request: RouteRequest, standings: Standings) -> Order:
            self.held.clear()
            return super().order(request, standings)

    policy = Forgetful(True)
    planning = planning_by(policy)
    policy.held.append(planning.load.started("r0", 10, 10, 1))
    assert planning.only([], replica(ranks=2)).replica_id == "r0"
    assert statistics_of(planning.load).in_flight == 0


def test_a_plug_in_may_be_a_built_in_policy_that_is_made_otherwise() -> None:
    """Then the core decides alone."""
    planner = RoutePlanner(make_policy(LEAST_DELAY), Known(LoadTracker()))
    assert not planner.asks_a_plug_in
    assert RoutePlanner(Busiest(), Known(LoadTracker())).asks_a_plug_in
