"""Certificates of the router: towards its clients, and towards its replicas."""

from __future__ import annotations

from collections.abc import Iterator

from router.config.rules import Location
from router.config.section import Section
from router.config.values import PlacedPath


class ListenerTlsConfig(Section, frozen=True):
    """The router's certificate, and the clients it accepts. PEM files, read again when they
    change."""

    certificate: PlacedPath | None = None
    """The router's, with the chain up to its authority; null: plain HTTP.

    Change it when clients come over a network: PEM, the router's certificate and then those up to
    its authority."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""
    client_ca: PlacedPath | None = None
    """Authorities of which a client must show a certificate; null: clients need none.

    Change it when only clients with a certificate of these authorities may connect, besides any
    key."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
        elif self.client_ca is not None and self.certificate is None:
            yield ("client_ca",), "there must be a certificate and a key for that"


class ReplicaTlsConfig(Section, frozen=True):
    """Towards replicas, or other routers, whose URL begins with https. PEM files, read again when
    they change."""

    ca: PlacedPath | None = None
    """Authorities that are trusted; null: the system's.

    Change it when certificates there are from an authority of your own; it is then the only one
    that is trusted."""
    certificate: PlacedPath | None = None
    """Shown to those that ask for one.

    Change it when they ask for a certificate, as a router does with `server.tls.client_ca`."""
    key: PlacedPath | None = None
    """Always with a certificate: its private key, without a password."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Parts that are missing."""
        if (self.certificate is None) != (self.key is None):
            yield (), "must have both certificate and key, or neither"
