"""A source that is predicted wrongly for long is rebuilt once; what stays wrong gets a name."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from router.fleet.quiet_moments import QuietMoments
from router.index.base import SourceId
from router.telemetry.self_repair import (
    TABLE,
    WINDOW,
    WRONG_ENOUGH,
    CacheFacts,
    Cause,
    Comparison,
    Finding,
    RepairTimes,
    SelfRepair,
    SourceTrust,
    Trust,
    likely_cause,
)

TIMES = RepairTimes()
STEP_S = 25.0
FACTS = CacheFacts(16)
R0 = SourceId("r0")


class Source:
    """One source's evidence, a comparison every 25 s."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self.trust = SourceTrust(TIMES)
        self._step_s = step_s
        self.now = 0.0

    def see(self, predicted: int, actual: int, times: int = 1) -> int:
        """Returns how often the source was to be rebuilt."""
        rebuilds = 0
        for _ in range(times):
            self.now += self._step_s
            rebuilds += self.trust.add(Comparison(self.now, predicted, actual), lambda: FACTS)
        return rebuilds


def test_wrong_predictions_over_a_minute_rebuild_a_source_once() -> None:
    """The first of them may be chance: the engine's cache was just reset, for one."""
    source = Source()
    assert source.see(64, 0, WRONG_ENOUGH - 1) == 0
    assert source.trust.state is Trust.TRUSTED
    assert source.see(64, 0) == 1
    assert (source.trust.state, source.trust.rebuilds) == (Trust.REBUILT, 1)
    assert source.see(64, 0, 100) == 0, "a rebuild did not help, so another would not"
    assert source.trust.rebuilds == 1


def test_a_burst_of_wrong_predictions_is_not_enough() -> None:
    """An engine that restarts shows many within a second, and its stream is repaired by itself."""
    source = Source()
    moments = [Comparison(0.001 * number, 64, 0) for number in range(WINDOW)]
    assert not any(source.trust.add(each, lambda: FACTS) for each in moments)
    late = Comparison(TIMES.wrong_for_s + 1, 64, 0)
    assert source.trust.add(late, lambda: FACTS), "but it lasts"


def test_a_source_asked_every_second_is_rebuilt_as_well() -> None:
    """The last comparisons then span less than a minute, however long it has been wrong."""
    source = Source(step_s=1.0)
    assert source.see(64, 0, int(TIMES.wrong_for_s)) == 0
    assert source.see(64, 0) == 1


def test_wrong_predictions_with_a_right_time_between_are_not_one_fault() -> None:
    """What was over does not count as lasting."""
    source = Source(step_s=1.0)
    for _ in range(10):
        assert source.see(64, 0, 2 * WRONG_ENOUGH) == 0
        assert source.see(64, 64, WINDOW) == 0


def test_a_few_wrong_among_many_right_are_forgotten() -> None:
    """One in a hundred is what concurrent requests of other clients cause."""
    source = Source()
    for _ in range(20):
        assert source.see(64, 0, WRONG_ENOUGH - 1) == 0
        assert source.see(64, 64, WINDOW - WRONG_ENOUGH + 1) == 0
    assert source.trust.state is Trust.TRUSTED


def test_new_prompts_say_nothing() -> None:
    """Zero predicted and zero reused is right whatever the index holds."""
    source = Source()
    source.see(64, 0, WRONG_ENOUGH - 1)
    source.see(0, 0, 100)
    assert source.see(64, 0) == 1, "they do not push the others out"


def test_a_rebuild_that_helped_restores_the_trust_and_may_be_repeated_after_the_cool_down() -> None:
    """A source that goes wrong once a day is repaired once a day, but never in a loop."""
    source = Source()
    assert source.see(64, 0, WRONG_ENOUGH) == 1
    source.see(64, 64, WINDOW)
    assert source.trust.state is Trust.TRUSTED
    assert source.now < TIMES.cool_down_s
    assert source.see(64, 0, WRONG_ENOUGH) == 0
    assert source.trust.state is Trust.TRUSTED, "a rebuild may still help"
    assert source.trust.cause is Cause.MISSING_GROUP, "until then an operator wants to know"
    assert source.see(64, 0, 30) == 1
    assert source.trust.rebuilds == 2


