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
from typing import Annotated, NamedTuple

import msgspec

from kvevents.field_docs import counter, gauge
from router.config.server import ClientKeyConfig
from router.errors import KeyLimitReached, ModelNotAllowed

_WINDOW_S = 60
_STEPS_PER_S = 2
"""Steps of the window: the counts of one step leave it together."""


SharedCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that routers publish to each other."""


class KeyCounts(NamedTuple):
    """Holds the counts of one key at one router, as it publishes them."""

    requests: SharedCount
    """Requests of the last minute."""
    tokens: SharedCount
    """Tokens of the last minute, of prompts and of responses."""
    in_flight: SharedCount


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
        """Return this router's counts."""
        now = self._clock()
        return KeyCounts(self._requests.at(now), self._tokens.at(now), self.in_flight)

    def may_enter(self) -> bool:
        """Return whether `enter` lets a request in at this moment."""
        config, now = self._config, self._clock()
        most, limit = config.max_in_flight, config.requests_per_minute
        if most is not None and self.in_flight + self.elsewhere.in_flight >= most:
            return False
        used = self._requests.at(now) + self.elsewhere.requests
        return limit is None or not _is_over(limit, used, 1)

    def may_spend(self, prompt_tokens: int) -> bool:
        """Return whether `spend` takes a prompt at this moment."""
        limit, now = self._config.tokens_per_minute, self._clock()
        used = self._tokens.at(now) + self.elsewhere.tokens
        return limit is None or not _is_over(limit, used, prompt_tokens)

    def enter(self) -> None:
        """A request has arrived; call `leave` at its end, unless this raises `KeyLimitReached`."""
        config, now = self._config, self._clock()
        most = config.max_in_flight
        if most is not None and self.in_flight + self.elsewhere.in_flight >= most:
            raise self._refused("in_flight", f"{most} requests at a time", 1)
        limit = config.requests_per_minute
        if limit is not None:
            self._check("requests", self._requests, self.elsewhere.requests, 1, limit, now)
        self._requests.add(1, now)
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
        now, limit = self._clock(), self._config.tokens_per_minute
        if limit is not None:
            self._check("tokens", self._tokens, self.elsewhere.tokens, prompt_tokens, limit, now)
        self._count_tokens(prompt_tokens, now)

    def leave(self, response_tokens: int = 0) -> None:
        """A request is over."""
        self.in_flight -= 1
        self._count_tokens(response_tokens, self._clock())

    @property
    def is_for_all_models(self) -> bool:
        """Return whether the key is for every model."""
        return self._config.models is None

    def allows(self, model: str) -> bool:
        """Return whether the key is for a model or adapter."""
        models = self._config.models
        return models is None or any(fnmatchcase(model, pattern) for pattern in models)

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return what is left, in OpenAI's headers."""
        config, now = self._config, self._clock()
        found: list[tuple[bytes, bytes]] = []
        for name, limit, used in (
            (b"requests", config.requests_per_minute, self._requests.at(now)),
            (b"tokens", config.tokens_per_minute, self._tokens.at(now)),
        ):
            if limit is not None:
                elsewhere = getattr(self.elsewhere, name.decode())
                left = max(limit - used - elsewhere, 0)
                found.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
                found.append((b"x-ratelimit-remaining-" + name, b"%d" % left))
        return tuple(found)

    def _check(
        self, what: str, own: MinuteCount, elsewhere: int, amount: int, limit: int, now: float
    ) -> None:
        """Refuse more than the limit."""
        used = own.at(now) + elsewhere
        if _is_over(limit, used, amount):
            must_fall = min(used + amount - limit, used)
            wait_s = own.falls_in_s(must_fall, now)
            if elsewhere:  # where others count, the sum is taken to be spread over the minute
                wait_s = _WINDOW_S * must_fall / used
            raise self._refused(what, f"{limit} {what} per minute", math.ceil(wait_s))

    def _refused(self, what: str, limit: str, retry_after_s: int) -> KeyLimitReached:
        self.refusals[what] += 1
        return KeyLimitReached(limit, max(retry_after_s, 1))

    def _count_tokens(self, tokens: int, now: float) -> None:
        if tokens:
            self._tokens.add(tokens, now)
            self.total_tokens += tokens


def _is_over(limit: int, used: int, amount: int) -> bool:
    """Return whether that much more is too much; a prompt over all of the limit passes after an
    idle minute."""
    return used + amount > limit and used > 0


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
