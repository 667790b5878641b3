"""The core's sums of what is in flight are those in plain Python, whatever happens."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.load import LoadTracker, ReplicaLoad
from tests.oracle.load import ReferenceLoad
from tests.support.loads import in_flight, statistics_of

replicas = st.sampled_from("abc")
ranks = st.none() | st.integers(0, 3)
tokens = st.integers(-2, 3000)
loads = st.builds(
    ReplicaLoad,
    st.integers(0, 5),
    st.integers(0, 900),
    st.integers(0, 5),
    st.integers(0, 900),
)
steps = st.one_of(
    st.tuples(st.just("started"), replicas, tokens, tokens, ranks),
    st.tuples(st.just("first_token"), st.integers(0, 9)),
    st.tuples(st.just("generated"), st.integers(0, 9), tokens),
    st.tuples(st.just("retried"), st.integers(0, 9), replicas, tokens, ranks),
    st.tuples(st.just("ended"), st.integers(0, 9)),
    st.tuples(
        st.just("take_others"),
        st.dictionaries(replicas | st.tuples(replicas, st.integers(0, 3)), loads, max_size=5),
    ),
)


class _Visit:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def first_token(self, is_timed: bool = True) -> None:
        self.heard.append(f"first token, {is_timed}")

    def ended(self, was_served: bool = True) -> None:
        self.heard.append(was_served)


class _Side:
    """One tracker, and what runs there."""

    def __init__(self, tracker: LoadTracker | ReferenceLoad) -> None:
        self.tracker = tracker
        self.flights: list[Any] = []
        self.visits: list[_Visit] = []

    def take(self, what: str, *rest: Any) -> None:
        if what == "take_others":
            self.tracker.take_others(*rest)
        elif what == "started":
            self.visits.append(_Visit())
            self.flights.append(self.tracker.started(*rest, visit=self.visits[-1]))
        elif self.flights:
            number, *arguments = rest
            flight = self.flights[number % len(self.flights)]
            if what == "retried":
                self.visits.append(_Visit())
                flight.retried(*arguments, visit=self.visits[-1])
            else:
                getattr(flight, what)(*arguments)

    def seen(self) -> dict[str, Any]:
        tracker = self.tracker
        return {
            "own": [tracker.load_of(name) for name in "abcd"],
            "all": [tracker.look_at(name) for name in "abcd"],
            "others": [tracker.others_at(name) for name in "abcd"],
            "ranks": [tracker.loads_of_ranks(name, [0, 1, 3]) for name in "abcd"],
            "places": sorted(tracker.places(), key=repr),
            "statistics": (
                tracker.statistics()
                if isinstance(tracker, ReferenceLoad)
                else statistics_of(tracker)
            ),
            "visits": [visit.heard for visit in self.visits],
            "at": [flight.replica_id for flight in self.flights],
        }


@given(st.lists(steps, max_size=40))
def test_every_sum_is_that_of_the_readable_form(history: list[tuple[Any, ...]]) -> None:
    """A leak of one request an hour would, in a week, keep traffic away from a healthy replica."""
    readable, in_core = _Side(ReferenceLoad()), _Side(LoadTracker())
    for step in history:
        readable.take(*step)
        in_core.take(*step)
        assert in_core.seen() == readable.seen()


def test_a_request_that_nobody_ends_is_taken_back_with_its_last_reference() -> None:
    """A task that dies between two steps must not count for ever."""
    tracker = LoadTracker()
    flight = tracker.started("a", 10, 20, dp_rank=1)
    flight.first_token()
    assert tracker.load_of("a") == ReplicaLoad(decoding_requests=1, context_tokens=20)
    del flight
    assert tracker.load_of("a") == ReplicaLoad()
    assert statistics_of(tracker).in_flight == 0
    assert list(tracker.places()) == []


def test_requests_for_token_ids_count_while_they_run() -> None:
    """They go to the replica that has the fewest."""
    tracker = LoadTracker()
    with tracker.tokenizing("a"), tracker.tokenizing("a"):
        assert tracker.load_of("a") == ReplicaLoad(tokenizing_requests=2)
    assert tracker.load_of("a") == ReplicaLoad()


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    """A fleet that scales up and down has a new name for every replica."""
    tracker = LoadTracker()
    for number in range(2000):
        with in_flight(tracker, f"r{number}", 1, 1):
            pass
    assert tracker.look_at("r5") == ReplicaLoad()
    assert list(tracker.places()) == []
