"""Orders the requests that wait for the replicas of one model. Pure: times are passed in.

Three orders, one inside the other:

    priority    the highest class in which someone can start
    tenant      deficit round robin over tokens, by weight
    request     shortest first, with ageing

A request's place among those of its tenant is its tokens plus the tokens that its arrival is worth:

    place = min(tokens, 4096) + ageing_tokens_per_s * arrived

All grow older at the same rate, so places never change. At 1,000 tokens a second, one of 3,000
tokens is overtaken by shorter ones that came up to 3 s later, and by none that came after that; one
of any length by none that came 4.1 s later. Without that bound the longest wait longer, and the
mean is no better. Other functions of the tokens trade the same for the same (docs/steering.md).

Where the bounds are reached, the tenant that has most waiting in the lowest class loses its last
one: a tenant that floods the line displaces its own requests, and no other's.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.errors import RequestError

LONGEST_TOKENS = 4096
"""Requests that cost more are served with those of this cost, as they come."""
_RATE_MEMORY_S = 10.0
_MIN_STARTS = 5
"""Fewer make no rate: one request that runs for a minute shows little."""
_LAST_RESPONSES = 32
"""How many of them the usual length is taken over."""
_FEW = 16
"""Entries of requests that have left are cleared away once there are more than this, and more than
of those that wait."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """One request that needs room at a replica."""

    model: str = ""
    """Its base model."""
    tenant: str
    """Never in a metric or a log."""
    weight: float = 1.0
    """The tenant's share, relative to those of others."""
    priority: int = 0
    """Its class; 0 goes first."""
    lane: str = ""
    """Requests of one lane can be served by the same replicas."""
    tokens: int
    """Its cost: prompt tokens to compute, and from its arrival on the usual response."""
    deadline: float = math.inf
    """When it must have started."""
    can_start: Callable[[], bool] = lambda: True
    """Returns whether a replica has room for it now."""
    start: Callable[[], object] = lambda: None
    """Called when it is its turn."""
    refuse: Callable[[RequestError], object] = lambda _error: None
    """Called when it will not have its turn."""
    arrived: float = 0.0
    place: float = 0.0
    response_tokens: int = 0
    """The part of its cost that is a guess."""
    is_waiting: bool = False
    is_charged: bool = False
    """True once its tenant has paid for it."""
    line: Line | None = None
    """The line it entered: its model's may be another by the time it ends."""

    def let_go(self) -> None:
        """Release the request: the line may remember its place for a while."""
        self.can_start, self.start, self.refuse = _never, _nothing, _nothing
        self.line = None


def _never() -> bool:
    return False


def _nothing(*_: object) -> None:
    pass


class LineLimits(NamedTuple):
    """Bounds on one line, and its order."""

    waiting: int = 1024
    """Requests."""
    tokens: int = 1 << 40
    """Their cost together. One request may always wait."""
    classes: int = 1
    ageing_tokens_per_s: float = 1000.0
    quantum_tokens: float = 1024.0
    """The cost that a tenant of weight 1 may start in each of its turns."""
    response_tokens: float = 0.0
    """The usual response, before any was seen."""


_Entry = tuple[float, int, Waiter]


def place_of(tokens: int, arrived: float, ageing_tokens_per_s: float) -> float:
    """Return a request's place; the lowest is next.

    Args:
        ageing_tokens_per_s: What a second of waiting is worth.
    """
    return min(tokens, LONGEST_TOKENS) + ageing_tokens_per_s * arrived


