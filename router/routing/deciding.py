"""Defines what the doors ask of routing; `Dispatcher` answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from router.prompt.body.splicing import with_model
from router.prompt.endpoints import Endpoint
from router.routing.decision import Decision
from router.routing.terms import NO_TERMS, Terms


class Deciding(Protocol):
    """Decides where requests go. `Dispatcher` says of each call what it raises."""

    async def dispatch(
        self,
        endpoint: Endpoint | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        encoding: Literal["json", "msgpack"] = "json",
        *,
        needs_model: bool = True,
    ) -> Decision:
        """Decide by the prompt in a body; where it holds none, by load."""
        ...

    def dispatch_now(
        self,
        endpoint: Endpoint,
        body: bytes,
        terms: Terms = NO_TERMS,
        encoding: Literal["json", "msgpack"] = "json",
    ) -> Decision | Coroutine[Any, Any, Decision]:
        """The same: at once where nothing has to be waited for."""
        ...

    def dispatch_by_load(
        self,
        name: str | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        *,
        needs_model: bool = True,
        rename: Callable[[bytes, str], bytes] = with_model,
    ) -> Decision:
        """Decide without a look at the prompt."""
        ...

    def dispatch_to_holder(
        self, response_id: str, body: bytes, terms: Terms = NO_TERMS
    ) -> Coroutine[Any, Any, Decision]:
        """Decide for the replica that has a stored response."""
        ...

    def have_room(self, decision: Decision) -> bool:
        """Return whether a replica has room for a request that waits."""
        ...

    def redecide(self, decision: Decision) -> Decision:
        """Decide again, by the replicas' present load."""
        ...
