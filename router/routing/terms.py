"""The terms of a request: all that is known of it besides its body."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from router.errors import UnknownResponse
from router.fleet.replica import IsEligible, Replica

CheckModel: TypeAlias = Callable[[str], object]
"""Called with a model or adapter, as the client names it; raises where its key is not for it."""
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})

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


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the terms of one request."""

    session: str | None = None
    """The client's, where a header names it; the body may name one as well."""
    headers: Mapping[bytes, bytes] = NO_HEADERS
    """Names in lower case; one may choose the model's version."""
    dp_rank: int | None = None
    """The data-parallel rank that the client asks for, where clients may."""
    salt: TenantSalt | None = None
    """The salt of the client's key; put into the body, and into the question to the index."""
    check_model: CheckModel | None = None
    """Checks that the key is for the model, before any work is done."""
    owner: ResponseOwner | None = None
    """The holder of that key, where there are several."""
    tenant: str = ""
    """The tenant of the request, where there may be several."""
    is_eligible: IsEligible | None = None
    """Returns whether a replica may be chosen; None: all that serve the model."""
    version: str | None = None
    """The version of the model, if chosen already."""

    @property
    def secret(self) -> bytes | None:
        """The secret of the salt."""
        return None if self.salt is None else self.salt.secret


NO_TERMS = Terms()


def session_in(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    """The client's session by a header; None where it names none."""
    session = headers.get(name)
    return session.decode("latin-1") if session else None


def among(replicas: Mapping[str, Replica], is_eligible: IsEligible | None) -> Mapping[str, Replica]:
    """Return those of *replicas* that may be chosen."""
    if is_eligible is None:
        return replicas
    return {id_: each for id_, each in replicas.items() if is_eligible(each)}
