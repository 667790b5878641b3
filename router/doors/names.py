"""Defines how gateways name a replica: by address, by URL, by number; and the headers for
sidecars."""

from __future__ import annotations

import xxhash

from router.fleet.replica import Replica
from router.plane.attempts import PREFILLER_HEADER, SOURCE_HEADER

RANK_ADDRESS_HEADER = b"x-data-parallel-host-port"
SIDECAR_HEADERS = (
    SOURCE_HEADER,
    RANK_ADDRESS_HEADER,
    PREFILLER_HEADER,
    b"x-encoder-hosts-ports",
)
"""Headers that direct llm-d's sidecar. A client's own would have it connect anywhere."""
_WORKER_BITS = 53
"""Every JSON reader holds such a number exactly."""


def names_of(replica: Replica) -> tuple[str, str, str]:
    """Return a replica's id, URL and address: a question may name it by any of them."""
    return replica.id, str(replica.origin), replica.address


def worker_number(replica_id: str) -> int:
    """Return a replica's id as a number, for clients that know workers by numbers: the same at
    every router and after every restart."""
    if replica_id.isascii() and replica_id.isdigit() and int(replica_id) < 1 << _WORKER_BITS:
        return int(replica_id)
    return xxhash.xxh3_64_intdigest(replica_id.encode()) >> (64 - _WORKER_BITS)
