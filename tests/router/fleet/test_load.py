"""In-flight accounting: whatever way requests take, the sums are right on the way and exactly zero
at the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.load import InFlight, LoadTracker, ReplicaLoad
from tests.support.loads import statistics_of


def test_a_request_counts_as_prefill_until_its_first_token_and_as_decode_until_its_end() -> None:
    """The two cost differently, so scoring must see them apart."""
    load = LoadTracker()
    flight = load.started("a", uncached_tokens=300, prompt_tokens=1000)
    assert load.load_of("a") == ReplicaLoad(prefilling_requests=1, prefill_tokens=300)
    flight.first_token()
    assert load.load_of("a") == ReplicaLoad(decoding_requests=1, context_tokens=1000)
    flight.generated(19)
    flight.generated(1)
    assert load.load_of("a") == ReplicaLoad(decoding_requests=1, context_tokens=1020)
    flight.ended()
    assert load.load_of("a") == ReplicaLoad()
    assert statistics_of(load).replicas == {}


def test_a_retried_request_leaves_the_replica_that_failed() -> None:
    """Else a dead replica would look busy for ever, also after its return."""
    load = LoadTracker()
    flight = load.started("a", 300, 1000)
    flight.retried("b", 900)
    assert load.load_of("a") == ReplicaLoad()
    assert load.load_of("b") == ReplicaLoad(prefilling_requests=1, prefill_tokens=900)
    assert flight.replica_id == "b"
    flight.ended()
    statistics = statistics_of(load)
    assert (statistics.replicas, statistics.in_flight, statistics.started, statistics.retried) == (
        {},
        0,
        1,
        1,
    )


def test_every_step_may_be_repeated() -> None:
    """The proxy's paths meet in more than one place; the books must not depend on who calls
    first."""
    load = LoadTracker()
    flight = load.started("a", 300, 1000)
    flight.first_token()
    flight.first_token()
    assert load.load_of("a").decoding_requests == 1
    flight.ended()
    flight.ended()
    flight.first_token()
    flight.generated(5)
    flight.retried("b", 10)
    assert statistics_of(load).replicas == {}
    assert statistics_of(load).in_flight == 0
    assert statistics_of(load).retried == 0


def test_negative_predictions_count_as_nothing() -> None:
    """A hit may be predicted longer than the prompt; the sums must not go below zero."""
    load = LoadTracker()
    flight = load.started("a", -5, -1)
    assert load.load_of("a") == ReplicaLoad(prefilling_requests=1)
    flight.retried("b", -3)
    assert load.load_of("b") == ReplicaLoad(prefilling_requests=1)
    flight.first_token()
    flight.generated(-10)
    assert load.load_of("b") == ReplicaLoad(decoding_requests=1)


def test_requests_for_token_ids_count_while_they_run() -> None:
    """They go to the replica that has the fewest; afterwards nothing is left of them."""
    load = LoadTracker()
    with load.tokenizing("a"):
        assert load.load_of("a") == ReplicaLoad(tokenizing_requests=1)
        with load.tokenizing("a"):
            assert load.load_of("a").tokenizing_requests == 2
    assert load.load_of("a") == ReplicaLoad()
    assert statistics_of(load).replicas == {}


def test_each_rank_has_a_load_of_its_own_and_shares_what_has_none() -> None:
    """The engine chose the rank of some requests; where they went is not known."""
    load = LoadTracker()
    first = load.started("a", 300, 1000, dp_rank=0)
    second = load.started("a", 200, 500, dp_rank=1)
    unknown = load.started("a", 31, 31)
    assert load.load_of("a") == ReplicaLoad(prefilling_requests=3, prefill_tokens=531)
    assert load.loads_of_ranks("a", [0, 1]) == [
        ReplicaLoad(prefilling_requests=2, prefill_tokens=316),
        ReplicaLoad(prefilling_requests=2, prefill_tokens=216),
    ]
    first.first_token()
    first.generated(20)
    second.retried("b", 100, dp_rank=3)
    unknown.ended()
    assert load.loads_of_ranks("a", [0, 1]) == [
        ReplicaLoad(decoding_requests=1, context_tokens=1020),
        ReplicaLoad(),
    ]
    assert load.loads_of_ranks("b", [3]) == [ReplicaLoad(prefilling_requests=1, prefill_tokens=100)]
    assert sorted(statistics_of(load).replicas) == ["a", "b"]
    first.ended()
    second.ended()
    assert load.loads_of_ranks("a", [0, 1]) == [ReplicaLoad(), ReplicaLoad()]
    assert load.loads_of_ranks("never heard of", [0]) == [ReplicaLoad()]


replica_ids = st.sampled_from("abc")
tokens = st.integers(0, 10_000)
steps = st.one_of(
    st.tuples(st.just("start"), replica_ids, tokens),
    st.tuples(
        st.sampled_from(["first_token", "generated", "retried", "ended"]),
        st.integers(0, 9),
        replica_ids,
        tokens,
    ),
)


def take(flight: InFlight, what: str, replica_id: str, count: int) -> None:
    if what == "first_token":
        flight.first_token()
    elif what == "generated":
        flight.generated(count)
    elif what == "retried":
        flight.retried(replica_id, count)
    else:
        flight.ended()


@given(st.lists(steps, max_size=60))
def test_after_any_history_the_sums_return_to_exactly_zero(
    history: list[tuple[object, ...]],
) -> None:
    """A leak of one request an hour would, in a week, keep traffic away from a healthy replica."""
    load, flights = LoadTracker(), []
    for what, *rest in history:
        if what == "start":
            replica_id, count = rest
            flights.append(load.started(str(replica_id), int(str(count)), 2 * int(str(count))))
        elif flights:
            number, replica_id, count = rest
            take(
                flights[int(str(number)) % len(flights)],
                str(what),
                str(replica_id),
                int(str(count)),
            )
        statistics = statistics_of(load)
        assert (
            sum(replica.requests for replica in statistics.replicas.values())
            == statistics.in_flight
        )
        assert all(
            min(replica.prefill_tokens, replica.context_tokens) >= 0
            for replica in statistics.replicas.values()
        )
    for flight in flights:
        flight.ended()
    assert statistics_of(load).replicas == {}
    assert statistics_of(load).in_flight == 0


@given(
    st.lists(
        st.tuples(replica_ids, tokens, st.sampled_from(["prefill", "decode", "ended"])), max_size=20
    )
)
def test_the_sums_are_those_of_the_requests(requests: list[tuple[str, int, str]]) -> None:
    """Checked against adding up by hand."""
    load, flights = LoadTracker(), []
    for replica_id, count, phase in requests:
        flight = load.started(replica_id, count, 3 * count)
        flights.append(flight)  # one that nobody knows is over
        if phase != "prefill":
            flight.first_token()
        if phase == "ended":
            flight.ended()
    for replica_id in "abc":
        here = [(count, phase) for name, count, phase in requests if name == replica_id]
        assert load.load_of(replica_id) == ReplicaLoad(
            prefilling_requests=sum(phase == "prefill" for _, phase in here),
            prefill_tokens=sum(count for count, phase in here if phase == "prefill"),
            decoding_requests=sum(phase == "decode" for _, phase in here),
            context_tokens=sum(3 * count for count, phase in here if phase == "decode"),
        )
