"""Computes the priority number of a request for engines that order their queue by numbers, so that
they serve in the order of our own line: by class, then short before long, with ageing.

    number = class * 2**58 + place, of its tokens to compute and its arrival in seconds since 1970

The wall clock makes the numbers of several routers comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.config.routing import OverloadConfig
from router.fleet.entrance import PriorityClasses
from router.fleet.line import LONGEST_TOKENS, place_of

_CLASS_BITS = 58
"""Bits below the class, of 63: there are at most 16 classes, and at 1e8 tokens a second places fit.
At more, all waiting requests are equal, and served as they come."""


class OrderFacts(NamedTuple):
    """The parts of these numbers, for the compiled core, which makes the same."""

    ageing_tokens_per_s: float
    usual_class: int
    """The usual class of requests whose headers and keys name none."""
    class_bits: int = _CLASS_BITS
    longest_tokens: int = LONGEST_TOKENS


class EngineOrder:
    """The order of our own queue, as numbers."""

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
