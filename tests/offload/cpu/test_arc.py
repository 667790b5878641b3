"""ARC compared with its paper.

N. Megiddo, D. S. Modha: "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.base import OffloadKey
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.policies.arc import ARCPolicy
from tests.offload.cpu.keys import REQUEST, access, hits, key, keys, store


class PaperARC:
    """Figure 4 of the paper, literally, on plain lists with the least recent key first."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.T1: list[int] = []
        self.T2: list[int] = []
        self.B1: list[int] = []
        self.B2: list[int] = []

    def request(self, x: int) -> bool:
        """ARC(c) for the request x. Returns whether it hit."""
        if x in self.T1 or x in self.T2:
            return self._case_1(x)
        if x in self.B1:
            delta = 1.0 if len(self.B1) >= len(self.B2) else len(self.B2) / len(self.B1)
            self.p = min(self.p + delta, self.c)
            self._replace(x)
            self.B1.remove(x)
            self.T2.append(x)
        elif x in self.B2:
            delta = 1.0 if len(self.B2) >= len(self.B1) else len(self.B1) / len(self.B2)
            self.p = max(self.p - delta, 0)
            self._replace(x)
            self.B2.remove(x)
            self.T2.append(x)
        else:
            self._case_4(x)
        return False

    def _case_1(self, x: int) -> bool:
        (self.T1 if x in self.T1 else self.T2).remove(x)
        self.T2.append(x)
        return True

    def _case_4(self, x: int) -> None:
        l1 = len(self.T1) + len(self.B1)
        total = l1 + len(self.T2) + len(self.B2)
        if l1 == self.c:
            if len(self.T1) < self.c:
                del self.B1[0]
                self._replace(x)
            else:
                del self.T1[0]
        elif l1 < self.c and total >= self.c:
            if total == 2 * self.c:
                del self.B2[0]
            self._replace(x)
        self.T1.append(x)

    def _replace(self, x: int) -> None:
        if self.T1 and (len(self.T1) > self.p or (x in self.B2 and len(self.T1) == self.p)):
            self.B1.append(self.T1.pop(0))
        else:
            self.B2.append(self.T2.pop(0))


def policy_of(tier: CPUOffloadingManager) -> ARCPolicy:
    policy = tier._policy
    assert isinstance(policy, ARCPolicy)
    return policy


def numbers(names: Iterable[OffloadKey]) -> list[int]:
    return [int.from_bytes(name[:4], "big") for name in names]


def lists(policy: ARCPolicy) -> tuple[list[int], list[int], list[int], list[int]]:
    """T1, T2, B1, B2 of an ARC without keys in flight."""
    parts = (policy.recent.idle, policy.frequent.idle, policy.recent_ghosts, policy.frequent_ghosts)
    t1, t2, b1, b2 = map(numbers, parts)
    return t1, t2, b1, b2


def assert_bounds(policy: ARCPolicy) -> None:
    """Section III of the paper, and its consequences."""
    t1, t2, b1, b2 = map(
        len, (policy.recent, policy.frequent, policy.recent_ghosts, policy.frequent_ghosts)
    )
    assert 0 <= policy.target <= policy.capacity
    assert t1 + t2 <= policy.capacity
    assert t1 + b1 <= policy.capacity
    assert t1 + t2 + b1 + b2 <= 2 * policy.capacity


# Each access names the list it comes from: plain random numbers seldom return from a ghost list
# often enough to move p far.
scripts = st.lists(
    st.tuples(st.sampled_from(["T1", "T2", "B1", "B1", "B2", "fresh"]), st.integers(0, 9)),
    max_size=150,
)


@settings(max_examples=400)
@given(capacity=st.integers(1, 7), script=scripts)
def test_one_access_at_a_time_is_the_papers_algorithm(
    capacity: int, script: list[tuple[str, int]]
) -> None:
    """Hits, all four lists in their order, and p are equal after every access."""
    tier = CPUOffloadingManager(capacity, "arc")
    paper = PaperARC(capacity)
    for turn, (source, index) in enumerate(script):
        known: list[int] = [] if source == "fresh" else getattr(paper, source)
        number = known[index % len(known)] if known else 100 + turn
        assert access(tier, number) == paper.request(number)
        policy = policy_of(tier)
        assert lists(policy) == (paper.T1, paper.T2, paper.B1, paper.B2)
        assert policy.target == paper.p
        assert hits(tier, range(250)) == {*paper.T1, *paper.T2}