@pytest.mark.parametrize(("wrong_ones", "state"), [(1, Trust.TRUSTED), (2, Trust.REBUILT)])
def test_after_a_rebuild_one_wrong_prediction_of_a_window_is_forgiven(
    wrong_ones: int, state: Trust
) -> None:
    """Two are a doubt; the next comparisons decide."""
    source = Source()
    source.see(64, 0, WRONG_ENOUGH)
    source.see(64, 0, wrong_ones)
    source.see(64, 64, WINDOW - wrong_ones)
    assert source.trust.state is state


def test_what_stays_wrong_is_named_and_what_becomes_right_is_trusted_again() -> None:
    """An operator who corrects the configuration must see it at work."""
    source = Source()
    source.see(80, 64, 2 * WRONG_ENOUGH)
    assert (source.trust.state, source.trust.cause) == (Trust.LASTING, Cause.EAGLE)
    source.see(0, 64, WRONG_ENOUGH)
    source.see(0, 96, WINDOW)
    assert source.trust.cause is Cause.TOKENIZER, "by the last comparisons"
    source.see(64, 64, WINDOW)
    assert (source.trust.state, source.trust.cause) == (Trust.TRUSTED, None)


def test_the_table_never_leads_from_a_lasting_fault_to_a_rebuild() -> None:
    """A rebuild costs a replay of everything; it must not repeat without a sign of success."""
    assert (Trust.LASTING, Finding.WRONG) not in TABLE
    assert [pair for pair, after in TABLE.items() if after is Trust.REBUILT] == [
        (Trust.TRUSTED, Finding.WRONG)
    ]


def test_the_times_are_the_operators() -> None:
    """An engine that answers once an hour is judged by other times than a busy one."""
    hasty = SourceTrust(RepairTimes(wrong_for_s=3.0, cool_down_s=5.0))
    seen = [hasty.add(Comparison(float(second), 64, 0), lambda: FACTS) for second in range(4)]
    assert seen == [False, False, False, True]
    quiet = QuietMoments(0.25)
    quiet.ended(quiet.began("r0", 0.0), 1.0)
    assert quiet.ended(quiet.began("r0", 1.25), 2.0)


# --- causes ---------------------------------------------------------------------------------------


def wrong(*pairs: tuple[int, int], **kinds: bool) -> list[Comparison]:
    return [Comparison(0.0, predicted, actual, **kinds) for predicted, actual in pairs]


RIGHT = wrong((64, 64))


@pytest.mark.parametrize(
    ("comparisons", "facts", "cause"),
    [
        (RIGHT + wrong((0, 64), has_salt=True), FACTS, Cause.SALT),
        (RIGHT + wrong((64, 0), has_adapter=True), FACTS, Cause.ADAPTER),
        (RIGHT + wrong((64, 16), has_media=True), FACTS, Cause.MEDIA),
        (wrong((0, 64), (0, 32)), CacheFacts(16, has_unplaced=True), Cause.HASH_SEED),
        (wrong((0, 64), (0, 32)), FACTS, Cause.TOKENIZER),
        (wrong((64, 0), (32, 0), has_salt=True), FACTS, Cause.MISSING_GROUP),
        (wrong((64, 0), (0, 32)), CacheFacts(16, has_unplaced=True), Cause.TOKENIZER),
        (RIGHT + wrong((113, 112), (65, 64)), FACTS, Cause.MISSING_GROUP),
        (RIGHT + wrong((80, 64), (32, 16)), FACTS, Cause.EAGLE),
        (RIGHT + wrong((64, 80), (16, 32)), FACTS, Cause.NO_EAGLE),
        (wrong((64, 72), (32, 40)), FACTS, Cause.BLOCK_SIZE),
        (wrong((64, 72), (32, 48)), FACTS, Cause.BLOCK_SIZE),
        (RIGHT + wrong((128, 64), (64, 16)), FACTS, Cause.MISSING_GROUP),
        (RIGHT + wrong((64, 128), (16, 127)), FACTS, Cause.UNSEEN_BLOCKS),
        (RIGHT + wrong((64, 128), (128, 16)), FACTS, Cause.TWO_ENGINES),
        (wrong((64, 128), (128, 16)), CacheFacts(), Cause.TWO_ENGINES),
    ],
)
def test_the_pattern_of_wrong_predictions_names_the_likely_cause(
    comparisons: list[Comparison], facts: CacheFacts, cause: Cause
) -> None:
    """A number that is merely wrong sends an operator searching for a day."""
    assert likely_cause(comparisons, facts) is cause


