"""The table of stream repair: which pairs can meet, where they lead, and how it is drawn."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.stream_diagram import diagram
from kvevents.stream_repair import TABLE, StreamRepair, Transition
from kvevents.stream_state import (
    CLEAR_REASONS,
    ON_A_BATCH,
    RESULTS,
    Action,
    Input,
    SourceState,
    State,
)

QUESTIONS = frozenset(RESULTS)
FATES = frozenset(
    {
        *(Input.NEXT, Input.BEGINNING, Input.PARTLY_KEPT, Input.ALL_KNOWN, Input.DUPLICATE),
        *(Input.GAP, Input.BACKWARDS, Input.IDENTITY_CHANGED, Input.MALFORMED),
    }
)
AT_REST = FATES | {Input.SILENCE, Input.DISTRUSTED, Input.DISCONNECTED}
"""What can come while no question is under way and the stream is connected."""
HANDED_ON = frozenset({Input.BEGINNING, Input.PARTLY_KEPT, Input.ALL_KNOWN, Input.MALFORMED})
"""Fates of a batch that is handed on behind a gap. `NEXT` is not an input then."""
CONNECTS = frozenset({Input.CONNECTED, Input.CONNECTED_WITHOUT_REPLAY})
PAIRS = [(state, given) for state in State for given in Input]

_HOLDS_SOMETHING = "a batch or a snapshot was applied before"
_LATER_NUMBERS = "numbers in a replay rise, and one batch was handed on already"
_BRINGS_ONE = "a replay from batch 0 that has begun brings at least one batch"
_BEGINS_WHOLE = "only a hole that a replay begins with is passed, and this one begins whole"

IMPOSSIBLE: dict[tuple[State, Input], str] = {
    **{
        (state, Input.NOTHING_HELD): _HOLDS_SOMETHING
        for state in (
            State.DOUBTING,
            State.MAKING_UP,
            State.LIVE_ADRIFT,
            State.INCOMPLETE,
            State.HOLED,
            State.OVERFULL,
            State.ADRIFT,
            State.HOLED_ADRIFT,
        )
    },
    **{
        (state, Input.BEGINNING): _HOLDS_SOMETHING
        for state in (
            State.LIVE_ADRIFT,
            State.INCOMPLETE,
            State.HOLED,
            State.OVERFULL,
            State.HOLED_ADRIFT,
        )
    },
    (State.MAKING_UP, Input.BEGINNING): _LATER_NUMBERS,
    (State.REPLAYING, Input.GAP): _BEGINS_WHOLE,
    (State.REPLAYING, Input.LOST): _BRINGS_ONE,
}
"""Pairs that `RESULTS` alone would allow, and the reasons why they cannot meet."""


class Place(NamedTuple):
    """Where a stream can be: its state and the question under way, and whether what the consumer
    holds has holes."""

    state: State
    question: Action | None = None
    has_holes: bool = False


class Meeting(NamedTuple):
    """An input that comes, where it comes, and what it leads to."""

    place: Place
    given: Input
    transition: Transition | None


def inputs_at(place: Place) -> frozenset[Input]:
    """What can come, as far as the kind of place goes."""
    if place.state is State.DEAD:
        return frozenset()
    if place.state.shown is SourceState.CONNECTING:
        return CONNECTS | {Input.CLOSED}
    possible = AT_REST if place.question is None else RESULTS[place.question]
    return possible | {Input.CLOSED}


def question_after(place: Place, given: Input, actions: Iterable[Action]) -> Action | None:
    """The question that *actions* raise; without one, the fate of a batch in an answer leaves the
    answer to go on, and anything else ends it."""
    raised = [action for action in actions if action in QUESTIONS]
    if raised:
        return raised[0]
    return place.question if given in FATES else None


def has_holes_after(place: Place, given: Input, actions: Iterable[Action]) -> bool:
    """Do holes remain in what the consumer holds? What may be one counts as one. A ring that begins
    later shows a hole, unless it was asked for what is held anyhow."""
    if given in (Input.ALL_KNOWN, Input.BEGINNING):
        return False
    kept = place.has_holes and Action.CLEAR not in actions
    passed = Action.HAND_ON in actions or Action.SKIP in actions
    unproven = place.state is State.UNCONFIRMED and given in FATES
    return (
        kept
        or passed
        or unproven
        or (given is Input.RING_LATER and place.state is not State.REFRESHING)
        or given in (Input.PARTLY_KEPT, Input.CONNECTED_WITHOUT_REPLAY)
    )


def meet(place: Place, given: Input) -> tuple[Meeting, Place | None]:
    """One input at one place."""
    transition = TABLE[place.state].get(given)
    if transition is None:
        return Meeting(place, given, None), None
    after = Place(
        transition.state,
        question_after(place, given, transition.actions),
        has_holes_after(place, given, transition.actions),
    )
    return Meeting(place, given, transition), after


def walk() -> Iterator[tuple[Meeting, Place | None]]:
    """Every meeting that can happen, from the first connection on, breadth first."""
    start = Place(State.CONNECTING)
    seen, ahead = {start}, deque([start])
    while ahead:
        place = ahead.popleft()
        for given in inputs_at(place):
            yield from (steps := list(_with_what_is_handed_on(place, given)))
            for _, after in steps:
                if after is not None and after not in seen:
                    seen.add(after)
                    ahead.append(after)


def _with_what_is_handed_on(place: Place, given: Input) -> Iterator[tuple[Meeting, Place | None]]:
    meeting, after = meet(place, given)
    yield meeting, after
    if after is not None and meeting.transition and Action.HAND_ON in meeting.transition.actions:
        for fate in HANDED_ON:
            yield meet(after, fate)


MEETINGS = list(walk())


# --- all of it ------------------------------------------------------------------------------------


def test_every_pair_that_can_meet_stands_in_the_table_or_says_why_it_cannot() -> None:
    """An overlooked combination is where a stream would hang, or claim what is not so."""
    unknown = {
        (meeting.place.state.value, meeting.given.value)
        for meeting, _ in MEETINGS
        if meeting.transition is None and (meeting.place.state, meeting.given) not in IMPOSSIBLE
    }
    assert unknown == set()


def test_every_pair_of_the_table_can_meet() -> None:
    """A dead row is a decision that cannot be checked."""
    met = {(meeting.place.state, meeting.given) for meeting, _ in MEETINGS}
    assert [
        (s.value, given.value) for s in TABLE for given in TABLE[s] if (s, given) not in met
    ] == []


def test_what_is_declared_impossible_has_a_reason_and_is_needed() -> None:
    """The list stays as short as it can be: of most pairs the open question already says that they
    cannot meet."""
    met = {(meeting.place.state, meeting.given) for meeting, _ in MEETINGS}
    assert all(pair in met and pair[1] not in TABLE[pair[0]] for pair in IMPOSSIBLE)
    assert all(IMPOSSIBLE.values())


def test_every_state_is_reached() -> None:
    """Beginning with a first connection."""
    assert {meeting.place.state for meeting, _ in MEETINGS} | {State.DEAD} == set(State)


@pytest.mark.parametrize("state", sorted(set(State) - {State.DEAD}, key=lambda each: each.value))
def test_every_state_can_become_live_again(state: State) -> None:
    """No trouble is for good, as long as the stream is followed."""
    seen, ahead = {state}, deque([state])
    while ahead:
        for transition in TABLE[ahead.popleft()].values():
            if transition.state not in seen:
                seen.add(transition.state)
                ahead.append(transition.state)
    assert State.LIVE in seen


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_an_input_that_cannot_come_is_an_error(state: State) -> None:
    """A mistake in the subscriber must end the stream, visibly, instead of being guessed at."""
    for given in set(Input) - set(TABLE[state]):
        repair = StreamRepair(state)
        with pytest.raises(RuntimeError, match=f"{state.value}: '{given.value}' cannot come"):
            repair.advance(given)
        assert repair.state is state


def test_a_source_is_shown_live_only_if_nothing_is_missing() -> None:
    """The one promise to the readers of the index."""
    with_holes = {after for _, after in MEETINGS if after is not None and after.has_holes}
    assert len({place.state for place in with_holes}) > 5
    assert not [place for place in with_holes if place.state.shown is SourceState.LIVE]


def test_a_look_at_a_silent_tail_that_finds_nothing_missing_never_leaves_live() -> None:
    """A silence may be no more than a late heartbeat."""
    state, actions = TABLE[State.LIVE][Input.SILENCE]
    assert (state, actions[-1]) == (State.LIVE, Action.ASK_FROM_LAST)
    for result in (Input.REPLAY_END, Input.CUT_SHORT, Input.VACANT):
        assert TABLE[State.LIVE][result].state is State.LIVE
    assert TABLE[State.LIVE][Input.NO_ANSWER].state.shown is SourceState.LIVE
    assert TABLE[State.LIVE][Input.NEWS].state is State.VERIFYING, "something was missing"


def test_a_second_look_without_an_answer_leaves_the_source_suspect_until_it_is_heard_of() -> None:
    """Behind a black hole nothing is lost, and nothing is known either."""
    assert run_through(Input.SILENCE, Input.NO_ANSWER, Input.SILENCE, Input.NO_ANSWER) == [
        State.LIVE,
        State.UNANSWERED,
        State.UNANSWERED,
        State.SILENT,
    ]
    assert State.SILENT.shown is SourceState.SUSPECT
    for heard in (Input.NEXT, Input.REPLAY_END, Input.VACANT):
        assert TABLE[State.SILENT][heard].state.shown is SourceState.LIVE


def test_live_batches_wait_wherever_the_source_is_shown_as_recovering() -> None:
    """They are taken at rest, so a recovering stream always has a question under way."""
    for _, after in MEETINGS:
        if after is not None and after.state.shown is SourceState.RECOVERING:
            assert after.question is not None


# --- actions --------------------------------------------------------------------------------------


def test_at_most_one_question_is_raised_and_it_comes_last() -> None:
    """What is done at once is done before anything can happen in between."""
    for state, row in TABLE.items():
        for given, (_, actions) in row.items():
            assert not QUESTIONS.intersection(actions[:-1]), (state, given)


def test_only_the_fate_of_a_batch_is_answered_with_something_to_do_with_it() -> None:
    """Other inputs come without a batch."""
    for state, row in TABLE.items():
        for given, (_, actions) in row.items():
            assert given in FATES or not ON_A_BATCH.intersection(actions), (state, given)


def test_a_batch_behind_a_hole_in_an_answer_raises_no_question() -> None:
    """The answer is still being read, and another question would cut it off."""
    for meeting, _ in MEETINGS:
        if meeting.place.question is not None and meeting.given in FATES:
            assert meeting.transition is None or not QUESTIONS.intersection(
                meeting.transition.actions
            ), meeting


def test_live_batches_are_put_back_before_anyone_is_asked_about_them() -> None:
    """Else the batch that showed the gap would be the next one missing."""
    for state, row in TABLE.items():
        for given in (Input.GAP, Input.BACKWARDS, Input.IDENTITY_CHANGED, Input.MALFORMED):
            actions = row[given].actions if given in row else ()
            assert (Action.ASK_FROM_LAST in actions) == (Action.PUT_BACK in actions), state


def test_a_consumer_that_is_cleared_is_given_a_reason() -> None:
    """It stands in the log, next to a cache that just became empty."""
    clearing = {
        given
        for row in TABLE.values()
        for given, (_, actions) in row.items()
        if Action.CLEAR in actions
    }
    assert clearing == set(CLEAR_REASONS)


def test_a_recovery_ends_unless_answers_break_off_or_fail_to_come() -> None:
    """Both are counted or timed where the questions are asked; what an endpoint answers to its end,
    however false, cannot keep a stream from its live batches."""
    bounded = FATES | {Input.CUT_SHORT, Input.TRY_AGAIN}
    following: dict[Place, set[Place]] = {}
    for meeting, after in MEETINGS:
        if meeting.place.question and after and after.question and meeting.given not in bounded:
            following.setdefault(meeting.place, set()).add(after)
    order = graphlib.TopologicalSorter(following)
    order.prepare()
    assert len(following) > 20


def run_through(*story: Input) -> list[State]:
    """The states after each input, from a live stream on."""
    repair = StreamRepair(State.LIVE)
    states = []
    for given in story:
        repair.advance(given)
        states.append(repair.state)
    return states


def test_a_gap_that_the_ring_fills_ends_live() -> None:
    """The ordinary repair."""
    assert run_through(Input.GAP, Input.NEWS, Input.REPLAY_END) == [
        State.VERIFYING,
        State.VERIFYING,
        State.LIVE,
    ]


def test_a_gap_that_nothing_fills_ends_behind_the_hole() -> None:
    """vLLM with a short ring: it makes no snapshots, and what its ring has is taken."""
    story = Input.GAP, Input.MOVED_ON, Input.NO_SNAPSHOT, Input.MOVED_ON, Input.REPLAY_END
    assert run_through(*story)[1:] == [State.MAKING_UP] * 3 + [State.HOLED]


def test_a_holed_stream_asks_for_a_snapshot_at_every_look_and_never_for_the_start() -> None:
    """A publisher may refuse snapshots for a while; reading a useless ring again and again costs
    the engine ten thousand replies."""
    assert TABLE[State.HOLED][Input.REPLAY_END].actions[-1] is Action.ASK_SNAPSHOT
    assert not any(
        Action.ASK_FROM_0 in transition.actions for transition in TABLE[State.HOLED].values()
    )


# --- the drawing ----------------------------------------------------------------------------------


def drawn_edges() -> dict[tuple[str, str], str]:
    """Target by source and input, as a reader of the drawing finds it."""
    edges = re.findall(r"^    (\w+) --> (\w+): (.+)$", diagram(), re.MULTILINE)
    return {
        (source, given): target for source, target, inputs in edges for given in inputs.split(", ")
    }


def test_the_drawing_says_what_the_table_says() -> None:
    """A drawing that leaves something out silently is worse than none."""
    edges = drawn_edges()
    for state, given in PAIRS:
        transition = TABLE[state].get(given)
        if transition is None or given in (Input.DISCONNECTED, Input.CLOSED):
            assert (state.value, given.value) not in edges
            continue
        drawn = edges.get((state.value, given.value), edges.get(("any", given.value), state.value))
        assert drawn == transition.state.value, (state, given)


def test_architecture_shows_the_drawing_of_this_table() -> None:
    """After a change of the table, replace it by what `python -m docs.stream_diagram` prints."""
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = re.search(
        r"<!-- stream-state -->\n+```mermaid\n(.*?)\n```\n+<!-- stream-state -->", text, re.DOTALL
    )
    assert shown is not None
    assert shown[1] == diagram()


def test_the_module_prints_the_drawing() -> None:
    """ARCHITECTURE.md is renewed with it."""
    command = [sys.executable, "-W", "ignore", "-m", "docs.stream_diagram"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == diagram() + "\n"
