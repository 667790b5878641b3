"""The interface that a simulation asks of a router, ours or another project's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvevents.events import EventBatch
from router.routing.steering import NO_HINTS, Hints


class Account(Protocol):
    """A router's account of one request that it sent."""

    def first_token(self) -> None:
        """Its first token has arrived."""
        ...

    def generated(self, tokens: int) -> None:
        """Its response grew."""
        ...

    def ended(self) -> None:
        """Its response is complete."""
        ...


class Routed(NamedTuple):
    """The replica that a request goes to."""

    replica_id: str
    predicted_tokens: int
    """The prompt tokens cached there now."""
    expected_tokens: int
    """The same when the engine admits it; those cached now where a router does not look ahead."""
    account: Account
    hints: Hints = NO_HINTS
    """The hints on what the engine is to keep."""
    pull_from: str | None = None
    """The replica from whose memory it pulls what it lacks."""


class Router(Protocol):
    """Decides where requests go."""

    def take_batch(self, replica_id: str, batch: EventBatch) -> None:
        """A replica's events."""
        ...

    def take_engine_load(
        self, replica_id: str, running: int, waiting: int, usage: float | None = None
    ) -> None:
        """A replica's gauges, scraped now.

        Args:
            replica_id: The replica.
            running: Requests in its batch.
            waiting: Requests in its queue.
            usage: Share of its blocks that requests hold.
        """
        ...

    def route(
        self, session: str, token_ids: Sequence[int], message_ends: Sequence[int] = ()
    ) -> Routed:
        """Decide where a request goes.

        Args:
            session: What the client calls its conversation.
            token_ids: The prompt.
            message_ends: Where its messages end that other sessions may share, in tokens.
        """
        ...
