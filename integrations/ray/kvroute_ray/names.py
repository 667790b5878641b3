"""What a replica of Ray Serve is called at the router."""

from __future__ import annotations

import re
from typing import Protocol

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 128


class DeploymentOfRay(Protocol):
    """Ray's `DeploymentID`, as far as it is read."""

    @property
    def name(self) -> str: ...
    @property
    def app_name(self) -> str: ...


class ReplicaOfRay(Protocol):
    """Ray's `ReplicaID`, as far as it is read."""

    @property
    def unique_id(self) -> str: ...
    @property
    def deployment_id(self) -> DeploymentOfRay: ...


def deployment_prefix(deployment: DeploymentOfRay) -> str:
    """What the names of all its replicas begin with.

    Names of applications and deployments may hold what a replica's id at the router may not, and be
    longer: they are cut, and what tells replicas apart is kept.
    """
    names = (deployment.app_name, deployment.name)
    return "".join(_NOT_IN_A_NAME.sub("-", name)[:40] + ":" for name in names)


def replica_name(replica: ReplicaOfRay) -> str:
    """Its id at the router: `APPLICATION:DEPLOYMENT:ID`."""
    unique = _NOT_IN_A_NAME.sub("-", replica.unique_id)
    return (deployment_prefix(replica.deployment_id) + unique)[-_LONGEST:]
