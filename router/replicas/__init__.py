"""Which replicas exist, their health and load.

`ReplicaRegistry` holds them; a watcher asks each one independently; `health` and `discovery` decide
and parse, without I/O.

The files; each imports only what is listed above it:

    load.py          what this router has in flight, by replica
    engine_load.py   what an engine's own metrics say about its load
    load_topic.py    what an engine publishes of its load
    types.py         plain values
    health.py        outcomes of checks and requests in, healthy or not out
    discovery.py     what a replica reports about itself
    replica.py       one replica's state
    watcher.py       two tasks a replica: its health; its models, streams and load
    registry.py      all replicas; reports changes to listeners
"""

from router.replicas.registry import ReplicaListener, ReplicaRegistry
from router.replicas.replica import Replica
from router.replicas.types import EventSource, Health, ReplicaState, ReplicaView, ServedModels
from router.replicas.watcher import Fetch, UpstreamFetch

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
