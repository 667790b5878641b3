"""Defines what the doors ask of routing; `Dispatcher` answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from router.prompt.body.splicing import with_model
from router.prompt.endpoints import Encoding, Endpoint
from router.routing.decision import Decision
from router.routing.terms import NO_TERMS, Terms


class Deciding(Protocol):
    """Decides where requests go; `Dispatcher` has what each call does and raises."""

    async def dispatch(
        self,
        endpoint: Endpoint | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        encoding: Encoding = "json",
        *,
        needs_model: bool = True,
    ) -> Decision: ...
    def dispatch_now(
        self, endpoint: Endpoint, body: bytes, terms: Terms = NO_TERMS, encoding: Encoding = "json"
    ) -> Decision | Coroutine[Any, Any, Decision]: ...
    def dispatch_by_load(
        self,
        name: str | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        *,
        needs_model: bool = True,
        rename: Callable[[bytes, str], bytes] = with_model,
    ) -> Decision: ...
    def dispatch_to_holder(
        self, response_id: str, body: bytes, terms: Terms = NO_TERMS
    ) -> Coroutine[Any, Any, Decision]: ...
    def have_room(self, decision: Decision) -> bool: ...
    def redecide(self, decision: Decision) -> Decision: ...
