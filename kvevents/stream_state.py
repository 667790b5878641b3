"""Defines the states, inputs and actions of a followed stream; see `kvevents.stream_repair`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class SourceState(Enum):
    """The trust in the consumer's picture."""

    CONNECTING = "connecting"
    """No connection: not yet, or not any more."""
    RECOVERING = "recovering"
    """Something is missing or unverified, and being asked for."""
    LIVE = "live"
    """Everything that was published has been handed on."""
    SUSPECT = "suspect"
    """Something is missing and cannot be had: until a snapshot, a restart, or a cache that is
    cleared as a whole."""
    DEAD = "dead"
    """The stream is no longer followed."""


class State(Enum):
    """The state of a stream: what is known of it, and the repair under way.

    *Whole*: everything published so far was handed on. *Adrift*: the replay endpoint is of no help,
    so gaps are passed instead of asked about, until a look at it succeeds.
    """

    shown: SourceState
    """The state that users see."""

    def __new__(cls, text: str, shown: SourceState) -> State:
        state = object.__new__(cls)
        state._value_, state.shown = text, shown
        return state

    # No connection.
    CONNECTING = "connecting", SourceState.CONNECTING
    """Whole so far, or nothing was handed on yet."""
    CONNECTING_INCOMPLETE = "connecting_incomplete", SourceState.CONNECTING
    """Something was missing already."""

    # Repair; live batches wait.
    VERIFYING = "verifying", SourceState.RECOVERING
    """Whole but for the question under way: is it the same process, and what did it publish
    since?"""
    DOUBTING = "doubting", SourceState.RECOVERING
    """A batch looks like another process's; otherwise nothing is known to be missing."""
    REBUILDING = "rebuilding", SourceState.RECOVERING
    """Nothing is held; a snapshot is asked for, else everything the ring has."""
    REFRESHING = "refreshing", SourceState.RECOVERING
    """Whole as far as known, and yet the consumer finds its picture wrong: a snapshot is asked for,
    else everything, if the ring still has it."""
    REPLAYING = "replaying", SourceState.RECOVERING
    """Taking the ring to its end; whole so far."""
    MAKING_UP = "making_up", SourceState.RECOVERING
    """Something is lost: a snapshot is asked for, else the ring's batches behind the hole."""
    LOADING = "loading", SourceState.RECOVERING
    """Taking a snapshot."""
    LOADING_PARTLY = "loading_partly", SourceState.RECOVERING
    """Taking a snapshot of which the consumer could not keep everything."""

    # At rest, or looking at the replay endpoint without a known loss; live batches are taken.
    LIVE = "live", SourceState.LIVE
    """Whole, and the replay endpoint is there to help."""
    UNANSWERED = "unanswered", SourceState.LIVE
    """Whole as far as known; the last look at the replay endpoint got no answer."""
    SILENT = "silent", SourceState.SUSPECT
    """Whole as far as known, but no batch came between looks that got no answer: batches may not
    arrive any more."""
    CROSSED = "crossed", SourceState.SUSPECT
    """Whole, but another process's batches come over the connection: the next one has to be proven,
    whatever its number."""
    LIVE_ADRIFT = "live_adrift", SourceState.LIVE
    """Whole, but adrift."""
    UNCONFIRMED = "unconfirmed", SourceState.SUSPECT
    """Adrift since a connect or a gap. Whole as far as known, if it is still the same process."""
    INCOMPLETE = "incomplete", SourceState.SUSPECT
    """Something is missing. A snapshot would repair it, or a ring that reaches back to batch 0."""
    HOLED = "holed", SourceState.SUSPECT
    """Something is missing that the ring cannot give: a snapshot would repair it."""
    OVERFULL = "overfull", SourceState.SUSPECT
    """The consumer could not keep all of a snapshot; another one would not fit either."""
    ADRIFT = "adrift", SourceState.SUSPECT
    """Like INCOMPLETE, but adrift."""
    HOLED_ADRIFT = "holed_adrift", SourceState.SUSPECT
    """Like HOLED, but adrift."""

    DEAD = "dead", SourceState.DEAD
    """No longer followed."""


class Input(Enum):
    """The inputs of a stream."""

    __hash__ = object.__hash__  # by identity: a look-up for every batch, and Enum's own is slow

    # The connection.
    CONNECTED = "connected"
    CONNECTED_WITHOUT_REPLAY = "connected without replay"
    """Connected, and there is no replay endpoint to ask."""
    DISCONNECTED = "disconnected"
    CLOSED = "closed"
    """The subscriber ends."""

    # The consumer.
    DISTRUSTED = "distrusted"
    """The batches handed on do not fit what the engine does, although none seems to be missing."""

    # The fate of a batch, live or from the ring. The first four were handed on.
    NEXT = "next"
    BEGINNING = "beginning"
    """Batch 0, handed on while nothing was held: the picture is whole."""
    PARTLY_KEPT = "partly kept"
    """The consumer could not keep everything: from here on something is missing."""
    ALL_KNOWN = "all known"
    """Nothing published before matters any more: all gaps are closed."""
    DUPLICATE = "duplicate"
    """Handed on before; relays repeat and delay messages."""
    GAP = "gap"
    """Ahead of the next one."""
    BACKWARDS = "backwards"
    """Behind, and not known as a duplicate: another process, or too old to know."""
    IDENTITY_CHANGED = "identity changed"
    """It names another process than the one followed."""
    MALFORMED = "malformed"
    """The number is right, but the batch is unreadable."""

    # Time.
    SILENCE = "silence"
    """It is time to check whether something was lost at the tail."""
    TRY_AGAIN = "try again"
    PATIENCE_OVER = "patience over"
    """Live batches have waited long enough."""

    # A replay from the batch applied last.
    NOTHING_HELD = "nothing held"
    """No batch was applied yet, so no replay can be asked for."""
    NEWS = "news"
    """The ring returned that batch unchanged, and has more."""
    REPLAY_END = "replay end"
    """It was read to its end."""
    STRANGERS = "strangers"
    """It was read to its end, and live batches waited that the answering process never sent."""
    CUT_SHORT = "cut short"
    """It broke off or had a hole, after something new, or for the first time without."""
    LOST = "lost"
    """The ring lacks the next batch, or it never gets through."""
    FOREIGN = "foreign"
    """Another process answers."""
    MIXED = "mixed"
    """The ring returned that batch unchanged, but not one before it: another process's came in
    between."""
    MOVED_ON = "moved on"
    """The ring begins behind the batch applied last."""
    UNPROVABLE = "unprovable"
    """That batch was never seen, only a snapshot that includes it: nothing to compare with."""
    VACANT = "vacant"
    """The ring is empty although something was published: perhaps it keeps nothing at all."""
    NO_ANSWER = "no answer"
    """No answer to a question, or one that breaks the protocol."""

    # A snapshot.
    SNAPSHOT_BEGINS = "snapshot begins"
    NO_SNAPSHOT = "no snapshot"
    """The publisher makes none, or refuses for now."""
    SNAPSHOT_END = "snapshot end"
    SNAPSHOT_BROKEN = "snapshot broken"

    # A replay from batch 0.
    RING_FROM_0 = "ring from 0"
    RING_LATER = "ring from later"
    """The ring begins with a later batch."""
    RING_EMPTY = "ring empty"
    """The ring is empty, and no live batch waits: nothing was published yet."""


