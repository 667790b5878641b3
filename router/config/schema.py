"""The configuration's models: frozen pydantic models that know their defaults and refuse unknown
keys.

Units are part of the names: `_s` is seconds, `_bytes` bytes, `_tokens` tokens.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    Field,
    ValidationError,
)

from kvevents.errors import LayoutError
from kvevents.events import GPU, STORAGE, GroupSpec
from kvevents.layout import KVCacheGroup, KVCacheLayout, group_from_spec
from router.config.approximate import ApproximateConfig
from router.config.board import BoardConfig
from router.config.discovery import DiscoveryConfig
from router.config.document import (
    Location,
    parse_document,
    problems_in,
    read_text,
)
from router.config.doors import DoorsConfig
from router.config.keys import ClientKeyConfig, OperatorKeyConfig, same_keys
from router.config.observability import ObservabilityConfig
from router.config.overload import OverloadConfig
from router.config.replica import ReplicaConfig, ReplicaOptions
from router.config.section import Section
from router.config.state import StateConfig
from router.config.tls import ListenerTlsConfig, ReplicaTlsConfig
from router.config.values import (
    PLAIN,
    Bytes,
    Checks,
    Count,
    CurvePublicKey,
    DrafterGroups,
    FilePath,
    HeaderName,
    HostName,
    Items,
    Name,
    Network,
    PlacedPath,
    PolicyName,
    Port,
    ProxiedPathPattern,
    Seconds,
    Secret,
    Tokens,
    UrlPath,
    Window,
    ZmqAddress,
)
from router.config.versions import VersionedModelConfig
from router.errors import ConfigError, ConfigProblem
from router.index import LayoutHints, StoreHint, TierHint
from router.policies.policies import BUILT_IN, LEAST_DELAY
from router.policies.types import Weights

PRIVATE_NETWORKS = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7"),
)
TOKENIZER_AT_REPLICA = "replica"


class TimeoutsConfig(Section, frozen=True):
    """How long each phase of a request may take."""

    connect_s: Seconds = 3.0
    """Change it when replicas are far away. After it the next replica is tried, so keep it
    short."""
    first_byte_s: Seconds = 600.0
    """From the request to the first byte of a streamed response: queue and prefill.

    Change it when queueing and prefill of a streamed response take longer."""
    whole_response_s: Seconds = 3600.0
    """Change it when responses that are not streamed take longer: their first byte is sent when all
    of it has been generated."""
    idle_s: Seconds = 120.0
    """Silence in the middle of a response.

    Change it when an engine may pause for longer between two tokens."""
    tokenize_s: Seconds = 0.5
    """Change it when replicas need longer to tokenise a prompt (where `models[].tokenizer` is
    `replica`; each megabyte gets a second more). After it another one is asked, then the request is
    routed by load."""
    client_body_s: Seconds = 60.0
    """For a client to send its whole request.

    Change it when clients on slow links send large bodies."""
    client_stall_s: Seconds = 60.0
    """For a client to read what was sent to it.

    Change it when clients may stop reading for longer without being cut off."""
    shutdown_grace_s: Seconds = 120.0
    """Change it when running requests need longer to finish after SIGTERM; the service manager must
    allow as much."""


class RetriesConfig(Section, frozen=True):
    """How often a request is tried again, while nothing of its response has arrived."""

    further_attempts: Annotated[int, Field(ge=0, le=100), PLAIN] = 2
    """Change it when requests should get more or fewer attempts after the first; a retry after a
    kept connection turns out to be closed counts."""
    budget_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), PLAIN] = 0.1
    """Change it when a larger or smaller share of all requests may be retried in the long run.
    Requests that leave a replica out of rotation do not count, since all of them must move; nor do
    those that go to one at ease: at most 3 of its last 32 requests failed, it has room, and nothing
    waits in its queue."""
    budget_burst: Annotated[int, Field(ge=0, le=1_000_000), PLAIN] = 10
    """How many more than that at once.

    Change it when more or fewer requests may be retried at once."""
    late_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), PLAIN] = 0.05
    """Of the streams that the data plane decides by itself, how many may be sent to a second
    replica as well since their first byte is late by what is usual; 0: none.

    Change it to 0 when no request may be computed twice."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServerConfig(Section, frozen=True):
    """Where the router listens, who may come in, and its limits."""

    host: Name = "127.0.0.1"
    """Change it when other machines should reach the router: `0.0.0.0`, `::` or one address."""
    port: Port = 8000
    """Change it when it is taken; 0 lets the system choose, and the first line on stderr names the
    port."""
    threads: Annotated[int, Field(ge=1, le=64), PLAIN] = 1
    """Threads of the [data plane](operations.md#the-data-plane), over one index.

    Change it when one core is not enough. `--threads` of `kvroute serve` overrides it."""
    client_api_key: Secret | None = None
    """Required of everyone who sends prompts; null lets everyone in.

    Change it when only some of those who reach the port may send prompts; sent as `Authorization:
    Bearer` or `x-api-key`."""
    operator_api_key: Secret | None = None
    """Required of everyone who reads or changes the list of replicas; null lets only this machine
    do so.

    Change it when other machines should see replicas, change them, or read `/config`: without it
    only the router's own may."""
    trust_client_rank: bool = False
    """Change it when clients choose the data-parallel rank of a replica themselves, by
    `x-data-parallel-rank`."""
    client_api_keys: Items[ClientKeyConfig] = ()
    """Change it when clients should have keys of their own, or keys are to be changed one by
    one."""
    operator_api_keys: Items[OperatorKeyConfig] = ()
    """More keys of operators.

    Change it when operators should have keys of their own, or keys are to be changed one by one."""
    wrong_key_delay_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False), PLAIN] = 1.0
    """How long the response to a wrong key is held back, after some from the same address.

    Change it when refusals of wrong keys should be held back for longer, or not at all; the first
    five from an address are not."""
    clients_see_hits: bool | None = None
    """Whether clients are told how much of a prompt is cached (`x-kv-hit-tokens`, `/route`); null:
    where they need no key.

    Change it when clients with keys should get `x-kv-hit-tokens`, and `/route` with their key: it
    [tells them](security.md#what-caches-tell) what others have asked. `null` means where no client
    key is set."""
    host_names: Items[HostName] = ()
    """Change it when the router is asked without a key under a name that is not `localhost`, the
    machine's own or in `host`, as `router` in a compose file; `"*"` accepts every name."""
    replica_networks: Items[Network] = PRIVATE_NETWORKS
    """Where replicas that are added at run time may be.

    Change it when replicas added by `POST /replicas` are elsewhere; those of the file may be
    anywhere."""
    trusted_proxies: Items[Network] = ()
    """Whose `x-forwarded-*` is passed on, with their own address added.

    Change it when a proxy in front tells the client's address: its `x-forwarded-for` and `-proto`
    go on, from others the router sets its own."""
    insecure: bool = False
    """Listen on other addresses than loopback although there is no client key.

    Change it when `host` is reached by other machines, and all of them may send prompts without a
    key. Without it such a router does not start."""
    max_body_bytes: Bytes = 64 * 1024 * 1024
    """Change it when requests with images or long prompts get 413."""
    max_header_bytes: Bytes = 64 * 1024
    """Change it when requests with large cookies or tokens get 431."""
    max_concurrent_requests: Count = 4096
    """Requests under way; more are refused with 503.

    Change it when requests get 503 `overloaded` although the replicas have room."""
    max_buffered_bytes: Bytes = 1024 * 1024 * 1024
    """Of the bodies of all requests under way; more are refused with 503. Parsing one takes several
    times its size for a moment.

    Change it when clients send more, or larger, bodies at once than the router's memory holds:
    those of all requests under way together; further ones get 503 `overloaded`."""
    max_upstream_connections: Count = 16_384
    """Change it when requests get 503 `overloaded` with "limit of connections"; each running
    request has one."""
    extra_paths: Items[ProxiedPathPattern] = ()
    """More paths that go to a replica as they are, by load.

    Change it when replicas have endpoints that the router does not know, such as `/pooling`; a
    final asterisk matches any rest: `/custom/*`, but none with `.` or `..` as a segment. Requests
    with any method are routed by load, among the replicas of the `model` in a JSON or form body if
    there is one."""
    tls: ListenerTlsConfig = ListenerTlsConfig()
    replica_tls: ReplicaTlsConfig = ReplicaTlsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    retries: RetriesConfig = RetriesConfig()

    @property
    def client_keys(self) -> tuple[ClientKeyConfig, ...]:
        """All of them; the one without a name is called `default`."""
        if self.client_api_key is None:
            return self.client_api_keys
        return ClientKeyConfig(name="default", key=self.client_api_key), *self.client_api_keys

    @property
    def operator_keys(self) -> tuple[OperatorKeyConfig, ...]:
        """All of them; the one without a name is called `default`."""
        if self.operator_api_key is None:
            return self.operator_api_keys
        return OperatorKeyConfig(name="default", key=self.operator_api_key), *self.operator_api_keys

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Keys that are the same, and an address that others reach without a key for clients."""
        for kind in ("client_api_keys", "operator_api_keys"):
            yield from same_keys(kind, getattr(self, kind))
        if not self.client_keys and not self.insecure and not _is_loopback(self.host):
            rule = (
                "others reach it, and without client_api_key all of them may send prompts; "
                "set the key, or insecure: true (--insecure)"
            )
            yield ("host",), f"{self.host!r}; {rule}"


class GroupConfig(Section, frozen=True):
    """One KV cache group of a model."""

    kind: Name
    """As in events: `full_attention`, `sliding_window`, `mamba` and the others that vLLM names."""
    block_size: Tokens
    """Tokens in a block of this group, as its events say."""
    sliding_window: Window | None = None
    """Change it when the kind is a sliding window: then it is required."""
    attention_chunk_size: Window | None = None
    """Change it when the kind is chunked local attention: then it is required."""

    def to_group(self, index: int) -> KVCacheGroup:
        """The group as the hit rule knows it; raises `LayoutError`."""
        return group_from_spec(
            index,
            GroupSpec(self.kind, self.block_size, self.sliding_window, self.attention_chunk_size),
        )


class LowerTierConfig(Section, frozen=True):
    """How much one lower tier keeps together, where its events do not tell soon enough."""

    medium: Annotated[str, Field(min_length=1, max_length=64), PLAIN]
    """The tier's name in events, in any case."""
    blocks_per_chunk: Annotated[int, Field(ge=1, le=4096), PLAIN] | None = None
    """Blocks of each group, as vLLM's option of this name says.

    Change it when vLLM's option of this name is set, or its `block_size`."""
    block_size: Tokens | None = None
    """Tokens, as vLLM's option of this name says, or LMCache's `chunk_size`.

    Change it when chunks have one size for all groups: LMCache's `chunk_size`. Exactly one of the
    two is required."""

    def to_hint(self) -> tuple[str, TierHint]:
        """The same for the index."""
        return self.medium.upper(), TierHint(self.blocks_per_chunk, self.block_size)

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Both sizes or none."""
        if (self.blocks_per_chunk is None) == (self.block_size is None):
            yield (), "must have either blocks_per_chunk or block_size"


class LayoutConfig(Section, frozen=True):
    """What the engines' events leave out about a model's cache. Everything is optional."""

    groups: Items[GroupConfig] = ()
    """By group index.

    Change it when a group's kind, window or chunk is missing from the events:
    `attention_chunk_size` of Llama 4, kinds before vLLM 0.22."""
    hash_block_size: Tokens | None = None
    """Change it when hashes are farther apart than the greatest common divisor of the block sizes
    seen."""
    scheduler_block_size: Tokens | None = None
    """Change it when hits are multiples of something other than the least common multiple of the
    block sizes seen."""
    eagle: DrafterGroups = False
    """The groups, by index, that hold layers of an EAGLE or MTP drafter; true: all.

    Change it when the engines draft with EAGLE or MTP: each hit is a block shorter, and no event
    says so. `true` for all groups; a list, as `[0]`, of those that hold the drafter's layers"""
    eagle_sees_last_token: bool = True
    """Change it when `eagle` is set and the engines are vLLM before 0.32."""
    prefix_replay_tokens: Annotated[int, Field(ge=0, le=2**20), PLAIN] = 0
    """Tokens of a hit's end that the engine computes again.

    Change it when the engines rebuild a sliding window after a hit instead of caching it, as vLLM
    does for DeepSeek V4.1: the window's tokens. A hit that is no longer is worth nothing"""
    authoritative: bool = False
    """The groups are facts, whatever the events say.

    Change it when events carry wrong kinds or windows; `groups` must then be complete."""
    assume_unseen: bool = LayoutHints().assume_unseen
    """Groups that no event has named yet exist all the same.

    Change it when `groups` lists groups that these engines do not have."""
    hash_seeds: Items[Annotated[str, PLAIN]] = LayoutHints().hash_seeds
    """Change it when the engines run with a different `PYTHONHASHSEED`; put it first."""
    tiers: Items[LowerTierConfig] = ()
    """Lower tiers.

    Change it when predictions from a lower tier are wrong until its events have shown how much it
    keeps together."""

    def to_hints(self) -> LayoutHints:
        """The same for the index."""
        groups = tuple(group.to_group(index) for index, group in enumerate(self.groups))
        return LayoutHints(
            groups=groups,
            hash_block_size=self.hash_block_size,
            scheduler_block_size=self.scheduler_block_size,
            eagle=self.eagle,
            eagle_sees_last_token=self.eagle_sees_last_token,
            prefix_replay_tokens=self.prefix_replay_tokens,
            authoritative=self.authoritative,
            assume_unseen=self.assume_unseen,
            hash_seeds=self.hash_seeds,
            tiers=tuple(tier.to_hint() for tier in self.tiers),
        )

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Invalid groups and inconsistent sizes."""
        broken = list(self._broken_groups())
        yield from broken
        if broken:
            return
        if self.authoritative and not self.groups:
            yield ("authoritative",), "true; there must be groups for that"
        elif self.groups:
            yield from self._broken_layout()

    def _broken_groups(self) -> Iterator[tuple[Location, str]]:
        for index, group in enumerate(self.groups):
            error = _group_error(group, index)
            if error is not None:
                yield ("groups", index), error

    def _broken_layout(self) -> Iterator[tuple[Location, str]]:
        groups = [group.to_group(index) for index, group in enumerate(self.groups)]
        try:
            KVCacheLayout.build(groups, self.hash_block_size, self.scheduler_block_size, self.eagle)
        except LayoutError as error:
            yield (), str(error)


def _group_error(group: GroupConfig, index: int) -> str | None:
    try:
        group.to_group(index)
    except LayoutError as error:
        return str(error)
    return None


class StoreConfig(Section, frozen=True):
    """A store that several replicas of a model read and write: one file system, one bucket."""

    name: Name
    """Of the store; in `/route`, in metrics, and in `policy.weights.tier_token`."""
    tiers: Items[Annotated[str, Field(min_length=1, max_length=256), PLAIN]] = ()
    """Change it when engines do not announce what is `REMOTE`: blocks in these tiers are in the
    store, unless announced as `LOCAL`. Empty: whatever is announced as `REMOTE`."""
    ownership: Annotated[str, Field(min_length=1, max_length=256), PLAIN] | None = None
    """Only blocks announced with this `ownership`, where an engine has several such tiers.

    Change it when an engine has several such tiers; vLLM's events name one in `ownership`."""
    replicas: Items[Annotated[str, Field(min_length=1, max_length=128), PLAIN]] | None = None
    """Ids of the replicas that share it, `*` standing for any characters; null: all.

    Change it when not all replicas share it; `*` stands for any characters."""

    def is_shared_by(self, replica_id: str) -> bool:
        """Whether a replica reads and writes it."""
        if self.replicas is None:
            return True
        return any(fnmatchcase(replica_id, pattern) for pattern in self.replicas)

    def to_hint(self) -> StoreHint:
        """The same for the index."""
        return StoreHint(self.name, tuple(tier.upper() for tier in self.tiers), self.ownership)

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """A tier that cannot be shared."""
        for index, tier in enumerate(self.tiers):
            if tier.upper() == GPU:
                yield ("tiers", index), f"{tier!r}; a GPU's blocks are its replica's own"


