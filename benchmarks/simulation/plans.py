"""The kinds of sessions: chats about documents, questions on documents, agents with tools, chats
beside scans, and one system prompt for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.sessions import Session, Turn
from benchmarks.simulation.workload import Texts

Bounds = tuple[int, int]
"""Numbers of tokens, bounds included; each as likely."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The time that someone thinks, or a tool runs."""

    mean_s: float
    spread: float | None = None
    """The standard deviation of the logarithm; None: an exponential distribution."""

    def draw(self, random: Random) -> float:
        """Return one pause, in seconds."""
        if self.spread is None:
            return random.expovariate(1 / self.mean_s)
        return random.lognormvariate(math.log(self.mean_s) - self.spread**2 / 2, self.spread)


class Chats:
    """Conversations behind one of a few system prompts; half of them are about one of a number of
    documents. Popularity falls as 1 / rank, as in most collections."""

    def __init__(
        self,
        pause: Pause,
        systems: int = 6,
        documents: int = 24,
        document_share: float = 0.5,
        system_tokens: Bounds = (800, 2400),
        document_tokens: Bounds = (2000, 10_000),
        turns: Bounds = (1, 9),
        message_tokens: Bounds = (30, 500),
        answer_tokens: Bounds = (40, 160),
    ) -> None:
        texts, random = Texts(), Random("texts of chats")
        self._pause = pause
        self._systems = [texts.text(random.randint(*system_tokens)) for _ in range(systems)]
        self._documents = [texts.text(random.randint(*document_tokens)) for _ in range(documents)]
        self._document_share = document_share
        self._turns, self._message, self._answer = turns, message_tokens, answer_tokens

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        head = (popular(random, self._systems),)
        if random.random() < self._document_share:
            head = (*head, popular(random, self._documents))
        turns = tuple(
            Turn(
                random.randint(*self._message),
                random.randint(*self._answer),
                self._pause.draw(random),
            )
            for _ in range(random.randint(*self._turns))
        )
        return Session(head, turns)


class Questions:
    """Single questions on documents that are longer than any window, with short answers."""

    def __init__(
        self,
        documents: int = 120,
        document_tokens: Bounds = (6000, 14_000),
        question_tokens: Bounds = (20, 200),
        answer_tokens: Bounds = (16, 128),
    ) -> None:
        texts, random = Texts(), Random("texts of questions")
        self._documents = [texts.text(random.randint(*document_tokens)) for _ in range(documents)]
        self._question, self._answer = question_tokens, answer_tokens

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        turn = Turn(random.randint(*self._question), random.randint(*self._answer), 0.0)
        return Session((popular(random, self._documents),), (turn,))


class HotPrefixes:
    """Questions behind one of a number of long prefixes: manuals, code bases, sets of examples. One
    at a time is what most of them are about, as with news or a new release; then it is another."""

    def __init__(
        self,
        prefixes: int = 40,
        hot_share: float = 0.6,
        questions_each: int = 150,
        prefix_tokens: Bounds = (12_000, 24_000),
        question_tokens: Bounds = (100, 1000),
        answer_tokens: Bounds = (16, 128),
    ) -> None:
        texts, random = Texts(), Random("texts of hot prefixes")
        self._prefixes = [texts.text(random.randint(*prefix_tokens)) for _ in range(prefixes)]
        self._hot_share, self._questions_each = hot_share, questions_each
        self._question, self._answer = question_tokens, answer_tokens
        self._asked = 0

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        self._asked += 1
        hot = self._prefixes[self._asked // self._questions_each % len(self._prefixes)]
        prefix = hot if random.random() < self._hot_share else popular(random, self._prefixes)
        turn = Turn(random.randint(*self._question), random.randint(*self._answer), 0.0)
        return Session((prefix,), (turn,))


class Agents:
    """Loops of a model and its tools, as recorded with coding agents: a median of 33 turns behind
    one of a few long tool prompts, contexts up to 80,000 tokens, and every seventh turn a pause in
    which someone reads."""

    LONGEST_TOKENS = 80_000

    def __init__(
        self,
        kinds: int = 4,
        tool_prompt_tokens: Bounds = (6000, 12_000),
        median_turns: float = 33.0,
        tool: Pause = Pause(3.0),
        reader: Pause = Pause(60.0, 1.0),
        reader_share: float = 0.15,
    ) -> None:
        texts, random = Texts(), Random("texts of agents")
        self._heads = [texts.text(random.randint(*tool_prompt_tokens)) for _ in range(kinds)]
        self._median_turns = median_turns
        self._tool, self._reader, self._reader_share = tool, reader, reader_share

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        head = popular(random, self._heads)
        wanted = max(1, round(random.lognormvariate(math.log(self._median_turns), 0.5)))
        turns, length = list[Turn](), len(head)
        while len(turns) < wanted:
            turn = self._turn(random)
            length += turn.message_tokens + turn.answer_tokens
            if turns and length > self.LONGEST_TOKENS:
                break
            turns.append(turn)
        return Session((head,), tuple(turns))

    def _turn(self, random: Random) -> Turn:
        # Most results of tools are short, a few are whole files.
        message = min(int(random.lognormvariate(math.log(600), 1.0)) + 20, 12_000)
        answer = random.randint(30, 150)
        reads = random.random() < self._reader_share
        return Turn(message, answer, (self._reader if reads else self._tool).draw(random))


class ChatsBesideScans:
    """Conversations, and requests that read something long once and never come back."""

    def __init__(
        self,
        pause: Pause,
        scan_share: float = 0.6,
        scan_tokens: Bounds = (3000, 12_000),
        scan_answer_tokens: Bounds = (16, 64),
    ) -> None:
        self._chats = Chats(pause, document_share=0.0, turns=(2, 12))
        self._scan_share = scan_share
        self._scan, self._answer = scan_tokens, scan_answer_tokens

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        if random.random() >= self._scan_share:
            return self._chats.session(random)
        return Session((), (Turn(random.randint(*self._scan), random.randint(*self._answer), 0.0),))


class OneSystemPrompt:
    """Short questions behind a long system prompt that all share, so that every replica needs it
    and none is better than another once it has it."""

    def __init__(self, system_tokens: int = 6000, question_tokens: Bounds = (50, 1500)) -> None:
        self._system = Texts().text(system_tokens)
        self._question = question_tokens

    def session(self, random: Random) -> Session:
        """See `Plan`."""
        turn = Turn(random.randint(*self._question), random.randint(40, 200), 0.0)
        return Session((self._system,), (turn,))


def popular(random: Random, choices: list[range]) -> range:
    """Return one of *choices*, the first most likely."""
    return random.choices(choices, weights=[1 / rank for rank in range(1, len(choices) + 1)])[0]
