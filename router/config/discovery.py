"""Sources of replicas besides the list in the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvevents.lookups import is_numeric
from router.config.replica import ReplicaOptions
from router.config.section import Location, Section, broken_rule, repeated
from router.config.values import PLAIN, Items, PlacedPath, Seconds, Url, UrlPath


def name_server(text: str) -> tuple[str, int]:
    """Return the address and the port of a name server, `address` or `address#port`."""
    address, _, port = text.partition("#")
    return address, int(port or 53)


def _check_name_server(text: str) -> str:
    address, port = name_server(text)
    if not is_numeric(address) or port > 65_535:
        raise broken_rule(f"{text!r}; expected an address, or address#port")
    return text


DnsName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$"), PLAIN]
NameServer = Annotated[
    str,
    Field(pattern=r"^[0-9A-Fa-f.:]{2,45}(#\d{1,5})?$"),
    PLAIN,
    AfterValidator(_check_name_server),
]
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"), PLAIN]
LabelSelector = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./=!,() -]{1,1024}$"), PLAIN]
IdPrefix = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,64}$"), PLAIN]
TcpPort = Annotated[int, Field(ge=1, le=65_535), PLAIN]
PortName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$"), PLAIN]
Scheme = Literal["http", "https"]


class FileDiscovery(Section, frozen=True):
    """A file with a list of replicas, read again when it changes."""

    path: PlacedPath
    """YAML or JSON: `replicas:` as in the configuration, or the list alone."""
    interval_s: Seconds = 1.0
    """How often the file is looked at.

    Change it when the file system is slow (raise)."""

    @property
    def title(self) -> str:
        """Return its name in logs, metrics and messages."""
        return f"file {self.path}"


class DnsDiscovery(Section, frozen=True):
    """A name whose records are the replicas, asked for again when they expire."""

    name: DnsName
    """The name whose records are the replicas: `vllm.models.svc.cluster.local`."""
    record: Literal["address", "srv"] = "address"
    """Change it when SRV records name each replica with its port; of their priorities only the
    lowest number is used."""
    port: TcpPort | None = None
    """Always with `address`, never with `srv`."""
    scheme: Scheme = "http"
    """Change it when the replicas serve TLS."""
    nameserver: NameServer | None = None
    """`10.0.0.10` or `10.0.0.10#5353`; null: as the system is configured.

    Change it when the system's resolver does not know the name: Consul's is `127.0.0.1#8600`."""
    min_interval_s: Seconds = 2.0
    """A record that expires sooner is asked for no sooner.

    Change it when a record's time to live is shorter, and asking costs too much."""
    max_interval_s: Seconds = 30.0
    """A record that expires later is asked for all the same; also after a failure.

    Change it when it is longer, and changes should be noticed sooner; also the longest wait after a
    failure."""
    replica: ReplicaOptions = ReplicaOptions()
    """Options of every one of them."""

    @property
    def title(self) -> str:
        """Return its name in logs, metrics and messages."""
        return f"dns {self.name} {self.record if self.port is None else self.port}"

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield a port that is missing or not used, and times the wrong way round."""
        if self.record == "address" and self.port is None:
            yield ("port",), "is missing; addresses need one"
        if self.record == "srv" and self.port is not None:
            yield ("port",), f"{self.port}; an SRV record has a port of its own"
        if self.min_interval_s > self.max_interval_s:
            rule = f"must be at most max_interval_s ({self.max_interval_s:g})"
            yield ("min_interval_s",), f"{self.min_interval_s:g}; {rule}"


class KubernetesDiscovery(Section, frozen=True):
    """Pods, watched through the API server. One of *selector*, *service* and *pool* selects
    them."""

    selector: LabelSelector | None = None
    """Change it when pods are chosen by labels: `app=vllm`. Exactly one of these three is
    required."""
    service: KubernetesName | None = None
    """Change it when the endpoints of a service are the replicas."""
    pool: KubernetesName | None = None
    """An InferencePool of the Gateway API: its selector, and its ports where *port* is null.

    Change it when an InferencePool of the Gateway API selects the pods and their ports."""
    namespace: KubernetesName | None = None
    """Null: the router's own.

    Change it when they are not in the router's own."""
    port: TcpPort | PortName | None = None
    """A number, or the name of a port of the container or the service; null where there is but one.

    Change it when a pod or the service has several ports."""
    scheme: Scheme = "http"
    """Change it when the replicas serve TLS."""
    path: UrlPath | None = None
    """The base path of each replica's URL.

    Change it when the engines serve below a base path."""
    id_prefix: IdPrefix = ""
    """Before the pod's name, to distinguish namespaces or clusters.

    Change it when two namespaces or clusters have pods of the same name: a replica's id is its
    pod's name."""
    api_server: Url | None = None
    """Null: from the pod's environment.

    Change it when the router runs outside the cluster."""
    token_file: PlacedPath | None = None
    """Null: the service account's, where there is one.

    Change it when the token is not where pods find theirs; it is read for every request."""
    ca_file: PlacedPath | None = None
    """Null: the service account's, where there is one.

    Change it when the certificate of the server's authority is not where pods find theirs."""
    replica: ReplicaOptions = ReplicaOptions()
    """Options of every one of them. A pod's label `llm-d.ai/role` overrides its `role`, and its
    annotation `kvroute.io/replica` overrides all: the same options as a JSON object, and `port`,
    `scheme` and `path`."""

    @property
    def title(self) -> str:
        """Return its name in logs, metrics and messages."""
        chosen = self.selector or self.service or self.pool
        port = "" if self.port is None else f" {self.port}"
        return f"kubernetes {self.namespace or 'own namespace'} {chosen}{port}"

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield that there is not exactly one way to choose pods."""
        given = [name for name in ("selector", "service", "pool") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            yield (), f"{found}; must have exactly one of selector, service and pool"


class DiscoveryConfig(Section, frozen=True):
    """Sources of replicas besides `replicas`. A replica that they no longer name gets no new
    requests, and is removed a little later."""

    files: Items[FileDiscovery] = ()
    """Change it when another program writes the list."""
    dns: Items[DnsDiscovery] = ()
    """Change it when a name stands for the replicas: a headless service, Consul."""
    kubernetes: Items[KubernetesDiscovery] = ()
    """Change it when replicas are pods."""
    linger_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False), PLAIN] = 30.0
    """How long a replica that is no longer named is kept, draining. One that comes back within this
    time still has its index.

    Change it when replicas that are away for longer should find their index when they return
    (raise)."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield places that are named twice."""
        for kind in ("files", "dns", "kubernetes"):
            yield from repeated(kind, [each.title for each in getattr(self, kind)])
