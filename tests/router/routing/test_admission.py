"""Who is let in: a bound on requests under way, and the end of it all."""

from __future__ import annotations

import pytest

from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.errors import Overloaded, ShuttingDown
from router.fleet.health import HealthRecord
from router.fleet.replica import Replica
from router.fleet.types import ServedModels
from router.routing.admission import Admission, Elsewhere


def test_requests_over_the_bound_are_refused_until_one_ends() -> None:
    """The bound is what keeps memory in bounds when clients arrive faster than replicas respond."""
    admission = Admission(max_requests=2)
    with admission:
        with admission:
            assert admission.under_way == 2
            with pytest.raises(Overloaded, match="2 requests"), admission:
                pytest.fail("it was let in")
            assert admission.under_way == 2, "a refused request is not under way"
        with admission:
            assert admission.under_way == 2
    assert admission.under_way == 0


def test_what_the_data_plane_lets_in_by_itself_takes_of_the_same_bounds() -> None:
    """The memory is one, whoever fills it."""
    admission, elsewhere = Admission(max_requests=3, max_buffered_bytes=100), [2, 60]
    allowed: list[int] = []
    here: list[int] = []
    admission.count_also(
        Elsewhere(lambda: elsewhere[0], lambda: elsewhere[1], allowed.append, here.append)
    )
    with admission:
        assert allowed == [3, 2], "it may not let in what is let in here"
        assert (admission.under_way, admission.buffered_bytes) == (3, 60)
        assert admission.is_full
        with pytest.raises(Overloaded, match="3 requests"), admission:
            pytest.fail("it was let in")
    assert not admission.is_full
    assert allowed == [3, 2, 1, 2, 3], "nor meanwhile, as long as it is not known to be refused"
    with pytest.raises(Overloaded, match="100 bytes"), admission.buffer() as held:
        held.add(41)
    with admission.buffer() as held:
        held.add(40)
        assert admission.is_full
        elsewhere[:] = [0, 0]
        assert admission.buffered_bytes == 40
        assert here[-1] == 40, "it may not hold what is held here"
    assert here[-1] == 0


def test_a_request_that_fails_is_no_longer_under_way() -> None:
    """Otherwise failures would use the bound up."""
    admission = Admission(max_requests=1)
    with pytest.raises(ZeroDivisionError), admission:
        raise ZeroDivisionError
    assert admission.under_way == 0


def test_after_the_signal_nothing_new_is_let_in_and_what_runs_goes_on() -> None:
    """A rolling update must not cost a response."""
    admission = Admission(max_requests=2)
    with admission:
        admission.shut_down()
        assert admission.under_way == 1
        with pytest.raises(ShuttingDown), admission:
            pytest.fail("it was let in")
    assert (admission.under_way, admission.is_shutting_down) == (0, True)


def replica(is_healthy: bool, models: tuple[str, ...] = ()) -> Replica:
    record = HealthRecord(HealthConfig().unhealthy_after, healthy_after=1)
    if is_healthy:
        record.check_passed()
    found = Replica(ReplicaConfig(url="http://127.0.0.1:1", id="r"), record, 0.0)
    found.served = ServedModels(models)
    return found


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ([], "none of 0 replicas is healthy"),
        ([replica(False, ("m",))], "none of 1 replicas is healthy"),
        ([replica(True), replica(False)], "none of 1 healthy replicas has reported its models yet"),
        ([replica(True), replica(True, ("m",))], None),
    ],
)
def test_the_router_is_ready_as_soon_as_one_replica_can_serve(
    replicas: list[Replica], reason: str | None
) -> None:
    """A load balancer sends requests from that moment on."""
    admission = Admission(max_requests=1)
    assert admission.why_not_ready(replicas) == reason
    admission.shut_down()
    assert admission.why_not_ready(replicas) == "the router is shutting down"
