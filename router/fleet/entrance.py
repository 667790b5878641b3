"""From a request's key and headers to its place in a line: whose it is, how urgent, until when."""

from __future__ import annotations

import math
from collections.abc import Mapping

from router.config import OverloadConfig
from router.errors import BadRequest
from router.fleet.line import LineLimits, Waiter
from router.fleet.room import WaitingRoom

_MAX_TENANT_BYTES = 256
_MAX_NUMBER_CHARS = 32


def line_limits(config: OverloadConfig) -> LineLimits:
    """The bounds on a line, as configured."""
    return LineLimits(
        waiting=config.max_waiting,
        tokens=config.max_waiting_tokens,
        classes=len(config.priorities),
        ageing_tokens_per_s=config.ageing_tokens_per_s,
    )


class PriorityClasses:
    """The classes, and which one a request has."""

    def __init__(self, config: OverloadConfig) -> None:
        """
        Args:
            config: Their names, the default, and the header that names one.
        """
        self._classes = {name: number for number, name in enumerate(config.priorities)}
        self._default = config.default_priority
        self._header = _name(config.priority_header)

    def of(self, headers: Mapping[bytes, bytes], of_key: str | None) -> int:
        """A request's class; 0 goes first.

        Args:
            headers: The request's, names in lower case.
            of_key: The highest class of its key.
        Raises:
            BadRequest: Its header names no class.
        """
        highest = self._classes[of_key or self._default]
        asked = headers.get(self._header) if self._header else None
        if not asked:
            return highest
        name = asked.decode("latin-1").strip()
        found = self._classes.get(name)
        if found is None:
            assert self._header is not None
            rule = f"expected one of {', '.join(self._classes)}"
            raise BadRequest(self._header.decode(), repr(name[:64]), rule)
        return found if of_key is None else max(found, highest)


class Entrance:
    """Where requests come in."""

    def __init__(self, config: OverloadConfig, room: WaitingRoom) -> None:
        """
        Args:
            config: Which headers are read, and the classes.
            room: Where they wait.
        """
        self.room = room
        self._max_wait_s = config.max_wait_s
        self._classes = PriorityClasses(config)
        self._timeout_header = _name(config.timeout_header)
        self._tenant_header = _name(config.tenant_header)

    def passed(
        self,
        model: str,
        uncached_tokens: int,
        holder: str = "",
        priority: str | None = None,
        share: float = 1.0,
    ) -> Waiter:
        """Count a request without headers that has started, since nobody waited. Call `room.over`
        at its end.

        Args:
            model: Its base model.
            uncached_tokens: To be computed.
            holder: As for `waiter`, like the next two.
            priority: The highest class of that key.
            share: Of that key.
        """
        waiter = self.waiter(model, {}, holder, priority, share)
        waiter.tokens = uncached_tokens
        self.room.passed(waiter)
        return waiter

    def waiter(
        self,
        model: str,
        headers: Mapping[bytes, bytes],
        holder: str = "",
        priority: str | None = None,
        share: float = 1.0,
    ) -> Waiter:
        """A request that needs room at a replica.

        Args:
            model: Its base model.
            headers: The request's, names in lower case.
            holder: Whose key it came with.
            priority: The highest class of that key.
            share: Of that key.
        Raises:
            BadRequest: A header does not say what it should.
        """
        return Waiter(
            model=model,
            tenant=self.tenant(headers) or holder,
            weight=share,
            priority=self._classes.of(headers, priority),
            tokens=0,
            deadline=self.room.clock() + self._patience_s(headers),
        )

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """Whose request it is, as its headers say; empty where they do not."""
        if self._tenant_header is None:
            return ""
        return headers.get(self._tenant_header, b"")[:_MAX_TENANT_BYTES].decode("latin-1")

    def _patience_s(self, headers: Mapping[bytes, bytes]) -> float:
        given = headers.get(self._timeout_header) if self._timeout_header else None
        if not given:
            return self._max_wait_s
        text = given.decode("latin-1").strip()[:_MAX_NUMBER_CHARS]
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            assert self._timeout_header is not None
            raise BadRequest(self._timeout_header.decode(), repr(text), "expected seconds above 0")
        return min(seconds, self._max_wait_s)


def _name(header: str | None) -> bytes | None:
    return None if header is None else header.encode()
