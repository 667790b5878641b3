"""A question where a request should go: its caller and its purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from router.fleet.limits import KeyUsage
from router.fleet.replica import IsEligible
from router.prompt.endpoints import Endpoint
from router.routing.key_holders import ResponseOwner, TenantSalt


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a question's key, and its rights."""

    name: str = ""
    """The name of the key; empty without one."""
    salt: TenantSalt | None = field(default=None, repr=False)
    usage: KeyUsage | None = field(default=None, repr=False)
    owner: ResponseOwner | None = field(default=None, repr=False)
    priority: str | None = None
    share: float = 1.0


ANONYMOUS = Caller()


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
    session: str | None = None
    dp_rank: int | None = None
    """The data-parallel rank, where the gateway has chosen it."""
    is_eligible: IsEligible | None = None
    """Returns whether the gateway can send it to a replica; None: to all."""
    caller: Caller = ANONYMOUS
    trace_id: str | None = None
