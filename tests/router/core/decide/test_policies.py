"""The core's policies order and cost as those in Python do, and say the same of it."""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.policies import (
    Candidate,
    CandidateLoad,
    PolicySettings,
    RouteRequest,
    Weights,
    make_policy,
)
from router.policies.policies import BUILT_IN
from tests.oracle.scoring.policies import make_reference

core = import_module("router._core")

few = st.integers(0, 3)
tokens = st.integers(0, 5000) | st.sampled_from([0, 64, 128, 640])
rates = st.sampled_from([0.0, 0.5, 2.0, 30.0]) | st.floats(0, 100)
shares = st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 1)
speeds = st.sampled_from([1.0, 2.0, 0.1]) | st.floats(0.05, 8)
tiers = st.sampled_from(["CPU", "cpu", "STORAGE", "fs", "obj", "PEER", "a store of no name"])
weights = st.builds(
    Weights,
    lower_tier_token=shares,
    queued_prefill_token=shares,
    decode_request=st.floats(0, 50),
    decode_context_token=shares,
    waiting_request=st.floats(0, 500),
    foreign_request=st.floats(0, 100),
    suspect_trust=shares,
    recent_trust=shares,
) | st.just(Weights())


class _Given:
    """Random numbers that are given."""

    def __init__(self, numbers: list[float]) -> None:
        self.random = cycle(numbers).__next__


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """A few, of which some are equal in nearly all."""
    names = draw(st.lists(st.text(max_size=4), min_size=1, max_size=7, unique=True))
    kinds = [draw(_fields()) for _ in range(min(len(names), 3))]
    return [Candidate(replica_id=name, **kinds[draw(few) % len(kinds)]) for name in names]


@st.composite
def _fields(draw: st.DrawFn) -> dict[str, Any]:
    gpu = draw(tokens)
    by_tier = draw(st.lists(st.tuples(tiers, st.integers(1, 2000)), max_size=2))
    below = draw(st.sampled_from([sum(count for _, count in by_tier), 0]) | tokens)
    return {
        "gpu_cached_tokens": gpu,
        "cached_tokens": gpu + below,
        "by_tier": tuple(by_tier),
        "load_price": draw(st.none() | shares),
        "junction_tokens": draw(st.just(0) | tokens),
        "recent_tokens": draw(st.just(0) | tokens),
        "progress_tokens": draw(st.floats(0, 5000)),
        "eviction_age_s": draw(st.none() | st.floats(0, 100)),
        "reuse_probability": draw(shares),
        "uncached_tokens_per_s": draw(rates) * 100,
        "arrivals_per_s": draw(rates),
        "refill": draw(shares),
        "suspect": draw(st.booleans()),
        "approximate_trust": draw(st.none() | st.floats(0.001, 1)),
        "load": CandidateLoad(
            queued_prefill_tokens=draw(tokens),
            prefilling_requests=draw(few),
            decoding_requests=draw(few),
            decode_context_tokens=draw(tokens),
            foreign_requests=draw(few),
            waiting_requests=draw(few),
        ),
        "speed": draw(speeds),
    }


requests = st.builds(
    RouteRequest,
    model=st.just("m"),
    prompt_tokens=tokens,
    session=st.none() | st.text(st.characters(), max_size=5) | st.just("\ud800"),
    prefill_tokens_per_s=st.floats(100, 50_000),
    keys=st.lists(st.integers(0, 2**61 - 2), max_size=40),
)
draws = st.lists(st.sampled_from([0.0, 0.25, 0.5]) | st.floats(0, 1), min_size=7, max_size=7)


BY_COST = [name for name in BUILT_IN if name not in ("round_robin", "random")]
"""All but those that order by turns and draws, which have tests of their own below."""


@pytest.mark.parametrize("name", BY_COST)
@given(candidates=candidates(), request=requests, weights=weights, drawn=draws)
def test_costs_and_order_are_those_of_the_readable_form(
    name: str,
    candidates: list[Candidate],
    request: RouteRequest,
    weights: Weights,
    drawn: list[float],
) -> None:
    """Two routers of one fleet may run different forms, and people read only one of them."""
    random: list[Any] = [_Given(drawn), _Given(drawn)]
    reference = make_reference(name, PolicySettings(weights=weights, random=random[0]))
    expected = reference.rank(request, candidates)
    found = make_policy(name, PolicySettings(weights=weights, random=random[1])).rank(
        request, candidates
    )
    assert [each.cost for each in found] == approx([each.cost for each in expected])
    if [each.candidate for each in found] == [each.candidate for each in expected]:
        assert [each.reason for each in found] == [each.reason for each in expected]
    costs, numbers, first, _ = ordered(name, weights, request, candidates, drawn)
    assert [costs[number] for number in numbers] == approx([each.cost for each in expected])
    for number, each in zip(numbers, expected, strict=True):
        # From Python 3.12 on, `sum` rounds otherwise: what is equal here may differ by that there.
        is_same = candidates[number] == each.candidate
        assert is_same or costs[number] == approx(costs[candidates.index(each.candidate)])
    assert first == numbers[0]


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def ordered(
    name: str,
    weights: Weights,
    request: RouteRequest,
    candidates: list[Candidate],
    drawn: list[float],
) -> Any:
    session = (request.session or "").encode("utf-8", "surrogatepass")
    return core.Policy(name, weights).order(
        request.model,
        session,
        request.prompt_tokens,
        request.prefill_tokens_per_s,
        list(request.keys),
        candidates,
        drawn,
    )


@given(candidates=candidates(), models=st.lists(st.sampled_from("abc"), max_size=12))
def test_turns_are_taken_per_model_by_name(candidates: list[Candidate], models: list[str]) -> None:
    """With one turn for all models, two that alternate would each always meet the same replica."""
    readable, policy = make_reference("round_robin"), core.Policy("round_robin", Weights())
    for model in models:
        request = RouteRequest(model=model, prompt_tokens=1)
        expected = [each.candidate for each in readable.rank(request, candidates)]
        _, numbers, _, _ = policy.order(model, b"", 1, 1.0, [], candidates, [])
        assert [candidates[number] for number in numbers] == expected


@given(count=st.integers(1, 20), drawn=draws)
def test_any_order_is_drawn(count: int, drawn: list[float]) -> None:
    """By the numbers that candidates draw; all of them are in it."""
    found = [Candidate(replica_id=str(number)) for number in range(count)]
    _, numbers, first, _ = core.Policy("random", Weights()).order(
        "m", b"", 1, 1.0, [], found, drawn
    )
    assert sorted(numbers) == list(range(count))
    values = [drawn[number % len(drawn)] for number in numbers]
    assert values == sorted(values)
    assert numbers[0] == first


@example(models=1025)
@given(models=st.integers(1, 3))
def test_models_without_end_do_not_fill_the_memory_of_turns(models: int) -> None:
    """A client may name any: beyond a bound all begin anew, in both forms."""
    readable, policy = make_reference("round_robin"), core.Policy("round_robin", Weights())
    two = [Candidate(replica_id=name) for name in "ab"]
    for model in [*map(str, range(models)), "0"]:
        expected = readable.rank(RouteRequest(model=model, prompt_tokens=1), two)
        _, numbers, _, _ = policy.order(model, b"", 1, 1.0, [], two, [])
        assert [two[number] for number in numbers] == [each.candidate for each in expected]
