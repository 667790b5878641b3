"""Decides whether one replica may be given another request. Pure but for the clock that is passed
in.

Four things close a gate, each by itself:

    limits      as much is under way there as may be: what can wait, waits
    back-off    it has answered 429 or 503 with `retry-after`: nothing is sent until then; of one
                tenant alone, where its 429 was an answer to that one
    breaker     too many of its last requests failed, though its checks pass
    slow start  it has just joined: its limits, and its speed for the policy, grow from a tenth

The breaker, as a table (`HALF_OPEN` is not stored: it is `OPEN` whose time is over):

    state       a request fails                     one is answered     one is sent
    CLOSED      one of too many: OPEN
    OPEN
    HALF_OPEN   OPEN again, for twice as long       CLOSED              no other until it has ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

AT_LIMIT = "at its limit of requests"
AT_TOKEN_LIMIT = "at its limit of prompt tokens"
BACKING_OFF = "asked to be left alone for a while"
TENANT_BACKING_OFF = "asked to be left alone by this client for a while"
BREAKER_OPEN = "failing too many requests"
BEING_PROBED = "being probed after it failed too many requests"
PASSING = frozenset((AT_LIMIT, AT_TOKEN_LIMIT, BACKING_OFF, BREAKER_OPEN, BEING_PROBED))
"""Obstacles for which it makes sense to wait. A tenant refused alone gets a `retry-after`."""
MAX_TENANTS_BACKING_OFF = 1024
"""The most at one replica; the one that may come back soonest is forgotten first."""
SLOWEST = 0.1
"""The share at the beginning of a slow start."""


class GateOptions(NamedTuple):
    """Holds the bounds that close a gate; see `OverloadConfig`. None and 0: no bound."""

    in_flight: int | None = None
    prefill_tokens: int | None = None
    breaker_failures: int | None = None
    breaker_open_s: float = 5.0
    breaker_max_open_s: float = 60.0
    max_back_off_s: float = 0.0
    slow_start_s: float = 0.0


class GateFacts(NamedTuple):
    """All that decides whether a gate is shut or full at a moment; times are on its clock."""

    in_flight: int | None
    prefill_tokens: int | None
    open_until: float | None
    """When the breaker becomes half open; None: it is closed."""
    probe_until: float
    backs_off_until: float
    tenants_back_off_until: list[tuple[str, float]]
    started_at: float | None
    """The beginning of its slow start; None: it is over."""
    slow_start_s: float


class Breaker(Enum):
    """The states of the breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True, eq=False, repr=False)
