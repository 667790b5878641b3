"""What every eviction policy of the CPU tier must do. One suite for the built-in ones and a
plug-in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.base import OffloadKey
from offload.cpu.policies import BUILT_IN, EvictionPolicy, create_policy
from tests.offload.cpu import plug_in
from tests.offload.cpu.keys import key

Make = Callable[[int], EvictionPolicy]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plug-in is reached through its entry point, as in production."""
    with plug_in.installed(tmp_path_factory.mktemp("site")):
        yield


POLICIES: dict[str, Make] = {
    name: lambda capacity, name=name: create_policy(name, capacity)
    for name in (*BUILT_IN, plug_in.NAME)
}

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
few = settings(max_examples=60)

# A step is a number and an action; `Driver` turns steps that do not fit the state into steps that
# do.
steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "touch", "hold", "release", "discard"]),
        st.integers(0, 30),
    )
)
capacities = st.integers(1, 8)


class Driver:
    """Calls a policy as the manager does, and tracks which keys are resident and which are held."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.resident: set[OffloadKey] = set()
        self.held: set[OffloadKey] = set()
        self.choices: list[OffloadKey | None] = []

    @property
    def idle(self) -> set[OffloadKey]:
        return self.resident - self.held

    def run(self, script: list[tuple[str, int]]) -> list[OffloadKey | None]:
        for action, number in script:
            self.step(action, number)
        return self.choices

    def step(self, action: str, number: int) -> None:
        if action == "admit":
            self.admit(key(number))
            return
        allowed = {
            "touch": self.resident,
            "hold": self.idle,
            "release": self.held,
            "discard": self.resident,
        }[action]
        if allowed:
            self.call(action, sorted(allowed)[number % len(allowed)])

    def admit(self, name: OffloadKey) -> None:
        evict = len(self.resident) == self.capacity
        if name in self.resident or (evict and not self.idle):
            return
        victim = self.policy.admit(name, evict)
        self.choices.append(victim)
        assert (victim is not None) == evict
        if victim is not None:
            assert victim in self.idle, "only a resident key that is not held may go"
            self.resident.remove(victim)
        self.resident.add(name)
        self.held.add(name)

    def call(self, action: str, name: OffloadKey) -> None:
        getattr(self.policy, action)(name)
        if action == "hold":
            self.held.add(name)
        if action in ("release", "discard"):
            self.held.discard(name)
        if action == "discard":
            self.resident.remove(name)

    def drain(self) -> set[OffloadKey]:
        """Evict by adding new keys; each admission must find a victim while a key is idle."""
        gone: set[OffloadKey] = set()
        for number in range(1000, 1000 + self.capacity):
            self.admit(key(number))
        gone.update(choice for choice in self.choices[-self.capacity :] if choice is not None)
        return gone


@every_policy
@few
@given(capacity=capacities, script=steps)
def test_only_resident_keys_that_are_not_held_are_evicted(
    make: Make, capacity: int, script: list[tuple[str, int]]
) -> None:
    """A block evicted during a copy would be overwritten while it is read.

    The driver checks every choice.
    """
    Driver(make(capacity), capacity).run(script)


@every_policy
@few
@given(capacity=capacities, script=steps)
def test_every_key_that_is_not_held_can_be_evicted(
    make: Make, capacity: int, script: list[tuple[str, int]]
) -> None:
    """The manager relies on its counts:

    a key that the policy lost would hold its block for good.
    """
    driver = Driver(make(capacity), capacity)
    driver.run(script)
    idle, free = len(driver.idle), capacity - len(driver.resident)
    before = len(driver.choices)
    driver.drain()
    assert len(driver.choices) - before == idle + free
    assert driver.held == driver.resident, "nothing is left that could go"


@every_policy
@few
@given(capacity=capacities, script=steps)
def test_after_release_every_key_can_be_evicted(
    make: Make, capacity: int, script: list[tuple[str, int]]
) -> None:
    """A hold ends with its release, whatever happened in between."""
    driver = Driver(make(capacity), capacity)
    driver.run(script)
    for name in sorted(driver.held):
        driver.call("release", name)
    resident = set(driver.resident)
    for number in range(1000, 1000 + capacity - len(resident)):
        driver.admit(key(number))
    assert driver.drain() >= resident


@every_policy
@few
@given(capacity=capacities, before=steps, script=steps)
def test_a_cleared_policy_chooses_as_a_new_one(
    make: Make, capacity: int, before: list[tuple[str, int]], script: list[tuple[str, int]]
) -> None:
    """What was learned from forgotten blocks is void, and a leftover would be a key without a
    block."""
    used = make(capacity)
    Driver(used, capacity).run(before)
    used.clear()
    assert Driver(used, capacity).run(script) == Driver(make(capacity), capacity).run(script)


@every_policy
@few
@given(capacity=capacities, script=steps)
def test_the_same_calls_give_the_same_choices(
    make: Make, capacity: int, script: list[tuple[str, int]]
) -> None:
    """Tensor-parallel schedulers, and a replay of a bug report, must agree."""
    assert Driver(make(capacity), capacity).run(script) == Driver(make(capacity), capacity).run(
        script
    )


@every_policy
def test_memory_is_bounded_by_the_capacity(make: Make) -> None:
    """A tier runs for weeks and sees every prompt."""
    policy = make(10)
    driver = Driver(policy, 10)
    for number in range(2000):
        name = key(number % 700)
        if name not in driver.resident:
            driver.admit(name)
            driver.call("release", name)
        if number % 3 == 0:
            driver.call("touch", name)
        if number % 7 == 0:
            driver.call("discard", name)
    assert 10 <= len(_keys_within(policy)) <= 2 * 10


def _keys_within(root: object) -> set[bytes]:
    """All keys that an object holds, directly or through others."""
    found: set[bytes] = set()
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(item))
        if isinstance(item, bytes):
            found.add(item)
        waiting.extend(gc.get_referents(item))
    return found
