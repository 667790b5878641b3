"""Which replicas exist, their health and load.

`registry.ReplicaRegistry` holds them; `watcher` asks each one on its own; `health` and `discovery`
decide and read, without I/O.

The files; each imports only what is listed above it:

    load.py          what this router has in flight, by replica
    engine_load.py   what an engine's own metrics say of its load
    types.py         plain values; what the registry needs of others
    fetch.py         one small GET
    health.py        checks and fates of requests in, healthy or not out
    discovery.py     what a replica says of itself
    replica.py       one replica's state
    watcher.py       two tasks a replica: its health; its models, streams and load
    registry.py      all replicas; reports changes to listeners
"""

from router.replicas.fetch import UpstreamFetch
from router.replicas.registry import (
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
    "Replica",
    "ReplicaListener",
    "ReplicaRegistry",
    "ReplicaState",
    "ReplicaView",
    "ServedModels",
    "UpstreamFetch",
]
