"""Reads the terms of requests from their keys and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.doors.asks import Key, tenant_salt
from router.fleet.entrance import Entrance
from router.plane.attempts import RANK_HEADER
from router.routing.terms import Terms, session_in

_MAX_RANK_DIGITS = 5


@dataclass(frozen=True, slots=True)
class TermsReader:
    """Reads the terms of requests: what their keys and headers say of them."""

    session_header: bytes
    """Names a client's session; in lower case."""
    entrance: Entrance | None
    """Reads which tenant they name; None: they name none."""
    trusts_rank: bool
    """True if clients may choose the data-parallel rank."""

    def read(self, key: Key, headers: Mapping[bytes, bytes], path: str) -> Terms:
        """Return the terms of one request.

        Args:
            headers: Names in lower case.
            path: The form of the body, which may have fields for the key's salt.
        """
        named = "" if self.entrance is None else self.entrance.tenant(headers)
        return Terms(
            session=session_in(headers, self.session_header),
            headers=headers,
            dp_rank=_rank(headers) if self.trusts_rank else None,
            salt=tenant_salt(key, path),
            check_model=key.check_model,
            owner=key.owner,
            tenant=named or key.tenant,
        )


def _rank(headers: Mapping[bytes, bytes]) -> int | None:
    """The data-parallel rank that a request asks for; anything else than a number is left to the
    engine."""
    given = headers.get(RANK_HEADER, b"")
    return int(given) if given.isdigit() and len(given) <= _MAX_RANK_DIGITS else None
