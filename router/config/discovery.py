"""Where replicas come from besides the list in the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from router.config.document import Location
from router.config.replica import ReplicaOptions
from router.config.section import Section
from router.config.values import PLAIN, Items, PlacedPath, Seconds, Url, UrlPath

DnsName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,253}$"), PLAIN]
NameServer = Annotated[str, Field(pattern=r"^[0-9A-Fa-f.:]{2,45}(#\d{1,5})?$"), PLAIN]
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
    """How often the file is looked at."""

    @property
    def title(self) -> str:
        """For logs, metrics and messages."""
        return f"file {self.path}"


class DnsDiscovery(Section, frozen=True):
    """A name whose records are the replicas, asked for again when they expire."""

    name: DnsName
    record: Literal["address", "srv"] = "address"
    """`address`: A and AAAA, all with *port*. `srv`: each target with its own port; of the
    priorities only the lowest number."""
    port: TcpPort | None = None
    """For `address`."""
    scheme: Scheme = "http"
    nameserver: NameServer | None = None
    """`10.0.0.10` or `10.0.0.10#5353`; null: as the system is configured."""
    min_interval_s: Seconds = 2.0
    """A record that expires sooner is asked for no sooner."""
    max_interval_s: Seconds = 30.0
    """A record that expires later is asked for all the same; also after a failure."""
    replica: ReplicaOptions = ReplicaOptions()
    """What is true of every one of them."""

    @property
    def title(self) -> str:
        """For logs, metrics and messages."""
        return f"dns {self.name} {self.record if self.port is None else self.port}"

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """A port that is missing or not used, and times the wrong way round."""
        if self.record == "address" and self.port is None:
            yield ("port",), "is missing; addresses need one"
        if self.record == "srv" and self.port is not None:
            yield ("port",), f"{self.port}; an SRV record has a port of its own"
        if self.min_interval_s > self.max_interval_s:
            rule = f"must be at most max_interval_s ({self.max_interval_s:g})"
            yield ("min_interval_s",), f"{self.min_interval_s:g}; {rule}"


class KubernetesDiscovery(Section, frozen=True):
    """Pods, watched through the API server. One of *selector*, *service* and *pool* says which."""

    selector: LabelSelector | None = None
    """Of labels: `app=vllm`."""
    service: KubernetesName | None = None
    """The endpoints of a service."""
    pool: KubernetesName | None = None
    """An InferencePool of the Gateway API: its selector, and its ports where *port* is null."""
    namespace: KubernetesName | None = None
    """Null: the router's own."""
    port: TcpPort | PortName | None = None
    """A number, or the name of a port of the container or the service; null where there is but
    one."""
    scheme: Scheme = "http"
    path: UrlPath | None = None
    """The base path of each replica's URL."""
    id_prefix: IdPrefix = ""
    """Before the pod's name, to tell namespaces or clusters apart."""
    api_server: Url | None = None
    """Null: as the pod's environment says."""
    token_file: PlacedPath | None = None
    """Null: the service account's, where there is one."""
    ca_file: PlacedPath | None = None
    """Null: the service account's, where there is one."""
    replica: ReplicaOptions = ReplicaOptions()
    """What is true of every one of them. A pod's annotation `kvroute.io/replica` overrides it: the
    same options as a JSON object, and `port`, `scheme` and `path`."""

    @property
    def title(self) -> str:
        """For logs, metrics and messages."""
        chosen = self.selector or self.service or self.pool
        port = "" if self.port is None else f" {self.port}"
        return f"kubernetes {self.namespace or 'own namespace'} {chosen}{port}"

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Not exactly one way to choose pods."""
        given = [name for name in ("selector", "service", "pool") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            yield (), f"{found}; must have exactly one of selector, service and pool"


class DiscoveryConfig(Section, frozen=True):
    """Where replicas come from besides `replicas`. What one of them no longer names gets no new
    requests, and is removed a little later."""

    files: Items[FileDiscovery] = ()
    dns: Items[DnsDiscovery] = ()
    kubernetes: Items[KubernetesDiscovery] = ()
    linger_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False), PLAIN] = 30.0
    """How long a replica that is no longer named is kept, draining. One that comes back within this
    time still has its index."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """The same place twice."""
        seen: dict[str, str] = {}
        for kind in ("files", "dns", "kubernetes"):
            for index, each in enumerate(getattr(self, kind)):
                first = seen.setdefault(each.title, f"{kind}[{index}]")
                if first != f"{kind}[{index}]":
                    yield (kind, index), f"{each.title!r}; {first} has it already"
