"""The options of each part, made from the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from kvevents.curve import CurveKeys, read_keys
from kvevents.errors import CurveError, HashKeyError
from kvevents.live import BacklogLimits
from kvevents.replay import ReplayLimits
from kvevents.sealing import hold_key, read_hash_key
from kvevents.sockets import SocketLimits
from kvevents.subscriber import SubscriberOptions
from router.config.extras import import_extra
from router.config.origin import Timeouts
from router.config.schema import RouterConfig
from router.errors import ConfigError, ConfigProblem
from router.feed.feed import Feed
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import ResponseTooLarge, UpstreamError
from router.fleet.gate import GateOptions
from router.fleet.replica import Replica
from router.index.mirror import ApproximateCaches, Mirror
from router.plane.attempts import RetryLimits
from router.telemetry.metrics import RouterMetrics
from router.telemetry.self_repair import RepairTimes

if TYPE_CHECKING:
    from router.telemetry.otel import OtelTracing

_RESPONSE_BYTES = 16 * 1024 * 1024
_RESPONSE_S = 2.0


def with_live_options(old: RouterConfig, new: RouterConfig) -> RouterConfig:
    """Return *old* with the options of *new* that a running router takes over."""
    level = {"log_level": new.observability.log_level}
    return old.model_copy(
        update={
            "replicas": new.replicas,
            "discovery": new.discovery,
            "observability": old.observability.model_copy(update=level),
        }
    )


def differences(one: BaseModel, other: BaseModel) -> Iterator[str]:
    """Paths of the options in which two sections of one kind differ."""
    for name in type(one).model_fields:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, BaseModel) and isinstance(right, BaseModel):
            yield from (f"{name}.{path}" for path in differences(left, right))
        elif left != right:
            yield name


class ReplicaResponses:
    """The stored responses of the replicas."""

    def __init__(self, upstream: UpstreamClient, config: RouterConfig) -> None:
        self._upstream = upstream
        times = config.server.timeouts.connect_s, config.health.timeout_s
        self._timeouts = Timeouts(min(times), min(*times, _RESPONSE_S), min(*times, _RESPONSE_S))

    async def has(self, replica: Replica, response_id: str) -> bool:
        """Return whether a replica has the response of that id, which must fit into a path."""
        target = b"/v1/responses/" + response_id.encode()
        try:
            status, _ = await self._upstream.fetch(
                replica.origin, target, self._timeouts, _RESPONSE_BYTES, replica.headers
            )
        except ResponseTooLarge:
            return True
        except UpstreamError:
            return False
        return status == 200


def secret_of(config: RouterConfig) -> bytes | None:
    """Return the routers' shared secret; None: no other router understands our keys of prefixes."""
    secret = config.board.secret
    return None if secret is None else secret.get_secret_value().encode()


def gate_options(config: RouterConfig) -> GateOptions:
    overload = config.overload
    return GateOptions(
        overload.max_in_flight,
        overload.max_prefill_tokens,
        overload.breaker_failures,
        overload.breaker_open_s,
        overload.breaker_max_open_s,
        overload.max_back_off_s,
        overload.slow_start_s,
    )


def make_tracing_of(config: RouterConfig, metrics: RouterMetrics) -> OtelTracing | None:
    """Make the sender of traces; None without one.

    Raises:
        ConfigError: OpenTelemetry is not installed, or a variable of it has an unsupported value.
    """
    if not config.observability.tracing.enabled:
        return None
    otel = import_extra("router.telemetry.otel", "otel", "observability.tracing.enabled", "true")
    made: OtelTracing | None = otel.make_tracing(
        config.observability.tracing, os.environ, metrics.traces
    )
    return made


def mirror_of(config: RouterConfig) -> Mirror:
    prices = config.weights.tier_token, config.weights.lower_tier_token
    return Mirror(config.policy.mirror_max_keys, *prices)


def approximate_of(config: RouterConfig, feed: Feed, mirror: Mirror) -> ApproximateCaches | None:
    options = config.approximate
    if not options.enabled:
        return None
    return ApproximateCaches(
        feed.lost_since, mirror, options.after_s, options.cache_tokens, options.max_keys
    )


def proxy_timeouts(config: RouterConfig) -> Timeouts:
    timeouts = config.server.timeouts
    return Timeouts(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s)


def retry_limits(config: RouterConfig) -> RetryLimits:
    retries = config.server.retries
    return RetryLimits(retries.further_attempts, retries.budget_share, retries.budget_burst)


def patient_timeouts(config: RouterConfig) -> Timeouts:
    connect_s = config.server.timeouts.connect_s
    return Timeouts(connect_s, config.health.timeout_s + 5.0, connect_s)


def repair_times(config: RouterConfig) -> RepairTimes:
    events = config.events
    return RepairTimes(
        wrong_for_s=events.self_repair_after_s,
        cool_down_s=events.rebuild_cool_down_s,
        quiet_s=events.self_repair_quiet_s,
    )


def hold_hash_key(config: RouterConfig) -> None:
    """Set the key of streams without token ids.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = config.events.hash_key
    try:
        if path is not None:
            hold_key(read_hash_key(Path(path)))
    except HashKeyError as error:
        raise ConfigError([ConfigProblem("events.hash_key", str(error))]) from None


def curve_keys(config: RouterConfig) -> CurveKeys | None:
    """Our own keys for encrypted streams.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = config.events.curve_keys
    try:
        return None if path is None else read_keys(Path(path))
    except CurveError as error:
        raise ConfigError([ConfigProblem("events.curve_keys", str(error))]) from error


def subscriber_options(config: RouterConfig) -> SubscriberOptions:
    events = config.events
    return SubscriberOptions(
        max_probe_s=events.silent_after_s,
        socket=SocketLimits(message_bytes=events.max_frame_bytes),
        backlog=BacklogLimits(
            batches=events.max_queued_batches, payload_bytes=4 * events.max_frame_bytes
        ),
        replay=ReplayLimits(
            payload_bytes=events.max_replay_bytes, silence_s=events.replay_timeout_s
        ),
    )
