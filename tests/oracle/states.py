"""Replicas as a decision sees them, in plain Python."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from router.fleet.engine_load import EngineLoad
from router.fleet.load import ReplicaLoad
from router.fleet.replica import Replica
from router.index.base import SourceId
from router.policies import State
from tests.oracle.load import NO_LOAD


class States(msgspec.Struct, frozen=True):
    """Replicas as scoring sees them; item i of the first two lists is about the same one."""

    replicas: list[Replica]
    states: list[State]
    """Of the whole replica, whatever the prompt."""
    with_ranks: list[int]
    """The places of those that have several."""


def sort_out(
    replicas: Iterable[Replica],
    loads: Mapping[Any, ReplicaLoad],
    now: float,
    engine_load_stale_after_s: float,
    suspects: Collection[SourceId],
    tenant: str = "",
) -> tuple[States, States]:
    """Who can take a request now, and who cannot.

    Args:
        replicas: Those that might.
        loads: What this router has in flight, by replica.
        now: On the registry's clock.
        engine_load_stale_after_s: An engine's own load is left out when it is older.
        suspects: Caches of which what is said is doubtful, since events were lost.
        tenant: Whose request it is.
    """
    able, unable = States([], [], []), States([], [], [])
    load_at = loads.get
    for replica in replicas:
        load, foreign, waiting = load_at(replica.id, NO_LOAD), 0, 0
        engine_load = replica.engine_load
        if engine_load and now - replica.engine_load_at <= engine_load_stale_after_s:
            foreign, waiting = replica.foreign_requests, engine_load.waiting
        state = (
            replica.id,
            None,
            replica.config.speed * replica.gate.speed,
            replica.cache in suspects if suspects else False,
            load.prefill_tokens,
            load.prefilling_requests,
            load.decoding_requests,
            load.context_tokens,
            foreign,
            waiting,
        )
        known = unable if replica.obstacle(load, tenant=tenant) else able
        if replica.has_ranks:
            known.with_ranks.append(len(known.replicas))
        known.replicas.append(replica)
        known.states.append(state)
    return able, unable


def state_of_rank(
    replica: Replica,
    dp_rank: int,
    load: ReplicaLoad,
    now: float,
    engine_load_stale_after_s: float,
    suspect: bool,
) -> State:
    """One of several ranks as scoring sees it, whatever the prompt.

    Args:
        replica: Its replica.
        dp_rank: The rank.
        load: What this router has in flight there.
        now: On the registry's clock.
        engine_load_stale_after_s: The engine's own load is left out when it is older. It is
            shared out equally where its metrics do not tell ranks apart.
        suspect: Whether what is said of its cache is doubtful, since events were lost.
    """
    foreign = waiting = 0
    engine_load = replica.engine_load
    if engine_load is not None and now - replica.engine_load_at <= engine_load_stale_after_s:
        foreign, waiting = _foreign_and_waiting(replica, engine_load, dp_rank)
    return (
        *(
            replica.id,
            dp_rank,
            replica.config.speed * replica.gate.speed,
            suspect,
            load.prefill_tokens,
        ),
        *(load.prefilling_requests, load.decoding_requests, load.context_tokens),
        *(foreign, waiting),
    )


def _foreign_and_waiting(
    replica: Replica, engine_load: EngineLoad, dp_rank: int
) -> tuple[int, int]:
    """Requests of others, and those that wait, at a rank."""
    rank = next((rank for rank in engine_load.ranks if rank.dp_rank == dp_rank), None)
    if rank is not None:
        return replica.foreign_requests_by_rank[dp_rank], rank.waiting
    ranks = len(replica.sources)
    return -(-replica.foreign_requests // ranks), -(-engine_load.waiting // ranks)
