"""Decides by a table how a followed stream is repaired; no I/O.

A stream is in one `State`. Each event is an `Input`: the fate of a batch, the result of a question
to the replay endpoint, a silence, a lost connection. `TABLE` has for each pair the next state and
the `Action`s to carry out, in order. At most one of them, the last, is a *question*: it takes time,
and its result is the next input (`RESULTS` lists the possible results). After an input that raises
no question the stream is at rest and takes live batches. The fate of a batch inside a replay or a
snapshot is the exception: the answer is read on.

`kvevents.delivery` finds the fates, `kvevents.recovery` asks the questions, `kvevents.subscriber`
brings silences, connections and the consumer's own distrust; all decisions are here. The *ring* is
the publisher's store of its last batches, which a replay reads. Two examples:

    a gap that the ring can fill          a gap that it cannot fill, and no snapshots

    LIVE        GAP                       LIVE        GAP
    VERIFYING   NEWS                      VERIFYING   MOVED_ON
    VERIFYING   REPLAY_END                MAKING_UP   NO_SNAPSHOT
    LIVE                                  MAKING_UP   MOVED_ON
                                          MAKING_UP   REPLAY_END
                                          HOLED
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvevents.stream_state import Action, Input, SourceState, State


class Transition(NamedTuple):
    """The result of an input."""

    state: State
    actions: tuple[Action, ...] = ()


def _to(state: State, *actions: Action) -> Transition:
    return Transition(state, actions)


_Row = dict[Input, Transition]

_LOOK = (Action.START_PATIENCE, Action.ASK_FROM_LAST)
_REFRESH = (Action.START_PATIENCE, Action.ASK_SNAPSHOT)
_LOOK_FIRST = (Action.START_PATIENCE, Action.PUT_BACK, Action.ASK_FROM_LAST)

# Parts of rows. Functions stand for states that differ only in where an input leads.

_RING_CANNOT_HELP: _Row = {
    Input.FOREIGN: _to(State.REBUILDING, Action.CLEAR, Action.ASK_SNAPSHOT),
    Input.MIXED: _to(State.REBUILDING, Action.CLEAR, Action.ASK_SNAPSHOT),
    Input.LOST: _to(State.MAKING_UP, Action.ASK_SNAPSHOT),
    Input.MOVED_ON: _to(State.MAKING_UP, Action.ASK_SNAPSHOT),
    Input.UNPROVABLE: _to(State.MAKING_UP, Action.ASK_SNAPSHOT),
}
_SNAPSHOT: _Row = {Input.SNAPSHOT_BEGINS: _to(State.LOADING, Action.CLEAR, Action.TAKE_SNAPSHOT)}
_RING: _Row = {
    Input.RING_FROM_0: _to(State.REPLAYING, Action.FOLLOW_PAST_HOLES),
    Input.RING_LATER: _to(State.MAKING_UP, Action.FOLLOW_PAST_HOLES),
    Input.RING_EMPTY: _to(State.LIVE),
}
_PAST_HOLES: _Row = {
    Input.MALFORMED: _to(State.MAKING_UP, Action.SKIP),
    Input.IDENTITY_CHANGED: _to(State.MAKING_UP, Action.CLEAR, Action.HAND_ON),
    Input.PARTLY_KEPT: _to(State.MAKING_UP),
    Input.ALL_KNOWN: _to(State.REPLAYING),
}
_LOADING: _Row = {
    Input.PARTLY_KEPT: _to(State.LOADING_PARTLY),
    Input.ALL_KNOWN: _to(State.LOADING),
    Input.SNAPSHOT_BROKEN: _to(State.REBUILDING, Action.CLEAR, Action.ASK_FROM_0),
}


_SHOWN_WHOLE: _Row = {
    Input.REPLAY_END: _to(State.LIVE, Action.DROP_COVERED),
    Input.STRANGERS: _to(State.CROSSED, Action.DROP_COVERED),
}


def _patient(state: State, again: Action, adrift: State) -> _Row:
    """A state that asks until an answer comes or patience is over."""
    return {
        Input.NO_ANSWER: _to(state, Action.WAIT),
        Input.TRY_AGAIN: _to(state, again),
        Input.PATIENCE_OVER: _to(adrift),
        Input.VACANT: _to(adrift),
    }


def _verifying(state: State) -> _Row:
    return {
        **_RING_CANNOT_HELP,
        **_patient(state, Action.ASK_FROM_LAST, State.UNCONFIRMED),
        **_SHOWN_WHOLE,
        Input.NEWS: _to(State.VERIFYING, Action.FOLLOW),
        Input.CUT_SHORT: _to(state, Action.ASK_FROM_LAST),
        Input.DISCONNECTED: _to(State.CONNECTING),
    }


def _whole(state: State, plain: State, unanswered: State) -> _Row:
    """Whole, and a silence brings a look. A plain batch leads to *plain*, a look without an answer
    to *unanswered*."""
    return {
        **_RING_CANNOT_HELP,
        **_SNAPSHOT,
        **_RING,
        **_SHOWN_WHOLE,
        Input.NEXT: _to(plain),
        # Once the ring has shown a batch, an empty ring is another process's. Without this look, a
        # stream that never falls silent would not have seen the ring when its engine restarts.
        Input.BEGINNING: _to(State.LIVE, *_LOOK),
        Input.PARTLY_KEPT: _to(State.INCOMPLETE),
        Input.ALL_KNOWN: _to(plain),
        Input.DUPLICATE: _to(state),
        Input.GAP: _to(State.VERIFYING, *_LOOK_FIRST),
        Input.BACKWARDS: _to(State.DOUBTING, *_LOOK_FIRST),
        Input.IDENTITY_CHANGED: _to(State.VERIFYING, *_LOOK_FIRST),
        Input.MALFORMED: _to(State.VERIFYING, *_LOOK_FIRST),
        Input.SILENCE: _to(state, *_LOOK),
        Input.NOTHING_HELD: _to(state, Action.ASK_SNAPSHOT),
        Input.NO_SNAPSHOT: _to(state, Action.ASK_FROM_0),
        Input.NEWS: _to(State.VERIFYING, Action.FOLLOW),
        Input.CUT_SHORT: _to(state, Action.ASK_FROM_LAST),
        # As when DOUBTING.
        Input.MOVED_ON: _to(State.LIVE, Action.DROP_OLD),
        Input.VACANT: _to(State.LIVE),
        Input.NO_ANSWER: _to(unanswered),
        Input.DISCONNECTED: _to(State.CONNECTING),
    }


def _incomplete(state: State, adrift: State) -> _Row:
    """Something is missing. The ring fills in what it has, without a change of state."""
    return {
        **_RING_CANNOT_HELP,
        Input.NEXT: _to(state),
        Input.DUPLICATE: _to(state),
        Input.DISTRUSTED: _to(state),
        Input.PARTLY_KEPT: _to(state),
        Input.ALL_KNOWN: _to(State.LIVE),
        Input.GAP: _to(state, *_LOOK_FIRST),
        Input.BACKWARDS: _to(state, *_LOOK_FIRST),
        Input.IDENTITY_CHANGED: _to(state, *_LOOK_FIRST),
        Input.MALFORMED: _to(state, *_LOOK_FIRST),
        Input.SILENCE: _to(state, *_LOOK),
        Input.NEWS: _to(state, Action.FOLLOW),
        Input.CUT_SHORT: _to(state, Action.ASK_FROM_LAST),
        Input.VACANT: _to(adrift),
        Input.NO_ANSWER: _to(adrift),
        Input.DISCONNECTED: _to(State.CONNECTING_INCOMPLETE),
    }


def _adrift(state: State, plain: State, passed: State) -> _Row:
    """Gaps are passed, and silences bring a look without patience. A plain batch leads to *plain*,
    one behind a gap to *passed*."""
    return {
        **_RING_CANNOT_HELP,
        Input.NEXT: _to(plain),
        Input.DUPLICATE: _to(plain),
        Input.DISTRUSTED: _to(state),
        Input.PARTLY_KEPT: _to(passed),
        Input.ALL_KNOWN: _to(State.LIVE_ADRIFT),
        Input.GAP: _to(passed, Action.HAND_ON),
        Input.BACKWARDS: _to(State.ADRIFT, Action.CLEAR, Action.HAND_ON),
        Input.IDENTITY_CHANGED: _to(State.ADRIFT, Action.CLEAR, Action.HAND_ON),
        Input.MALFORMED: _to(passed, Action.SKIP),
        Input.SILENCE: _to(state, Action.ASK_FROM_LAST),
        Input.CUT_SHORT: _to(state, Action.ASK_FROM_LAST),
        Input.VACANT: _to(state),
        Input.NO_ANSWER: _to(state),
    }


_WHOLE_ADRIFT: _Row = {
    **_SHOWN_WHOLE,
    Input.NEWS: _to(State.VERIFYING, Action.FOLLOW),
    Input.DISCONNECTED: _to(State.CONNECTING),
}


def _read_to_its_end(state: State, *actions: Action) -> _Row:
    """Something is missing, whatever an answer to its end shows of the connection."""
    end = _to(state, Action.DROP_COVERED, *actions)
    return {Input.REPLAY_END: end, Input.STRANGERS: end}


_ROWS: dict[State, _Row] = {
    State.CONNECTING: {
        Input.CONNECTED: _to(State.VERIFYING, *_LOOK),
        Input.CONNECTED_WITHOUT_REPLAY: _to(State.ADRIFT),
    },
    State.CONNECTING_INCOMPLETE: {
        Input.CONNECTED: _to(State.INCOMPLETE, *_LOOK),
        Input.CONNECTED_WITHOUT_REPLAY: _to(State.ADRIFT),
    },
    State.VERIFYING: {
        **_verifying(State.VERIFYING),
        Input.NOTHING_HELD: _to(State.REBUILDING, Action.ASK_SNAPSHOT),
        Input.PARTLY_KEPT: _to(State.INCOMPLETE),
        Input.ALL_KNOWN: _to(State.VERIFYING),
    },
    State.DOUBTING: {
        **_verifying(State.DOUBTING),
        # The ring is too short to prove anything by now; but nothing is known to be missing, and
        # live batches will show it.
        Input.MOVED_ON: _to(State.LIVE, Action.DROP_OLD),
    },
    State.REBUILDING: {
        **_patient(State.REBUILDING, Action.ASK_SNAPSHOT, State.UNCONFIRMED),
        **_SNAPSHOT,
        **_RING,
        Input.NO_SNAPSHOT: _to(State.REBUILDING, Action.ASK_FROM_0),
        Input.DISCONNECTED: _to(State.CONNECTING),
    },
    State.REFRESHING: {
        **_SNAPSHOT,
        Input.NO_SNAPSHOT: _to(State.REFRESHING, Action.ASK_FROM_0),
        Input.RING_FROM_0: _to(State.REPLAYING, Action.CLEAR, Action.FOLLOW_PAST_HOLES),
        # The picture may be wrong; the few batches in the ring would be less.
        Input.RING_LATER: _to(State.LIVE),
        Input.RING_EMPTY: _to(State.LIVE),
        Input.VACANT: _to(State.LIVE),
        Input.NO_ANSWER: _to(State.UNANSWERED),
    },
    State.REPLAYING: {
        **_PAST_HOLES,
        **_SHOWN_WHOLE,
        Input.BEGINNING: _to(State.REPLAYING),
        Input.CUT_SHORT: _to(State.VERIFYING, Action.ASK_FROM_LAST),
        Input.NO_ANSWER: _to(State.VERIFYING, Action.WAIT),
    },
    State.MAKING_UP: {
        **_RING_CANNOT_HELP,
        **_patient(State.MAKING_UP, Action.ASK_SNAPSHOT, State.HOLED_ADRIFT),
        **_SNAPSHOT,
        **_PAST_HOLES,
        **_read_to_its_end(State.HOLED),
        Input.GAP: _to(State.MAKING_UP, Action.HAND_ON),
        Input.NO_SNAPSHOT: _to(State.MAKING_UP, Action.ASK_FROM_LAST),
        Input.NEWS: _to(State.MAKING_UP, Action.FOLLOW_PAST_HOLES),
        Input.MOVED_ON: _to(State.MAKING_UP, Action.FOLLOW_PAST_HOLES),
        Input.UNPROVABLE: _to(State.MAKING_UP, Action.FOLLOW_PAST_HOLES),
        Input.CUT_SHORT: _to(State.MAKING_UP, Action.ASK_FROM_LAST),
        Input.LOST: _to(State.HOLED_ADRIFT),
        Input.DISCONNECTED: _to(State.CONNECTING_INCOMPLETE),
    },
    State.LOADING: {**_LOADING, Input.SNAPSHOT_END: _to(State.LIVE, Action.DROP_COVERED)},
    State.LOADING_PARTLY: {
        **_LOADING,
        Input.SNAPSHOT_END: _to(State.OVERFULL, Action.DROP_COVERED),
    },
    State.LIVE: {
        **_whole(State.LIVE, plain=State.LIVE, unanswered=State.UNANSWERED),
        Input.DISTRUSTED: _to(State.REFRESHING, *_REFRESH),
    },
    State.UNANSWERED: {
        **_whole(State.UNANSWERED, plain=State.UNANSWERED, unanswered=State.SILENT),
        Input.DISTRUSTED: _to(State.REFRESHING, *_REFRESH),
    },
    State.SILENT: {
        **_whole(State.SILENT, plain=State.UNANSWERED, unanswered=State.SILENT),
        Input.DISTRUSTED: _to(State.SILENT),
    },
    State.CROSSED: {
        **_whole(State.CROSSED, plain=State.CROSSED, unanswered=State.SILENT),
        # The expected number proves nothing here.
        Input.NEXT: _to(State.VERIFYING, *_LOOK),
        Input.ALL_KNOWN: _to(State.VERIFYING, *_LOOK),
        Input.DISTRUSTED: _to(State.CROSSED),
    },
    State.LIVE_ADRIFT: {
        **_adrift(State.LIVE_ADRIFT, plain=State.LIVE_ADRIFT, passed=State.ADRIFT),
        **_WHOLE_ADRIFT,
        Input.NO_ANSWER: _to(State.SILENT),
    },
    State.UNCONFIRMED: {
        # Nothing proves that it is the process we followed: its batches may not fit what we hold.
        **_adrift(State.UNCONFIRMED, plain=State.ADRIFT, passed=State.ADRIFT),
        **_WHOLE_ADRIFT,
        **_SNAPSHOT,
        **_RING,
        Input.BEGINNING: _to(State.LIVE_ADRIFT),
        Input.NOTHING_HELD: _to(State.UNCONFIRMED, Action.ASK_SNAPSHOT),
        Input.NO_SNAPSHOT: _to(State.UNCONFIRMED, Action.ASK_FROM_0),
    },
    State.INCOMPLETE: {
        **_incomplete(State.INCOMPLETE, adrift=State.ADRIFT),
        **_SNAPSHOT,
        **_read_to_its_end(State.INCOMPLETE, Action.ASK_SNAPSHOT),
        Input.NO_SNAPSHOT: _to(State.INCOMPLETE, Action.ASK_FROM_0),
        Input.RING_FROM_0: _to(State.REPLAYING, Action.CLEAR, Action.FOLLOW_PAST_HOLES),
        Input.RING_LATER: _to(State.HOLED),
        Input.RING_EMPTY: _to(State.HOLED),
    },
    State.HOLED: {
        **_incomplete(State.HOLED, adrift=State.HOLED_ADRIFT),
        **_SNAPSHOT,
        **_read_to_its_end(State.HOLED, Action.ASK_SNAPSHOT),
        Input.NO_SNAPSHOT: _to(State.HOLED),
    },
    State.OVERFULL: {
        **_incomplete(State.OVERFULL, adrift=State.HOLED_ADRIFT),
        **_read_to_its_end(State.OVERFULL),
    },
    State.ADRIFT: {
        **_adrift(State.ADRIFT, plain=State.ADRIFT, passed=State.ADRIFT),
        **_read_to_its_end(State.INCOMPLETE, Action.ASK_SNAPSHOT),
        Input.BEGINNING: _to(State.LIVE_ADRIFT),
        Input.NEWS: _to(State.INCOMPLETE, Action.FOLLOW),
        Input.DISCONNECTED: _to(State.CONNECTING_INCOMPLETE),
    },
    State.HOLED_ADRIFT: {
        **_adrift(State.HOLED_ADRIFT, plain=State.HOLED_ADRIFT, passed=State.HOLED_ADRIFT),
        **_read_to_its_end(State.HOLED, Action.ASK_SNAPSHOT),
        Input.NEWS: _to(State.HOLED, Action.FOLLOW),
        Input.DISCONNECTED: _to(State.CONNECTING_INCOMPLETE),
    },
}

TABLE: Mapping[State, Mapping[Input, Transition]] = {
    **{state: {**row, Input.CLOSED: _to(State.DEAD)} for state, row in _ROWS.items()},
    State.DEAD: {},
}
"""Every pair that can meet; `tests/kvevents/test_stream_repair.py` gives reasons for the others."""


class StreamRepair:
    """The state of one stream."""

    def __init__(self, state: State = State.CONNECTING) -> None:
        self._enter(state)

    @property
    def is_connected(self) -> bool:
        """Return False while there is no connection, or none any more."""
        return self.state.shown not in (SourceState.CONNECTING, SourceState.DEAD)

    def advance(self, given: Input) -> tuple[Action, ...]:
        """Go to the next state; return the actions, in order.

        Raises:
            RuntimeError: The table has no such pair: a mistake in the code that brings the input.
        """
        transition = self._row.get(given)
        if transition is None:
            raise RuntimeError(f"{self.state.value}: {given.value!r} cannot come")
        if transition.state is not self.state:
            self._enter(transition.state)
        return transition.actions

    def _enter(self, state: State) -> None:
        self.state = state
        self._row = TABLE[state]
        self.stays_on_next = self._row.get(Input.NEXT) == _to(state)
        """True if the next batch changes nothing, so that `advance` can be left out."""
