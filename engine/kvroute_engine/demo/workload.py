"""The prompts of the demo: questions about shared documents, which fall out of use and come back.

Every document is longer than the window, so the window has slid past most of it when its first
answer begins. In each round most of the documents are in use, more than fit side by side, and each
is asked about several times; before the next round, some fall out of use and others come.

    round   in use      new or back
      1     A B C D     all
      2     A B E D     E, which takes the place of C in some cache
      3     A C E D     C: where it was, full attention still holds the beginning of it
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VOCABULARY = 256
"""Token ids are below this: the small engine's tokenizer starts with the 256 bytes."""


@dataclass(frozen=True, slots=True)
class WorkloadSizes:
    """The size of the workload. All lengths in tokens."""

    documents: int = 12
    document_tokens: Sequence[int] = (210, 700)
    """Lengths of the documents, in turn."""
    in_use: int = 9
    """Documents that are asked about in a round."""
    swapped: int = 1
    """Documents of these that fall out of use before the next round."""
    rounds: int = 4
    questions: int = 3
    """Questions about each document in use, in a round."""
    question_tokens: int = 40
    answer_tokens: int = 2
    """Short, since results are decided before the answer, and a longer one only takes longer."""
    seed: int = 1


class Workload:
    """Prompts in a fixed order: the same whichever replica responds first.

    Args:
        prompts: In the order in which they are sent.
        answer_tokens: Generated for each.
    """

    def __init__(self, prompts: Sequence[list[int]], answer_tokens: int) -> None:
        self.requests = len(prompts)
        self.answer_tokens = answer_tokens
        self._waiting = deque(prompts)

    def next(self) -> list[int] | None:
        """Take the prompt whose turn it is; None if all were taken."""
        return self._waiting.popleft() if self._waiting else None


def questions_about_documents(sizes: WorkloadSizes) -> Workload:
    """Return the demo's workload."""
    chance = random.Random(sizes.seed)
    lengths = sizes.document_tokens
    documents = [_tokens(chance, lengths[index % len(lengths)]) for index in range(sizes.documents)]
    asked = list(_asked(chance, sizes))
    prompts = [[*documents[index], *_tokens(chance, sizes.question_tokens)] for index in asked]
    return Workload(prompts, sizes.answer_tokens)


def _asked(chance: random.Random, sizes: WorkloadSizes) -> Iterator[int]:
    """Yield the document of each question."""
    in_use = list(range(min(sizes.in_use, sizes.documents)))
    for number in range(sizes.rounds):
        if number:
            _swap(chance, in_use, sizes)
        for _ in range(sizes.questions):
            yield from chance.sample(in_use, len(in_use))


def _swap(chance: random.Random, in_use: list[int], sizes: WorkloadSizes) -> None:
    for _ in range(sizes.swapped):
        away = [index for index in range(sizes.documents) if index not in in_use]
        if away:
            in_use.remove(chance.choice(in_use))
            in_use.append(chance.choice(away))


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]
