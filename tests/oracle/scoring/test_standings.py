"""The policies in Python as they are meant, one candidate at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import (
    Candidate,
    CandidateLoad,
    PlugIn,
    PolicySettings,
    RouteRequest,
    Weights,
)
from tests.oracle.scoring.delay import delays_of, mean_congestion
from tests.oracle.scoring.policies import REFERENCES, draw, make_reference
from tests.oracle.scoring.standings import ChangingStandings, mean_price, standings_of
from tests.router.policies.candidates import candidate_lists, tokens

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
    lower_cost = lower * mean_price(WEIGHTS, candidate.by_tier) if lower else 0.0
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

requests = st.builds(
    RouteRequest,
    model=st.just("m"),
    prompt_tokens=tokens,
    session=st.sampled_from([None, "s"]),
    prefill_tokens_per_s=st.sampled_from([8000.0, 12_345.6]),
)


@pytest.mark.parametrize("name", REFERENCES)
@given(request=requests, candidates=candidate_lists())
def test_every_policy_orders_standings_as_its_candidates(
    name: str, request: RouteRequest, candidates: list[Candidate]
) -> None:
    """Candidates, costs to the last bit, and what decides between equals."""
    policy = make_reference(name, PolicySettings(weights=WEIGHTS, random=Random(SEED)))
    plain = PLAIN[name](request, candidates, Random(SEED))
    ranking = PlugIn(policy).rank(request, standings_of(candidates))
    assert [(entry.candidate, entry.cost) for entry in ranking] == plain
    assert ranking[0].candidate == plain[0][0], "as read before the rest was made"
    again = make_reference(name, PolicySettings(weights=WEIGHTS, random=Random(SEED)))
    ranked = again.rank(request, candidates)
    assert [(entry.candidate, entry.cost) for entry in ranked] == plain
    assert [entry.reason for entry in ranked] == [entry.reason for entry in ranking]


def test_any_number_of_candidates_may_be_put_in_place_of_others() -> None:
    """Thousands of replicas may be without events, or have data-parallel ranks: the estimate or the
    best rank of each is put in its place."""
    count = 3000
    standings = standings_of(
        [Candidate(replica_id=f"r{i}") for i in range(count)], ChangingStandings
    )
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
