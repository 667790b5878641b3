"""TLS contexts for the listener and towards replicas. Certificates and authorities that are renewed
in their files are used for new connections; those that are open stay."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from router.config.document import Stamp, stamp_of
from router.config.server import ListenerTlsConfig, ReplicaTlsConfig
from router.errors import ConfigError, ConfigProblem

logger = logging.getLogger(__name__)

LISTENER, REPLICAS, PEERS = "server.tls", "server.replica_tls", "state.peer_tls"
PICKER = "doors.ext_proc.tls"
"""Their places in the configuration."""
_WATCH_S = 5.0


@dataclass(eq=False)
class Certificate:
    """A context, made of the files that one side shows and trusts.

    Raises:
        ConfigError: A file cannot be used.
    """

    place: str
    is_of_server: bool
    certificate: str | None
    key: str | None
    authorities: str | None
    """Trusted authorities; None: the system's, or no certificate is asked for."""
    context: ssl.SSLContext = field(init=False, repr=False)
    """It is another one once the files have been read again."""
    loaded: list[Stamp | None] = field(init=False, repr=False)
    """The stamp of the files before they were read for it."""

    def __post_init__(self) -> None:
        self.load()

    def load(self) -> None:
        """Make the context of what the files hold now. A context that exists can be given
        authorities, but none can be taken from it.

        Raises:
            ConfigError: They cannot be read, or do not belong together; the old context stays.
        """
        stamp, context = self.stamp(), self._trusting()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (OSError, ValueError) as error:
                raise _refusal(f"{self.place}.certificate", self.certificate, error) from None
        self.context, self.loaded = context, stamp

    def stamp(self) -> list[Stamp | None]:
        """Return a value that changes when a file changes."""
        files = self.certificate, self.key, self.authorities
        return [stamp_of(Path(path)) for path in files if path]

    def _trusting(self) -> ssl.SSLContext:
        """Return a new context that shows nothing yet."""
        if self.authorities is None and not self.is_of_server:
            return ssl.create_default_context()
        protocol = ssl.PROTOCOL_TLS_SERVER if self.is_of_server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        if self.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            option = "client_ca" if self.is_of_server else "ca"
            try:
                context.load_verify_locations(self.authorities)
            except (OSError, ValueError) as error:
                raise _refusal(f"{self.place}.{option}", self.authorities, error) from None
        return context


def listener_certificate(config: ListenerTlsConfig, place: str = LISTENER) -> Certificate | None:
    """Return a listener's certificate; None for one without encryption.

    Args:
        place: Its path in the configuration.
    Raises:
        ConfigError: A file cannot be used.
    """
    if config.certificate is None:
        return None
    return Certificate(place, True, config.certificate, config.key, config.client_ca)


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
    return Certificate(place, False, config.certificate, config.key, config.ca)


def context_of(certificate: Certificate | None) -> ssl.SSLContext | None:
    """Return the context of what its files last held; None to trust the system's authorities."""
    return None if certificate is None else certificate.context


async def keep_fresh(
    certificates: Sequence[Certificate], on_renewed: Callable[[], None] = lambda: None
) -> None:
    """Read certificates again when their files change, until cancelled. While a pair does not
    belong together, as between two writes, or cannot be read, the old one stays and the new one is
    tried again.

    Args:
        on_renewed: Called when one has been read again; may raise `ConfigError`.
    """
    seen = [each.loaded for each in certificates]
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


def _refusal(place: str, path: str, error: Exception) -> ConfigError:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return ConfigError([ConfigProblem(place, f"{path!r} cannot be used: {why}")])


def _no_password() -> str:
    """Give OpenSSL no password for an encrypted key: it must not wait for a terminal."""
    raise ValueError("the key is encrypted; it must have no password")
