"""Eviction policies by name: built in, installed, and broken ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.policies import create_policy, policy_names
from offload.cpu.policies.arc import ARCPolicy
from offload.cpu.policies.lru import LRUPolicy
from offload.errors import CacheConfigError, TierStateError
from tests.offload.cpu import plug_in
from tests.offload.cpu.keys import REQUEST, hits, keys, store


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with plug_in.installed(tmp_path):
        yield tmp_path


def test_the_built_in_policies_have_names() -> None:
    """They are chosen by a word in a configuration file."""
    assert policy_names()[:2] == ["lru", "arc"]
    assert isinstance(create_policy("lru", 4), LRUPolicy)
    assert isinstance(create_policy("arc", 4), ARCPolicy)


def test_a_plug_in_is_found_by_its_entry_point_and_given_the_number_of_blocks(
    installed: Path,
) -> None:
    """Installing a package is enough."""
    assert plug_in.NAME in policy_names()
    assert create_policy(plug_in.NAME, 7).capacity == 7  # type: ignore[attr-defined]
    tier = CPUOffloadingManager(2, plug_in.NAME)
    store(tier, 1, 2)
    tier.touch(keys(1), REQUEST)
    store(tier, 3)
    assert hits(tier, range(5)) == {2, 3}, "first in, first out, touched or not"


def test_a_built_in_policy_cannot_be_replaced_by_a_plug_in(installed: Path) -> None:
    """A package must not change eviction by merely being installed."""
    assert policy_names().count("lru") == 1
    assert isinstance(create_policy("lru", 4), LRUPolicy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LRU", r"cache_policy: 'LRU' is unknown; did you mean lru\? known: lru, arc, .*fifo"),
        ("missing", "cannot be imported: No module named 'kvroute_no_such_module'"),
        ("absent", "cannot be imported"),
        ("number", "is int; it must be callable"),
        (
            "nothing",
            "made NoneType, which lacks admit, touch, hold, release, discard, clear",
        ),
        ("half", "made Half, which lacks release, discard, clear"),
    ],
)
def test_the_error_of_an_unusable_policy_describes_the_problem(
    installed: Path, name: str, message: str
) -> None:
    """It surfaces at start-up, to a user who did not write it."""
    with pytest.raises(CacheConfigError, match=message):
        CPUOffloadingManager(4, name)


def test_a_name_that_two_packages_offer_is_refused(installed: Path) -> None:
    """Which of them is taken would be chance."""
    plug_in.install(
        installed, "another", "[kvroute.offload_policies]\nfifo = kvroute_another:FIFOPolicy\n"
    )
    with pytest.raises(
        CacheConfigError,
        match=r"'fifo' is offered by kvroute_another:FIFOPolicy of another 1\.0 "
        "and kvroute_offload_plug_in",
    ):
        create_policy("fifo", 4)


@pytest.mark.parametrize("name", ["in_flight", "evicts_nothing"])
def test_a_plug_in_that_breaks_the_rules_stops_the_store(installed: Path, name: str) -> None:
    """A block handed out during a copy would serve another prompt's keys and values."""
    tier = CPUOffloadingManager(2, name)
    store(tier, 1, 2)
    tier.prepare_load(keys(1), REQUEST)
    with pytest.raises(
        TierStateError, match=r"\.admit must return a stored key that is not in flight"
    ):
        tier.prepare_store(keys(3), REQUEST)
    tier.complete_load(keys(1), REQUEST)
