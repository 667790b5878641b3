"""What the router says about itself: logs, metrics, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.config.section import Section
from router.config.values import PLAIN, Url


class TracingConfig(Section, frozen=True):
    """OpenTelemetry traces, over OTLP/HTTP; the standard's `OTEL_*` variables hold for the rest."""

    enabled: bool = False
    """Needs the extra `otel`."""
    endpoint: Url | None = None
    """Base URL of the collector, as `http://collector:4318`; null: as `OTEL_EXPORTER_OTLP_ENDPOINT`
    says."""
    sampled_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), PLAIN] | None = None
    """Of the requests that belong to no trace yet; those that do are recorded where their sender
    was. Null: as `OTEL_TRACES_SAMPLER` says, else all."""


class ObservabilityConfig(Section, frozen=True):
    """What the router says about itself."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = False
    allow_capture: bool = False
    """Whether operators may record prompts, as token ids, with `kvroute capture --url`."""
    metrics_need_key: bool = False
    """Whether /metrics asks for the operator's key."""
    tracing: TracingConfig = TracingConfig()
