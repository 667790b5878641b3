"""What a router knows when it starts."""

from __future__ import annotations

from router.config.section import Section
from router.config.tls import ReplicaTlsConfig
from router.config.values import Bytes, Items, PlacedPath, Seconds, Url


class StateConfig(Section, frozen=True):
    """Snapshots of the index, so that a start does not read every cache from its engine."""

    directory: PlacedPath | None = None
    """Where one is kept; null: nowhere."""
    interval_s: Seconds = 60.0
    """How often it is written while the router runs; it is written at the end, too."""
    max_age_s: Seconds = 900.0
    """An older one is not used at a start."""
    peers: Items[Url] = ()
    """Routers of the same replicas, which are asked first, and may ask this one; every address
    behind a name is one of them. All have the same `board.secret`."""
    peer_timeout_s: Seconds = 10.0
    """Event streams are not followed before a peer has sent its snapshot, all have refused, or this
    time is over."""
    peer_max_bytes: Bytes = 1024 * 1024 * 1024
    """Of one snapshot."""
    peer_tls: ReplicaTlsConfig = ReplicaTlsConfig()
    """Towards peers whose URL begins with https."""