class ModelConfig(Section, frozen=True):
    """One model, as replicas serve it."""

    name: Name
    """The name under which replicas serve it."""
    aliases: Items[Name] = ()
    """Change it when replicas serve the same model under other names. A request may use any of
    them; its `model` is rewritten where the replica has another name for it, and all else stays
    byte for byte."""
    tokenizer: FilePath = TOKENIZER_AT_REPLICA
    """A directory with the model's tokenizer files, or `replica`: ask a replica's /tokenize.

    Change it when you have the model's files (`tokenizer.json`, `tokenizer_config.json`, chat
    template): this saves a round trip per prompt; by which library, see
    [operations.md](operations.md#tokenizers)."""
    tokenizer_library: Literal["auto", "tokenizers"] = "auto"
    """Change it when a vocabulary should not be trusted to `fastokens`, though it passed all
    checks; `auto` takes it where it gives the same ids."""
    chat_template: FilePath | None = None
    """A file that replaces the model's own template.

    Change it when the engines run with a `--chat-template` of their own."""
    lora_adapters: Items[Name] = ()
    """Adapters that requests may name in place of this model; more are discovered where replicas
    list them.

    Change it when replicas do not list their adapters in `GET /v1/models`."""
    layout: LayoutConfig = LayoutConfig()
    retention_hints: Literal["auto", "always", "never"] = "auto"
    """Whether replicas are told what to keep of windows and states ([steering](steering.md)).

    Change it to `always` for vLLM with the plug-in but with its own publisher of events, which
    cannot say that it takes hints; to `never` where engines should keep what they keep by
    themselves."""
    stores: Items[StoreConfig] = ()
    """What replicas share; an event belongs to the first store that it fits.

    Change it when several replicas share a file system or a bucket."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Stores of one name."""
        names = [store.name for store in self.stores]
        for index, name in enumerate(names):
            first = names.index(name)
            if first != index:
                yield ("stores", index, "name"), f"{name!r}; stores[{first}] has it already"

    @property
    def names(self) -> tuple[str, ...]:
        """Everything a request may call it, adapters included."""
        return (self.name, *self.aliases, *self.lora_adapters)

    @property
    def tokenized_at_replica(self) -> bool:
        """Whether a replica is asked for token ids."""
        return self.tokenizer == TOKENIZER_AT_REPLICA


