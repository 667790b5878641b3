"""Separates the holders of keys: salts their cached blocks, and names their responses."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from functools import cached_property

from router.errors import UnknownResponse

_NAME = re.compile(r"(resp_[0-9a-f]{32})([0-9a-f]{32})\Z")
_STRETCHED = 10_000
"""Rounds between a key and the seal of its ids, so that they do not help to guess it."""


@dataclass(frozen=True, slots=True)
class TenantSalt:
    """Holds the salt that separates the cached blocks of a key's holders from others'."""

    secret: bytes = field(repr=False)
    names: tuple[str, ...]
    """The fields of the body that engines read a salt from."""


class ResponseOwner:
    """The holder of a key, where there are several: it names the responses made with it, and
    recognises its names.

    The router sends `request_id`, which engines take as the response's id: half of it is random,
    the other half a seal that only the same key gives. So every router knows whose a
    response is, also after a restart, and none has to remember it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def name_response(self, body: bytes) -> bytes:
        """The JSON object *body* with an id for the response that it asks for. An id that the
        client has chosen comes before it, and engines take the last."""
        random = f"resp_{secrets.token_hex(16)}"
        end = len(body.rstrip()) - 1
        comma = b"" if body[:end].rstrip().endswith(b"{") else b","
        name = f'"request_id":"{random}{self._seal(random)}"}}'.encode()
        return b"".join((memoryview(body)[:end], comma, name))

    def check(self, response_id: str) -> None:
        """Check that a response was made with this key.

        Raises:
            UnknownResponse: It was not, or does not exist.
        """
        found = _NAME.match(response_id)
        if found is None or not hmac.compare_digest(found[2], self._seal(found[1])):
            raise UnknownResponse

    def _seal(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()[:32]

    @cached_property
    def _secret(self) -> bytes:
        return hashlib.pbkdf2_hmac("sha256", self._key, b"kvroute stored responses", _STRETCHED)
