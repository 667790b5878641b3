"""Defines the interfaces of a provider of replicas and of its listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.config.replica import ReplicaConfig

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""The delay after a failure, and after many in a row."""


class ProviderListener(Protocol):
    """Receives one provider's reports, on the event loop."""

    def on_replicas(self, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()) -> None:
        """Take the complete list of its replicas.

        Args:
            replicas: In any order.
            broken: Entries that cannot be replicas, each with the reason.
        """

    def on_failure(self, why: str) -> None:
        """It cannot list its replicas now; the last list stays."""


class ReplicaProvider(Protocol):
    """One source of replicas."""

    name: str
    """Its kind and its place, for logs, metrics and messages."""

    async def follow(self, listener: ProviderListener) -> None:
        """Report to *listener* until cancelled. Errors are reported, and it tries again."""
        ...
