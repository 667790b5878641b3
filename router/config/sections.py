"""The sections of the configuration. Each is frozen, knows its defaults, and refuses what it does
not know.

Units are in the names: `_s` are seconds, `_bytes` bytes, `_tokens` tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from kvevents.errors import LayoutError
from kvevents.events import GroupSpec
from kvevents.layout import KVCacheGroup, KVCacheLayout, group_from_spec
from router.config.reader import Section
from router.config.secret import Secret
from router.errors import Problem
from router.index.reference.learning import LayoutHints
from router.scoring.policies import BUILT_IN, policy_names
from router.scoring.types import Weights
from router.upstream.origin import Origin, OriginError

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=1024, le=2**40)]
Tokens = Annotated[int, Meta(ge=1, le=2**20)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Path = Annotated[str, Meta(pattern=r"^/[!-~]{0,255}$")]
HeaderName = Annotated[str, Meta(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]{1,64}$")]
ReplicaId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
"""It stands in headers, in metrics and in the path of a URL."""

TOKENIZER_AT_REPLICA = "replica"

_ENDPOINT = re.compile(r"(tcp://[^\s/]+:\d{1,5}|ipc://\S+|inproc://\S+)\Z")


class TimeoutsConfig(Section, frozen=True, kw_only=True):
    """How long each phase of a request may take."""

    connect_s: Seconds = 3.0
    """For a connection to a replica. Then the next one is tried, so it is short."""
    first_byte_s: Seconds = 600.0
    """From the request to the first byte of a streamed answer: queue and prefill."""
    whole_answer_s: Seconds = 3600.0
    """From the request to an answer that is not streamed: its first byte comes when all of it is
    generated."""
    idle_s: Seconds = 120.0
    """Silence in the middle of an answer."""
    client_body_s: Seconds = 60.0
    """For a client to send its whole request."""
    client_stall_s: Seconds = 60.0
    """For a client to read what was sent to it."""
    shutdown_grace_s: Seconds = 120.0
    """For running requests to finish after SIGTERM."""


class ServerConfig(Section, frozen=True, kw_only=True):
    """Where the router listens, who may come in, and how much of everything."""

    host: Name = "127.0.0.1"
    port: Port = 8000
    """0 lets the system choose."""
    client_api_key: Secret | None = None
    """Asked of everybody who sends prompts; None lets everybody in."""
    operator_api_key: Secret | None = None
    """Asked of everybody who looks at replicas or changes them."""
    max_body_bytes: Bytes = 64 * 1024 * 1024
    max_header_bytes: Bytes = 64 * 1024
    max_concurrent_requests: Count = 4096
    """Requests under way; more are refused with 503."""
    max_upstream_connections: Count = 16_384
    timeouts: TimeoutsConfig = TimeoutsConfig()


class GroupConfig(Section, frozen=True, kw_only=True):
    """One KV cache group of a model."""

    kind: Name
    """As on the wire: `full_attention`, `sliding_window`, `chunked_local_attention`, `mamba` ..."""
    block_size: Tokens
    sliding_window: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    attention_chunk_size: Annotated[int, Meta(ge=1, le=2**31)] | None = None

    def to_group(self, index: int) -> KVCacheGroup:
        """The group as the hit rule knows it; raises `LayoutError`."""
        return group_from_spec(
            index,
            GroupSpec(self.kind, self.block_size, self.sliding_window, self.attention_chunk_size),
        )


class LayoutConfig(Section, frozen=True, kw_only=True):
    """What the engines' events do not say of a model's cache. All of it may be left out."""

    groups: tuple[GroupConfig, ...] = ()
    """By group index."""
    hash_block_size: Tokens | None = None
    scheduler_block_size: Tokens | None = None
    eagle: bool = False
    """The engines draft with EAGLE or MTP; nothing on the wire says so."""
    eagle_sees_last_token: bool = True
    """False for vLLM before 0.32."""
    authoritative: bool = False
    """The groups are facts, whatever the events say."""
    assume_unseen: bool = LayoutHints().assume_unseen
    """Groups that no event has named yet exist all the same."""
    hash_seeds: tuple[str, ...] = LayoutHints().hash_seeds
    """Values of PYTHONHASHSEED that the engines may run with."""

    def to_hints(self) -> LayoutHints:
        """For the index."""
        groups = tuple(group.to_group(index) for index, group in enumerate(self.groups))
        return LayoutHints(
            groups=groups,
            hash_block_size=self.hash_block_size,
            scheduler_block_size=self.scheduler_block_size,
            eagle=self.eagle,
            eagle_sees_last_token=self.eagle_sees_last_token,
            authoritative=self.authoritative,
            assume_unseen=self.assume_unseen,
            hash_seeds=self.hash_seeds,
        )

    def problems(self) -> Iterator[Problem]:
        """Groups that are none, and sizes that do not fit together."""
        broken = list(self._broken_groups())
        yield from broken
        if broken:
            return
        if self.authoritative and not self.groups:
            yield Problem("authoritative", "true; there must be groups for that")
        elif self.groups:
            yield from self._broken_layout()

    def _broken_groups(self) -> Iterator[Problem]:
        for index, group in enumerate(self.groups):
            error = _error_of(group, index)
            if error:
                yield Problem(f"groups[{index}]", error)

    def _broken_layout(self) -> Iterator[Problem]:
        groups = [group.to_group(index) for index, group in enumerate(self.groups)]
        try:
            KVCacheLayout.build(groups, self.hash_block_size, self.scheduler_block_size, self.eagle)
        except LayoutError as error:
            yield Problem("", str(error))


def _error_of(group: GroupConfig, index: int) -> str | None:
    try:
        group.to_group(index)
    except LayoutError as error:
        return str(error)
    return None


class ModelConfig(Section, frozen=True, kw_only=True):
    """One model, as replicas serve it."""

    name: Name
    aliases: tuple[Name, ...] = ()
    """Other names under which the replicas serve the same model. The router passes a request on as
    it came."""
    tokenizer: Annotated[str, Meta(min_length=1, max_length=4096)] = TOKENIZER_AT_REPLICA
    """A directory with the model's tokenizer files, or `replica`: ask a replica's /tokenize."""
    chat_template: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """A file that replaces the model's own template."""
    lora_adapters: tuple[Name, ...] = ()
    """Adapters that requests may name in place of this model; more are discovered where replicas
    tell."""
    layout: LayoutConfig = LayoutConfig()

    @property
    def names(self) -> tuple[str, ...]:
        """Everything a request may call it, adapters included."""
        return (self.name, *self.aliases, *self.lora_adapters)

    @property
    def tokenized_at_replica(self) -> bool:
        """Whether a replica is asked for token ids."""
        return self.tokenizer == TOKENIZER_AT_REPLICA