class _Heap:
    """The requests of one tenant and lane by their places, or of a line by their deadlines. Those
    that leave are skipped, and removed now and then."""

    __slots__ = ("_entries", "_gone")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._gone = 0

    def push(self, entry: _Entry) -> None:
        heapq.heappush(self._entries, entry)

    def first(self) -> _Entry | None:
        """The next one; None if none waits."""
        entries = self._entries
        while entries and not entries[0][2].is_waiting:
            heapq.heappop(entries)
            self._gone -= 1
        return entries[0] if entries else None

    def left(self) -> None:
        """Note that one of them waits no longer."""
        self._gone += 1
        if self._gone > max(_FEW, len(self._entries) // 2):
            self._entries = list(self.waiting())
            heapq.heapify(self._entries)
            self._gone = 0

    def waiting(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries if entry[2].is_waiting)


@dataclass(slots=True, eq=False)
class _Tenant:
    """Holds one tenant's waiting requests of one class, and its deficit."""

    name: str
    weight: float = 1.0
    deficit: float = 0.0
    """Tokens that it may start now. Below 0 after requests that cost more than was thought."""
    lanes: dict[str, _Heap] = field(default_factory=dict)
    waiting: int = 0
    in_flight: int = 0
    tokens: int = 0

    def first(self, is_ready: Callable[[Waiter], bool]) -> Waiter | None:
        """Return its next request among the lanes that are ready."""
        best: _Entry | None = None
        for lane, heap in list(self.lanes.items()):
            entry = heap.first()
            if entry is None:
                del self.lanes[lane]
            elif is_ready(entry[2]) and (best is None or entry < best):
                best = entry
        return None if best is None else best[2]

    def last(self) -> Waiter:
        """Return its request that is farthest from its turn."""
        return max(entry for heap in self.lanes.values() for entry in heap.waiting())[2]

    def tokens_before(self, place: float) -> int:
        """Return the cost of those before *place*."""
        return sum(
            entry[2].tokens
            for heap in self.lanes.values()
            for entry in heap.waiting()
            if entry[0] <= place
        )


@dataclass(slots=True, eq=False)
class _Class:
    """One priority class: its tenants in turn."""

    _quantum: float
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    """Tenants with requests waiting or in flight."""
    waiting: int = 0
    tokens: int = 0
    _ring: deque[_Tenant] = field(default_factory=deque)
    """Tenants with requests waiting; the one whose turn it is stands first."""
    _turn: _Tenant | None = None

    def tenant(self, waiter: Waiter) -> _Tenant:
        found = self.tenants.get(waiter.tenant)
        if found is None:
            found = self.tenants[waiter.tenant] = _Tenant(waiter.tenant)
        found.weight = waiter.weight
        return found

    def add(self, waiter: Waiter, number: int) -> None:
        tenant = self.tenant(waiter)
        if not tenant.waiting:
            self._ring.append(tenant)
        heap = tenant.lanes.get(waiter.lane)
        if heap is None:
            heap = tenant.lanes[waiter.lane] = _Heap()
        heap.push((waiter.place, number, waiter))
        self._count(tenant, waiter, 1)

    def remove(self, waiter: Waiter) -> None:
        tenant = self.tenants[waiter.tenant]
        tenant.lanes[waiter.lane].left()
        self._count(tenant, waiter, -1)
        if not tenant.waiting:
            self._ring.remove(tenant)
            tenant.lanes.clear()
            # Unused credit is lost, debt is kept: as long as it has any in flight.
            tenant.deficit = min(tenant.deficit, 0.0)
            self._forget_if_idle(tenant)

    def ended(self, waiter: Waiter, further_tokens: int) -> None:
        """One of its requests is over, and cost more or less than was thought."""
        tenant = self.tenants[waiter.tenant]
        tenant.in_flight -= 1
        tenant.deficit -= further_tokens
        self._forget_if_idle(tenant)

    def take(self, is_ready: Callable[[Waiter], bool]) -> Waiter | None:
        """Return the next request, charged to its tenant."""
        heads = [
            (tenant, head) for tenant in self._ring if (head := tenant.first(is_ready)) is not None
        ]
        if not heads:
            return None
        tenant, head = self._choose(heads)
        tenant.deficit -= head.tokens
        return head

    def _choose(self, heads: list[tuple[_Tenant, Waiter]]) -> tuple[_Tenant, Waiter]:
        """Deficit round robin: a tenant keeps its turn while its deficit lasts; each one that gets
        it has a quantum added. Rounds in which none can start are made at once."""
        tenant, head = heads[0]
        if tenant is self._turn is self._ring[0]:
            if tenant.deficit >= head.tokens:
                return heads[0]
            heads.append(heads.pop(0))
        rounds = [
            max(1, math.ceil((head.tokens - tenant.deficit) / (self._quantum * tenant.weight)))
            for tenant, head in heads
        ]
        fewest = min(rounds)
        chosen = rounds.index(fewest)
        for number, (tenant, _) in enumerate(heads):
            visits = fewest if number <= chosen else fewest - 1
            tenant.deficit += visits * self._quantum * tenant.weight
        self._turn = heads[chosen][0]
        self._ring.rotate(-self._ring.index(self._turn))
        return heads[chosen]

    def heaviest(self) -> _Tenant:
        """Return the tenant with most waiting for its weight."""
        return max(self._ring, key=lambda tenant: tenant.tokens / tenant.weight)

    @property
    def weights(self) -> float:
        """The sum of the weights of all tenants that have requests waiting."""
        return sum(tenant.weight for tenant in self._ring)

    def _count(self, tenant: _Tenant, waiter: Waiter, sign: int) -> None:
        for counted in (self, tenant):
            counted.waiting += sign
            counted.tokens += sign * waiter.tokens

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        if not tenant.waiting and not tenant.in_flight:
            self.tenants.pop(tenant.name, None)


class _Rate:
    """Tokens per second that were started lately."""

    __slots__ = ("_at", "_since", "_starts", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._starts = 0.0
        self._at = self._since = -math.inf

    def add(self, tokens: int, now: float) -> None:
        if now - self._at > 3 * _RATE_MEMORY_S:
            self._tokens, self._starts, self._since = 0.0, 0.0, now
        kept = math.exp(-(now - self._at) / _RATE_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._starts = self._starts * kept + 1
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate; 0 where too little is known."""
        kept = math.exp(-(now - self._at) / _RATE_MEMORY_S)
        if self._starts * kept < _MIN_STARTS:
            return 0.0
        share = -math.expm1(-max(now - self._since, 0.1) / _RATE_MEMORY_S)
        return self._tokens * kept / _RATE_MEMORY_S / share


class Line:
    """The requests that wait for one model, bounded."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._classes = [_Class(limits.quantum_tokens) for _ in range(limits.classes)]
        self._deadlines = _Heap()
        self._numbers = itertools.count()
        self._rate = _Rate()
        self._response_tokens = limits.response_tokens

    @property
    def waiting(self) -> int:
        return sum(each.waiting for each in self._classes)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self._classes)

    def all_waiting(self) -> list[Waiter]:
        return [
            entry[2]
            for each in self._classes
            for tenant in each.tenants.values()
            for heap in tenant.lanes.values()
            for entry in heap.waiting()
        ]

    def by_class(self) -> list[tuple[int, int]]:
        """Requests and tokens that wait, by class."""
        return [(each.waiting, each.tokens) for each in self._classes]

    def put(self, waiter: Waiter, now: float) -> list[Waiter]:
        """Let a request wait.

        Returns:
            The requests displaced by it, perhaps itself. They wait no longer.
        """
        limits = self._limits
        self._arrive(waiter, now)
        waiter.place = place_of(waiter.tokens, now, limits.ageing_tokens_per_s)
        waiter.is_waiting = True
        number = next(self._numbers)
        self._classes[waiter.priority].add(waiter, number)
        if waiter.deadline < math.inf:
            self._deadlines.push((waiter.deadline, number, waiter))
        displaced = []
        while self.waiting > limits.waiting or (self.waiting > 1 and self.tokens > limits.tokens):
            lowest = next(each for each in reversed(self._classes) if each.waiting)
            displaced.append(lowest.heaviest().last())
            self.leave(displaced[-1])
        return displaced

    def pass_by(self, waiter: Waiter, now: float) -> None:
        """Count a request that starts without having waited, since none waits."""
        self._arrive(waiter, now)
        self._rate.add(waiter.tokens, now)

    def take(self, now: float) -> Waiter | None:
        """Return the next one that can start, which waits no longer; None if none can.

        `Waiter.can_start` is asked once for each lane.
        """
        ready: dict[str, bool] = {}

        def is_ready(waiter: Waiter) -> bool:
            found = ready.get(waiter.lane)
            if found is None:
                found = ready[waiter.lane] = waiter.can_start()
            return found

        for each in self._classes:
            waiter = each.take(is_ready) if each.waiting else None
            if waiter is not None:
                waiter.is_charged = True
                each.tenant(waiter).in_flight += 1
                self.leave(waiter)
                self._rate.add(waiter.tokens, now)
                return waiter
        return None

    def leave(self, waiter: Waiter) -> None:
        """Remove a request, if it waits."""
        if waiter.is_waiting:
            waiter.is_waiting = False
            self._classes[waiter.priority].remove(waiter)
            if waiter.deadline < math.inf:
                self._deadlines.left()

    def ended(self, waiter: Waiter, response_tokens: int | None) -> None:
        """A request is over: if it was taken, its tenant pays the difference.

        Args:
            response_tokens: Those of its response; None if that is not known.
        """
        further = 0
        if response_tokens is not None:
            further = response_tokens - waiter.response_tokens
            self._response_tokens += (response_tokens - self._response_tokens) / _LAST_RESPONSES
        if waiter.is_charged:
            waiter.is_charged = False
            self._classes[waiter.priority].ended(waiter, further)

    def expired(self, now: float) -> list[Waiter]:
        """Remove and return those whose deadline has passed."""
        found = []
        while (entry := self._deadlines.first()) is not None and entry[0] <= now:
            found.append(entry[2])
            self.leave(entry[2])
        return found

    def wait_s(self, waiter: Waiter, now: float, behind_all: bool = False) -> float:
        """Return how long a request like *waiter* would wait if it came now: the tokens before it,
        at the rate of the last seconds. 0 without a rate.

        Args:
            waiter: It need not wait.
            behind_all: True if it would come after all that its tenant has waiting.
        """
        rate = self._rate.per_s(now)
        if rate <= 0:
            return 0.0
        own = self._classes[waiter.priority]
        higher = sum(each.tokens for each in self._classes[: waiter.priority])
        tenant = own.tenants.get(waiter.tenant)
        place = place_of(waiter.tokens, now, self._limits.ageing_tokens_per_s)
        before = 0 if tenant is None else tenant.tokens_before(math.inf if behind_all else place)
        is_new = tenant is None or not tenant.waiting
        weights = own.weights + (waiter.weight if is_new else 0.0)
        return (higher + min(own.tokens, before * weights / waiter.weight)) / rate

    def _arrive(self, waiter: Waiter, now: float) -> None:
        waiter.arrived = now
        waiter.response_tokens = round(self._response_tokens)
        waiter.tokens += waiter.response_tokens
