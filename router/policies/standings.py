"""The candidates of one decision as columns of plain numbers, and the order that a plug-in gives
them.

A router decides for every request, and of a decision it needs the first place only. So candidates,
their reasons, and all places behind the first are made when they are asked for: a retry, an
explanation, or a policy that ranks `Candidate` objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

from typing_extensions import override

from router.policies.reasons import Why
from router.policies.types import Candidate, CandidateLoad, Ranked, RouteRequest

State: TypeAlias = tuple[str, int | None, float, bool | float, int, int, int, int, int, int]
"""Fields of a `Candidate`: `replica_id`, `dp_rank` and `speed`; then the doubt about its hit:
False, True where it is `suspect`, or else its `approximate_trust`; and of its load
`queued_prefill_tokens`, `prefilling_requests`, `decoding_requests`, `decode_context_tokens`,
`foreign_requests` and `waiting_requests`."""
Outlook: TypeAlias = tuple[float | None, float, float, float, float]
"""Fields of a `Candidate`: `eviction_age_s`, `reuse_probability`, `uncached_tokens_per_s`,
`arrivals_per_s` and `refill`."""


class Lower(NamedTuple):
    """Holds a candidate's hit below its GPU; the fields are those of `Candidate`."""

    by_tier: tuple[tuple[str, int], ...] = ()
    load_price: float | None = None
    pull_from: str | None = None


@dataclass(slots=True, eq=False, repr=False)
class Standings:
    """The candidates of one decision: item i of every column is about candidate i. Policies must
    not change them."""

    states: list[State]
    """The values that do not depend on the prompt."""
    gpu_cached_tokens: list[int]
    """From `Candidate`, like the next four."""
    cached_tokens: list[int]
    """At least `gpu_cached_tokens`."""
    junction_tokens: list[int]
    recent_tokens: list[int]
    progress_tokens: list[float]
    outlooks: list[Outlook]
    """The activity of each cache."""
    lower_of: Callable[[int], Lower]
    """Returns candidate i's hit below its GPU."""

    def __len__(self) -> int:
        return len(self.states)

    def requests(self, number: int) -> int:
        _, _, _, _, _, prefilling, decoding, _, foreign, _ = self.states[number]
        return prefilling + decoding + foreign

    def candidate(self, number: int) -> Candidate:
        state, outlook, lower = self.states[number], self.outlooks[number], self.lower_of(number)
        return Candidate(
            replica_id=state[0],
            gpu_cached_tokens=self.gpu_cached_tokens[number],
            cached_tokens=self.cached_tokens[number],
            by_tier=lower.by_tier,
            load_price=lower.load_price,
            pull_from=lower.pull_from,
            junction_tokens=self.junction_tokens[number],
            recent_tokens=self.recent_tokens[number],
            progress_tokens=self.progress_tokens[number],
            eviction_age_s=outlook[0],
            reuse_probability=outlook[1],
            uncached_tokens_per_s=outlook[2],
            arrivals_per_s=outlook[3],
            refill=outlook[4],
            suspect=state[3] is True,
            approximate_trust=None if isinstance(state[3], bool) else state[3],
            load=CandidateLoad(*state[4:]),
            speed=state[2],
            dp_rank=state[1],
        )


# --- the order ------------------------------------------------------------------------------------


class Order(NamedTuple):
    """How a policy orders standings: by cost."""

    costs: Sequence[float]
    """Costs by candidate; finite."""
    tie: Callable[[int], Any]
    """Decides between candidates of equal cost, by their numbers: the least value first. The values
    can be compared with each other."""
    why: Why

    def first(self) -> int:
        """The number of the best candidate; there is one."""
        costs = self.costs
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return min((i for i, cost in enumerate(costs) if cost == least), key=self.tie)

    def numbers(self) -> list[int]:
        costs, tie = self.costs, self.tie
        return sorted(range(len(costs)), key=lambda number: (costs[number], tie(number)))


@runtime_checkable
class OrdersStandings(Protocol):
    """A plug-in that needs no candidates to choose among them, and makes decisions cheaper: it has
    this method besides `Policy.rank`."""

    needs_outlook: bool
    """True if it reads outlooks and progress. If not, they may all be `IDLE` and 0. If so, it also
    chooses among the data-parallel ranks of a replica: it gets them as standings of their own, all
    with the same `replica_id`."""

    def order(self, request: RouteRequest, standings: Standings) -> Order:
        """Order *standings* as `Policy.rank` would order its candidates, with the same costs.

        Args:
            standings: At least one.
        """


class Ranking(Sequence[Ranked]):
    """The candidates of a decision in the order of a policy. Each place is made when it is asked
    for."""

    __slots__ = ("_best", "_count", "_numbers", "_place", "_places")

    def __init__(
        self,
        count: int,
        first: int,
        numbers: Callable[[], list[int]],
        place: Callable[[int, int], Ranked],
    ) -> None:
        """
        Args:
            count: Candidates; at least one.
            first: The number of the best.
            numbers: Returns the numbers of all, best first.
            place: Makes the entry of a candidate, by its number and its place, 0 for the first.
        """
        self._count = count
        self._numbers = numbers
        self._place = place
        self._best = place(first, 0)
        self._places: list[Ranked] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Ranked: ...

    @overload
    def __getitem__(self, index: slice) -> list[Ranked]: ...

    @override
    def __getitem__(self, index: int | slice) -> Ranked | list[Ranked]:
        return self._best if index == 0 else self._all()[index]

    @override
    def __iter__(self) -> Iterator[Ranked]:
        yield self._best
        yield from self._all()[1:]

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> list[Ranked]:
        if self._places is None:
            behind = enumerate(self._numbers()[1:], 1)
            self._places = [self._best, *(self._place(number, place) for place, number in behind)]
        return self._places
