"""The prompts of the demo: conversations with shared system prompts, and questions about long
documents."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

VOCABULARY = 256
"""Token ids are below this: the small engine's tokenizer starts with the 256 bytes."""


@dataclass(frozen=True, slots=True)
class WorkloadSizes:
    """The size of the workload. All lengths in tokens."""

    system_prompts: int = 3
    system_prompt_tokens: int = 320
    conversations: int = 12
    turns: int = 4
    turn_tokens: int = 90
    documents: int = 6
    document_tokens: int = 900
    questions: int = 4
    question_tokens: int = 30
    answer_tokens: int = 8
    seed: int = 1


@dataclass(slots=True)
class Dialogue:
    """One client, whose next prompt extends its last one."""

    name: str
    history: list[int]
    turns_left: int
    turn_tokens: int
    random: random.Random = field(repr=False)

    def prompt(self) -> list[int]:
        """Take the next turn: the history so far, extended by new tokens."""
        self.history += [self.random.randrange(VOCABULARY) for _ in range(self.turn_tokens)]
        self.turns_left -= 1
        return list(self.history)


class Workload:
    """Dialogues that take turns; the prompts are the same whichever replica responds first."""

    def __init__(self, sizes: WorkloadSizes) -> None:
        chance = random.Random(sizes.seed)
        systems = [_tokens(chance, sizes.system_prompt_tokens) for _ in range(sizes.system_prompts)]
        documents = [_tokens(chance, sizes.document_tokens) for _ in range(sizes.documents)]
        found = [
            Dialogue(
                f"conversation-{index}",
                list(systems[index % len(systems)]),
                sizes.turns,
                sizes.turn_tokens,
                _own(chance),
            )
            for index in range(sizes.conversations)
        ]
        for index, document in enumerate(documents):
            # Each question follows the document directly: earlier questions and their answers are
            # not part of its prompt.
            found += [
                Dialogue(
                    f"document-{index}", list(document), 1, sizes.question_tokens, _own(chance)
                )
                for _ in range(sizes.questions)
            ]
        chance.shuffle(found)
        self.answer_tokens = sizes.answer_tokens
        self.requests = sum(dialogue.turns_left for dialogue in found)
        self._ready = deque(found)

    def next(self) -> Dialogue | None:
        """The dialogue whose turn it is; None if every one is under way or over."""
        return self._ready.popleft() if self._ready else None

    def answered(self, dialogue: Dialogue) -> None:
        """Queue a dialogue for its next turn, if it has one."""
        if dialogue.turns_left:
            self._ready.append(dialogue)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def _own(chance: random.Random) -> random.Random:
    return random.Random(chance.random())
