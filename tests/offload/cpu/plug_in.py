"""A policy from a third-party package, installed as pip would leave it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAME = "fifo"

MODULE = '''
class FIFOPolicy:
    """The least that a plug-in has to do: first stored, first out."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.clear()

    def admit(self, key, evict):
        victim = None
        if evict:
            victim = next(held for held in self.keys if held not in self.held)
            del self.keys[victim]
        self.keys[key] = None
        self.held.add(key)
        return victim

    def touch(self, key):
        self.keys[key]  # KeyError: not resident, the manager's mistake

    def hold(self, key):
        self.held.add(key)

    def release(self, key):
        self.held.remove(key)

    def discard(self, key):
        del self.keys[key]
        self.held.discard(key)

    def clear(self):
        self.keys = {}
        self.held = set()


class EvictsWhatIsInFlight(FIFOPolicy):
    def admit(self, key, evict):
        return next(iter(self.held)) if evict and self.held else super().admit(key, evict)


class EvictsNothing(FIFOPolicy):
    def admit(self, key, evict):
        return super().admit(key, False)


class Half:
    def __init__(self, capacity):
        pass

    def admit(self, key, evict):
        pass

    touch = hold = admit


def nothing(capacity):
    return None


number = 5
'''

ENTRY_POINTS = """
[kvroute.offload_policies]
fifo = kvroute_offload_plug_in:FIFOPolicy
lru = kvroute_offload_plug_in:nothing
in_flight = kvroute_offload_plug_in:EvictsWhatIsInFlight
evicts_nothing = kvroute_offload_plug_in:EvictsNothing
missing = kvroute_no_such_module:Policy
absent = kvroute_offload_plug_in:Absent
number = kvroute_offload_plug_in:number
nothing = kvroute_offload_plug_in:nothing
half = kvroute_offload_plug_in:Half
"""


def install(
    site: Path, distribution: str = "kvroute-offload-plug-in", entry_points: str = ENTRY_POINTS
) -> None:
    """Write the distribution into *site*, a folder that is or will be on `sys.path`."""
    name = distribution.replace("-", "_")
    (site / "kvroute_offload_plug_in.py").write_text(MODULE)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """Make the distribution in *site* importable like any other while this lasts."""
    install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    sys.modules.pop("kvroute_offload_plug_in", None)