class ReplicaGate:
    """The gate of one replica. The calls report what happens there."""

    _options: GateOptions
    _clock: Callable[[], float] = time.monotonic
    _outcomes: int = 0
    """The last requests, the latest in the lowest bit: 1 for one that failed."""
    _open_s: float = 0.0
    _open_until: float | None = None
    _probe_until: float = 0.0
    _back_off_until: dict[str, float] = field(default_factory=dict)
    """Ends of back-offs by tenant; an empty name stands for all."""
    _started_at: float | None = None
    on_changed: Callable[[], None] | None = None
    """Called when its facts have changed."""
    opened: int = 0
    """Times that the breaker opened, from `CLOSED` or again."""
    times_busy: int = 0
    """Times that the replica answered that it is busy."""

    # --- what happens there -----------------------------------------------------------------------

    def sent(self) -> None:
        if self._open_until is not None and self.breaker is Breaker.HALF_OPEN:
            self._probe_until = self._clock() + max(self._open_s, self._options.breaker_open_s)
            self._notify()

    def answered(self) -> None:
        if self._open_until is not None and self.breaker is Breaker.HALF_OPEN:
            self._open_until, self._open_s = None, 0.0
            self._notify()
        if self._outcomes:
            self._outcomes = self._outcomes << 1 & self._window

    def failed(self) -> None:
        """A request failed through its fault."""
        most = self._options.breaker_failures
        if most is None or self.breaker is Breaker.OPEN:
            return
        self._outcomes = (self._outcomes << 1 | 1) & self._window
        if self._open_until is not None or self._outcomes.bit_count() >= most:
            self._open(self._options)

    def busy(self, retry_after_s: float, tenant: str = "") -> None:
        """It answered that it cannot take requests for so long.

        Args:
            tenant: The tenant refused; empty: all.
        """
        self.times_busy += 1
        until = self._clock() + min(retry_after_s, self._options.max_back_off_s)
        self._forget_past()
        until_by_tenant = self._back_off_until
        until_by_tenant[tenant] = max(until_by_tenant.get(tenant, 0.0), until)
        if len(until_by_tenant) > MAX_TENANTS_BACKING_OFF:
            del until_by_tenant[min(until_by_tenant, key=lambda name: until_by_tenant[name])]
        self._notify()

    def start_slowly(self) -> None:
        """Begin a slow start: it has just joined others that can take its share meanwhile."""
        if self._options.slow_start_s:
            self._started_at = self._clock()
            self._notify()

    # --- its state --------------------------------------------------------------------------------

    @property
    def facts(self) -> GateFacts:
        """The state, for judgements elsewhere."""
        options, until = self._options, self._back_off_until
        return GateFacts(
            options.in_flight,
            options.prefill_tokens,
            self._open_until,
            self._probe_until,
            until.get("", 0.0),
            [(tenant, time_s) for tenant, time_s in until.items() if tenant],
            self._started_at,
            options.slow_start_s,
        )

    @property
    def is_watching(self) -> bool:
        """Return whether it may refuse, or slow down."""
        options = self._options
        return (
            options.in_flight is not None
            or options.prefill_tokens is not None
            or self._open_until is not None
            or self._backs_off_from_any()
            or self.speed < 1
        )

    @property
    def breaker(self) -> Breaker:
        if self._open_until is None:
            return Breaker.CLOSED
        return Breaker.OPEN if self._clock() < self._open_until else Breaker.HALF_OPEN

    def backs_off_s(self, tenant: str = "") -> float:
        """Return for how many seconds it still gets no requests of a tenant, as it asked; without
        one, no requests at all."""
        return max(self._back_off_until.get(tenant, 0.0) - self._clock(), 0.0)

    @property
    def speed(self) -> float:
        """The share of its speed that counts since it joined: up to 1."""
        if self._started_at is None:
            return 1.0
        grown = (self._clock() - self._started_at) / self._options.slow_start_s
        if grown >= 1:
            self._started_at = None
            return 1.0
        return max(grown, SLOWEST)

    def shut(self, tenant: str = "") -> str | None:
        """Return why no request of a tenant may be sent there, room or not; None if one may."""
        if self.backs_off_s():
            return BACKING_OFF
        if self.backs_off_s(tenant):
            return TENANT_BACKING_OFF
        breaker = self.breaker
        if breaker is Breaker.OPEN:
            return BREAKER_OPEN
        is_probed = breaker is Breaker.HALF_OPEN and self._clock() < self._probe_until
        return BEING_PROBED if is_probed else None

    def full(self, requests: int, prefill_tokens: int) -> str | None:
        """Return why it has no room for a request that can wait; None if it has.

        Args:
            prefill_tokens: Their prompt tokens still to be computed.
        """
        options = self._options
        if options.in_flight is not None and requests >= max(options.in_flight * self.speed, 1):
            return AT_LIMIT
        if options.prefill_tokens is not None and (
            prefill_tokens >= options.prefill_tokens * self.speed
        ):
            return AT_TOKEN_LIMIT
        return None

    def opens_in_s(self, tenant: str = "") -> float:
        """Return after how many seconds it opens for a tenant, as far as that is known."""
        opens_in_s = max((self._open_until or 0.0) - self._clock(), 0.0)
        return max(opens_in_s, self.backs_off_s(), self.backs_off_s(tenant))

    def _backs_off_from_any(self) -> bool:
        self._forget_past()
        return bool(self._back_off_until)

    def _forget_past(self) -> None:
        now = self._clock()
        for tenant in [name for name, until in self._back_off_until.items() if until <= now]:
            del self._back_off_until[tenant]

    @property
    def _window(self) -> int:
        return (1 << 2 * (self._options.breaker_failures or 0)) - 1

    def _open(self, options: GateOptions) -> None:
        longer = max(2 * self._open_s, options.breaker_open_s)
        self._open_s = min(longer, options.breaker_max_open_s)
        self._open_until = self._clock() + self._open_s
        self._probe_until = 0.0
        self._outcomes = 0
        self.opened += 1
        self._notify()

    def _notify(self) -> None:
        if self.on_changed is not None:
            self.on_changed()
