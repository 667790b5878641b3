"""Where routers on several machines publish their load to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.rules import Location
from router.config.section import Section
from router.config.values import PLAIN, Name, PlacedPath, Secret

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
    """Shown to a server that asks for one.

    Change it when the server asks clients for a certificate."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if self.url is not None and self.secret is None:
            yield ("secret",), "null; with a url it must be set, the same at all routers"
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
