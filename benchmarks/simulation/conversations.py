"""Synthetic conversations: shared system prompts, documents that several conversations ask about,
turns that append to the previous ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.simulation.workload import Arrival, WorkloadSize

VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """Numbers, lengths and popularity; ranges are in tokens, bounds included."""

    conversations: int = 250
    systems: int = 6
    system_tokens: tuple[int, int] = (800, 2400)
    documents: int = 24
    document_tokens: tuple[int, int] = (2000, 10_000)
    document_share: float = 0.5
    """Share of the conversations that are about a document."""
    turns: tuple[int, int] = (1, 6)
    message_tokens: tuple[int, int] = (30, 500)
    answer_tokens: tuple[int, int] = (16, 64)
    think_share: float = 0.12
    """From the end of a response to the next message: the mean of an exponential distribution, as a
    share of the time in which all conversations begin. So a different request rate is the same
    workload, faster or slower, with the same number of concurrent conversations."""
    seed: int = 0


@dataclass(slots=True)
class _Conversation:
    start_s: float
    said: list[int]
    messages: list[list[int]]
    answers: list[int]
    thinks: list[float]
    """Before each message, as shares of the time in which all conversations begin."""


@dataclass(slots=True)
class Conversations:
    """Conversations that begin at random times (Poisson); each message waits for the response to
    the previous one."""

    options: ConversationOptions
    requests_per_s: float
    """The rate of all turns, while conversations begin."""
    size: WorkloadSize = field(init=False)
    _conversations: list[_Conversation] = field(init=False)
    _span_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._conversations = _plan(self.options)
        self.size = _size(self._conversations)
        self._span_s = self.size.requests / self.requests_per_s
        random, now = Random(self.options.seed + 1), 0.0
        for planned in self._conversations:
            now += random.expovariate(len(self._conversations) / self._span_s)
            planned.start_s = now

    def arrivals(self) -> list[Arrival]:
        """See `Workload`."""
        return [
            self._turn(place, 0, planned.start_s)
            for place, planned in enumerate(self._conversations)
        ]

    def prompt(self, arrival: Arrival) -> list[int]:
        """See `Workload`."""
        planned = self._conversations[arrival.place]
        planned.said += planned.messages[_turn_of(arrival)]
        return list(planned.said)

    def answered(self, arrival: Arrival, answer: Sequence[int], now_s: float) -> Arrival | None:
        """See `Workload`."""
        planned, turn = self._conversations[arrival.place], _turn_of(arrival) + 1
        planned.said += answer
        if turn == len(planned.messages):
            planned.said = []
            return None
        return self._turn(arrival.place, turn, now_s + planned.thinks[turn] * self._span_s)

    def _turn(self, place: int, turn: int, at_s: float) -> Arrival:
        answer_tokens = self._conversations[place].answers[turn]
        return Arrival(
            f"conversation-{place}/{turn}", at_s, f"conversation-{place}", answer_tokens, place
        )


def _turn_of(arrival: Arrival) -> int:
    return int(arrival.request_id.rpartition("/")[2])


def _plan(options: ConversationOptions) -> list[_Conversation]:
    random = Random(options.seed)
    systems = [_tokens(random, options.system_tokens) for _ in range(options.systems)]
    documents = [_tokens(random, options.document_tokens) for _ in range(options.documents)]
    # Popularity falls as 1 / rank, as in most collections.
    return [
        _conversation(random, options, _popular(random, systems), _popular(random, documents))
        for _ in range(options.conversations)
    ]


def _conversation(
    random: Random, options: ConversationOptions, system: list[int], document: list[int]
) -> _Conversation:
    turns = random.randint(*options.turns)
    about_document = random.random() < options.document_share
    return _Conversation(
        start_s=0.0,
        said=[*system, *document] if about_document else list(system),
        messages=[_tokens(random, options.message_tokens) for _ in range(turns)],
        answers=[random.randint(*options.answer_tokens) for _ in range(turns)],
        thinks=[random.expovariate(1 / options.think_share) for _ in range(turns)],
    )


def _popular(random: Random, choices: list[list[int]]) -> list[int]:
    return random.choices(choices, weights=[1 / rank for rank in range(1, len(choices) + 1)])[0]


def _tokens(random: Random, bounds: tuple[int, int]) -> list[int]:
    return random.choices(range(VOCABULARY), k=random.randint(*bounds))


def _size(conversations: Sequence[_Conversation]) -> WorkloadSize:
    starts = {tuple(planned.said) for planned in conversations}
    # A document behind two system prompts is two prefixes, and a system prompt in front of it is
    # one with it bare.
    heads = {start: len(start) for start in starts}
    prompts, answers, appended, longest = 0, 0, 0, 0
    for planned in conversations:
        length = len(planned.said)
        for message, answer in zip(planned.messages, planned.answers, strict=True):
            prompts += length + len(message)
            length += len(message) + answer
        appended += length - len(planned.said)
        longest = max(longest, length)
        answers += sum(planned.answers)
    turns = sum(len(planned.messages) for planned in conversations)
    return WorkloadSize(turns, prompts, answers, sum(heads.values()) + appended, longest)
