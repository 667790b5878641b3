"""The router's TLS identity and the authorities it trusts, as the core has them. The core brings no
OpenSSL of its own: it uses the library that this Python is linked with, or else the system's."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from router._core import TlsContext, load_tls


class NoTls(Exception):
    """TLS has no library, or a file cannot be used."""

    is_towards_clients = False
    """True if the file is shown to clients, or they are trusted by it."""


class PemFiles(NamedTuple):
    """Paths of PEM files; empty: no such file."""

    certificate: str = ""
    key: str = ""
    authorities: str = ""


class Secured(NamedTuple):
    """The two sides that may use TLS."""

    towards_clients: TlsContext | None = None
    """None: clients speak plain HTTP."""
    towards_replicas: TlsContext | None = None
    """None: no replica can be reached by https."""

    @classmethod
    def made(cls, towards_clients: PemFiles | None, towards_replicas: PemFiles) -> Secured:
        """Make it from the files as they are now, after `load_openssl`.

        Args:
            towards_clients: None: plain HTTP.
            towards_replicas: Without authorities, the system's are trusted.
        Raises:
            NoTls: A file cannot be used.
        """
        clients = None
        try:
            if towards_clients is not None:
                clients = TlsContext.for_clients(*towards_clients)
        except ValueError as error:
            found = NoTls(str(error))
            found.is_towards_clients = True
            raise found from None
        try:
            return cls(clients, TlsContext.for_servers(*towards_replicas))
        except ValueError as error:
            raise NoTls(str(error)) from None


def load_openssl() -> str:
    """Find the library; return its version.

    Raises:
        NoTls: No usable one was found.
    """
    places = ["libssl.so.3"]
    try:
        linked = import_module("_ssl")
    except ImportError:
        pass
    else:
        # Whatever that is linked with is found through it, under any name.
        places[:0] = filter(None, [getattr(linked, "__file__", None)])
    try:
        return load_tls(places)
    except ValueError as error:
        raise NoTls(str(error)) from None
