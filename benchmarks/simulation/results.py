"""Finished runs in a file of JSON lines, so that a sweep can be interrupted and continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.simulation.routing import LEAST_DELAY

Line = dict[str, Any]
_ROOT = Path(__file__).parents[2]
_OURS = (
    *("router/policies", "router/index", "router/routing", "router/fleet"),
    "router/routing",
)
SIMULATION = 3
"""Counted up by whoever changes what a run with unchanged policies would measure."""


@cache
def code_version(policy: str) -> str:
    """Return the version of what a run's figures depend on: the simulation, and the source of the
    policy that is still being worked on."""
    if not policy.startswith(LEAST_DELAY):
        return str(SIMULATION)
    digest = hashlib.sha256()
    for folder in _OURS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{SIMULATION}-{digest.hexdigest()[:12]}"


class Results:
    """One line for each run, by situation, policy, seed and code version. Lines are appended as
    runs end; a line that was cut short is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        if not self._path.exists():
            return
        for line in self._path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)

    def has(self, situation: str, policy: str, seed: int, version: str) -> bool:
        """Return whether a run is there.

        Args:
            situation: Its name.
            policy: Its name.
            seed: Of the workload and the router.
            version: From `code_version`.
        """
        return (situation, policy, seed, version) in set(map(_key, self))

    def add(self, line: Line) -> None:
        """Append a finished run."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def latest(lines: Iterable[Line]) -> list[Line]:
    """Return the last run of each situation, policy and seed, whatever its version is."""
    return list({_key(line)[:3]: line for line in lines}.values())


def _key(line: Line) -> tuple[Any, ...]:
    return line["situation"], line["policy"], line["seed"], line["version"]
