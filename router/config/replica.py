"""One replica: its address and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError

from router.config.document import parse_document, problems_in, read_text
from router.config.origin import Origin
from router.config.section import Location, PriorityOrder, Role, Section, repeated
from router.config.values import (
    PLAIN,
    POLLED,
    Count,
    CurvePublicKey,
    EventAddress,
    Items,
    Name,
    PeerHost,
    ReplicaId,
    Secret,
    Url,
    ZmqAddress,
)
from router.errors import BadRequest, ConfigError


class EventSourceConfig(Section, frozen=True):
    """The addresses of events of one data-parallel rank of a replica."""

    endpoint: EventAddress
    """The address it publishes at; `*` as host means the replica's own. `listen`: it connects to
    the router, at `events.listen`, and publishes under `kv@POD@MODEL`, where POD is the replica's
    id, host, or host and port. `http://*:8000/kv_cache_events`: it is polled, as TensorRT-LLM has
    to be; by one router only."""
    replay_endpoint: ZmqAddress | None = None
    """Change it when the engine has one: without it, lost events cannot be recovered."""
    snapshot_endpoint: ZmqAddress | None = None
    """Change it when the engine has an address for snapshots alone, as proposed for vLLM; one on
    the replay endpoint, as ours, needs nothing."""
    server_key: CurvePublicKey | None = None
    """Change it when its stream is encrypted, and its public key is another than
    `events.curve_server_key`."""
    topic: Annotated[str, Field(max_length=1024), PLAIN] = ""
    """Change it when several publishers share an address. Compared exactly; empty accepts every
    topic."""
    dp_rank: Annotated[int, Field(ge=0, le=65_535), PLAIN] = 0
    """Change it when there are several ranks; vLLM adds the rank to both ports."""


class PeerTierConfig(Section, frozen=True):
    """The address at which other engines pull cached prefixes from a replica's memory."""

    host: PeerHost = "*"
    """`*` means the replica's own.

    Change it when engines reach each other at another address than the router reaches them."""
    port: Annotated[int, Field(ge=1, le=65_535), PLAIN]
    """The port of the engine's `p2p` tier."""


class ReplicaAddress(Section, frozen=True):
    """The URL and the id of a replica."""

    url: Url
    """Without user, password, query or fragment."""
    id: ReplicaId | None = None
    """Null: host and port.

    Change it when headers, metrics and paths should show a name other than host and port."""

    @property
    def origin(self) -> Origin:
        """Return the URL, taken apart."""
        return Origin.parse(self.url)

    @property
    def replica_id(self) -> str:
        """Return the id, given or derived."""
        return self.id or f"{self.origin.host}:{self.origin.port}".replace("%", "-")


class ReplicaOptions(Section, frozen=True):
    """Holds a replica's options besides its address. The replica is asked for those left out."""

    models: Items[Name] | None = None
    """Models that it serves; null asks its GET /v1/models.

    Change it when its `GET /v1/models` is wrong or missing; it is still asked for adapters."""
    kv_events: Items[EventSourceConfig] | None = None
    """The addresses of its events; null asks its GET /kv_event_sources or /server_info, an empty
    list means that it publishes none.

    Change it when it has neither `GET /kv_event_sources` (vLLM 0.32) nor `kv_events` in `GET
    /server_info` (SGLang 0.5.17); `[]` means that it publishes nothing."""
    api_key: Secret | None = None
    """Change it when the engine requires one; it replaces the client's."""
    role: Role = "both"
    """Its part of a request: `prefill` gets no requests of its own, and computes prompts for
    others; `decode` has its longer prompts computed elsewhere.

    Change it when engines are set up to compute prompts for each other ([prefill and decode
    replicas](gateways.md#prefill-and-decode-replicas)); llm-d's pods have it in their label."""
    speed: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False), PLAIN] = 1.0
    """Relative to the other replicas.

    Change it when replicas differ: 2 is twice as fast as 1."""
    p2p: PeerTierConfig | None = None
    """Its `p2p` tier, below a tier in memory.

    Change it when the engine has one (vLLM 0.33, `kvroute engine`): where another replica's memory
    holds more of a prompt, requests then name it as the source to pull from."""
    max_concurrent_requests: Count | None = None
    """Change it when it must never have more requests from this router at a time; when all replicas
    are full, clients get 503."""
    priority_order: Literal["ask"] | PriorityOrder | None = None
    """Which priority number its engine serves first; the router then orders what waits there. Null:
    it does not.

    Change it when the engine orders by priority ([the order in
    engines](operations.md#the-order-in-engines)): `lower_first` for vLLM, `higher_first` for
    SGLang; `ask` asks its `GET /server_info`, where SGLang and kvroute's engine report it."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield ranks that appear twice, and options that a polled source cannot have."""
        for index, source in enumerate(self.kv_events or ()):
            for name in ("replay_endpoint", "snapshot_endpoint", "server_key", "topic"):
                if source.endpoint.startswith(POLLED) and getattr(source, name):
                    rule = "must be left out where the endpoint is asked over HTTP"
                    yield ("kv_events", index, name), rule
        yield from repeated("kv_events", [each.dp_rank for each in self.kv_events or ()], "dp_rank")


class ReplicaConfig(ReplicaOptions, ReplicaAddress, frozen=True):
    """One replica. Only the URL is required where the replica reports the rest."""


def read_replica(data: object) -> ReplicaConfig:
    """Read a replica from the body of a request.

    It may hold an API key, but not name an environment variable: that would send any variable, as a
    key, to any URL.

    Raises:
        BadRequest: With all problems.
    """
    try:
        return ReplicaConfig.model_validate(data)
    except ValidationError as error:
        first, *others = problems_in(error, ReplicaConfig, "$")
        raise BadRequest(
            first.place, first.text, "; ".join(map(str, others)) or "see the schema in /docs"
        ) from None


def key_bytes(key: SecretStr | None) -> bytes | None:
    """Return a key as it appears in a header; None if none is configured.

    Reveal a key once, where it is put to use: not with every request.
    """
    return None if key is None else key.get_secret_value().encode("ascii")


class _ReplicaList(Section, frozen=True):
    """A document that holds replicas and nothing else."""

    replicas: Items[ReplicaConfig] = ()

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield the ids and URLs that appear twice."""
        yield from repeated("replicas", [each.replica_id for each in self.replicas], "id")
        yield from repeated("replicas", [str(each.origin) for each in self.replicas], "url")


def read_replicas(path: Path, environ: Mapping[str, str]) -> tuple[ReplicaConfig, ...]:
    """Read a file with a list of replicas: `replicas:` as in the configuration, or the list alone.

    Args:
        path: YAML or JSON.
    Raises:
        ConfigError: The file cannot be read, or has problems; the message lists all of them.
    """
    document = parse_document(read_text(path))
    data = {"replicas": document} if isinstance(document, list) else document
    context = {"environ": environ, "directory": path.parent}
    try:
        return _ReplicaList.model_validate({} if data is None else data, context=context).replicas
    except ValidationError as error:
        raise ConfigError(problems_in(error, _ReplicaList)) from None
