"""What gateways that send requests themselves may hold here."""

from __future__ import annotations

from router.config.section import Section
from router.config.values import Count, Seconds


class DoorsConfig(Section, frozen=True):
    """For gateways that ask where a request should go and send it themselves."""

    max_reservations: Count = 16_384
    """Change it when gateways have more requests under way at a time; more are refused with 503."""
    reservation_idle_s: Seconds = 600.0
    """A reservation of which its gateway has said nothing for so long ends by itself.

    Change it when responses take longer and the gateway reports no progress, or when gateways are
    often killed and what they had booked should be free sooner."""
