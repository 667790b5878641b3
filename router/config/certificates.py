"""TLS contexts for the listener and towards replicas. A certificate that is renewed in its file is
used for new connections; those that are open stay."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from router.config.files import Stamp, stamp_of
from router.config.tls import ListenerTlsConfig, ReplicaTlsConfig
from router.errors import ConfigError, ConfigProblem

logger = logging.getLogger(__name__)

LISTENER, REPLICAS, PEERS = "server.tls", "server.replica_tls", "state.peer_tls"
"""Their places in the configuration."""
_WATCH_S = 5.0


class Certificate(NamedTuple):
    """A context, and the files that its own certificate came from."""

    context: ssl.SSLContext
    place: str
    certificate: str | None = None
    key: str | None = None
    authorities: str | None = None
    """Trusted authorities; None: the system's, or no certificate is asked for."""

    def load(self) -> None:
        """Read the files (again).

        Raises:
            ConfigError: They cannot be read, or do not belong together.
        """
        if self.certificate is None:
            return
        try:
            # A failed attempt would leave the context with a part of it.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.context):
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _refusal(f"{self.place}.certificate", self.certificate, error) from None

    def stamp(self) -> list[Stamp | None]:
        """A value that changes when a file changes."""
        return [stamp_of(Path(path)) for path in (self.certificate, self.key) if path]


def listener_certificate(config: ListenerTlsConfig) -> Certificate | None:
    """Return the listener's certificate; None for plain HTTP.

    Raises:
        ConfigError: A file cannot be used.
    """
    if config.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, f"{LISTENER}.client_ca", config.client_ca)
    found = Certificate(context, LISTENER, config.certificate, config.key, config.client_ca)
    found.load()
    return found


def replica_certificate(config: ReplicaTlsConfig, place: str = REPLICAS) -> Certificate | None:
    """Return the certificate towards replicas; None to trust the system's authorities and to show
    nothing.

    Args:
        place: Its path in the configuration.
    Raises:
        ConfigError: A file cannot be used.
    """
    if config.ca is None and config.certificate is None:
        return None
    if config.ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(context, f"{place}.ca", config.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    found = Certificate(context, place, config.certificate, config.key, config.ca)
    found.load()
    return found


async def keep_fresh(
    certificates: Sequence[Certificate], on_renewed: Callable[[], None] = lambda: None
) -> None:
    """Read certificates again when their files change, until cancelled. While a pair does not
    belong together, as between two writes, or cannot be read, the old one stays and the new one is
    tried again.

    Args:
        on_renewed: Called when one has been read again; may raise `ConfigError`.
    """
    seen = [await asyncio.to_thread(each.stamp) for each in certificates]
    refused: dict[int, str] = {}  # why, by index
    while True:
        await asyncio.sleep(_WATCH_S)
        for index, each in enumerate(certificates):
            stamp = await asyncio.to_thread(each.stamp)
            if stamp == seen[index] and index not in refused:
                continue
            seen[index], before = stamp, refused.pop(index, None)
            why = _load_again(each, on_renewed)
            if why is None:
                logger.info("%s: the renewed certificate is in use", each.place)
                continue
            refused[index] = why
            if why != before:
                logger.error("a renewed certificate is refused, the old one stays: %s", why)


def _load_again(certificate: Certificate, on_renewed: Callable[[], None]) -> str | None:
    """Return why it is refused; None if it is in use."""
    try:
        certificate.load()
        on_renewed()
    except ConfigError as error:
        return str(error)
    return None


def _trust(context: ssl.SSLContext, place: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise _refusal(place, path, error) from None


def _refusal(place: str, path: str, error: Exception) -> ConfigError:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return ConfigError([ConfigProblem(place, f"{path!r} cannot be used: {why}")])


def _no_password() -> str:
    """Give OpenSSL no password for an encrypted key: it must not wait for a terminal."""
    raise ValueError("the key is encrypted; it must have no password")
