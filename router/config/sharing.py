"""The state that a router keeps over a restart, and the board where routers publish their load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.section import Location, Section
from router.config.server import ReplicaTlsConfig
from router.config.values import PLAIN, Bytes, Items, Name, PlacedPath, Seconds, Secret, Url


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


BoardUrl = Annotated[
    str, Field(pattern=r"^(redis|valkey)s?://[A-Za-z0-9_.:\[\]-]+(/[0-9]{1,4})?$"), PLAIN
]
Prefix = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$"), PLAIN]


class BoardConfig(Section, frozen=True):
    """A Valkey or Redis server that several routers use."""

    url: BoardUrl | None = None
    """`redis://host:port/db`, or `rediss://` for TLS; `valkey` is the same. Null: none.

    Change it when several routers serve the same replicas: `rediss://valkey.internal:6379/0`; the
    `s` is TLS."""
    username: Name | None = None
    """Change it when the server has users (ACL): this one needs `SET`, `PUBLISH`, `SUBSCRIBE`,
    `SCAN`, `MGET`, `PING`."""
    password: Secret | None = None
    """Change it when the server asks for one."""
    secret: Secret | None = None
    """Required with a `url`, the same at all routers: their messages are sealed with it, and it
    makes their keys of prefixes the same."""
    prefix: Prefix = "kvroute"
    """The prefix of keys and channel; routers with another one do not receive these.

    Change it when routers of another fleet use the same server."""
    ca: PlacedPath | None = None
    """Authorities that are trusted with TLS; null: the system's.

    Change it when the server's certificate is of an authority of your own."""
    certificate: PlacedPath | None = None
    """Change it when the server asks clients for a certificate."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield parts that are missing."""
        if self.url is not None and self.secret is None:
            yield ("secret",), "null; with a url it must be set, the same at all routers"
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