class Action(Enum):
    """The actions after an input. *The batch* is the one whose fate the input was."""

    PUT_BACK = "put back"
    """Let the batch come again as a live one, after the questions."""
    HAND_ON = "hand on"
    """Hand the batch on, although something before it is missing. Its fate is an input again."""
    SKIP = "skip"
    """Pass over the batch; the next number is expected after it."""
    CLEAR = "clear"
    """Make the consumer forget everything."""
    DROP_COVERED = "drop covered"
    """Drop the waiting live batches that came before a replay was asked for, which was then read to
    its end: each of them was in it, or was never sent by the publisher."""
    DROP_OLD = "drop old"
    """Drop the waiting live batches with numbers up to the one handed on last."""
    START_PATIENCE = "start patience"
    """Begin the time that live batches may wait for an answer."""

    # Questions.
    ASK_FROM_LAST = "ask from last"
    """Ask for a replay from the batch applied last: one more than is missing, to compare it; and
    a few of those before it, as far as no replay has shown them yet."""
    FOLLOW = "follow"
    """Hand the replay on, up to its end or its first hole."""
    FOLLOW_PAST_HOLES = "follow past holes"
    """Hand the replay on, past an unreadable batch and past a hole at its beginning. A later hole
    may be filled by the next replay."""
    ASK_SNAPSHOT = "ask snapshot"
    TAKE_SNAPSHOT = "take snapshot"
    """Hand the snapshot on, and the batches since."""
    ASK_FROM_0 = "ask from 0"
    WAIT = "wait"
    """Wait a moment before the next try, if there is patience left."""


ON_A_BATCH = frozenset({Action.PUT_BACK, Action.HAND_ON, Action.SKIP})
"""The actions that concern one batch, so they only follow its fate."""

CLEAR_REASONS: Mapping[Input, str] = {
    Input.FOREIGN: "restart",
    Input.MIXED: "another engine's batches",
    Input.BACKWARDS: "restart",
    Input.IDENTITY_CHANGED: "restart",
    Input.RING_FROM_0: "rebuild",
    Input.SNAPSHOT_BEGINS: "snapshot",
    Input.SNAPSHOT_BROKEN: "broken snapshot",
}
"""Why the consumer is cleared, by the input that leads to it."""


_KEPT_OTHERWISE = frozenset({Input.PARTLY_KEPT, Input.ALL_KNOWN})
_ENDS_OF_A_REPLAY = frozenset(
    {Input.REPLAY_END, Input.STRANGERS, Input.CUT_SHORT, Input.LOST, Input.NO_ANSWER}
)
RESULTS: Mapping[Action, frozenset[Input]] = {
    Action.ASK_FROM_LAST: _ENDS_OF_A_REPLAY
    | {Input.NOTHING_HELD, Input.NEWS, Input.FOREIGN, Input.MIXED}
    | {Input.MOVED_ON, Input.UNPROVABLE, Input.VACANT},
    Action.FOLLOW: _ENDS_OF_A_REPLAY | _KEPT_OTHERWISE | {Input.FOREIGN},
    Action.FOLLOW_PAST_HOLES: _ENDS_OF_A_REPLAY
    | _KEPT_OTHERWISE
    | {Input.BEGINNING, Input.GAP, Input.IDENTITY_CHANGED, Input.MALFORMED},
    Action.ASK_SNAPSHOT: frozenset({Input.SNAPSHOT_BEGINS, Input.NO_SNAPSHOT, Input.NO_ANSWER}),
    Action.TAKE_SNAPSHOT: _KEPT_OTHERWISE | {Input.SNAPSHOT_END, Input.SNAPSHOT_BROKEN},
    Action.ASK_FROM_0: frozenset(
        {Input.RING_FROM_0, Input.RING_LATER, Input.RING_EMPTY, Input.VACANT, Input.NO_ANSWER}
    ),
    Action.WAIT: frozenset({Input.TRY_AGAIN, Input.PATIENCE_OVER, Input.DISCONNECTED}),
}
"""The questions and the inputs that each can bring. The fate `NEXT` is not among them: inside an
answer it is the ordinary case and is not reported."""
