"""Do the router and its replicas tokenise alike? Each replica is asked whenever it becomes healthy.

A router whose tokenizer differs from the engine's, by one token at the front, predicts hits that
never happen, and nothing else would show why. The usual causes: another version of the model's
files, a chat template given on the engine's command line, a BOS token that only one of them adds, a
version of transformers that rebuilds Llama's tokenizer instead of reading it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.replicas import Replica
from router.routing.models import Model
from router.tokenize import (
    ChatPrompt,
    LocalTokenizer,
    RemoteTokenizer,
    ReplicaAnswerError,
    TextPrompt,
    UntokenizableError,
)

logger = logging.getLogger(__name__)

_TEXT = "The answer is 42.\n\n  Isn't it?\tна́йден 日本語 🙂"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
_USER = {"role": "user", "content": _TEXT}
_TURNS = [
    {"role": "system", "content": "Be brief."},
    _USER,
    {"role": "assistant", "content": "Yes."},
    _USER,
]

_PROBES: dict[str, TextPrompt | ChatPrompt] = {
    "text": TextPrompt(_TEXT),
    # Where SentencePiece models differ by the age of the library that converted them.
    "text after a blank": TextPrompt("  " + _TEXT),
    "text without special tokens": TextPrompt(_TEXT, add_special_tokens=False),
    "one message": ChatPrompt([_USER]),
    "several turns": ChatPrompt(_TURNS),
    "tools": ChatPrompt([_USER], tools=[_TOOL]),
}


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One probe that came out differently."""

    probe: str
    """Its name."""
    first_difference: int
    """Index of the first id that differs, or the length of the shorter list."""
    local_count: int
    """Ids in the router."""
    remote_count: int
    """Ids at the replica."""


class TokenizerCheck:
    """Runs the checks and keeps their results. Belongs to one event loop.

    Args:
        ask: `(replica, path, body) -> (status, body)`; raises OSError or TimeoutError where the
            replica does not respond.
    """

    def __init__(self, ask: Callable[[Replica, str, bytes], Awaitable[tuple[int, bytes]]]) -> None:
        self._ask = ask
        self._running: set[asyncio.Task[None]] = set()
        self.disagreements: dict[tuple[str, str], int] = {}
        """(model, replica) -> probes tokenised differently; absent where that is not known."""

    def start(self, replica: Replica, model: Model) -> None:
        """Check a replica in the background, if the router tokenises its model itself.

        Args:
            replica: The one to ask.
            model: What it serves.
        """
        local = model.tokenization.local
        if local is None:
            return
        task = asyncio.get_running_loop().create_task(
            self._check(replica, model.name, local), name=f"tokenizer {replica.id}"
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that was removed."""
        self.disagreements = {
            key: count for key, count in self.disagreements.items() if key[1] != replica_id
        }

    async def close(self) -> None:
        """End all checks."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _check(self, replica: Replica, model: str, local: LocalTokenizer) -> None:
        async def fetch(path: str, body: bytes) -> tuple[int, bytes]:
            return await self._ask(replica, path, body)

        served = replica.served.models[0] if replica.served.models else model
        try:
            found = await find_disagreements(local, RemoteTokenizer(fetch), served)
        except (ReplicaAnswerError, OSError, asyncio.TimeoutError) as error:
            logger.info(
                "replica %s: its tokenizer could not be compared (%s)",
                replica.id,
                type(error).__name__,
            )
            return
        self.disagreements[model, replica.id] = len(found)
        if found:
            names = ", ".join(each.probe for each in found)
            logger.warning(
                "replica %s tokenises %s differently: hits will be mispredicted (%s)",
                replica.id,
                model,
                names,
            )


async def find_disagreements(
    local: LocalTokenizer, remote: RemoteTokenizer, model: str | None
) -> list[Disagreement]:
    """Tokenise the probes on both sides and return where they differ.

    Probes that one side cannot tokenise are left out.

    Args:
        local: The router's tokenizer.
        remote: The replica's.
        model: The model's name at the replica; None asks for its default.
    Raises:
        ReplicaAnswerError: The replica refused, or its response makes no sense.
        OSError: The replica did not respond; asyncio.TimeoutError likewise.
    """
    found: list[Disagreement] = []
    for name, prompt in _PROBES.items():
        try:
            here = local.finish(local.prepare(prompt, None))
            there = await remote.tokenize(prompt, model=model, cache_salt=None)
        except UntokenizableError:
            continue
        if here != there:
            first = _first_difference(here, there)
            found.append(Disagreement(name, first, len(here), len(there)))
    return found


def _first_difference(here: Sequence[int], there: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(here, there, strict=False)):
        if one != other:
            return index
    return min(len(here), len(there))