class EventSourceConfig(Section, frozen=True, kw_only=True):
    """Where one data-parallel rank of a replica publishes its events."""

    endpoint: Annotated[str, Meta(max_length=1024)]
    """`tcp://host:port`; a wildcard host means the replica's own."""
    replay_endpoint: Annotated[str, Meta(max_length=1024)] | None = None
    topic: Annotated[str, Meta(max_length=1024)] = ""
    dp_rank: Annotated[int, Meta(ge=0, le=65_535)] = 0

    @classmethod
    def flaw_in(cls, name: str, value: object) -> str | None:
        """Addresses that no socket can connect to."""
        if name.endswith("endpoint") and isinstance(value, str) and not is_endpoint(value):
            return f"{value!r}; expected tcp://host:port or ipc://path"
        return None


class ReplicaConfig(Section, frozen=True, kw_only=True):
    """One replica. Only the URL is needed where it tells the rest."""

    url: Annotated[str, Meta(max_length=2048)]
    id: ReplicaId | None = None
    """None: host and port."""
    models: tuple[Name, ...] | None = None
    """What it serves; None asks its GET /v1/models."""
    kv_events: tuple[EventSourceConfig, ...] | None = None
    """Where its events are; None asks its GET /kv_event_sources, an empty list means that it has
    none."""
    api_key: Secret | None = None
    """Sent to it in place of the client's key."""
    speed: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Relative to the other replicas; 2 is twice as fast."""
    max_concurrent_requests: Count | None = None

    @property
    def origin(self) -> Origin:
        """The URL, taken apart."""
        return Origin.parse(self.url)

    @property
    def replica_id(self) -> str:
        """The id, given or derived."""
        return self.id or f"{self.origin.host}:{self.origin.port}".replace("%", "-")

    @classmethod
    def flaw_in(cls, name: str, value: object) -> str | None:
        """A URL that is none."""
        if name != "url":
            return None
        try:
            Origin.parse(str(value), name)
        except OriginError as error:
            return str(error).removeprefix("url: ")
        return None

    def problems(self) -> Iterator[Problem]:
        """Ranks that appear twice."""
        ranks = [source.dp_rank for source in self.kv_events or ()]
        for index, rank in enumerate(ranks):
            if rank in ranks[:index]:
                yield Problem(
                    f"kv_events[{index}].dp_rank",
                    f"{rank}; kv_events[{ranks.index(rank)}] has it already",
                )


class PolicyConfig(Section, frozen=True, kw_only=True):
    """How a replica is chosen."""

    name: Name = "prefix"
    weights: Weights = Weights()
    session_header: HeaderName = "x-session-id"
    """Names the session, for the policy `session`; in lower case."""
    recent_ttl_s: Seconds = 5.0
    """How long a prefix that was sent somewhere counts as cached there before any event says so."""
    recent_max_entries: Annotated[int, Meta(ge=1, le=100_000_000)] = 262_144
    options: dict[str, Any] = field(default_factory=dict)
    """For a plug-in; it checks them."""

    @classmethod
    def flaw_in(cls, name: str, value: object) -> str | None:
        """A policy that nobody knows."""
        if name == "name" and value not in BUILT_IN and value not in policy_names():
            return f"{value!r}; expected one of {', '.join(policy_names())}"
        return None

    def problems(self) -> Iterator[Problem]:
        """Options that nobody reads."""
        if self.name in BUILT_IN and self.options:
            yield Problem(
                "options", f"a mapping of {len(self.options)}; the built-in policies take none"
            )


class HealthConfig(Section, frozen=True, kw_only=True):
    """How replicas are watched."""

    path: Path = "/health"
    interval_s: Annotated[float, Meta(ge=0.01, le=3600)] = 2.0
    """A replica that returns is back in rotation within this time."""
    timeout_s: Seconds = 2.0
    unhealthy_after: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Failures in a row."""
    healthy_after: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Good checks in a row. Above 1 a return takes as many intervals."""
    discovery_interval_s: Seconds = 30.0
    """How often a healthy replica is asked again for its models and event sources."""
    scrape_metrics: bool = True
    metrics_path: Path = "/metrics"
    gauges_stale_after_s: Seconds = 10.0
    """Scraped gauges older than this do not count."""

    def problems(self) -> Iterator[Problem]:
        """Times that defeat each other."""
        if self.timeout_s > self.interval_s:
            yield Problem(
                "timeout_s", f"{self.timeout_s:g}; must be at most interval_s ({self.interval_s:g})"
            )
        stale_s = self.gauges_stale_after_s
        if self.scrape_metrics and stale_s <= self.interval_s:
            yield Problem(
                "gauges_stale_after_s", f"{stale_s:g}; must exceed interval_s ({self.interval_s:g})"
            )


class EventsConfig(Section, frozen=True, kw_only=True):
    """Bounds on the event streams, each per source."""

    max_frame_bytes: Bytes = 64 * 1024 * 1024
    max_queued_batches: Count = 10_000
    """Received and not yet applied. What comes on top is dropped, counted, and recovered."""
    max_replay_bytes: Bytes = 1024 * 1024 * 1024
    """Of one replay or snapshot."""
    replay_timeout_s: Seconds = 5.0
    """Between two replies of a replay."""
    silent_after_s: Seconds = 60.0
    """Without any message for this long, the replay endpoint is asked whether the end of the stream
    was lost."""


class ObservabilityConfig(Section, frozen=True, kw_only=True):
    """What the router says of itself."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = False
    metrics_need_key: bool = False
    """Whether /metrics asks for the operator's key."""


def is_endpoint(text: str) -> bool:
    """Whether *text* has the form of a ZMQ address; wildcards included."""
    return bool(_ENDPOINT.match(text)) and len(text) <= 1024
