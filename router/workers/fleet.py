"""Replicas that an operator adds, drains and removes by hand: at this worker, and at all others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from router.config import read_replica
from router.errors import RequestError
from router.replicas import Replica, ReplicaRegistry
from router.workers.member import Member

logger = logging.getLogger(__name__)

WHAT = "fleet"


class FleetChange(msgspec.Struct, frozen=True):
    """What an operator did."""

    action: Literal["add", "remove", "drain", "undrain"]
    replica_id: str
    config: Any = None
    """Of a new replica, as it came."""


class FleetChanges:
    """Does what an operator asks for.

    Args:
        registry: This worker's replicas.
        allows: Whether an address may be connected to for a replica that was added by hand.
        member: Of several workers this one; None: there is one.
    """

    def __init__(
        self, registry: ReplicaRegistry, allows: Callable[[str], bool], member: Member | None
    ) -> None:
        self._registry = registry
        self._allows = allows
        self.member = member
        if member is not None:
            member.answers[WHAT] = self._hear

    async def add(self, config: Any) -> Replica:
        """Add the replica that *config* describes, as `read_replica` reads it.

        Raises:
            RequestError: As `ReplicaRegistry.add`.
        """
        replica = self._registry.add(read_replica(config), self._allows)
        await self._tell(FleetChange("add", replica.id, config))
        return replica

    async def remove(self, replica_id: str) -> None:
        """Remove it; raises `UnknownReplica`."""
        self._registry.remove(replica_id)
        await self._tell(FleetChange("remove", replica_id))

    async def drain(self, replica_id: str) -> Replica:
        """Send it nothing new; raises `UnknownReplica`."""
        replica = self._registry.drain(replica_id)
        await self._tell(FleetChange("drain", replica_id))
        return replica

    async def undrain(self, replica_id: str) -> Replica:
        """Send it requests again; raises `UnknownReplica`."""
        replica = self._registry.undrain(replica_id)
        await self._tell(FleetChange("undrain", replica_id))
        return replica

    async def _tell(self, change: FleetChange) -> None:
        if self.member is not None:
            # Whether it is there, and whether it drains: of each the last change counts.
            kind = "presence" if change.action in ("add", "remove") else "draining"
            body = msgspec.msgpack.encode(change)
            await self.member.ask(WHAT, body, f"{kind} {change.replica_id}")

    async def _hear(self, body: bytes) -> bytes:
        change = msgspec.msgpack.decode(body, type=FleetChange)
        try:
            if change.action == "add":
                self._registry.add(read_replica(change.config), self._allows)
            elif change.action == "remove":
                self._registry.remove(change.replica_id)
            elif change.action == "drain":
                self._registry.drain(change.replica_id)
            else:
                self._registry.undrain(change.replica_id)
        except RequestError as error:
            # As where a provider has done the same here a moment ago.
            logger.warning("%s of replica %s: %s", change.action, change.replica_id, error)
        return b"done"
