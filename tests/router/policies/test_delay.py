"""Each part of a delay moves the decision the way it should."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from router._core import Policy as CorePolicy
from router.policies import (
    LEAST_DELAY,
    Candidate,
    CandidateLoad,
    Policy,
    PolicySettings,
    RouteRequest,
    Weights,
    make_policy,
)
from tests.oracle.scoring.delay import MOST_BUSY, Delays

SPEED = 8000.0
BUSY = {"arrivals_per_s": 2.0, "uncached_tokens_per_s": 4000.0}


def least_delay(weights: Weights | None = None) -> Policy:
    return make_policy(LEAST_DELAY, PolicySettings(weights or Weights(), random=Random(1)))


def delays_of(
    prompt_tokens: int, at: Candidate, speed: float, weights: Weights, mean: float | None = None
) -> Delays:
    """The parts of the delay of a prompt at a candidate."""
    mean = congestion(at, speed) if mean is None else mean
    return Delays(*CorePolicy(LEAST_DELAY, weights).delays(prompt_tokens, at, speed, mean))


def congestion(at: Candidate, speed: float) -> float:
    return mean_congestion([at], speed)


def mean_congestion(candidates: Sequence[Candidate], speed: float) -> float:
    """The `m` of the cost."""
    draws = [0.5] * len(candidates)
    policy = CorePolicy(LEAST_DELAY, Weights())
    return policy.order("m", b"", 1, speed, (), list(candidates), draws)[3]


def candidate(name: str, cached: int = 0, **fields: Any) -> Candidate:
    load = CandidateLoad(**fields.pop("load", {}))
    return Candidate(
        replica_id=name, gpu_cached_tokens=cached, cached_tokens=cached, load=load, **fields
    )


def best(*candidates: Candidate) -> str:
    policy = least_delay()
    request = RouteRequest(model="m", prompt_tokens=4000, prefill_tokens_per_s=SPEED)
    return policy.rank(request, candidates)[0].candidate.replica_id


def test_the_longer_hit_wins_among_idle_replicas() -> None:
    """What is cached need not be computed."""
    assert best(candidate("a", 1000), candidate("b", 2000)) == "b"


def test_a_queue_outweighs_a_short_hit() -> None:
    """Waiting for 3,000 tokens is longer than computing 1,000."""
    busy = candidate("a", 1000, load={"queued_prefill_tokens": 3000, "prefilling_requests": 1})
    assert best(busy, candidate("b")) == "b"


def test_what_is_done_of_a_queue_no_longer_counts() -> None:
    """The same queue, nearly done."""
    busy = candidate(
        "a",
        1000,
        load={"queued_prefill_tokens": 3000, "prefilling_requests": 1},
        progress_tokens=2800.0,
    )
    assert best(busy, candidate("b")) == "a"


def test_what_is_being_computed_need_not_be_computed_again() -> None:
    """A burst of equal prompts stays together."""
    computing = candidate(
        "a",
        recent_tokens=3900,
        load={"queued_prefill_tokens": 3900, "prefilling_requests": 1},
        progress_tokens=1000.0,
    )
    assert best(computing, candidate("b")) == "a"


def test_a_burst_of_equal_prompts_is_split_once_waiting_costs_more() -> None:
    """A hot prefix gets a second copy before its holder drowns."""
    computing = candidate(
        "a", recent_tokens=3900, load={"queued_prefill_tokens": 9000, "prefilling_requests": 30}
    )
    assert best(computing, candidate("b")) == "b"


def test_at_a_busy_replica_a_long_prompt_avoids_the_queue_that_a_short_one_joins() -> None:
    """Work behind work delays all that come after it; where few come, it does not matter."""
    queue = {"queued_prefill_tokens": 1000, "prefilling_requests": 1}
    busy, quiet = candidate("a", 500, load=queue, **BUSY), candidate("b", load=queue)
    assert best(busy, quiet) == "b"
    assert best(candidate("a", 500, load=queue), quiet) == "a"
    short = Candidate(replica_id="a", gpu_cached_tokens=3900, cached_tokens=3900, **BUSY)
    assert best(short, candidate("b", 3000)) == "a"


def test_content_that_will_be_used_again_is_not_evicted_for_a_cold_prompt() -> None:
    """Two idle replicas, one of them full of what comes back."""
    full = candidate("a", eviction_age_s=5.0, reuse_probability=0.8)
    assert best(full, candidate("b", load={"decoding_requests": 3})) == "b"
    stale = candidate("a", eviction_age_s=500.0, reuse_probability=0.001)
    assert best(stale, candidate("b", load={"decoding_requests": 3})) == "a"


def test_a_faster_replica_is_worth_more() -> None:
    """All of its delays are shorter."""
    assert best(candidate("a"), candidate("b", speed=2.0)) == "b"
    assert best(candidate("a", 1000), candidate("b", speed=2.0)) == "b"


def test_an_estimated_hit_counts_in_part() -> None:
    """No events say that it is there."""
    assert best(candidate("a", 2000, approximate_trust=0.5), candidate("b", 1500)) == "b"
    assert best(candidate("a", 2000, approximate_trust=0.9), candidate("b", 1500)) == "a"


def test_the_last_token_is_computed_also_of_a_prompt_that_is_all_cached() -> None:
    """An engine computes it to have something to go on from, also where an equal prompt was just
    sent."""
    for sent in (3999, 4000, 5000):
        found = candidate("a", recent_tokens=sent)
        assert delays_of(4000, found, SPEED, Weights()).own == 1


def test_requests_that_the_router_did_not_send_are_work_ahead() -> None:
    """Each counts for what an average one is taken to be."""
    weights = Weights(foreign_request=700.0, waiting_request=900.0)
    load = {"foreign_requests": 3, "waiting_requests": 2}
    assert delays_of(4000, candidate("a", load=load), SPEED, weights).ahead == 3 * 700 + 2 * 900


def test_a_suspect_hit_counts_in_part() -> None:
    """Events were lost: perhaps it is gone."""
    assert best(candidate("a", 2000, suspect=True), candidate("b", 1500)) == "b"


def test_a_lower_tier_costs_its_transfer_and_its_place_on_the_gpu() -> None:
    """Bringing back is cheaper than computing, and evicts just as much."""
    tier = Candidate(replica_id="a", cached_tokens=3000, by_tier=(("CPU", 3000),))
    delays = delays_of(4000, tier, SPEED, Weights())
    assert delays.own == pytest.approx(1000 + 300)
    full = Candidate(
        replica_id="a", cached_tokens=3000, by_tier=(("CPU", 3000),), reuse_probability=0.5
    )
    assert delays_of(4000, full, SPEED, Weights()).evicted == pytest.approx(2000)


def test_a_lower_tier_costs_what_its_loads_were_measured_to_take() -> None:
    """A guess of the configuration is right within a factor of a few, a measurement is right."""
    hit = {"cached_tokens": 3000, "by_tier": (("CPU", 3000),)}
    measured = Candidate(replica_id="a", load_price=0.02, **hit)
    assert delays_of(4000, measured, SPEED, Weights()).own == pytest.approx(1000 + 60)
    assert best(measured, Candidate(replica_id="b", **hit)) == "a"
    assert best(Candidate(replica_id="a", load_price=0.9, **hit), candidate("b", 1500)) == "b"


def test_what_a_tier_below_holds_costs_its_load_when_it_is_evicted() -> None:
    """A cache above a store gives nothing up for good: there the load decides, and not what would
    be driven out."""
    full = {"eviction_age_s": 5.0, "reuse_probability": 0.8}
    held = candidate("a", refill=0.1, **full)
    assert delays_of(4000, held, SPEED, Weights()).evicted == pytest.approx(0.8 * 400)
    waiting = candidate("b", load={"queued_prefill_tokens": 1000, "prefilling_requests": 1})
    assert best(held, waiting) == "a"
    assert best(candidate("a", **full), waiting) == "b"


def test_a_hit_that_everyone_can_load_leaves_the_choice_to_load() -> None:
    """A prompt in a shared store has no home, and a replica with nothing to do takes it."""
    hit = {"cached_tokens": 3900, "by_tier": (("shared", 3900),), "load_price": 0.04}
    warm = candidate("a", 3900, load={"queued_prefill_tokens": 400, "prefilling_requests": 1})
    assert best(warm, Candidate(replica_id="b", **hit)) == "b"
    assert best(warm, candidate("b", 3000)) == "a"


def test_congestion_is_bounded_and_grows_with_the_load() -> None:
    """A replica beyond what it can serve must not make costs infinite."""
    rates = (0.0, 0.5, 2.0, 3.9, 100.0)
    values = [
        congestion(candidate("a", arrivals_per_s=rate, uncached_tokens_per_s=rate * 2000), SPEED)
        for rate in rates
    ]
    assert values == sorted(set(values))
    assert values[-1] == pytest.approx(100 / (2 * SPEED * (1 - MOST_BUSY)))


def test_a_quiet_replica_is_not_free_where_the_others_are_busy() -> None:
    """What goes there brings its own future, and drives out what others will compute again: a
    second copy of what the holder can still serve is not worth it."""
    others = [candidate(f"r{n}", **BUSY) for n in range(6)]
    holder = candidate("holder", 3900, load={"queued_prefill_tokens": 4500}, **BUSY)
    quiet = candidate("quiet", reuse_probability=0.5, arrivals_per_s=0.01)
    assert best(holder, quiet, *others) == "holder"
    alone = delays_of(4000, quiet, SPEED, Weights())
    mean = mean_congestion([holder, quiet, *others], SPEED)
    among = delays_of(4000, quiet, SPEED, Weights(), mean)
    assert among.behind > 5 * alone.behind > 0
    assert among.evicted > alone.evicted


def test_the_rate_that_cold_work_meets_is_between_the_replicas_own_and_the_mean() -> None:
    """Halfway on the scale of rates: four times the mean and a quarter of it are as far away."""
    rates = {name: candidate(name, arrivals_per_s=rate) for name, rate in (("a", 8.0), ("b", 2.0))}
    mean = congestion(rates["b"], SPEED)
    at_busy, at_mean = (
        delays_of(4000, rates[name], SPEED, Weights(), mean).behind for name in ("a", "b")
    )
    assert at_mean == pytest.approx(mean * 4000**2)
    assert at_busy == pytest.approx(2 * at_mean)


def test_the_mean_is_that_of_a_replica_that_gets_the_mean_of_everything() -> None:
    """Of speeds as well; of equals it is that of each."""
    busy = candidate("a", **BUSY)
    assert mean_congestion([busy, busy], SPEED) == pytest.approx(congestion(busy, SPEED))
    idle, fast = candidate("b"), candidate("c", speed=2.0, **BUSY)
    expected = candidate("d", arrivals_per_s=4 / 3, uncached_tokens_per_s=8000 / 3, speed=4 / 3)
    found = mean_congestion([busy, idle, fast], SPEED)
    assert found == pytest.approx(congestion(expected, SPEED))


def test_the_reason_says_where_the_hit_is_and_how_far_it_is_trusted() -> None:
    """An operator must see why a large hit counts little."""
    policy, request = (
        least_delay(),
        RouteRequest(model="m", prompt_tokens=900),
    )
    offloaded = Candidate(
        replica_id="a",
        gpu_cached_tokens=100,
        cached_tokens=500,
        by_tier=(("CPU", 400),),
        suspect=True,
    )
    (found,) = policy.rank(request, [offloaded])
    assert found.reason.startswith(
        "100 of 900 tokens cached and 400 offloaded (400 CPU); discounted, since events were lost; "
    )


def test_a_home_wins_over_a_little_load_and_never_over_a_hit() -> None:
    """Whatever is drawn: what is cached, be it little, need not be computed again."""
    policy, names = least_delay(), [f"r{number}" for number in range(8)]
    request = RouteRequest(model="m", prompt_tokens=70, keys=[7])
    for name in names:
        fleet = [candidate(each, 32 if each == name else 0) for each in names]
        assert policy.rank(request, fleet)[0].candidate.replica_id == name
    cold = [candidate(name) for name in names]
    home = policy.rank(request, cold)[0].candidate.replica_id
    busy = {"decoding_requests": 2}
    cold = [candidate(name, load=busy if name == home else {}) for name in names]
    assert policy.rank(request, cold)[0].candidate.replica_id == home


def test_equals_go_to_the_one_with_the_fewest_requests() -> None:
    """Foreign ones included, at no cost here."""
    policy = least_delay(Weights(foreign_request=0.0))
    request = RouteRequest(model="m", prompt_tokens=4000)
    crowd = [candidate(f"r{n}", load={"foreign_requests": 8 - n}) for n in range(8)]
    ranked = policy.rank(request, crowd)
    assert [entry.candidate.replica_id for entry in ranked] == [f"r{n}" for n in reversed(range(8))]


def test_the_reason_names_every_part_of_the_delay() -> None:
    """An operator sees why."""
    full = candidate(
        "a",
        500,
        load={"queued_prefill_tokens": 800, "decoding_requests": 2},
        reuse_probability=0.3,
        **BUSY,
    )
    policy = least_delay()
    (ranked,) = policy.rank(
        RouteRequest(model="m", prompt_tokens=4000, prefill_tokens_per_s=SPEED), [full]
    )
    for words in (
        "500 of 4,000 tokens cached",
        "ahead of it",
        "3,500 to compute",
        "behind",
        "evicts",
    ):
        assert words in ranked.reason
    assert ranked.cost == pytest.approx(sum(delays_of(4000, full, SPEED, Weights())))
