"""How replicas are watched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.rules import Location
from router.config.section import Section
from router.config.values import PLAIN, Checks, Seconds, UrlPath


class HealthConfig(Section, frozen=True):
    """How replicas are watched."""

    path: UrlPath = "/health"
    """Change it when the engine's health check has another path; any status 200 to 299 is
    healthy."""
    interval_s: Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False), PLAIN] = 2.0
    """A replica that returns is back in rotation within this time; a check that hung when it
    returned adds `timeout_s` at most.

    Change it when a recovered replica should return sooner (lower), or checks cost too much
    (raise)."""
    no_traffic_factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False), PLAIN] = 4.0
    """How many times longer the interval is for a healthy replica while no request has come for
    five intervals and none is under way. The first one ends that. Metrics by which others' requests
    run or wait there are scraped at the usual interval.

    Change it when a router that gets no requests should notice a lost replica sooner (lower), or
    cost less (raise)."""
    timeout_s: Seconds = 2.0
    """May exceed `interval_s`: the next check of a replica waits for the one before.

    Change it when a busy engine responds late; also the timeout of discovery and scrapes."""
    unhealthy_after: Checks = 3
    """Failures in a row.

    Change it when replicas flap (raise) or stay in rotation too long (lower); failed checks, or
    failed requests, in a row."""
    healthy_after: Checks = 1
    """Passed checks in a row. Above 1 a return takes as many intervals.

    Change it when a recovered replica should pass more checks before it gets requests."""
    discovery_interval_s: Seconds = 30.0
    """How often a healthy replica is asked again for its models and event sources, and for metrics
    where it had none.

    Change it when adapters are added and removed faster than this."""
    ready_wait_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False), PLAIN] = 30.0
    """After a start: how long `/readyz` waits for the event streams of each configured replica to
    catch up; 0 does not wait. A replica that has been unhealthy for longer, and never reported its
    models, no longer keeps an unknown model from being 404.

    Change it when event streams take longer to catch up after a start (raise); 0: ready at once,
    with caches still unknown."""
    scrape_metrics: bool = True
    """Change it when the engines have no `/metrics`; without it, requests from other clients are
    not seen."""
    metrics_path: UrlPath = "/metrics"
    """Change it when the engines serve it elsewhere."""
    engine_load_stale_after_s: Seconds = 10.0
    """Scraped gauges older than this do not count.

    Change it when `interval_s` is raised: this must be longer."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Times that defeat each other."""
        interval_s, stale_s = self.interval_s, self.engine_load_stale_after_s
        if self.scrape_metrics and stale_s <= interval_s:
            yield (
                ("engine_load_stale_after_s",),
                f"{stale_s:g}; must exceed interval_s ({interval_s:g})",
            )
