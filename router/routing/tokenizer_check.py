"""Compares the tokenizer of every replica with the router's own, each time it becomes healthy.

A router whose tokenizer differs from the engine's predicts hits that do not happen, and nothing
else would show why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.replicas import Replica
from router.routing.models import Model
from router.tokenize import LocalTokenizer, RemoteTokenizer, ReplicaAnswerError, find_disagreements

logger = logging.getLogger(__name__)


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
