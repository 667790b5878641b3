"""Counts and limits the usage of a key's holder: requests and tokens in a minute, requests at a
time, models.

A minute is any 60 s, not one of the clock's, so that no one gets twice as much around its turn.
What other routers have counted for the same key is added: each publishes its own counts from time
to time, and no request waits for that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from kvevents.field_docs import counter, gauge
from router.config.server import ClientKeyConfig
from router.errors import KeyLimitReached, ModelNotAllowed
from router.fleet.types import KeyCounts

_WINDOW_S = 60
_STEPS_PER_S = 2
"""Steps of the window: the counts of one step leave it together."""


_NOTHING = KeyCounts(0, 0, 0)


@dataclass(slots=True, eq=False, repr=False)
class MinuteCount:
    """A sum over the last minute. Its memory is bounded by the steps of a minute."""

    _steps: deque[tuple[int, int]] = field(default_factory=deque)
    _sum: int = 0

    def add(self, amount: int, now: float) -> None:
        self.at(now)
        step = math.floor(now * _STEPS_PER_S)
        if self._steps and self._steps[-1][0] >= step:
            step, before = self._steps.pop()
            self._steps.append((step, before + amount))
        else:
            self._steps.append((step, amount))
        self._sum += amount

    def at(self, now: float) -> int:
        """The sum of the last minute."""
        oldest = math.floor(now * _STEPS_PER_S) - _WINDOW_S * _STEPS_PER_S
        while self._steps and self._steps[0][0] <= oldest:
            self._sum -= self._steps.popleft()[1]
        return self._sum

    def falls_in_s(self, amount: int, now: float) -> float:
        """After how many seconds the sum is less by *amount*, if nothing is added; the whole minute
        where it never will be."""
        for step, counted in self._steps:
            amount -= counted
            if amount <= 0:
                return (step + 1) / _STEPS_PER_S + _WINDOW_S - now
        return float(_WINDOW_S)


@dataclass(slots=True, eq=False, repr=False)
class KeyUsage:
    """Counts and limits the usage of one key's holder. Belongs to one event loop."""

    _config: ClientKeyConfig
    _clock: Callable[[], float] = time.monotonic
    _requests: MinuteCount = field(default_factory=MinuteCount)
    _tokens: MinuteCount = field(default_factory=MinuteCount)
    elsewhere: KeyCounts = _NOTHING
    """The counts of other routers for this key."""
    total_requests: Annotated[int, counter("kvroute_key_requests")] = 0
    """Requests with a key that has limits (`server.client_api_keys[]`)."""
    total_tokens: Annotated[int, counter("kvroute_key_tokens")] = 0
    """Tokens of prompts and responses with a key that has limits."""
    in_flight: Annotated[int, gauge("kvroute_key_in_flight")] = 0
    """Requests under way with a key that has limits."""
    refusals: Annotated[dict[str, int], counter("kvroute_key_refusals", "limit")] = field(
        default_factory=lambda: dict.fromkeys(("requests", "tokens", "in_flight", "model"), 0)
    )
    """Requests that a limit of their key refused: `requests`, `tokens`, `in_flight`, `model`."""

    def counts(self) -> KeyCounts:
        now = self._clock()
        return KeyCounts(self._requests.at(now), self._tokens.at(now), self.in_flight)

    def may_enter(self) -> bool:
        """Return whether `enter` lets a request in at this moment."""
        return not self._is_full and self._wait_s("requests", 1) is None

    def may_spend(self, prompt_tokens: int) -> bool:
        """Return whether `spend` takes a prompt at this moment."""
        return self._wait_s("tokens", prompt_tokens) is None

    def enter(self) -> None:
        """A request has arrived; call `leave` at its end, unless this raises `KeyLimitReached`."""
        if self._is_full:
            rule = f"{self._config.max_in_flight} requests at a time"
            raise self._refused("in_flight", rule, 1)
        self._check("requests", 1)
        self._requests.add(1, self._clock())
        self.total_requests += 1
        self.in_flight += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that is over when the block is left, and costs no tokens."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def check_model(self, model: str) -> None:
        """Check that the key is for a model or adapter, as the client names it; raises
        `ModelNotAllowed`."""
        if not self.allows(model):
            self.refusals["model"] += 1
            raise ModelNotAllowed(model)

    def spend(self, prompt_tokens: int) -> None:
        """The prompt is known; raises `KeyLimitReached` where it has more tokens than the holder
        may have in a minute."""
        self._check("tokens", prompt_tokens)
        self._count_tokens(prompt_tokens)

    def leave(self, response_tokens: int = 0) -> None:
        self.in_flight -= 1
        self._count_tokens(response_tokens)

    @property
    def is_for_all_models(self) -> bool:
        return self._config.models is None

    def allows(self, model: str) -> bool:
        """Return whether the key is for a model or adapter."""
        models = self._config.models
        return models is None or any(fnmatchcase(model, pattern) for pattern in models)

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return what is left, in OpenAI's headers."""
        found: list[tuple[bytes, bytes]] = []
        for name in ("requests", "tokens"):
            limit, own, elsewhere = self._minute(name)
            if limit is not None:
                left = max(limit - own.at(self._clock()) - elsewhere, 0)
                found.append((b"x-ratelimit-limit-" + name.encode(), b"%d" % limit))
                found.append((b"x-ratelimit-remaining-" + name.encode(), b"%d" % left))
        return tuple(found)

    @property
    def _is_full(self) -> bool:
        most = self._config.max_in_flight
        return most is not None and self.in_flight + self.elsewhere.in_flight >= most

    def _minute(self, what: str) -> tuple[int | None, MinuteCount, int]:
        """Return a minute's limit, the count here, and that of other routers."""
        if what == "requests":
            return self._config.requests_per_minute, self._requests, self.elsewhere.requests
        return self._config.tokens_per_minute, self._tokens, self.elsewhere.tokens

    def _wait_s(self, what: str, amount: int) -> float | None:
        """Return after how many seconds that much more is within the limit; None if it is now. A
        prompt over all of the limit passes after an idle minute."""
        limit, own, elsewhere = self._minute(what)
        if limit is None:
            return None
        now = self._clock()
        used = own.at(now) + elsewhere
        if used == 0 or used + amount <= limit:
            return None
        must_fall = min(used + amount - limit, used)
        if elsewhere:  # where others count, the sum is taken to be spread over the minute
            return _WINDOW_S * must_fall / used
        return own.falls_in_s(must_fall, now)

    def _check(self, what: str, amount: int) -> None:
        """Refuse more than the limit."""
        wait_s = self._wait_s(what, amount)
        if wait_s is not None:
            limit, _, _ = self._minute(what)
            raise self._refused(what, f"{limit} {what} per minute", math.ceil(wait_s))

    def _refused(self, what: str, limit: str, retry_after_s: int) -> KeyLimitReached:
        self.refusals[what] += 1
        return KeyLimitReached(limit, max(retry_after_s, 1))

    def _count_tokens(self, tokens: int) -> None:
        if tokens:
            self._tokens.add(tokens, self._clock())
            self.total_tokens += tokens


class KeyLimits:
    """The usage of every key that has a limit."""

    def __init__(
        self, keys: Iterable[ClientKeyConfig], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.usages: Mapping[str, KeyUsage] = {
            key.name: KeyUsage(key, clock) for key in keys if key.is_limited
        }
        """The usages, by the name of the key."""

    def counts(self) -> dict[str, KeyCounts]:
        """Return this router's counts, to be published to others."""
        return {name: usage.counts() for name, usage in self.usages.items()}

    def take_elsewhere(self, counts: Iterable[Mapping[str, KeyCounts]]) -> None:
        """Replace the counts of other routers.

        Args:
            counts: From `counts` of each; names that are not keys here are left out.
        """
        reports = list(counts)
        for name, usage in self.usages.items():
            found = [_NOTHING, *(report[name] for report in reports if name in report)]
            usage.elsewhere = KeyCounts(*map(sum, zip(*found, strict=True)))
