"""The options by which replicas and their event streams are watched, and estimates stand in for
streams that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from kvevents.endpoints import ZmqEndpoint
from kvevents.errors import EndpointError
from router.config.section import Location, Section
from router.config.values import (
    PLAIN,
    Bytes,
    Checks,
    Count,
    CurvePublicKey,
    PlacedPath,
    Seconds,
    UrlPath,
    ZmqAddress,
)


class HealthConfig(Section, frozen=True):
    """Configures how replicas are watched."""

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
        """Yield times that defeat each other."""
        interval_s, stale_s = self.interval_s, self.engine_load_stale_after_s
        if self.scrape_metrics and stale_s <= interval_s:
            yield (
                ("engine_load_stale_after_s",),
                f"{stale_s:g}; must exceed interval_s ({interval_s:g})",
            )


class EventsConfig(Section, frozen=True):
    """Bounds on the event streams, each per source."""

    max_frame_bytes: Bytes = 64 * 1024 * 1024
    """Change it when a single batch is larger: a publisher that sends one is disconnected,
    `kvroute_source_connections_total` grows and the source becomes suspect."""
    max_queued_batches: Count = 10_000
    """Received and not yet applied. Anything beyond is dropped, counted, and recovered.

    Change it when `kvroute_events_overflow_total` grows: the number of batches that may wait while
    a replay runs, within 4 x `max_frame_bytes`."""
    max_replay_bytes: Bytes = 1024 * 1024 * 1024
    """Change it when a replay or snapshot of a large cache is cut short and
    `kvroute_events_unanswered_total` grows."""
    replay_timeout_s: Seconds = 5.0
    """Change it when the engine takes longer between two replies."""
    silent_after_s: Seconds = 60.0
    """Without any message for this long, the replay endpoint is asked whether the end of the stream
    was lost.

    Change it when a loss at the end of a quiet stream should be noticed sooner; checks begin after
    2 s of silence and back off up to this interval."""
    listen: ZmqAddress | None = None
    """The address for engines that connect to the router instead of the other way round, such as
    `tcp://*:5557`.

    Change it when engines are configured so, as llm-d's and KServe's are; the sources of such a
    replica have `endpoint: listen`. Any client that reaches the address can publish as any of them:
    let only engines through."""
    listen_ranks: Annotated[int, Field(ge=1, le=64), PLAIN] = 1
    """Addresses from there on, one for each data-parallel rank.

    Change it when engines have several ranks: each connects to the port of `listen` plus its
    rank."""
    curve_keys: PlacedPath | None = None
    """Change it when engines encrypt their streams
    ([security.md](security.md#encrypted-event-streams)): the file `NAME.key_secret` of `kvroute
    keys NAME`."""
    hash_key: PlacedPath | None = None
    """Change it when engines announce blocks without token ids
    ([security.md](security.md#event-streams-without-prompts)): the file `NAME.hash_key` of `kvroute
    keys --hash NAME`, the same as theirs."""
    curve_server_key: CurvePublicKey | None = None
    """Always with `curve_keys`: the public key of the engines, where `kv_events` names no other.
    Streams without a key are plain text."""
    self_repair: bool = True
    """Rebuild a source whose hits are predicted wrongly for long in quiet moments.

    Change it when sources whose hits are predicted wrongly for long should not be rebuilt; they are
    shown all the same."""
    self_repair_after_s: Seconds = 60.0
    """Change it when a wrong picture should be rebuilt sooner (lower), or short disturbances of the
    engines cause rebuilds (raise): the time from the first wrong prediction to the last."""
    self_repair_quiet_s: Seconds = 1.0
    """Change it when events take longer to arrive (raise), or requests follow each other so closely
    that none is judged (lower): only requests that come this long after the last one at a replica
    are judged."""
    rebuild_cool_down_s: Seconds = 600.0
    """The least time between two such rebuilds of one source.

    Change it when rebuilds cost too much (raise), or should be repeated sooner (lower)."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield a listener that checks no key, and ranks without one or without a port there."""
        if self.listen is None:
            if self.listen_ranks > 1:
                yield ("listen_ranks",), "there must be events.listen for that"
            return
        if self.curve_server_key is not None:
            rule = "events.curve_server_key is set, and who connects to the router shows no key"
            yield ("listen",), rule
        try:
            ZmqEndpoint.parse("", self.listen).for_rank(self.listen_ranks - 1)
        except EndpointError as error:
            yield ("listen_ranks",), str(error)


class ApproximateConfig(Section, frozen=True):
    """Estimates of caches without events."""

    enabled: bool = True
    """Change it when replicas without events should be routed by load alone, and hits that are
    suspect stay discounted however long."""
    after_s: Seconds = 60.0
    """How long a stream must have been incomplete until an estimate replaces its doubtful hits.

    Change it when an event stream that is not whole should be replaced by an estimate sooner or
    later. Until then its hits are `suspect`; once it is whole again they are exact at once."""
    cache_tokens: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 262_144
    """Size of a replica's cache, where its metrics do not report it.

    Change it when the caches of replicas without events are of another size, and their metrics do
    not report it. vLLM's (`vllm:cache_config_info`) and SGLang's (`sglang:max_total_num_tokens`)
    do."""
    max_keys: Annotated[int, Field(ge=1024, le=1_000_000_000), PLAIN] = 1_048_576
    """Bound on what is remembered of all such caches: keys, one for 64 tokens.

    Change it when memory is short (lower: a key for each 64 tokens of all such caches takes some
    200 bytes), or they hold more than 64 million tokens."""
