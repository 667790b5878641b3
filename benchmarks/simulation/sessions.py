"""Sessions of requests, each of which waits for the response to the one before, and for someone to
think or a tool to run. What a session consists of is drawn by a plan; see `plans`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol

from benchmarks.simulation.workload import Arrival, Texts, WorkloadSize, arrival_times

_SAMPLES = 600
_WARM_START_SHARE = 0.2
"""Sessions that are under way when the simulation begins resume within this share of its time."""


class Turn(NamedTuple):
    """One request of a session."""

    message_tokens: int
    answer_tokens: int
    pause_s: float
    """The time from the response before to this request; it counts from the second turn on."""


class Session(NamedTuple):
    """One session before its first request."""

    head: tuple[range, ...]
    """Texts that it shares with others, in their order."""
    turns: tuple[Turn, ...]

    @property
    def pauses_s(self) -> float:
        """Return how long it takes, apart from the responses."""
        return sum(turn.pause_s for turn in self.turns[1:])


class Plan(Protocol):
    """Draws sessions. The texts they share are made with the plan."""

    def session(self, random: Random) -> Session:
        """Return the next session."""
        ...


@dataclass(frozen=True, slots=True)
class Profile:
    """The averages of a plan's sessions."""

    turns: float
    pauses_s: float
    size: WorkloadSize


def profile(plan: Plan) -> Profile:
    """Draw sessions of their own to find out, the same whatever the seed of a run is, so that a
    rate means the same for every seed."""
    random = Random(12345)
    sessions = [plan.session(random) for _ in range(_SAMPLES)]
    prompts = [prompt for session in sessions for prompt in _prompts(session)]
    return Profile(
        turns=len(prompts) / len(sessions),
        pauses_s=sum(session.pauses_s for session in sessions) / len(sessions),
        size=WorkloadSize(sum(prompts) / len(prompts), max(map(_length, sessions))),
    )


def _prompts(session: Session) -> list[int]:
    lengths, length = list[int](), sum(map(len, session.head))
    for turn in session.turns:
        lengths.append(length + turn.message_tokens)
        length = lengths[-1] + turn.answer_tokens
    return lengths


def _length(session: Session) -> int:
    return _prompts(session)[-1] + session.turns[-1].answer_tokens


@dataclass(slots=True)
class _Open:
    """A session under way."""

    session: Session
    start_s: float
    own: range
    """The text of all its own messages, in their order."""
    turn: int = 0
    said: list[int] = field(default_factory=list)


class Sessions:
    """Sessions that begin at random times. As many as are open on average are under way when the
    simulation begins, each in the middle of its turns, so that the load is steady from early on.

    No request begins after *ends_s*.
    """

    def __init__(
        self, plan: Plan, requests_per_s: float, ends_s: float, variation: float, seed: int
    ) -> None:
        """
        Args:
            plan: What the sessions consist of.
            requests_per_s: Of all sessions together.
            ends_s: When the load ends.
            variation: Of the times between the sessions' beginnings; see `arrival_times`.
            seed: Of everything that is drawn.
        """
        self.ends_s = ends_s
        found = profile(plan)
        self.size = found.size
        random = Random(f"sessions {seed}")
        starts_per_s = requests_per_s / found.turns
        self._texts = Texts()
        self._texts.text(1 << 28)  # behind those of the plan
        self._open = [
            self._opened(plan.session(random), random.random() * _WARM_START_SHARE * ends_s, random)
            for _ in range(round(starts_per_s * found.pauses_s))
        ]
        for start_s in arrival_times(random, starts_per_s, ends_s, variation):
            self._open.append(self._opened(plan.session(random), start_s))

    def _opened(self, session: Session, start_s: float, under_way: Random | None = None) -> _Open:
        tokens = sum(turn.message_tokens + turn.answer_tokens for turn in session.turns)
        turn = under_way.randrange(len(session.turns)) if under_way else 0
        return _Open(session, start_s, self._texts.text(tokens), turn)

    def arrivals(self) -> list[Arrival]:
        """See `Workload`."""
        return [
            self._arrival(place, opened, opened.start_s) for place, opened in enumerate(self._open)
        ]

    def prompt(self, arrival: Arrival) -> list[int]:
        """See `Workload`."""
        opened = self._open[arrival.place]
        if not opened.said:
            for text in opened.session.head:
                opened.said += text
            for turn in opened.session.turns[: opened.turn]:
                _say(opened, turn.message_tokens + turn.answer_tokens)
        _say(opened, opened.session.turns[opened.turn].message_tokens)
        return list(opened.said)

    def shared_ends(self, arrival: Arrival) -> Sequence[int]:
        """See `Workload`."""
        return list(accumulate(map(len, self._open[arrival.place].session.head)))

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> Arrival | None:
        """See `Workload`."""
        opened = self._open[arrival.place]
        opened.said += answer
        opened.turn += 1
        if opened.turn < len(opened.session.turns):
            at_s = now_s + opened.session.turns[opened.turn].pause_s
            if at_s <= self.ends_s:
                return self._arrival(arrival.place, opened, at_s)
        opened.said = []
        return None

    def _arrival(self, place: int, opened: _Open, at_s: float) -> Arrival:
        answer = opened.session.turns[opened.turn].answer_tokens
        name = f"session-{place}"
        return Arrival(f"{name}/{opened.turn}", at_s, name, answer, place, opened.turn)


def _say(opened: _Open, tokens: int) -> None:
    opened.said += opened.own[:tokens]
    opened.own = opened.own[tokens:]
