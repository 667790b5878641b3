"""CURVE for event streams, which carry prompts: ZMQ's encryption, with a pair of keys at each end.

The publisher has a pair, and a list of permitted subscribers; a subscriber has one as well, and
knows the publisher's public key. Without the right key a peer gets nothing. The protocol is
CurveZMQ (rfc.zeromq.org/spec/26), the files are those of pyzmq's `zmq.auth`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kvevents.errors import CurveError

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
ZAP_DOMAIN = "kvevents"
"""The domain of all sockets that publishers bind (rfc.zeromq.org/spec/27)."""
# Z85 (rfc.zeromq.org/spec/32): 40 characters for 32 bytes.
_KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
PUBLIC_KEY_CHARS = 40
_MAX_CLIENTS = 4096


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The pair of one end."""

    public: bytes
    """40 characters of Z85."""
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The keys of a publisher."""

    keys: CurveKeys
    clients: frozenset[bytes] | None = None
    """Public keys of permitted clients; None: all that know the publisher's."""

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Admit only clients with a key. Call it before the socket is bound."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def start_authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator | None:
        """Return the started authenticator of the clients' keys; None without keys to check.

        A context has room for one.
        """
        if self.clients is None:
            return None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(ZAP_DOMAIN, self)
        return authenticator

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a client may connect; called in the authenticator's thread."""
        return self.clients is None or key in self.clients


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The keys of a subscriber."""

    keys: CurveKeys
    server: bytes
    """The publisher's public key."""

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Connect to that publisher only. Call it before the socket is connected."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a pair; return the files of the public and of the secret key. Only the owner can read
    the latter.

    Args:
        name: The files', before their suffix.
    Raises:
        CurveError: The files cannot be written, exist, or this libzmq has no CURVE.
    """
    _require_curve()
    paths = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    existing = [path for path in paths if path.exists()]
    if existing:
        raise CurveError(f"{existing[0]}: exists already")
    before = os.umask(0o077)
    try:
        zmq.auth.create_certificates(directory, name)
    except OSError as error:
        raise CurveError(f"{directory}: {error.strerror}") from None
    finally:
        os.umask(before)
    paths[0].chmod(0o644)
    return paths


def read_keys(path: Path) -> CurveKeys:
    """Read a pair from the file of its secret key.

    Raises:
        CurveError: The file cannot be read, or holds no secret key.
    """
    _require_curve()
    public, secret = _read(path)
    if secret is None:
        raise CurveError(f"{path}: holds no secret key; expected the file {SECRET_SUFFIX}")
    return CurveKeys(public, secret)


def read_clients(directory: Path) -> frozenset[bytes]:
    """Read all public keys in a directory.

    Raises:
        CurveError: It cannot be read, holds none, or too many.
    """
    try:
        paths = sorted(directory.glob(f"*{PUBLIC_SUFFIX}"))
    except OSError as error:
        raise CurveError(f"{directory}: {error.strerror}") from None
    if not 0 < len(paths) <= _MAX_CLIENTS:
        rule = f"expected 1 to {_MAX_CLIENTS} files {PUBLIC_SUFFIX}, one for each client"
        raise CurveError(f"{directory}: holds {len(paths)} public keys; {rule}")
    return frozenset(_read(path)[0] for path in paths)


def parse_public_key(text: str) -> bytes:
    """Parse a public key: 40 characters of Z85.

    Raises:
        CurveError: It is not a key.
    """
    key = text.encode("utf-8", "replace")
    if not _KEY.match(key):
        raise CurveError(f"{text[:60]!r}; a public key has 40 characters of Z85")
    return key


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except ValueError:
        raise CurveError(f"{path}: holds no public key") from None
    if not all(_KEY.match(key) for key in (public, secret) if key is not None):
        raise CurveError(f"{path}: holds a key that is not 40 characters of Z85")
    return public, secret


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise CurveError("this build of libzmq has no CURVE; pyzmq's own wheels have it")
