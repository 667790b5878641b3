"""Which replicas exist, their health and load.

`registry.ReplicaRegistry` holds them; `watcher` asks each one on its own; `health` and `discovery`
decide and read, without I/O.
"""

from router.replicas.fetch import UpstreamFetch
from router.replicas.registry import (
    NullListener,
    RegistryStatistics,
    ReplicaListener,
    ReplicaRegistry,
)
from router.replicas.replica import Replica
from router.replicas.types import (
    EventSource,
    Fetch,
    Health,
    ReplicaState,
    ReplicaView,
    ServedModels,
)

__all__ = [
    "EventSource",
    "Fetch",
    "Health",
    "NullListener",
    "RegistryStatistics",
    "Replica",
    "ReplicaListener",
    "ReplicaRegistry",
    "ReplicaState",
    "ReplicaView",
    "ServedModels",
    "UpstreamFetch",
]
