"""A prompt that a replica computes for another one, from its choice to its end."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.types import Candidate
from router.routing.booking import Booking


@dataclass(slots=True, eq=False)
class ObservedPrefill:
    """One such prompt. Its end is what that replica responds to the router; where a sidecar asks it
    instead, no one reports that, and it counts as computed once the response begins."""

    booking: Booking
    """Its load there."""
    has_responded: bool = False

    @property
    def candidate(self) -> Candidate:
        """The replica that computes it."""
        return self.booking.placement.candidate

    def responded(self, cached_tokens: int | None) -> None:
        """That replica has responded.

        Args:
            cached_tokens: That it reports; None: it does not.
        """
        self.booking.first_token()
        self.booking.ended()
        self.booking.reported(cached_tokens)
        self.has_responded = True

    def response_began(self, is_timed: bool) -> None:
        """Whoever waits for the prompt has it.

        Args:
            is_timed: As for `Booking.first_token`.
        """
        if not self.has_responded:
            self.booking.first_token(is_timed)

    def ended(self, was_served: bool = True) -> None:
        """Nobody waits for it any more.

        Args:
            was_served: True if it may have been computed.
        """
        if not self.has_responded:
            self.booking.ended(was_served)
            self.booking.reported(None)
