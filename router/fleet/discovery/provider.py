"""Defines what a provider of replicas is, and what it reports to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.config import ReplicaConfig

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""After a failure, and after many in a row."""


class ProviderListener(Protocol):
    """Receives what one provider finds, on the event loop."""

    def on_replicas(self, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()) -> None:
        """These are all of its replicas from now on.

        Args:
            replicas: In any order.
            broken: What it named besides and cannot be one, each with the reason.
        """

    def on_failure(self, why: str) -> None:
        """It cannot list its replicas now; the last list stays."""


class ReplicaProvider(Protocol):
    """One place that knows of replicas."""

    name: str
    """For logs, metrics and messages: its kind and its place."""

    async def follow(self, listener: ProviderListener) -> None:
        """Report to *listener* until cancelled. Whatever goes wrong on the way is reported and
        tried again."""
        ...
