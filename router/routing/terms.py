"""The terms of a request: all that is known of it besides its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from router.fleet.replica import IsEligible, Replica
from router.routing.key_holders import ResponseOwner, TenantSalt

CheckModel: TypeAlias = Callable[[str], object]
"""Called with a model or adapter, as the client names it; raises where its key is not for it."""
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


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
