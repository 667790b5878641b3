"""Where replicas come from: lists that change, and the registry made to follow them.

A provider reports the complete list of its replicas whenever it changes; what it cannot find out it
reports as a failure, and the last list stays.

The files; each imports only what is listed above it:

    provider.py        what a provider is, and what it reports to; waits after failures
    file.py            a file that is watched
    dns.py             A, AAAA and SRV records
    kubernetes_api.py  a collection of objects, kept true by a list and watches
    kubernetes.py      pods, endpoints of a service, an InferencePool
    keeper.py          adds, drains and removes replicas as the providers report
"""

from router.fleet.discovery.keeper import (
    CONFIGURATION,
    ProviderStatistics,
    ReplicaKeeper,
    make_providers,
)
from router.fleet.discovery.provider import ProviderListener, ReplicaProvider

__all__ = [
    "CONFIGURATION",
    "ProviderListener",
    "ProviderStatistics",
    "ReplicaKeeper",
    "ReplicaProvider",
    "make_providers",
]
