"""The outcomes of calls: placed, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


class CallRefused(Exception):
    """The router refuses this call, and nothing is booked: raised to the caller that awaits the
    response.

    Args:
        status: The matching HTTP status for a client.
        code: The same for every refusal of one kind.
        message: For people; without any of the prompt.
        retry_after_s: When to try again, where that makes sense.
    """

    CODES: ClassVar = frozenset(
        (
            *("invalid_value", "context_length_exceeded", "body_too_large", "model_not_allowed"),
            *("rate_limit_exceeded", "queue_full", "queue_timeout"),
        )
    )
    """Refusals that hold for a call wherever it would go; after all others Ray chooses."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, code, message, retry_after_s)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RoutingStatistics:
    """Counts of what one request router has done so far."""

    decisions: Mapping[str, int]
    """Calls by who chose: `router`, and where Ray did why: `no_prompt`, `no_answer`, `paused`,
    `misconfigured`, or the code of the router's refusal. `refused` calls were not sent."""
    lost_reports: int
    """Ends of bookings that did not reach the router; there they end by silence."""
