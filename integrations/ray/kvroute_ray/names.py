"""The names of Ray Serve's replicas at the router."""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 128
_LONGEST_PART = 40


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
    """Return the beginning of the names of all its replicas.

    Names of applications and deployments may hold what a replica's id at the router may not, and be
    longer: they are cut, with a hash in place of what is left out.
    """
    names = (deployment.app_name, deployment.name)
    return "".join(_cut(_NOT_IN_A_NAME.sub("-", name)) + ":" for name in names)


def _cut(name: str) -> str:
    if len(name) <= _LONGEST_PART:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_PART - 9]}-{digest}"


def replica_name(replica: ReplicaOfRay) -> str:
    """Return its id at the router: `APPLICATION:DEPLOYMENT:ID`."""
    unique = _NOT_IN_A_NAME.sub("-", replica.unique_id)
    return (deployment_prefix(replica.deployment_id) + unique)[-_LONGEST:]
