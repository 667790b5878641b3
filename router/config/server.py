"""The options of the router as a server: addresses, certificates, keys, limits, gateways, and what
it reports about itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from router.config.section import Location, Section, repeated
from router.config.values import (
    PLAIN,
    Bytes,
    Count,
    HostName,
    Items,
    KeyName,
    Name,
    Network,
    PlacedPath,
    Port,
    ProxiedPathPattern,
    Seconds,
    Secret,
    TokenCount,
    Url,
)

# --- certificates ---------------------------------------------------------------------------------


class ListenerTlsConfig(Section, frozen=True):
    """The router's certificate, and the clients it accepts. PEM files, read again when they
    change."""

    certificate: PlacedPath | None = None
    """The router's, with the chain up to its authority; null: plain HTTP.

    Change it when clients come over a network: PEM, the router's certificate and then those up to
    its authority."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""
    client_ca: PlacedPath | None = None
    """Authorities of which a client must show a certificate; null: clients need none.

    Change it when only clients with a certificate of these authorities may connect, besides any
    key."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
        elif self.client_ca is not None and self.certificate is None:
            yield ("client_ca",), "there must be a certificate and a key for that"


class ReplicaTlsConfig(Section, frozen=True):
    """Towards replicas, or other routers, whose URL begins with https. PEM files, read again when
    they change."""

    ca: PlacedPath | None = None
    """Authorities that are trusted; null: the system's.

    Change it when certificates there are from an authority of your own; it is then the only one
    that is trusted."""
    certificate: PlacedPath | None = None
    """Change it when they ask for a certificate, as a router does with `server.tls.client_ca`."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"


# --- keys -----------------------------------------------------------------------------------------


class OperatorKeyConfig(Section, frozen=True):
    """One of several keys, so that each holder's can be changed by itself."""

    name: KeyName
    """The name of the holder; it may appear in logs."""
    key: Secret
    """Sent by the holder as `Authorization: Bearer` or `x-api-key`."""


class ClientKeyConfig(OperatorKeyConfig, frozen=True):
    """The same for clients."""

    cache_salt: Secret | None = None
    """Added to every prompt sent with this key, so that its holders share cached blocks only with
    those of the same salt.

    Change it when others must not learn what the holder's prompts are: see
    [security.md](security.md#what-caches-tell)."""
    priority: KeyName | None = None
    """The highest priority class of its requests; null: overload.default_priority.

    Change it when its requests should go before others, or after them, [while requests
    wait](operations.md#when-replicas-are-full)."""
    share: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False), PLAIN] = 1.0
    """Change it when its holder should get more or less of the replicas' time than others of the
    same priority, while requests wait."""
    requests_per_minute: Count | None = None
    """In any 60 s; null: any number.

    Change it when its holder may send so many requests in any 60 s; more get 429 with
    `Retry-After`."""
    tokens_per_minute: TokenCount | None = None
    """Change it when its holder may use so many tokens in any 60 s: of prompts (cached ones too)
    and of responses, which are counted at their end. A prompt over the whole limit passes after an
    idle minute."""
    max_in_flight: Count | None = None
    """Change it when it may have so many requests at a time, those that wait included; with several
    routers a burst may pass it, see [several routers](operations.md#several-routers)."""
    models: Items[Annotated[str, Field(min_length=1, max_length=256), PLAIN]] | None = None
    """Models and adapters that it is for; null: all.

    Change it when it is not for every model and adapter; `*` stands for any characters. Others get
    403, and are not listed."""

    @property
    def is_limited(self) -> bool:
        """Return whether anything has to be counted or checked."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_in_flight, self.models)
        return any(limit is not None for limit in limits)


# --- gateways that send requests themselves -------------------------------------------------------

ListenAddress = Annotated[
    str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$", max_length=256), PLAIN
]


class ExtProcConfig(Section, frozen=True):
    """The endpoint picker for Envoy and the gateways made of it: external processing over gRPC.
    Needs the extra `gateway`."""

    listen: ListenAddress | None = None
    """Change it when a gateway asks here where requests go: `0.0.0.0:9002`. Any client that reaches
    that port can ask; with client keys, for what its key is for."""
    fallbacks: Annotated[int, Field(ge=0, le=8), PLAIN] = 0
    """Change it when the gateway takes a list of endpoints and tries the next by itself; a cluster
    of Envoy's kind `ORIGINAL_DST` takes one only."""
    read_response: bool = True
    """Change it when responses should not pass through here: then what engines report is not
    compared with predictions, and a request counts as over when its response begins. Needs
    `allow_mode_override` in the gateway."""
    rank_ports: bool = False
    """Change it when each data-parallel rank has a port of its own, the replica's plus the rank, as
    llm-d's sidecar has: the picker then writes `x-data-parallel-host-port`."""
    max_streams: Count = 16_384
    """Change it when gateways have more requests under way at a time; more are refused with 503."""
    tls: ListenerTlsConfig = ListenerTlsConfig()
    """Like [`server.tls`](#servertls); a new certificate needs a restart."""


class DoorsConfig(Section, frozen=True):
    """Configures what gateways need that ask where a request should go and send it themselves."""

    max_reservations: Count = 16_384
    """Change it when gateways have more requests under way at a time; more are refused with 503."""
    reservation_idle_s: Seconds = 600.0
    """A reservation without a report of its gateway for so long ends by itself.

    Change it when responses take longer and the gateway reports no progress, or when gateways are
    often killed and what they had booked should be free sooner."""
    ext_proc: ExtProcConfig = ExtProcConfig()


# --- logs, metrics, traces ------------------------------------------------------------------------


