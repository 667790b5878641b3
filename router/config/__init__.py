"""The router's configuration: one frozen, validated model, built at the edge and passed down.

`RouterConfig.load` reads a file. `read_replica` reads one replica in the same form from a request,
and `ReplicaConfig.model_json_schema()` describes it.

The files; each imports only what is listed above it:

    files.py          has a watched file changed?
    origin.py         where a server is; timeouts
    document.py       YAML text -> plain data; pydantic's errors -> ours
    values.py         what one value may be
    section.py        what all mappings have in common
    replica.py        one replica
    discovery.py      where more of them come from
    tls.py            certificates
    certificates.py   our identity and trusted authorities, from these files; kept fresh
    state.py          what outlives a restart
    board.py          where routers publish their load to each other
    keys.py           who may come in, and what comes with a key
    overload.py       what waits when replicas have no room
    doors.py          what gateways that send requests themselves may hold
    observability.py  logs, metrics, traces
    approximate.py    what stands in for event streams that are not there
    versions.py       names that stand for several versions of a model
    models.py         models, and what events leave out about their caches
    server.py         where the router listens, who may come in, its limits
    policy.py         how it chooses
    prefill.py        when prompts are computed elsewhere
    health.py         how replicas are watched
    events.py         how event streams are followed
    schema.py         the whole, and the rules between its sections
"""

from router.config.board import BoardConfig
from router.config.discovery import (
    DiscoveryConfig,
    DnsDiscovery,
    FileDiscovery,
    KubernetesDiscovery,
)
from router.config.document import read_text
from router.config.doors import ExtProcConfig
from router.config.health import HealthConfig
from router.config.keys import ClientKeyConfig
from router.config.models import ModelConfig, StoreConfig
from router.config.observability import TracingConfig
from router.config.overload import OverloadConfig
from router.config.replica import (
    EventSourceConfig,
    PeerTierConfig,
    PriorityOrder,
    ReplicaConfig,
    ReplicaOptions,
    Role,
    key_bytes,
    read_replica,
    read_replicas,
)
from router.config.schema import Overrides, RouterConfig
from router.config.server import ServerConfig, TimeoutsConfig
from router.config.versions import VersionConfig, VersionedModelConfig

__all__ = [
    "BoardConfig",
    "ClientKeyConfig",
    "DiscoveryConfig",
    "DnsDiscovery",
    "EventSourceConfig",
    "ExtProcConfig",
    "FileDiscovery",
    "HealthConfig",
    "KubernetesDiscovery",
    "ModelConfig",
    "OverloadConfig",
    "Overrides",
    "PeerTierConfig",
    "PriorityOrder",
    "ReplicaConfig",
    "ReplicaOptions",
    "Role",
    "RouterConfig",
    "ServerConfig",
    "StoreConfig",
    "TimeoutsConfig",
    "TracingConfig",
    "VersionConfig",
    "VersionedModelConfig",
    "key_bytes",
    "read_replica",
    "read_replicas",
    "read_text",
]