def test_salts_are_not_to_blame_where_salted_prompts_are_right_too() -> None:
    """What right predictions have as well is not the cause."""
    mixed = wrong((64, 0), has_salt=True) + wrong((64, 64), has_salt=True)
    assert likely_cause(mixed, FACTS) is not Cause.SALT
    assert likely_cause(RIGHT + mixed, FACTS) is not Cause.SALT


# --- quiet moments --------------------------------------------------------------------------------


def moments() -> Iterator[tuple[str, float, float, bool]]:
    yield "the first request", 0.0, 1.0, True
    yield "one at once after it", 1.0 + TIMES.quiet_s / 2, 2.0, False
    yield "one after a pause", 2.0 + TIMES.quiet_s, 4.0, True


def test_a_request_is_quiet_if_it_runs_alone_and_after_a_pause() -> None:
    """The events about the request before must have arrived."""
    quiet = QuietMoments(TIMES.quiet_s)
    for what, begins, ends, expected in moments():
        moment = quiet.began("r0", begins)
        assert quiet.ended(moment, ends) is expected, what


def test_overlapping_requests_are_not_quiet_and_other_replicas_do_not_matter() -> None:
    """Each changes the cache that the other was predicted for."""
    quiet = QuietMoments(TIMES.quiet_s)
    first = quiet.began("r0", 0.0)
    elsewhere = quiet.began("r1", 0.1)
    second = quiet.began("r0", 0.2)
    assert not quiet.ended(second, 0.3)
    assert not quiet.ended(first, 0.4)
    assert quiet.ended(elsewhere, 0.5)


def test_a_request_that_begins_beside_an_older_one_is_not_quiet_after_any_pause() -> None:
    """The older one may run for an hour."""
    quiet = QuietMoments(TIMES.quiet_s)
    older = quiet.began("r0", 0.0)
    quiet.ended(quiet.began("r0", 0.1), 0.2)
    late = quiet.began("r0", 0.2 + TIMES.quiet_s)
    assert not quiet.ended(late, 3.0)
    assert not quiet.ended(older, 4.0)
    assert quiet.ended(quiet.began("r0", 4.0 + TIMES.quiet_s), 6.0)


def test_a_replica_that_is_removed_meanwhile_is_not_known_again() -> None:
    """Its requests end later."""
    quiet = QuietMoments(TIMES.quiet_s)
    moment = quiet.began("r0", 0.0)
    quiet.forget("r0")
    assert not quiet.ended(moment, 1.0)


