"""A question where a request should go: the key that it came with, and its purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from router.doors.proxied_paths import salt_names
from router.fleet.limits import KeyUsage
from router.fleet.replica import IsEligible
from router.prompt.endpoints import Endpoint
from router.routing.key_holders import ResponseOwner, TenantSalt

_MAX_REQUEST_ID_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Key:
    """A key that was presented and accepted, and the rights of its holder."""

    name: str = ""
    """Empty where no key is needed."""
    secret: bytes = field(default=b"", repr=False)
    cache_salt: bytes | None = field(default=None, repr=False)
    priority: str | None = None
    """The highest class of its requests."""
    share: float = 1.0
    usage: KeyUsage | None = field(default=None, repr=False, compare=False)
    """Its holder's usage, if that is limited."""
    owner: ResponseOwner | None = field(default=None, repr=False, compare=False)
    """The owner of the responses made with it, where there are several keys."""

    @property
    def check_model(self) -> Callable[[str], object] | None:
        """Checks that it is for a model; None: it is for all."""
        return None if self.usage is None else self.usage.check_model

    @property
    def tenant(self) -> str:
        """Its holder, where there are several."""
        return "" if self.owner is None else self.name

    @property
    def in_line(self) -> tuple[str, str | None, float]:
        """The place of its requests in a line: holder, class and share."""
        return self.name, self.priority, self.share


ANONYMOUS = Key()
"""In place of a key where none is needed."""


def tenant_salt(key: Key, path: str) -> TenantSalt | None:
    """Return the salt of a key, and its fields; None where none is to be added."""
    if key.cache_salt is None or not salt_names(path):
        return None
    return TenantSalt(key.cache_salt, salt_names(path))


def new_id() -> str:
    """Return an id that cannot be guessed."""
    return f"{random.SystemRandom().getrandbits(128):032x}"


def request_id_in(headers: Mapping[bytes, bytes]) -> str:
    """The client's id of a request, or a new one where it gives none, or one that is too long."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("latin-1") if 0 < len(given) <= _MAX_REQUEST_ID_LENGTH else new_id()


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question of a gateway."""

    endpoint: Endpoint | None
    """The form of the body; `Endpoint.ROUTE`: the body names it; None: it holds no prompt that is
    looked at."""
    response_id: str = ""
    """The stored response that it names."""
    body: bytes
    path: str
    """The path, for the request log."""
    request_id: str
    """Ties the logs of gateway, router and engine together."""
    headers: Mapping[bytes, bytes] = MappingProxyType({})
    """Names in lower case."""
    dp_rank: int | None = None
    """The data-parallel rank, where the gateway has chosen it."""
    is_eligible: IsEligible | None = None
    """Returns whether the gateway can send it to a replica; None: to all."""
    caller: Key = ANONYMOUS
    trace_id: str | None = None
