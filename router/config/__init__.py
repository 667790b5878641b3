"""The router's configuration: one frozen, validated model, built at the edge and passed down.

`RouterConfig.load` reads a file; `sections` says what may stand in it. `read_replica` reads the
same form of a replica from a request.

The files; each imports only what is listed above it:

    secret.py     API keys that do not print themselves
    document.py   YAML text -> plain data
    reader.py     plain data -> checked structs, every problem found
    sections.py   what may stand in the file
    root.py       the whole; what sections must not do to each other
"""

from router.config.root import RouterConfig, read_replica
from router.config.secret import Secret
from router.config.sections import (
    EventsConfig,
    EventSourceConfig,
    GroupConfig,
    HealthConfig,
    LayoutConfig,
    ModelConfig,
    ObservabilityConfig,
    PolicyConfig,
    ReplicaConfig,
    ServerConfig,
    TimeoutsConfig,
)

__all__ = [
    "EventSourceConfig",
    "EventsConfig",
    "GroupConfig",
    "HealthConfig",
    "LayoutConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "PolicyConfig",
    "ReplicaConfig",
    "RouterConfig",
    "Secret",
    "ServerConfig",
    "TimeoutsConfig",
    "read_replica",
]