class TracingConfig(Section, frozen=True):
    """OpenTelemetry traces, over OTLP/HTTP; the standard's `OTEL_*` variables hold for the rest."""

    enabled: bool = False
    """Needs the extra `otel`.

    Change it when you want traces."""
    endpoint: Url | None = None
    """Base URL of the collector, as `http://collector:4318`; null: from
    `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Change it when `OTEL_EXPORTER_OTLP_ENDPOINT` is not set, and the collector is not at
    `http://localhost:4318`; without `/v1/traces`."""
    sampled_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), PLAIN] | None = None
    """The share of the requests without a trace yet.

    Change it when fewer requests should be recorded than all. Requests whose client sent a
    `traceparent` are recorded if the client's was. Null: by `OTEL_TRACES_SAMPLER`, else all."""


class ObservabilityConfig(Section, frozen=True):
    """Configures logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Change it when you want less: `warning` hides changes of state of event streams, which are
    logged as `info`."""
    log_format: Literal["text", "json"] = "text"
    """Change it when a log collector reads it: one JSON object per line; `serve --log-format`,
    `--log-level` override both."""
    access_log: bool = False
    """Change it when you want one line for each request: [operations.md](operations.md) has its
    fields."""
    allow_capture: bool = False
    """Change it when operators may record what a replica caches, with the prompts it is sent as
    token ids: `kvroute capture` with `--url`; on the command line `--allow-capture`."""
    metrics_need_key: bool = False
    """Change it when only some may scrape: `/metrics` then requires `operator_api_key`, which must
    be set."""
    tracing: TracingConfig = TracingConfig()


# --- the server itself ----------------------------------------------------------------------------

PRIVATE_NETWORKS = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7"),
)


class TimeoutsConfig(Section, frozen=True):
    """Bounds how long each phase of a request may take."""

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
    """Bounds how often a request is tried again, while nothing of its response has arrived."""

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
    """How many of the streams that the data plane decides by itself may be sent to a second
    replica as well since their first byte is late by what is usual; 0: none.

    Change it to 0 when no request may be computed twice."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServerConfig(Section, frozen=True):
    """Addresses, keys and limits of the server."""

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
    """Change it when operators should have keys of their own, or keys are to be changed one by
    one."""
    wrong_key_delay_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False), PLAIN] = 1.0
    """Change it when refusals of wrong keys should be held back for longer, or not at all; the
    first five from an address are not."""
    clients_see_hits: bool | None = None
    """True: clients see how much of a prompt is cached (`x-kv-hit-tokens`, `/route`); null: where
    they need no key.

    Change it when clients with keys should get `x-kv-hit-tokens`, and `/route` with their key: it
    [reveals](security.md#what-caches-tell) what others have asked. `null` means where no client key
    is set."""
    host_names: Items[HostName] = ()
    """Change it when the router is asked without a key under a name that is not `localhost`, the
    machine's own or in `host`, as `router` in a compose file; `"*"` accepts every name."""
    replica_networks: Items[Network] = PRIVATE_NETWORKS
    """Change it when replicas added by `POST /replicas` are elsewhere; those of the file may be
    anywhere."""
    trusted_proxies: Items[Network] = ()
    """Proxies whose `x-forwarded-*` is passed on, with their own address added.

    Change it when a proxy in front adds the client's address: its `x-forwarded-for` and `-proto` go
    on, from others the router sets its own."""
    insecure: bool = False
    """Change it when `host` is reached by other machines, and all of them may send prompts without
    a key. Without it such a router does not start."""
    max_body_bytes: Bytes = 64 * 1024 * 1024
    """Change it when requests with images or long prompts get 413."""
    max_header_bytes: Bytes = 64 * 1024
    """Change it when requests with large cookies or tokens get 431."""
    max_concurrent_requests: Count = 4096
    """Requests under way; more are refused with 503.

    Change it when requests get 503 `overloaded` although the replicas have room."""
    max_buffered_bytes: Bytes = 1024 * 1024 * 1024
    """The bound on the bodies of all requests under way; more are refused with 503. Parsing one
    takes several times its size for a moment.

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
    there is one. Their bodies stay as they are: where an engine generates at such a path, clients
    can reach its fields that the router takes out elsewhere, as `kv_cache_report_mode` of
    `vllm_xargs`, which makes predictions wrong for all."""
    tls: ListenerTlsConfig = ListenerTlsConfig()
    replica_tls: ReplicaTlsConfig = ReplicaTlsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    retries: RetriesConfig = RetriesConfig()

    @property
    def client_keys(self) -> tuple[ClientKeyConfig, ...]:
        """Return all keys; the one without a name is called `default`."""
        if self.client_api_key is None:
            return self.client_api_keys
        return ClientKeyConfig(name="default", key=self.client_api_key), *self.client_api_keys

    @property
    def operator_keys(self) -> tuple[OperatorKeyConfig, ...]:
        """Return all keys; the one without a name is called `default`."""
        if self.operator_api_key is None:
            return self.operator_api_keys
        return OperatorKeyConfig(name="default", key=self.operator_api_key), *self.operator_api_keys

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield keys that are the same, and an address that others reach without a key for
        clients."""
        for kind in ("client_api_keys", "operator_api_keys"):
            keys = getattr(self, kind)
            yield from repeated(kind, [each.name for each in keys], "name")
            yield from repeated(kind, [each.key for each in keys], "key")
        if not self.client_keys and not self.insecure and not _is_loopback(self.host):
            rule = (
                "others reach it, and without client_api_key all of them may send prompts; "
                "set the key, or insecure: true (--insecure)"
            )
            yield ("host",), f"{self.host!r}; {rule}"