class PolicyConfig(Section, frozen=True):
    """How a replica is chosen."""

    name: PolicyName = LEAST_DELAY
    """Change it when you want `prefix` (a request's own wait only, which was the default before),
    `least_loaded`, `session`, `round_robin`, `random`, or a plug-in (entry point group
    `kvroute.policies`)."""
    weights: Weights = Weights()
    session_header: HeaderName = "x-session-id"
    """Names the session, for the policy `session`; in lower case.

    Change it when clients name their session in another header; used by `session`. Without the
    header, `session_id`, `prompt_cache_key`, `conversation`, `previous_response_id` or `user` of
    the body is used."""
    recent_ttl_s: Seconds = 5.0
    """How long a prefix that was sent somewhere counts as cached there before any event says so.

    Change it when prefill takes longer than this, and bursts of equal prompts spread over replicas;
    only with `prefix`."""
    recent_max_entries: Annotated[int, Field(ge=1, le=100_000_000), PLAIN] = 262_144
    """Change it when `kvroute_recent_prefix_keys` stays at the bound; an entry stands for 64 prompt
    tokens and takes some 80 bytes."""
    mirror_max_keys: Annotated[int, Field(ge=1, le=1_000_000_000), PLAIN] = 1_048_576
    """Change it when `kvroute_mirror_kept_keys` stays at the bound: the caches together hold more
    than 64 times as many tokens, or very many prompts that are short or share all but their ends. A
    key takes some 400 bytes, most of them its prompt's token ids; each prompt counts for four more,
    and is remembered only while its cache holds some of it: 3 MB for 500,000 cached tokens."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For a plug-in; it checks them.

    Change it when a plug-in has options; the built-in policies have none."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Options that no policy reads."""
        if self.name in BUILT_IN and self.options:
            yield (
                ("options",),
                f"a mapping of {len(self.options)}; the built-in policies take none",
            )


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
    five intervals and none is under way. The first one ends that.

    Change it when a router that nobody asks should notice a lost replica sooner (lower), or cost
    less (raise)."""
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
    """How often a healthy replica is asked again for its models and event sources.

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
    """Where engines connect to that publish to the router instead of the other way round, such as
    `tcp://*:5557`.

    Change it when engines are configured so, as llm-d's and KServe's are; the sources of such a
    replica have `endpoint: listen`. Whoever reaches the address can publish as any of them: let
    only engines through."""
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


