"""What every policy must do: one suite, run on each built-in policy and on a plug-in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policies import (
    Candidate,
    CandidateLoad,
    Policy,
    PolicySettings,
    Ranked,
    RouteRequest,
    empty_reason,
    make_policy,
)
from router.policies.policies import BUILT_IN
from tests.oracle.scoring.ranking import rank


class ByName:
    """A minimal plug-in."""

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        draws = Random(ascii(request.session))  # which may be a lone surrogate
        shuffled = draws.sample(list(candidates), len(candidates))
        return [Ranked(candidate, index, "by its name") for index, candidate in enumerate(shuffled)]


Make = Callable[[int], Policy]
POLICIES: dict[str, Make] = {
    name: lambda seed, name=name: make_policy(name, PolicySettings(random=Random(seed)))
    for name in BUILT_IN
} | {"plug-in": lambda seed: ByName()}

# Every policy runs each property, so fewer examples are enough.
few = settings(max_examples=40)
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())

tokens = st.integers(0, 2_000_000)
counts = st.integers(0, 100_000)
candidate_loads = st.builds(
    CandidateLoad,
    queued_prefill_tokens=tokens,
    prefilling_requests=counts,
    decoding_requests=counts,
    decode_context_tokens=tokens,
    foreign_requests=counts,
    waiting_requests=counts,
)
candidate_states = st.fixed_dictionaries(
    {
        "gpu_cached_tokens": tokens,
        "cached_tokens": tokens,
        "recent_tokens": tokens,
        "suspect": st.booleans(),
        "load": candidate_loads,
        "speed": st.floats(0.001, 1000),
    }
)
candidate_lists = st.lists(candidate_states, max_size=12).map(
    lambda states: [
        Candidate(replica_id=f"r{index}", **state) for index, state in enumerate(states)
    ]
)
requests = st.builds(
    RouteRequest,
    model=st.sampled_from(["gemma", "bamba"]),
    prompt_tokens=tokens,
    session=st.none() | st.text(st.characters(), max_size=20),
)


def idle(count: int) -> list[Candidate]:
    return [Candidate(replica_id=f"r{index}") for index in range(count)]


def request(session: str | None = None, prompt_tokens: int = 1000) -> RouteRequest:
    return RouteRequest(model="gemma", prompt_tokens=prompt_tokens, session=session)


@every_policy
@few
@given(asked=requests, candidates=candidate_lists)
def test_every_candidate_is_ranked_exactly_once(
    make: Make, asked: RouteRequest, candidates: list[Candidate]
) -> None:
    """A failed request is retried on the rest of the ranking, so no candidate may be missing or
    repeated."""
    ranked = make(1).rank(asked, candidates)
    assert sorted(entry.candidate.replica_id for entry in ranked) == sorted(
        candidate.replica_id for candidate in candidates
    )
    assert all(entry.candidate in candidates for entry in ranked)


@every_policy
@few
@given(asked=requests, candidates=candidate_lists)
def test_costs_are_finite_and_never_fall_along_the_ranking(
    make: Make, asked: RouteRequest, candidates: list[Candidate]
) -> None:
    """Readers of /route take the cost as the reason for the order."""
    costs = [entry.cost for entry in make(1).rank(asked, candidates)]
    assert all(math.isfinite(cost) for cost in costs)
    assert costs == sorted(costs)


@every_policy
@few
@given(asked=requests, candidates=candidate_lists)
def test_reasons_are_one_line_and_hold_nothing_of_the_client(
    make: Make, asked: RouteRequest, candidates: list[Candidate]
) -> None:
    """Reasons appear in logs and on the live page, where a session, possibly a user's name, must
    not."""
    secret = RouteRequest(
        model=asked.model, prompt_tokens=asked.prompt_tokens, session="name-of-a-user"
    )
    for entry in make(1).rank(secret, candidates):
        assert entry.reason
        assert "\n" not in entry.reason
        assert "name-of-a-user" not in entry.reason + repr(secret)


@every_policy
def test_the_callers_list_is_left_as_it_is(make: Make) -> None:
    """The caller ranks one list several times."""
    candidates = idle(9)
    make(1).rank(request(session="s"), candidates)
    assert candidates == idle(9)


@every_policy
def test_without_candidates_the_ranking_is_empty(make: Make) -> None:
    """All replicas of a model may be gone at once; that is a response with 503, not a crash."""
    assert make(1).rank(request(), []) == []
    assert rank(make(1), request(), []) == ((), ())


@every_policy
def test_the_same_seed_gives_the_same_choices(make: Make) -> None:
    """A report from production can be replayed."""

    def choices() -> list[list[str]]:
        policy = make(7)
        return [
            [e.candidate.replica_id for e in policy.rank(request(str(turn)), idle(5))]
            for turn in range(20)
        ]

    assert choices() == choices()


@every_policy
def test_equal_and_idle_replicas_share_the_requests(make: Make) -> None:
    """No policy may favour a replica because of its name or its place in the list."""
    policy = make(3)
    firsts = Counter(
        policy.rank(request(session=str(turn)), idle(4))[0].candidate.replica_id
        for turn in range(4000)
    )
    assert set(firsts) == {"r0", "r1", "r2", "r3"}
    assert max(firsts.values()) < 1.2 * min(firsts.values())


@every_policy
@pytest.mark.parametrize("obstacle", ["not healthy", "draining", "at its limit of requests"])
def test_a_replica_that_cannot_serve_is_never_ranked(make: Make, obstacle: str) -> None:
    """However good its cache is: a request sent there would fail."""
    good = Candidate(replica_id="good")
    unable = Candidate(
        replica_id="unable", gpu_cached_tokens=900, cached_tokens=900, obstacle=obstacle
    )
    policy = make(1)
    for turn in range(20):
        ranking, excluded = rank(policy, request(session=str(turn)), [unable, good])
        assert [entry.candidate for entry in ranking] == [good]
        assert [(each, each.obstacle) for each in excluded] == [(unable, obstacle)]


@every_policy
def test_when_no_replica_can_serve_the_ranking_says_why(make: Make) -> None:
    """The sentence goes into the 503, and is the first thing an operator sees."""
    candidates = [
        Candidate(replica_id="a", obstacle="not healthy"),
        Candidate(replica_id="b", obstacle="not healthy"),
        Candidate(replica_id="c", obstacle="draining"),
    ]
    ranking, excluded = rank(make(1), request(), candidates)
    assert ranking == ()
    assert empty_reason(excluded) == "2 not healthy, 1 draining"
