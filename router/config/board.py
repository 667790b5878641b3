"""Where routers on several machines tell each other of their load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.document import Location
from router.config.section import Section
from router.config.values import PLAIN, Name, PlacedPath, Secret


class BoardConfig(Section, frozen=True):
    """A Valkey or Redis server that several routers use. Workers of one router need none."""

    url: (
        Annotated[
            str, Field(pattern=r"^(redis|valkey)s?://[A-Za-z0-9_.:\[\]-]+(/[0-9]{1,4})?$"), PLAIN
        ]
        | None
    ) = None
    """`redis://host:port/db`, or `rediss://` for TLS; `valkey` is the same. Null: none."""
    username: Name | None = None
    password: Secret | None = None
    secret: Secret | None = None
    """The same at all routers that share: what they say is sealed with it."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$"), PLAIN] = "kvroute"
    """Of keys and channel; routers of another one do not hear these."""
    ca: PlacedPath | None = None
    """Authorities that are trusted with TLS; null: the system's."""
    certificate: PlacedPath | None = None
    """Shown to a server that asks for one."""
    key: PlacedPath | None = None
    """Its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if self.url is not None and self.secret is None:
            yield ("secret",), "null; with a url it must be set, the same at all routers"
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