# --- the whole ------------------------------------------------------------------------------------


class Overrides(NamedTuple):
    """What the command line says besides the file; None and an empty list leave the file's."""

    host: str | None = None
    port: int | None = None
    replica_urls: Sequence[str] = ()
    insecure: bool | None = None
    observability: Mapping[str, object] = MappingProxyType({})
    """Options of `observability`."""
    threads: int | None = None
    ext_proc: str | None = None
    """Where gateways ask by external processing."""

    def applied_to(self, data: object) -> object:
        """A document with these values in it; what is not a document is left to be refused."""
        if not isinstance(data, dict):
            return data
        server, replicas = data.get("server") or {}, data.get("replicas") or []
        names = ("host", "port", "insecure", "threads")
        given = {name: getattr(self, name) for name in names}
        if isinstance(server, dict):
            server = {**server, **{key: value for key, value in given.items() if value is not None}}
        if isinstance(replicas, list):
            replicas = [*replicas, *({"url": url} for url in self.replica_urls)]
        doors = data.get("doors") or {}
        if isinstance(doors, dict) and self.ext_proc is not None:
            picker = doors.get("ext_proc") or {}
            listening = {"listen": self.ext_proc}
            picker = {**picker, **listening} if isinstance(picker, dict) else picker
            doors = {**doors, "ext_proc": picker}
        observability = data.get("observability") or {}
        if isinstance(observability, dict):
            observability = {**observability, **self.observability}
        return {
            **data,
            "server": server,
            "replicas": replicas,
            "doors": doors,
            "observability": observability,
        }