@pytest.mark.parametrize("capacity", [1, 2, 50, 200])
def test_a_long_mixed_trace_is_the_papers_algorithm(capacity: int) -> None:
    """At these sizes p takes fractions and every case occurs thousands of times."""
    draw = Random(capacity)
    tier = CPUOffloadingManager(capacity, "arc", enable_events=False)
    paper = PaperARC(capacity)
    targets = set()
    for step in range(15_000):
        popular = int(draw.paretovariate(0.6)) % (6 * capacity + 1)
        number = popular if draw.random() < 0.7 else 10_000 + step % (3 * capacity)
        assert access(tier, number) == paper.request(number)
        targets.add(paper.p)
    assert lists(policy_of(tier)) == (paper.T1, paper.T2, paper.B1, paper.B2)
    assert policy_of(tier).target == paper.p
    assert len(targets) > min(capacity, 10), "p moved, or nothing of the adaptation was tested"


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "finish", "fail", "load", "unload", "bad", "touch", "reset"]
        ),
        st.lists(st.integers(0, 12), min_size=1, max_size=4),
    ),
    max_size=80,
)


@given(capacity=st.integers(1, 6), script=actions)
def test_the_bounds_hold_with_copies_in_flight(
    capacity: int, script: list[tuple[str, list[int]]]
) -> None:
    """The paper has no batches, failures or resets.

    The bounds on memory and on p must survive them.
    """
    tier = CPUOffloadingManager(capacity, "arc")
    storing: list[list[OffloadKey]] = []
    loading: list[list[OffloadKey]] = []
    for action, chosen in script:
        if action == "store":
            output = tier.prepare_store(keys(*chosen), REQUEST)
            storing += [list(output.keys_to_store)] if output else []
        elif action in ("finish", "fail") and storing:
            tier.complete_store(storing.pop(), REQUEST, success=action == "finish")
        elif action == "load":
            loading.append([key(number) for number in sorted(hits(tier, chosen))])
            tier.prepare_load(loading[-1], REQUEST)
        elif action in ("unload", "bad") and loading:
            tier.complete_load(loading.pop(), REQUEST, success=action == "unload")
        elif action == "touch":
            tier.touch(keys(*chosen), REQUEST)
        elif action == "reset":
            tier.reset()
        policy, now = policy_of(tier), tier.statistics()
        assert_bounds(policy)
        assert (
            len(policy.recent) + len(policy.frequent)
            == now.idle_blocks + now.loading_blocks + now.pending_blocks
        )


def hot_set_after_a_scan(cache_policy: str) -> set[int]:
    """A set of 50 blocks in constant use, then ten times the tier's size of prompts seen once."""
    tier = CPUOffloadingManager(100, cache_policy)
    for _ in range(3):
        for number in range(50):
            access(tier, number)
    for number in range(1000, 2000):
        access(tier, number)
    return hits(tier, range(50))


def test_a_hot_set_survives_a_scan() -> None:
    """This is the policy's purpose: a batch of fresh documents must not evict the system prompt."""
    assert hot_set_after_a_scan("arc") == set(range(50))


def test_lru_loses_the_hot_set_to_the_same_scan() -> None:
    """Otherwise the trace would prove nothing about ARC."""
    assert hot_set_after_a_scan("lru") == set()


def test_the_target_grows_with_returns_of_recent_ghosts_and_falls_with_those_of_frequent_ones() -> (
    None
):
    """The paper's learning rule by hand: a return shows which of the lists was too short."""
    tier = CPUOffloadingManager(2, "arc")
    policy = policy_of(tier)
    for number in (1, 1, 2, 3):
        access(tier, number)
    assert lists(policy) == ([3], [1], [2], [])
    access(tier, 2)
    assert policy.target == 1.0
    assert lists(policy) == ([3], [2], [], [1])
    access(tier, 1)
    assert policy.target == 0.0
    assert lists(policy) == ([], [2, 1], [3], [])


