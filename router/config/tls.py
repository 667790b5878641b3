"""Certificates of the router: towards its clients, and towards its replicas."""

from __future__ import annotations

from collections.abc import Iterator

from router.config.document import Location
from router.config.section import Section
from router.config.values import PlacedPath


class ListenerTlsConfig(Section, frozen=True):
    """How the router shows who it is, and whom it lets in. PEM files, read again when they
    change."""

    certificate: PlacedPath | None = None
    """The router's, with the chain up to its authority; null: plain HTTP."""
    key: PlacedPath | None = None
    """Its private key, without a password."""
    client_ca: PlacedPath | None = None
    """Authorities of which a client must show a certificate; null: clients need none."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
        elif self.client_ca is not None and self.certificate is None:
            yield ("client_ca",), "there must be a certificate and a key for that"


class ReplicaTlsConfig(Section, frozen=True):
    """Towards replicas, or other routers, whose URL begins with https. PEM files."""

    ca: PlacedPath | None = None
    """Authorities that are trusted; null: the system's."""
    certificate: PlacedPath | None = None
    """Shown to those that ask for one; read again when it changes."""
    key: PlacedPath | None = None
    """Its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