class RouterConfig(Section, frozen=True):
    """Everything that is configured. Frozen; at run time replicas are added to and removed from the
    registry, not here."""

    server: ServerConfig = ServerConfig()
    models: Items[ModelConfig] = ()
    versioned_models: Items[VersionedModelConfig] = ()
    replicas: Items[ReplicaConfig] = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    policy: PolicyConfig = PolicyConfig()
    health: HealthConfig = HealthConfig()
    overload: OverloadConfig = OverloadConfig()
    doors: DoorsConfig = DoorsConfig()
    events: EventsConfig = EventsConfig()
    approximate: ApproximateConfig = ApproximateConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    state: StateConfig = StateConfig()
    board: BoardConfig = BoardConfig()

    @classmethod
    def load(
        cls, path: str | Path, environ: Mapping[str, str], overrides: Overrides | None = None
    ) -> RouterConfig:
        """Read a file. Relative paths in it start at its own directory.

        Args:
            path: The YAML file.
            environ: Where `${NAME}` is looked up, as `os.environ`.
            overrides: What the command line says besides.
        Raises:
            ConfigError: The file cannot be read, or has problems; the message lists all of them.
        """
        return cls.from_yaml(read_text(Path(path)), environ, Path(path).parent, overrides)

    @classmethod
    def from_yaml(
        cls,
        text: str,
        environ: Mapping[str, str],
        base_directory: Path | None = None,
        overrides: Overrides | None = None,
    ) -> RouterConfig:
        """Read a text.

        Args:
            text: The YAML document; an empty one means the defaults.
            environ: Where `${NAME}` is looked up, as `os.environ`.
            base_directory: Where relative paths start; None leaves them as they are.
            overrides: What the command line says besides; checked together with the text.
        Raises:
            ConfigError: With every problem in the text.
        """
        document = parse_document(text)
        data = {} if document is None else document
        if overrides is not None:
            data = overrides.applied_to(data)
        context = {"environ": environ, "directory": base_directory}
        try:
            config = cls.model_validate(data, context=context)
        except ValidationError as error:
            raise ConfigError([*problems_in(error, cls), *_across(data, context)]) from None
        problems = list(_across(data, context))
        if problems:
            raise ConfigError(problems)
        return config if base_directory is None else config._relative_to(base_directory)

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """What asks for a key or a priority class that is not there."""
        if self.observability.metrics_need_key and not self.server.operator_keys:
            place: Location = ("observability", "metrics_need_key")
            yield place, "true; server.operator_api_key must be set for that"
        if self.state.peers and self.board.secret is None:
            yield (
                ("state", "peers"),
                "there must be a board.secret for that, the same at all of them",
            )
        yield from self._listening()
        yield from self._picking()
        if self.events.curve_keys is None:
            yield from self._keys_without_ours()
        known = self.overload.priorities
        for index, key in enumerate(self.server.client_api_keys):
            if key.priority is not None and key.priority not in known:
                rule = f"{key.priority!r}; expected one of overload.priorities: {', '.join(known)}"
                yield ("server", "client_api_keys", index, "priority"), rule

    @property
    def owns_priority(self) -> bool:
        """Whether the order of requests at engines is the router's to decide: where it tells
        clients apart, or orders them itself."""
        overload = self.overload
        ordered = overload.is_queueing or overload.priority_header is not None
        return ordered or bool(self.server.client_api_keys) or self._orders_engines

    @property
    def _orders_engines(self) -> bool:
        return any(each.priority_order is not None for _, each in self._options())

    def _listening(self) -> Iterator[tuple[Location, str]]:
        """Sources that connect to where nothing listens, and keys that nobody checks there."""
        events = self.events
        if events.listen is not None and events.curve_server_key is not None:
            rule = "events.curve_server_key is set, and who connects to the router shows no key"
            yield ("events", "listen"), rule
        if events.listen is None and events.listen_ranks > 1:
            yield ("events", "listen_ranks"), "there must be events.listen for that"
        ranks = 0 if events.listen is None else events.listen_ranks
        for place, options in self._options():
            for index, rank in options.listened_ranks:
                if not ranks:
                    rule = "listen; there must be events.listen for that"
                    yield (*place, "kv_events", index, "endpoint"), rule
                elif rank >= ranks:
                    rule = f"{rank}; must be below events.listen_ranks ({ranks})"
                    yield (*place, "kv_events", index, "dp_rank"), rule
                if (options.kv_events or ())[index].server_key is not None:
                    rule = "who connects to the router shows no key; must be left out"
                    yield (*place, "kv_events", index, "server_key"), rule

    def _picking(self) -> Iterator[tuple[Location, str]]:
        """Options of the endpoint picker that come to a wrong address."""
        picker = self.doors.ext_proc
        if picker.rank_ports and picker.fallbacks:
            rule = "true; a rank's port is that of one endpoint: fallbacks must be 0"
            yield ("doors", "ext_proc", "rank_ports"), rule

    def _options(self) -> Iterator[tuple[Location, ReplicaOptions]]:
        """All that is said of replicas, with its place."""
        for index, replica in enumerate(self.replicas):
            yield ("replicas", index), replica
        for index, dns in enumerate(self.discovery.dns):
            yield ("discovery", "dns", index, "replica"), dns.replica
        for index, pods in enumerate(self.discovery.kubernetes):
            yield ("discovery", "kubernetes", index, "replica"), pods.replica

    def _keys_without_ours(self) -> Iterator[tuple[Location, str]]:
        rule = "there must be events.curve_keys for that"
        if self.events.curve_server_key is not None:
            yield ("events", "curve_server_key"), rule
        for index, replica in enumerate(self.replicas):
            for number, source in enumerate(replica.kv_events or ()):
                if source.server_key is not None:
                    yield ("replicas", index, "kv_events", number, "server_key"), rule

    @property
    def weights(self) -> Weights:
        """Those of the policy, with a cost for every shared store: one that they do not name costs
        what the slowest tier behind it does."""
        weights = self.policy.weights
        costs = dict(weights.tier_token)
        for store in (store for model in self.models for store in model.stores):
            known = max(map(weights.of_tier, store.tiers or (STORAGE,)))
            costs.setdefault(store.name.upper(), known)
        return replace(weights, tier_token=costs)

    def to_public_dict(self) -> dict[str, Any]:
        """The configuration as plain data, with every secret masked."""
        return self.model_dump(mode="json")

    def _relative_to(self, directory: Path) -> RouterConfig:
        models = tuple(_model_relative_to(model, directory) for model in self.models)
        return self.model_copy(update={"models": models})


