"""A decision without an object for each candidate is the same decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import PolicyError
from router.scoring import (
    Candidate,
    CandidateLoad,
    Order,
    OrdersStandings,
    PolicySettings,
    Ranked,
    Ranker,
    RouteRequest,
    Standings,
    Weights,
    make_policy,
)
from router.scoring.delay import delays_of, mean_congestion
from router.scoring.policies import BUILT_IN, draw

WEIGHTS = Weights(recent_trust=0.75)
SEED = 11

# --- the policies as they are meant, one candidate at a time --------------------------------------

Ordered = list[tuple[Candidate, float]]


def _busyness(load: CandidateLoad) -> float:
    return (
        load.queued_prefill_tokens * WEIGHTS.queued_prefill_token
        + load.decoding_requests * WEIGHTS.decode_request
        + load.decode_context_tokens * WEIGHTS.decode_context_token
        + load.foreign_requests * WEIGHTS.foreign_request
        + load.waiting_requests * WEIGHTS.waiting_request
    )


def _wait(tokens: int, candidate: Candidate) -> float:
    trust = WEIGHTS.suspect_trust if candidate.suspect else 1.0
    gpu = max(candidate.gpu_cached_tokens * trust, candidate.recent_tokens * WEIGHTS.recent_trust)
    gpu = min(gpu, tokens)
    lower = min(max(candidate.cached_tokens * trust - gpu, 0.0), tokens - gpu)
    lower_cost = lower * WEIGHTS.of_lower(candidate.by_tier) if lower else 0.0
    uncached = tokens - gpu - lower
    return (uncached + lower_cost + _busyness(candidate.load)) / candidate.speed


def _by_cost(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], float], random: Random
) -> Ordered:
    found = [(cost(each), each.load.requests, random.random(), each) for each in candidates]
    found.sort(key=lambda entry: entry[:3])
    return [(each, its_cost) for its_cost, _, _, each in found]


def _prefix(request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> Ordered:
    return _by_cost(candidates, lambda each: _wait(request.prompt_tokens, each), random)


def _least_delay(request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> Ordered:
    speed = request.prefill_tokens_per_s
    mean = mean_congestion(candidates, speed)

    def cost(candidate: Candidate) -> float:
        return sum(delays_of(request.prompt_tokens, candidate, speed, WEIGHTS, mean))

    return _by_cost(candidates, cost, random)


def _least_loaded(
    request: RouteRequest,
    candidates: Sequence[Candidate],
    random: Random,
) -> Ordered:
    return _by_cost(candidates, lambda each: _busyness(each.load) / each.speed, random)


def _round_robin(
    request: RouteRequest,
    candidates: Sequence[Candidate],
    random: Random,
) -> Ordered:
    ordered = sorted(candidates, key=lambda candidate: candidate.replica_id)
    return [(candidate, place) for place, candidate in enumerate(ordered)]


def _random(
    request: RouteRequest,
    candidates: Sequence[Candidate],
    random: Random,
) -> Ordered:
    ordered = list(candidates)
    random.shuffle(ordered)
    return [(candidate, place) for place, candidate in enumerate(ordered)]


def _session(request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> Ordered:
    if not request.session:
        return _least_loaded(request, candidates, random)
    session = request.session.encode()
    draws = [(draw(session, each.replica_id, each.speed), each) for each in candidates]
    draws.sort(key=lambda entry: (entry[0], entry[1].replica_id))
    return [(candidate, number) for number, candidate in draws]


PLAIN: dict[str, Callable[[RouteRequest, Sequence[Candidate], Random], Ordered]] = {
    "prefix": _prefix,
    "least_delay": _least_delay,
    "round_robin": _round_robin,
    "random": _random,
    "least_loaded": _least_loaded,
    "session": _session,
}

# --- few values, so that many candidates are equal ------------------------------------------------

counts = st.sampled_from([0, 0, 0, 1, 3])
tokens = st.sampled_from([0, 0, 64, 1000, 4096, 100_000])
loads = st.builds(
    CandidateLoad,
    queued_prefill_tokens=tokens,
    prefilling_requests=counts,
    decoding_requests=counts,
    decode_context_tokens=tokens,
    foreign_requests=counts,
    waiting_requests=counts,
)


@st.composite
def candidate_lists(draw_from: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw_from(st.integers(1, 8))):
        gpu, lower = draw_from(tokens), draw_from(tokens)
        by_tier = draw_from(st.sampled_from([(), (("CPU", lower),), (("FS", lower),)]))
        found.append(
            Candidate(
                replica_id=f"r{9 - number}",
                gpu_cached_tokens=gpu,
                cached_tokens=gpu + lower,
                by_tier=by_tier if lower else (),
                recent_tokens=draw_from(tokens),
                progress_tokens=draw_from(st.sampled_from([0.0, 50.5, 900.0])),
                reuse_probability=draw_from(st.sampled_from([0.0, 0.25])),
                uncached_tokens_per_s=draw_from(st.sampled_from([0.0, 4000.0])),
                arrivals_per_s=draw_from(st.sampled_from([0.0, 2.0])),
                suspect=draw_from(st.booleans()),
                load=draw_from(loads),
                speed=draw_from(st.sampled_from([1.0, 1.0, 2.0, 0.3])),
                dp_rank=draw_from(st.sampled_from([None, 1])),
            )
        )
    return found


requests = st.builds(
    RouteRequest,
    model=st.just("m"),
    prompt_tokens=tokens,
    session=st.sampled_from([None, "s"]),
    prefill_tokens_per_s=st.sampled_from([8000.0, 12_345.6]),
)


@pytest.mark.parametrize("name", BUILT_IN)
@given(request=requests, candidates=candidate_lists())
def test_every_policy_orders_standings_as_its_candidates(
    name: str, request: RouteRequest, candidates: list[Candidate]
) -> None:
    """Candidates, costs to the last bit, and what decides between equals."""
    policy = make_policy(name, PolicySettings(weights=WEIGHTS, random=Random(SEED)))
    plain = PLAIN[name](request, candidates, Random(SEED))
    ranking = Ranker(policy).rank(request, Standings.of(candidates))
    assert [(entry.candidate, entry.cost) for entry in ranking] == plain
    assert ranking[0].candidate == plain[0][0], "as read before the rest was made"
    again = make_policy(name, PolicySettings(weights=WEIGHTS, random=Random(SEED)))
    ranked = again.rank(request, candidates)
    assert [(entry.candidate, entry.cost) for entry in ranked] == plain
    assert [entry.reason for entry in ranked] == [entry.reason for entry in ranking]


# --- plug-ins -------------------------------------------------------------------------------------


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
        ranking = Ranker(policy).rank(request, Standings.of(candidates))
        found.append([(entry.candidate, entry.reason) for entry in ranking])
    assert found[0] == found[1]


def test_only_a_policy_that_looks_at_outlooks_gets_them() -> None:
    """They take as long as all the rest. A plug-in that ranks candidates may look at anything."""
    assert {name for name in BUILT_IN if Ranker(make_policy(name)).needs_outlook} == {"least_delay"}
    assert Ranker(Longest()).needs_outlook
    assert not Ranker(LongestOfStandings()).needs_outlook
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
        Ranker(Wrong()).rank(RouteRequest(model="m", prompt_tokens=1), Standings.of(both))


def test_a_ranking_is_a_sequence_of_places() -> None:
    """Retries, explanations and the log read it as they always did."""
    candidates = [Candidate(replica_id=f"r{n}", gpu_cached_tokens=n) for n in range(4)]
    ranking = Ranker(make_policy("prefix")).rank(
        RouteRequest(model="m", prompt_tokens=10), Standings.of(candidates)
    )
    assert [entry.candidate.replica_id for entry in ranking] == ["r3", "r2", "r1", "r0"]
    assert ranking[-1].candidate == candidates[0]
    assert [entry.candidate for entry in ranking[1:3]] == [candidates[2], candidates[1]]
    assert len(ranking) == 4
    assert ranking[0] is ranking[0]
    with pytest.raises(IndexError):
        ranking[4]


def test_any_number_of_candidates_may_be_put_in_place_of_others() -> None:
    """Thousands of replicas may be without events, or have data-parallel ranks: the estimate or the
    best rank of each is put in its place."""
    count = 3000
    standings = Standings.of([Candidate(replica_id=f"r{i}") for i in range(count)])
    tiers = (("cpu", 32),)
    for i in range(0, count, 2):
        other = Candidate(replica_id=f"r{i}", cached_tokens=64 + i, by_tier=tiers)
        standings.put(i, other)
        standings.put_estimate(i + 1, 16, 0.5)
        standings.put_eviction(i + 1, 3.0, 0.25)
    for i in (0, count - 2):
        assert standings.lower_of(i).by_tier == tiers
        assert standings.candidate(i) == Candidate(
            replica_id=f"r{i}", cached_tokens=64 + i, by_tier=tiers
        )
        assert standings.candidate(i + 1) == Candidate(
            replica_id=f"r{i + 1}",
            gpu_cached_tokens=16,
            cached_tokens=16,
            eviction_age_s=3.0,
            reuse_probability=0.25,
            approximate_trust=0.5,
        )
