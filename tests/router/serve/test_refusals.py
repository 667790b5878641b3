"""Refusals of the data plane, of which Python gets no request."""

from __future__ import annotations

import pytest

from router.config.schema import RouterConfig
from router.serve.server import count_refusal
from router.serve.service import RouterService


@pytest.mark.parametrize(("reason", "failed"), [("overloaded", 1), ("slow_request", 0)])
async def test_a_refusal_for_want_of_memory_is_a_failure(reason: str, failed: int) -> None:
    """Its client got a 503, through no fault of its own; others are refused for what they did."""
    service = RouterService(RouterConfig())
    async with service.lifespan():
        count_refusal(service, reason)
        assert service.request_log.totals.total().failed == failed
        assert service.metrics.bad_requests.labels(reason).value == 1