class OtherRequests:
    """Requests that the data plane decides, as it counts them."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int, float]] = {}

    def company(self, replica_id: str) -> tuple[int, int, float]:
        return self.counts.get(replica_id, (0, 0, -math.inf))

    def begun(self) -> dict[str, int]:
        return {name: count for name, (_, count, _) in self.counts.items()}

    def forget(self, replica_id: str) -> None:
        del self.counts[replica_id]


def test_other_routers_hear_of_what_the_data_plane_began_as_well() -> None:
    """It disturbs their evidence like what was begun here."""
    quiet, company = QuietMoments(TIMES.quiet_s), OtherRequests()
    quiet.began("r0", 1.0)
    assert quiet.begun() == {"r0": 1}
    quiet.count_also(company)
    company.counts = {"r0": (1, 3, -math.inf), "r1": (0, 2, 1.0), "r2": (0, 0, -math.inf)}
    assert quiet.begun() == {"r0": 4, "r1": 2}


def test_what_the_data_plane_sends_is_company() -> None:
    """It changes the cache like any other request."""
    quiet, company = QuietMoments(TIMES.quiet_s), OtherRequests()
    quiet.count_also(company)
    pause = TIMES.quiet_s
    for during, before, expected in (
        ((0, 0, -math.inf), (0, 0, -math.inf), True),
        ((1, 1, -math.inf), (0, 0, -math.inf), False),  # it came in between
        ((0, 1, 10.5), (0, 0, -math.inf), False),  # and went
        ((1, 1, -math.inf), (1, 1, -math.inf), False),  # it was there
        ((0, 1, 10.0 - pause / 2), (0, 1, 10.0 - pause / 2), False),  # a moment ago
        ((0, 1, 10.0 - pause), (0, 1, 10.0 - pause), True),
    ):
        company.counts["r0"] = before
        quiet.forget("r0")
        company.counts["r0"] = before
        moment = quiet.began("r0", 10.0)
        company.counts["r0"] = during
        assert quiet.ended(moment, 11.0) is expected, (before, during)


def test_a_request_of_the_data_plane_is_quiet_if_none_from_here_was_near() -> None:
    """Evidence from both must be as good."""
    quiet = QuietMoments(TIMES.quiet_s)
    assert quiet.was_quiet("r0", 0.0)
    moment = quiet.began("r0", 1.0)
    assert not quiet.was_quiet("r0", 9.0), "one is there still"
    quiet.ended(moment, 10.0)
    assert not quiet.was_quiet("r0", 9.0)
    assert not quiet.was_quiet("r0", 10.0 + TIMES.quiet_s / 2)
    assert quiet.was_quiet("r0", 10.0 + TIMES.quiet_s)


# --- all sources ----------------------------------------------------------------------------------


class Judged:
    """The repair of one source, with what it asks for."""

    def __init__(self, is_on: bool = True) -> None:
        self.rebuilt: list[SourceId] = []
        self.is_live = True
        self.repair = SelfRepair(
            self.rebuilt.append, lambda *_: self.is_live, lambda *_: FACTS, TIMES, is_on
        )

    def see_wrong(self, times: int) -> None:
        for number in range(times):
            self.repair.compare("m", R0, Comparison(number * STEP_S, 64, 0))


def test_only_a_live_source_is_judged() -> None:
    """A suspect one is known to be wrong, and is being repaired."""
    judged = Judged()
    judged.is_live = False
    judged.see_wrong(50)
    assert (judged.rebuilt, judged.repair.statistics()) == ([], {})


def test_a_source_is_rebuilt_and_forgotten_with_its_replica() -> None:
    """Another replica of that name begins with a clean record."""
    judged = Judged()
    judged.see_wrong(WRONG_ENOUGH)
    assert judged.rebuilt == [R0]
    assert judged.repair.statistics()[R0].rebuilds == 1
    moment = judged.repair.quiet.began("r0", 0.0)
    judged.repair.forget("r0")
    assert judged.repair.statistics() == {}
    assert not judged.repair.quiet.ended(moment, 1.0)


def test_switched_off_it_still_finds_what_is_wrong() -> None:
    """Those who do not want rebuilds want to know all the same."""
    judged = Judged(is_on=False)
    judged.see_wrong(2 * WRONG_ENOUGH)
    assert judged.rebuilt == []
    assert judged.repair.statistics()[R0].cause is Cause.MISSING_GROUP
