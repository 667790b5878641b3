"""Configures the snapshots that a router starts from."""

from __future__ import annotations

from router.config.section import Section
from router.config.tls import ReplicaTlsConfig
from router.config.values import Bytes, Items, PlacedPath, Seconds, Url


class StateConfig(Section, frozen=True):
    """Snapshots of the index, so that a start does not read every cache from its engine."""

    directory: PlacedPath | None = None
    """The directory of the snapshot; null: none is kept.

    Change it when a start should not read every cache from its engine; the snapshot is the file
    `index.snapshot` there."""
    interval_s: Seconds = 60.0
    """How often it is written while the router runs.

    Change it when it should be written more often, or less; it is also written at the end."""
    max_age_s: Seconds = 900.0
    """Change it when engines keep more, or less, for a replay; an older one is not used."""
    peers: Items[Url] = ()
    """Change it when there are several routers: a start should take the caches from one that runs.
    Every address behind a name is asked, so the name of the routers' own headless service does:
    `[https://kvroute-peers:8080]`; its own address may be among them. Needs
    [`board.secret`](#board), the same at all of them, and lets these ask this router."""
    peer_timeout_s: Seconds = 10.0
    """Change it when caches are large, or the network between routers is slow: streams are not
    followed before a peer has sent its snapshot, all have refused, or this time is over."""
    peer_max_bytes: Bytes = 1024 * 1024 * 1024
    """Change it when a snapshot is larger: 42 MB for 64 replicas of 20,000 blocks."""
    peer_tls: ReplicaTlsConfig = ReplicaTlsConfig()
    """Towards peers whose URL begins with https."""
