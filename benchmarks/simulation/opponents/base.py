"""The common part of other projects' routers: they count what they have sent, and may read events
and gauges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.contract import Routed
from benchmarks.simulation.layouts import ReplicaConfig
from kvevents.events import EventBatch
from kvroute_engine.demo.blind import GroupBlindIndex
from router.index.base import SourceId


@dataclass(slots=True)
class Load:
    """The requests that a router has in flight at one replica, and the gauges of the replica."""

    requests: int = 0
    queued_tokens: int = 0
    """Uncached prompt tokens, as predicted, of requests without a first token."""
    context_tokens: int = 0
    """Prompts and responses of all requests there."""
    waiting: int = 0
    """The requests in the engine's queue."""
    usage: float = 0.0
    """Share of the engine's blocks that requests hold."""


class OpponentAccount:
    """See `Account`."""

    def __init__(self, load: Load, uncached_tokens: int, prompt_tokens: int) -> None:
        self._load = load
        self._uncached_tokens = uncached_tokens
        self._context_tokens = prompt_tokens
        load.requests += 1
        load.queued_tokens += uncached_tokens
        load.context_tokens += prompt_tokens

    def first_token(self) -> None:
        """See `Account`."""
        self._load.queued_tokens -= self._uncached_tokens
        self._uncached_tokens = 0

    def generated(self, tokens: int) -> None:
        """See `Account`."""
        self._context_tokens += tokens
        self._load.context_tokens += tokens

    def ended(self) -> None:
        """See `Account`."""
        self.first_token()
        self._load.requests -= 1
        self._load.context_tokens -= self._context_tokens


class Opponent(ABC):
    """A router with a rule of its own. It finds prefixes in an index of its own, too."""

    def __init__(
        self,
        replica_ids: Sequence[str],
        clock: Callable[[], float],
        replica: ReplicaConfig,
        seed: int = 0,
    ) -> None:
        """
        Args:
            replica_ids: All replicas.
            clock: Virtual time, in seconds.
            replica: What they are; routers learn block sizes and rates from their operators.
            seed: Of what is drawn among equals.
        """
        self.clock = clock
        self.replica = replica
        self.loads = {replica_id: Load() for replica_id in replica_ids}
        self.random = Random(seed)
        self.block_tokens = replica.model().block_size
        self.begin()

    def begin(self) -> None:  # noqa: B027 (optional)
        """Make what the rule itself keeps, once the rest is there."""

    def take_batch(self, replica_id: str, batch: EventBatch) -> None:  # noqa: B027 (optional)
        """See `Router`; most do not listen."""

    def take_engine_load(
        self,
        replica_id: str,
        running: int,  # noqa: ARG002 (the protocol's)
        waiting: int,
        usage: float | None = None,
    ) -> None:
        """See `Router`."""
        self.loads[replica_id].waiting = waiting
        self.loads[replica_id].usage = usage or 0.0

    def route(
        self,
        session: str,  # noqa: ARG002
        token_ids: Sequence[int],
        message_ends: Sequence[int] = (),  # noqa: ARG002
    ) -> Routed:
        """See `Router`."""
        hits = self.hits(token_ids)
        chosen = self.choose(len(token_ids), hits)
        hit = hits.get(chosen, 0)
        self.sent(chosen, token_ids, hit)
        account = OpponentAccount(self.loads[chosen], len(token_ids) - hit, len(token_ids))
        return Routed(chosen, hit, hit, account)

    @abstractmethod
    def hits(self, token_ids: Sequence[int]) -> Mapping[str, int]:
        """Return the leading tokens of a prompt that each replica is thought to hold; those without
        are left out."""

    @abstractmethod
    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """Return the replica that a prompt goes to.

        Args:
            prompt_tokens: Its length.
            hits: From `hits`.
        """

    def sent(self, replica_id: str, token_ids: Sequence[int], hit: int) -> None:  # noqa: B027
        """Note where a prompt went.

        Args:
            replica_id: From `choose`.
            token_ids: The prompt.
            hit: What it was thought to hold of it.
        """

    def lowest(self, costs: Mapping[str, float]) -> str:
        """Return the replica with the lowest cost; one of them at random."""
        least = min(costs.values())
        return self.random.choice([name for name, cost in costs.items() if cost == least])

    def fewest_requests(self) -> str:
        """Return the replica with the fewest requests of this router."""
        return self.lowest({name: load.requests for name, load in self.loads.items()})


class EventDriven(Opponent):
    """A router that follows events, in an index of blocks by replica that knows no groups: a block
    counts while any group holds it. None of the publications says so; where the first removal
    deletes it, all of these rules end in overload before hybrid caches."""

    def begin(self) -> None:
        """See `Opponent`."""
        self._index = GroupBlindIndex(any_copy=True)

    def take_batch(self, replica_id: str, batch: EventBatch) -> None:
        """See `Router`."""
        self._index.apply(SourceId(replica_id), batch)

    def hits(self, token_ids: Sequence[int]) -> dict[str, int]:
        """See `Opponent`."""
        prompt = self._index.prepare(token_ids)
        found = self._index.match_prompt(prompt)
        return {source.replica: hit.gpu_cached_tokens for source, hit in found.items()}
