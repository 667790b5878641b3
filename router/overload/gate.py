"""How much one replica may be given at a time."""

from __future__ import annotations

from typing import NamedTuple

AT_LIMIT = "at its limit of requests"
AT_TOKEN_LIMIT = "at its limit of prompt tokens"
PASSING = frozenset((AT_LIMIT, AT_TOKEN_LIMIT))
"""Obstacles for which it makes sense to wait."""


class GateLimits(NamedTuple):
    """Bounds on what is under way at one replica; None: no bound."""

    in_flight: int | None = None
    """Requests."""
    prefill_tokens: int | None = None
    """Prompt tokens to compute. One request may always be there."""


class ReplicaGate:
    """Says whether one replica may be given another request.

    Args:
        limits: What may be under way there.
    """

    __slots__ = ("_limits",)

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits

    def full(self, requests: int, prefill_tokens: int) -> str | None:
        """Why it has no room; None if it has.

        Args:
            requests: Under way there.
            prefill_tokens: Of those, that are still to be computed.
        """
        limits = self._limits
        if limits.in_flight is not None and requests >= limits.in_flight:
            return AT_LIMIT
        if limits.prefill_tokens is not None and prefill_tokens >= limits.prefill_tokens:
            return AT_TOKEN_LIMIT
        return None