def _model_relative_to(model: ModelConfig, directory: Path) -> ModelConfig:
    tokenizer = model.tokenizer if model.tokenized_at_replica else str(directory / model.tokenizer)
    template = None if model.chat_template is None else str(directory / model.chat_template)
    return model.model_copy(update={"tokenizer": tokenizer, "chat_template": template})


# --- contradictions between sections --------------------------------------------------------------

SectionT = TypeVar("SectionT", bound=Section)


def _across(data: object, context: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Problems between sections, among those that are valid by themselves: a typo in one replica
    does not hide that two others share an id."""
    models = list(_valid(ModelConfig, data, "models", context))
    replicas = list(_valid(ReplicaConfig, data, "replicas", context))
    versioned = list(_valid(VersionedModelConfig, data, "versioned_models", context))
    names = [
        (f"{path}.{place}", name) for path, model in models for place, name in _name_places(model)
    ]
    yield from _repeated([*names, *((f"{path}.name", each.name) for path, each in versioned)])
    yield from _nested(versioned)
    yield from _repeated([(f"{path}.id", replica.replica_id) for path, replica in replicas])
    yield from _repeated([(f"{path}.url", str(replica.origin)) for path, replica in replicas])
    known = {name for _, model in models for name in model.names}
    for path, replica in replicas if known else []:
        yield from _unknown_models(path, replica, known)


def _valid(
    kind: type[SectionT], data: object, key: str, context: dict[str, Any]
) -> Iterator[tuple[str, SectionT]]:
    """The sections of the list *key* that can be read, each with its path."""
    items = data.get(key) if isinstance(data, dict) else None
    for index, item in enumerate(items if isinstance(items, list) else ()):
        with suppress(ValidationError):
            yield f"{key}[{index}]", kind.model_validate(item, context=context)


def _nested(versioned: Sequence[tuple[str, VersionedModelConfig]]) -> Iterator[ConfigProblem]:
    names = {each.name for _, each in versioned}
    for path, each in versioned:
        for index, version in enumerate(each.versions):
            if version.model in names:
                rule = "must be a model that replicas serve, not another versioned name"
                place = f"{path}.versions[{index}].model"
                yield ConfigProblem(place, f"{version.model!r}; {rule}")


def _unknown_models(
    path: str, replica: ReplicaConfig, known: Collection[str]
) -> Iterator[ConfigProblem]:
    for index, name in enumerate(replica.models or ()):
        if name not in known:
            rule = f"expected one of the configured models: {', '.join(sorted(known))}"
            yield ConfigProblem(f"{path}.models[{index}]", f"{name!r}; {rule}")


def _name_places(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "name", model.name
    for index, alias in enumerate(model.aliases):
        yield f"aliases[{index}]", alias
    for index, adapter in enumerate(model.lora_adapters):
        yield f"lora_adapters[{index}]", adapter


def _repeated(values: Sequence[tuple[str, str]]) -> Iterator[ConfigProblem]:
    first: dict[str, str] = {}
    for place, value in values:
        if value in first:
            yield ConfigProblem(place, f"{value!r}; {first[value]} has it already")
        first.setdefault(value, place)
