"""Reads a request's place from its key and headers: in a line by tenant, class and deadline, and in
an engine's queue by a number.

Gateways' own names of a header count at every door where the configured header does: llm-d's names,
and the older ones of the Gateway API's inference extension.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.config.routing import OverloadConfig
from router.errors import BadRequest
from router.fleet.line import LONGEST_TOKENS, LineLimits, Waiter, place_of
from router.fleet.room import WaitingRoom

_FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_TTFT = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
_MAX_TENANT_BYTES = 256
_MAX_NUMBER_CHARS = 32
_MAX_MS_DIGITS = 9
_CLASS_BITS = 58
"""Bits below the class, of 63: there are at most 16 classes, and at 1e8 tokens a second places fit.
At more, all waiting requests are equal, and served as they come."""


def headers_read(config: OverloadConfig) -> frozenset[bytes]:
    """All headers that decide on a request's place; names in lower case. Without a queue here the
    order is the engine's, which orders by priority alone."""
    priority = _names(config.priority_header, _OBJECTIVE)
    if not config.is_queueing:
        return frozenset(priority)
    return frozenset(
        (
            *priority,
            *_names(config.tenant_header, _FAIRNESS),
            *_names(config.timeout_header, ()),
            *(_TTFT if config.ttft_is_deadline else ()),
        )
    )


def line_limits(config: OverloadConfig) -> LineLimits:
    """The bounds on a line, as configured."""
    return LineLimits(
        waiting=config.max_waiting,
        tokens=config.max_waiting_tokens,
        classes=len(config.priorities),
        ageing_tokens_per_s=config.ageing_tokens_per_s,
    )


class PriorityClasses:
    """The priority classes, and a request's class."""

    def __init__(self, config: OverloadConfig) -> None:
        """
        Args:
            config: Their names, the default, and the header that names one.
        """
        self._classes = {name: number for number, name in enumerate(config.priorities)}
        self._default = config.default_priority
        self._headers = _names(config.priority_header, _OBJECTIVE)

    def of(self, headers: Mapping[bytes, bytes], of_key: str | None) -> int:
        """A request's class; 0 goes first.

        Args:
            of_key: The highest class of its key.
        Raises:
            BadRequest: Its header names no class.
        """
        highest = self._classes[of_key or self._default]
        header = _first(headers, self._headers)
        if header is None:
            return highest
        name = headers[header].decode("latin-1").strip()
        found = self._classes.get(name)
        if found is None:
            rule = f"expected one of {', '.join(self._classes)}"
            raise BadRequest(header.decode(), repr(name[:64]), rule)
        return found if of_key is None else max(found, highest)


class Entrance:
    """Reads the places of requests."""

    def __init__(self, config: OverloadConfig, room: WaitingRoom) -> None:
        self.room = room
        self._max_wait_s = config.max_wait_s
        self._classes = PriorityClasses(config)
        self._timeout_headers = _names(config.timeout_header, ())
        self._tenant_headers = _names(config.tenant_header, _FAIRNESS)
        self._objectives = _TTFT if config.ttft_is_deadline else ()

    def passed(
        self,
        model: str,
        uncached_tokens: int,
        holder: str = "",
        priority: str | None = None,
        share: float = 1.0,
    ) -> Waiter:
        """Note a request without headers that has started, since none waited. Call `room.over` at
        its end."""
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
        """Return a request that needs room at a replica.

        Raises:
            BadRequest: A header has no valid value.
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
        """The tenant that the headers name; empty without one."""
        header = _first(headers, self._tenant_headers)
        return "" if header is None else headers[header][:_MAX_TENANT_BYTES].decode("latin-1")

    def _patience_s(self, headers: Mapping[bytes, bytes]) -> float:
        return min(self._given_s(headers), self._objective_s(headers), self._max_wait_s)

    def _given_s(self, headers: Mapping[bytes, bytes]) -> float:
        """Seconds after which the client wants no response any more."""
        header = _first(headers, self._timeout_headers)
        if header is None:
            return math.inf
        text = headers[header].decode("latin-1").strip()[:_MAX_NUMBER_CHARS]
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise BadRequest(header.decode(), repr(text), "expected seconds above 0")
        return seconds

    def _objective_s(self, headers: Mapping[bytes, bytes]) -> float:
        """Seconds after which a first token is of no use."""
        header = _first(headers, self._objectives)
        if header is None:
            return math.inf
        text = headers[header].decode("latin-1").strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_MS_DIGITS and int(text)):
            raise BadRequest(header.decode(), repr(text[:40]), "expected milliseconds above 0")
        return int(text) / 1000


class OrderFacts(NamedTuple):
    """The parts of the numbers of an `EngineOrder`, for the compiled core, which makes the same."""

    ageing_tokens_per_s: float
    usual_class: int
    """The usual class of requests whose headers and keys name none."""
    class_bits: int = _CLASS_BITS
    longest_tokens: int = LONGEST_TOKENS


class EngineOrder:
    """Computes the priority numbers of requests for engines that order their queue by numbers, so
    that they serve in the order of our own line: by class, then short before long, with ageing.

        number = class * 2**58 + place, of its tokens to compute and its arrival in seconds since
                 1970

    The wall clock makes the numbers of several routers comparable.
    """

    def __init__(self, config: OverloadConfig, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: The wall clock, in seconds since 1970.
        """
        self._classes = PriorityClasses(config)
        self._ageing_tokens_per_s = config.ageing_tokens_per_s
        self._clock = clock

    @property
    def facts(self) -> OrderFacts:
        return OrderFacts(self._ageing_tokens_per_s, self.class_of(None))

    def class_of(self, of_key: str | None) -> int:
        """The class of requests whose headers name none; 0 goes first.

        Args:
            of_key: The highest class of their key.
        """
        return self._classes.of({}, of_key)

    def numbers(
        self, headers: Mapping[bytes, bytes], of_key: str | None, waited_s: float
    ) -> Callable[[int], int]:
        """Return a function from one request's tokens to compute to its number; lower goes first.

        Args:
            of_key: The highest class of its key.
        Raises:
            BadRequest: Its header names no class.
        """
        first = self._classes.of(headers, of_key) << _CLASS_BITS
        arrived = self._clock() - waited_s

        def number_of(tokens: int) -> int:
            place = round(place_of(tokens, arrived, self._ageing_tokens_per_s))
            return first + min(place, (1 << _CLASS_BITS) - 1)

        return number_of


def _names(header: str | None, others: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return a header and its other names; nothing where it is not read."""
    return () if header is None else (header.encode(), *others)


def _first(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> bytes | None:
    """Return the first of the headers that is present and not empty."""
    return next((name for name in names if headers.get(name)), None)
