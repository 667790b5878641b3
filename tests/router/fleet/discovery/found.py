"""Follows a provider and keeps what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from router.config.replica import ReplicaConfig
from router.fleet.discovery.provider import ReplicaProvider


class Found:
    """What a provider has reported so far."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaConfig] = {}
        self.lists: list[list[str]] = []
        self.broken: Sequence[str] = ()
        self.failures: list[str] = []

    def on_replicas(self, replicas: Sequence[ReplicaConfig], broken: Sequence[str] = ()) -> None:
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self.lists.append(sorted(self.replicas))
        self.broken = broken

    def on_failure(self, why: str) -> None:
        self.failures.append(why)

    @property
    def urls(self) -> dict[str, str]:
        return {name: str(replica.origin) for name, replica in self.replicas.items()}


@asynccontextmanager
async def following(provider: ReplicaProvider) -> AsyncIterator[Found]:
    found = Found()
    task = asyncio.create_task(provider.follow(found))
    try:
        yield found
        assert not task.done(), "a provider follows until it is cancelled"
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception():
            raise task.exception() or AssertionError