def test_the_target_stops_at_the_capacity() -> None:
    """Above it, returns of frequent ghosts would first have to undo a meaningless excess."""
    tier = CPUOffloadingManager(5, "arc")
    for number in (1, 1, 2, 2, 3, 3, 4, 4, 10, 11, 12, 13, 14, 14):
        access(tier, number)
    targets = []
    for number in (10, 11, 12, 13):
        access(tier, number)
        targets.append(policy_of(tier).target)
    assert targets == [1.0, 2.0, 3.0, 5.0], "the last step is 3: as many ghosts in B2 to one in B1"


def test_a_block_in_flight_is_passed_over_and_the_other_list_gives() -> None:
    """REPLACE prefers T1 here; its only block is being read."""
    tier = CPUOffloadingManager(2, "arc")
    for number in (1, 1, 2):
        access(tier, number)
    tier.prepare_load(keys(2), REQUEST)
    store(tier, 3)
    assert hits(tier, range(5)) == {2, 3}
    assert lists(policy_of(tier)) == ([3], [], [], [1])
    tier.complete_load(keys(2), REQUEST)
    assert lists(policy_of(tier)) == ([3, 2], [], [], [1])


def test_recent_keys_give_below_their_target_if_all_frequent_ones_are_in_flight() -> None:
    """The reverse: REPLACE prefers T2 here."""
    tier = CPUOffloadingManager(2, "arc")
    for number in (1, 1, 2, 3, 2):
        access(tier, number)
    assert lists(policy_of(tier)) == ([3], [2], [], [1])
    assert policy_of(tier).target == 1.0
    tier.prepare_load(keys(2), REQUEST)
    store(tier, 4)
    assert hits(tier, range(5)) == {2, 4}
    assert lists(policy_of(tier)) == ([4], [], [3], [1])


def test_a_reset_forgets_what_was_learned() -> None:
    """Ghosts are keys of forgotten blocks, and p was learned from them."""
    tier = CPUOffloadingManager(2, "arc")
    for number in (1, 1, 2, 3, 2):
        access(tier, number)
    tier.reset()
    assert lists(policy_of(tier)) == ([], [], [], [])
    assert policy_of(tier).target == 0.0


def test_the_preferred_list_gives_again_when_its_block_is_back() -> None:
    """Being passed over once must not keep a block for good."""
    tier = CPUOffloadingManager(2, "arc")
    for number in (1, 1, 2):
        access(tier, number)
    tier.prepare_load(keys(2), REQUEST)
    tier.complete_load(keys(2), REQUEST)
    store(tier, 3)
    assert hits(tier, range(5)) == {1, 3}


def test_a_block_touched_while_it_is_stored_is_frequent() -> None:
    """Another request wants it before it has arrived: that is a second use."""
    tier = CPUOffloadingManager(2, "arc")
    tier.prepare_store(keys(1), REQUEST)
    tier.touch(keys(1), REQUEST)
    tier.complete_store(keys(1), REQUEST)
    assert lists(policy_of(tier)) == ([], [1], [], [])


def test_a_load_without_a_touch_is_not_a_use() -> None:
    """A request's touch counts as use; its load must not count again."""
    tier = CPUOffloadingManager(2, "arc")
    store(tier, 1)
    tier.prepare_load(keys(1), REQUEST)
    tier.complete_load(keys(1), REQUEST)
    assert lists(policy_of(tier)) == ([1], [], [], [])


def test_a_miss_that_is_not_stored_teaches_nothing() -> None:
    """A block that is never stored does not belong in a history of what the tier held."""
    tier = CPUOffloadingManager(2, "arc")
    for number in (1, 1, 2, 3):
        access(tier, number)
    before = lists(policy_of(tier))
    tier.lookup(key(2), REQUEST)
    tier.touch(keys(2, 9), REQUEST)
    assert lists(policy_of(tier)) == before
    assert policy_of(tier).target == 0.0


def test_a_failed_store_leaves_no_ghost() -> None:
    """It was never evicted, so its return shows nothing about the lists' sizes."""
    tier = CPUOffloadingManager(2, "arc")
    tier.prepare_store(keys(1, 2), REQUEST)
    tier.complete_store(keys(1), REQUEST, success=False)
    tier.complete_store(keys(2), REQUEST)
    assert lists(policy_of(tier)) == ([2], [], [], [])
