"""Configurations that are read again."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from router.config.schema import RouterConfig
from router.serve.reload import REFUSED, TAKEN, Reloader
from router.telemetry.metrics import RouterMetrics
from tests.support.waiting import eventually


async def test_one_that_cannot_be_taken_over_does_not_keep_out_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through a bug, say: the router read none any more, and did not say so."""
    taken: list[RouterConfig] = []

    def take(config: RouterConfig) -> list[str]:
        taken.append(config)
        if len(taken) == 1:
            raise ZeroDivisionError
        return []

    metrics = RouterMetrics(CollectorRegistry())
    reloader = Reloader(RouterConfig, take, metrics)
    running = asyncio.create_task(reloader.run())
    try:
        for outcome in (REFUSED, TAKEN):
            reloader.ask()
            counted = metrics.reloads.labels(outcome)
            await eventually(lambda counted=counted: counted.value == 1, outcome)
    finally:
        running.cancel()
    assert "ZeroDivisionError" in caplog.text
