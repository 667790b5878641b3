"""What the CPU tier holds, by example and against a plain model of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvevents.events import CPU
from offload.base import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
)
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.policies import create_policy
from offload.errors import CacheConfigError, TierStateError
from tests.offload.cpu import plug_in
from tests.offload.cpu.keys import REQUEST, hits, key, keys, replayed, store


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plug_in.installed(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(params=["lru", "arc", plug_in.NAME])
def tier(request: pytest.FixtureRequest) -> CPUOffloadingManager:
    """Three blocks; everything tested here holds for every policy."""
    return CPUOffloadingManager(3, request.param, enable_events=True)


def prepare_store(tier: OffloadingManager, *numbers: int) -> PrepareStoreOutput:
    output = tier.prepare_store(keys(*numbers), REQUEST)
    assert output is not None
    return output


def lookup(tier: OffloadingManager, number: int) -> LookupResult:
    return tier.lookup(key(number), REQUEST)


def event(*numbers: int, removed: bool = False) -> OffloadingEvent:
    return OffloadingEvent(tuple(keys(*numbers)), CPU, removed)


# --- storing --------------------------------------------------------------------------------------


def test_a_block_is_a_hit_only_after_its_store(tier: CPUOffloadingManager) -> None:
    """Before that its memory holds another prompt's keys and values."""
    assert lookup(tier, 1) is LookupResult.MISS
    output = prepare_store(tier, 1)
    assert lookup(tier, 1) is LookupResult.PENDING
    assert tier.take_events() == []
    with pytest.raises(TierStateError, match="prepare_load: key 1 of 1 is not a hit"):
        tier.prepare_load(keys(1), REQUEST)
    tier.complete_store(output.keys_to_store, REQUEST)
    assert lookup(tier, 1) is LookupResult.HIT
    assert tier.take_events() == [event(1)]


def test_what_is_stored_or_pending_is_not_stored_again(tier: CPUOffloadingManager) -> None:
    """A second copy of a block would take another block's room."""
    store(tier, 1)
    prepare_store(tier, 2)
    output = prepare_store(tier, 3, 2, 1)
    assert list(output.keys_to_store) == keys(3)
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert len(output.store_spec.block_ids) == 1


def test_a_key_named_twice_is_stored_once(tier: CPUOffloadingManager) -> None:
    """Two requests of a batch may share a prompt, and duplicates may get this far."""
    output = prepare_store(tier, 1, 2, 1)
    assert list(output.keys_to_store) == keys(1, 2)
    tier.complete_store(keys(2, 1, 2), REQUEST)
    assert tier.take_events() == [event(2, 1)]
    assert prepare_store(tier, 2, 1, 3, 3, 3).evicted_keys == []


def test_nothing_new_to_store_is_not_a_refusal(tier: CPUOffloadingManager) -> None:
    """None would mean that there is no room."""
    store(tier, 1)
    assert prepare_store(tier, 1) == PrepareStoreOutput([], CPULoadStoreSpec([]), [])
    assert prepare_store(tier) == PrepareStoreOutput([], CPULoadStoreSpec([]), [])


def test_a_failed_store_leaves_nothing_behind(tier: CPUOffloadingManager) -> None:
    """No key, no event, and the block is free again."""
    prepare_store(tier, 1, 2, 3)
    tier.complete_store(keys(1, 2, 3), REQUEST, success=False)
    assert [lookup(tier, number) for number in (1, 2, 3)] == [LookupResult.MISS] * 3
    assert tier.take_events() == []
    assert tier.statistics().free_blocks == 3
    assert tier.statistics().counts.failed_stores == 3
    assert len(prepare_store(tier, 1, 4, 5).keys_to_store) == 3


def test_parts_of_a_store_may_end_separately(tier: CPUOffloadingManager) -> None:
    """One call's blocks may travel in several jobs, one of which fails."""
    prepare_store(tier, 1, 2, 3)
    tier.complete_store(keys(2), REQUEST)
    tier.complete_store(keys(1), REQUEST, success=False)
    assert [lookup(tier, n) for n in (1, 2, 3)] == [
        LookupResult.MISS,
        LookupResult.HIT,
        LookupResult.PENDING,
    ]


def test_a_store_ends_once(tier: CPUOffloadingManager) -> None:
    """A job reported twice must not free or announce a block that has another key by then."""
    prepare_store(tier, 1, 2)
    tier.complete_store(keys(1), REQUEST)
    with pytest.raises(TierStateError, match="complete_store: key 2 of 2 has no store in flight"):
        tier.complete_store(keys(2, 1), REQUEST)
    with pytest.raises(TierStateError, match="key 1 of 1 has no store in flight"):
        tier.complete_store(keys(9), REQUEST)
    assert lookup(tier, 2) is LookupResult.PENDING


# --- eviction -------------------------------------------------------------------------------------


def test_room_is_made_in_one_batch(tier: CPUOffloadingManager) -> None:
    """One event per batch, before anything is stored in place of the evicted blocks."""
    store(tier, 1, 2, 3)
    tier.take_events()
    output = prepare_store(tier, 4, 5)
    (removed,) = tier.take_events()
    assert removed.removed
    assert list(removed.keys) == list(output.evicted_keys)
    assert hits(tier, range(9)) == {1, 2, 3} - {
        int.from_bytes(name[:4], "big") for name in output.evicted_keys
    }
    assert tier.statistics().counts.evicted == 2


def test_blocks_of_the_same_call_do_not_evict_each_other(tier: CPUOffloadingManager) -> None:
    """The call's stored blocks are needed along with its new ones, or the prompt has a hole."""
    for number in (1, 2, 3):
        store(tier, number)
    output = prepare_store(tier, 1, 4, 2)
    assert list(output.evicted_keys) == keys(3)
    tier.complete_store(output.keys_to_store, REQUEST)
    assert hits(tier, range(9)) == {1, 2, 4}


def test_more_keys_than_blocks_are_refused(tier: CPUOffloadingManager) -> None:
    """Part of them would be stored and evicted again at once."""
    store(tier, 1)
    assert tier.prepare_store(keys(1, 2, 3, 4), REQUEST) is None
    assert tier.prepare_store(keys(5, 6, 7, 8), REQUEST) is None
    assert hits(tier, range(9)) == {1}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_refused_store_changes_nothing(policy: str) -> None:
    """No block, no event, not the order of eviction: a twin that was never asked behaves alike."""
    asked, twin = CPUOffloadingManager(4, policy), CPUOffloadingManager(4, policy)
    for tier in (asked, twin):
        store(tier, 1, 2, 3, 4)
        tier.touch(keys(2), REQUEST)
        store(tier, 5)
        tier.prepare_load(keys(2, 5), REQUEST)
        tier.take_events()
    state = asked.statistics()
    assert asked.prepare_store(keys(1, 6, 7, 8), REQUEST) is None
    assert asked.take_events() == []
    after = asked.statistics()
    assert (after.free_blocks, after.idle_blocks, after.pending_blocks) == (
        state.free_blocks,
        state.idle_blocks,
        0,
    )
    assert after.counts.refused_stores == state.counts.refused_stores + 1
    for tier in (asked, twin):
        tier.complete_load(keys(2, 5), REQUEST)
    for number in (4, 1, 9, 10, 11, 12, 13):
        assert asked.prepare_store(keys(number), REQUEST) == twin.prepare_store(
            keys(number), REQUEST
        )
        for tier in (asked, twin):
            if lookup(tier, number) is LookupResult.PENDING:
                tier.complete_store(keys(number), REQUEST)


def test_a_block_under_load_is_not_evicted(tier: CPUOffloadingManager) -> None:
    """Its memory is being read."""
    store(tier, 1, 2, 3)
    tier.prepare_load(keys(1), REQUEST)
    tier.prepare_load(keys(1, 2), REQUEST)
    assert tier.prepare_store(keys(4, 5), REQUEST) is None
    tier.complete_load(keys(1, 2), REQUEST)
    assert list(prepare_store(tier, 4, 5).evicted_keys) in (keys(2, 3), keys(3, 2))
    assert tier.prepare_store(keys(6), REQUEST) is None
    tier.complete_load(keys(1), REQUEST)
    assert list(prepare_store(tier, 6).evicted_keys) == keys(1)


# --- loading --------------------------------------------------------------------------------------


def test_a_load_reads_where_the_store_wrote(tier: CPUOffloadingManager) -> None:
    """Any other block is another prompt's."""
    written = prepare_store(tier, 1, 2, 3)
    tier.complete_store(keys(1, 2, 3), REQUEST)
    assert isinstance(written.store_spec, CPULoadStoreSpec)
    first, second, third = written.store_spec.block_ids
    assert tier.prepare_load(keys(3, 1, 1, 2), REQUEST) == CPULoadStoreSpec(
        [third, first, first, second]
    )


def test_a_load_with_a_miss_in_it_protects_nothing(tier: CPUOffloadingManager) -> None:
    """It would never be completed."""
    store(tier, 1, 2)
    with pytest.raises(TierStateError, match="prepare_load: key 3 of 3 is not a hit"):
        tier.prepare_load(keys(1, 2, 3), REQUEST)
    assert len(prepare_store(tier, 4, 5, 6).evicted_keys) == 2


def test_a_load_ends_once(tier: CPUOffloadingManager) -> None:
    """An extra completion would end another request's protection."""
    store(tier, 1, 2)
    tier.prepare_load(keys(1), REQUEST)
    with pytest.raises(
        TierStateError,
        match="complete_load: key 2 of 2 has 0 loads in flight, 1 are reported over",
    ):
        tier.complete_load(keys(1, 2), REQUEST)
    with pytest.raises(
        TierStateError, match="key 1 of 1 has 1 loads in flight, 2 are reported over"
    ):
        tier.complete_load(keys(1, 1), REQUEST)
    with pytest.raises(TierStateError, match="key 1 of 1 has 0 loads in flight"):
        tier.complete_load(keys(9), REQUEST)
    assert tier.statistics().loading_blocks == 1
    tier.complete_load(keys(1), REQUEST)
    assert tier.statistics().loading_blocks == 0


def test_a_block_that_could_not_be_read_is_dropped(tier: CPUOffloadingManager) -> None:
    """It would fail the next request too."""
    store(tier, 1, 2)
    tier.take_events()
    tier.prepare_load(keys(1, 2), REQUEST)
    tier.complete_load(keys(1, 2), REQUEST, success=False)
    assert hits(tier, range(9)) == set()
    assert tier.take_events() == [event(1, 2, removed=True)]
    assert tier.statistics().free_blocks == 3


def test_a_bad_block_keeps_its_id_while_others_read_it(tier: CPUOffloadingManager) -> None:
    """It ceases to be a hit at once; its memory is written again only after its last reader."""
    store(tier, 1)
    tier.take_events()
    for _ in range(3):
        tier.prepare_load(keys(1), REQUEST)
    tier.complete_load(keys(1), REQUEST, success=False)
    assert lookup(tier, 1) is LookupResult.MISS
    assert tier.take_events() == [event(1, removed=True)]
    assert tier.prepare_store(keys(2, 3, 4), REQUEST) is None
    assert list(prepare_store(tier, 1).keys_to_store) == [], (
        "one key has one block: it is stored again later"
    )
    tier.complete_load(keys(1), REQUEST, success=False)
    tier.complete_load(keys(1), REQUEST)
    assert tier.take_events() == []
    assert len(prepare_store(tier, 1, 3, 4).keys_to_store) == 3
    assert tier.statistics().counts.failed_loads == 2


# --- reset ----------------------------------------------------------------------------------------


def test_a_reset_forgets_all_and_reports_it_once(tier: CPUOffloadingManager) -> None:
    """New weights make every block wrong; an uninformed router keeps sending prompts there."""
    store(tier, 1, 2)
    tier.prepare_load(keys(2), REQUEST)
    prepare_store(tier, 3)
    tier.take_events()
    tier.reset()
    tier.reset()
    assert tier.take_events() == [event(1, 2, removed=True)]
    assert hits(tier, range(9)) == set()
    assert lookup(tier, 3) is LookupResult.MISS


def test_what_is_in_flight_at_a_reset_never_comes_back(tier: CPUOffloadingManager) -> None:
    """Its bytes were computed with the old weights."""
    store(tier, 1)
    tier.prepare_load(keys(1), REQUEST)
    prepare_store(tier, 2, 3)
    tier.take_events()
    tier.reset()
    assert tier.take_events() == [event(1, removed=True)]
    assert tier.prepare_store(keys(4), REQUEST) is None, "all three ids are under copy"
    assert list(prepare_store(tier, 2).keys_to_store) == []
    tier.complete_store(keys(2), REQUEST)
    tier.complete_store(keys(3), REQUEST, success=False)
    tier.complete_load(keys(1), REQUEST, success=False)
    assert tier.take_events() == []
    assert tier.statistics().free_blocks == 3
    assert len(prepare_store(tier, 2, 3, 4).keys_to_store) == 3


# --- the rest -------------------------------------------------------------------------------------


def test_events_do_not_pile_up_unless_they_were_asked_for() -> None:
    """Without a consumer they would never be taken."""
    tier = CPUOffloadingManager(2)
    store(tier, 1, 2)
    store(tier, 3)
    tier.reset()
    assert tier.take_events() == []


def test_events_are_handed_out_once(tier: CPUOffloadingManager) -> None:
    """A consumer that counts copies would count double."""
    store(tier, 1)
    assert tier.take_events() == [event(1)]
    assert tier.take_events() == []


def test_blocks_of_different_groups_are_different_blocks(tier: CPUOffloadingManager) -> None:
    """Two groups have the same hash at the same boundary, but different bytes."""
    output = tier.prepare_store([key(1, group=0), key(1, group=1)], REQUEST)
    assert output is not None
    tier.complete_store([key(1, group=1)], REQUEST)
    assert tier.lookup(key(1, group=1), REQUEST) is LookupResult.HIT
    assert tier.lookup(key(1, group=0), REQUEST) is LookupResult.PENDING


def test_a_tier_of_no_blocks_is_refused() -> None:
    """It would silently refuse every store."""
    with pytest.raises(CacheConfigError, match="CPU tier: num_blocks 0 must be at least 1"):
        CPUOffloadingManager(0)


def test_lookups_are_counted_by_their_result(tier: CPUOffloadingManager) -> None:
    """Operators choose the size of the tier by its hit ratio."""
    store(tier, 1)
    prepare_store(tier, 2)
    for number in (1, 1, 1, 2, 2, 3):
        lookup(tier, number)
    counts = tier.statistics().counts
    assert (counts.lookup_hits, counts.lookup_pending, counts.lookup_misses) == (3, 2, 1)
    assert (counts.stored, counts.loads) == (1, 0)


def test_the_tier_names_its_medium(tier: CPUOffloadingManager) -> None:
    """Its events reach the router under that name."""
    assert tier.medium == "CPU"


def test_the_policy_is_lru_by_default() -> None:
    """The simplest one is the default."""
    assert type(CPUOffloadingManager(2)._policy) is type(create_policy("lru", 2))


# --- against a model ------------------------------------------------------------------------------

NUMBERS = st.integers(0, 9)


class TierMachine(RuleBasedStateMachine):
    """Random calls in any order that the protocol allows.

    Sets and counters predict their results.
    """

    policy = "lru"
    stores = Bundle("stores")
    """Keys of one job, which ends as a whole."""
    loads = Bundle("loads")

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 4
        self.tier = CPUOffloadingManager(self.capacity, self.policy, enable_events=True)
        self.stored: set[OffloadKey] = set()
        self.pending: set[OffloadKey] = set()
        self.doomed: set[OffloadKey] = set()
        self.loading: Counter[OffloadKey] = Counter()
        self.block_ids: dict[OffloadKey, int] = {}
        self.announced: set[OffloadKey] = set()
        self.counts: Counter[str] = Counter()

    @property
    def idle(self) -> set[OffloadKey]:
        return {name for name in self.stored if not self.loading[name]}

    def forget(self, names: set[OffloadKey]) -> None:
        for name in names:
            del self.block_ids[name]

    @rule(target=stores, numbers=st.lists(NUMBERS, max_size=6))
    def prepare_store(self, numbers: list[int]) -> list[OffloadKey]:
        asked = keys(*numbers)
        new = [name for name in dict.fromkeys(asked) if name not in self.block_ids]
        evictions = max(0, len(new) - (self.capacity - len(self.block_ids)))
        candidates = self.idle - set(asked)
        output = self.tier.prepare_store(asked, REQUEST)
        if evictions > len(candidates):
            assert output is None
            self.counts["refused_stores"] += 1
            return multiple()
        assert output is not None
        self.took(output, new, evictions, candidates)
        return list(new) if new else multiple()

    def took(
        self,
        output: PrepareStoreOutput,
        new: list[OffloadKey],
        evictions: int,
        candidates: set[OffloadKey],
    ) -> None:
        evicted = set(output.evicted_keys)
        assert len(output.evicted_keys) == len(evicted) == evictions
        assert evicted <= candidates
        assert list(output.keys_to_store) == new
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        self.stored -= evicted
        self.forget(evicted)
        self.pending |= set(new)
        self.block_ids.update(zip(new, output.store_spec.block_ids, strict=True))
        self.counts["evicted"] += evictions

    @rule(names=consumes(stores), success=st.booleans())
    def complete_store(self, names: list[OffloadKey], success: bool) -> None:
        self.tier.complete_store(names, REQUEST, success)
        came = set(names) - self.doomed
        self.pending -= came
        if success:
            self.stored |= came
            self.counts["stored"] += len(came)
        else:
            self.counts["failed_stores"] += len(names)
        self.forget(set(names) if not success else set(names) & self.doomed)
        self.doomed -= set(names)

    @precondition(lambda self: self.stored)
    @rule(target=loads, data=st.data())
    def prepare_load(self, data: st.DataObject) -> list[OffloadKey]:
        names = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=4))
        spec = self.tier.prepare_load(names, REQUEST)
        assert list(spec.block_ids) == [self.block_ids[name] for name in names]
        self.loading.update(names)
        self.counts["loads"] += len(names)
        return names

    @rule(names=consumes(loads), success=st.booleans() | st.just(True))
    def complete_load(self, names: list[OffloadKey], success: bool) -> None:
        self.tier.complete_load(names, REQUEST, success)
        self.loading -= Counter(names)
        if not success:
            self.counts["failed_loads"] += len(names)
            self.doomed |= set(names)
            self.stored -= set(names)
        over = {name for name in names if name in self.doomed and not self.loading[name]}
        self.doomed -= over
        self.forget(over)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.tier.touch(iter(keys(*numbers)), REQUEST)

    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.counts["reset_blocks"] += len(self.stored)
        self.forget(self.idle)
        self.doomed |= self.pending | (self.stored - self.idle)
        self.pending = set()
        self.stored = set()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def misuse(self, numbers: list[int]) -> None:
        """Each call is refused if a single key does not fit, and then changes nothing."""
        names = keys(*numbers)
        storing = self.pending | {name for name in self.doomed if not self.loading[name]}
        self.refuses(self.tier.prepare_load, names, set(names) <= self.stored)
        self.refuses(self.tier.complete_store, names, set(names) <= storing)
        self.refuses(self.tier.complete_load, names, Counter(names) <= self.loading)

    def refuses(self, call: Callable[..., object], names: list[OffloadKey], fits: bool) -> None:
        if not fits:
            with pytest.raises(TierStateError):
                call(names, REQUEST)

    @rule()
    def follow_events(self) -> None:
        self.announced = replayed(self.tier.take_events(), self.announced)
        assert self.announced == self.stored

    @invariant()
    def lookups_are_those_of_the_model(self) -> None:
        for number in range(10):
            answer = self.tier.lookup(key(number), REQUEST)
            expected = LookupResult.PENDING if key(number) in self.pending else LookupResult.MISS
            assert answer is (LookupResult.HIT if key(number) in self.stored else expected)

    @invariant()
    def no_two_keys_share_a_block(self) -> None:
        ids = list(self.block_ids.values())
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(self.capacity))

    @invariant()
    def the_statistics_are_those_of_the_model(self) -> None:
        statistics = self.tier.statistics()
        assert statistics.free_blocks == self.capacity - len(self.block_ids)
        assert statistics.idle_blocks == len(self.idle)
        assert statistics.loading_blocks == len(self.stored) - len(self.idle)
        assert statistics.pending_blocks == len(self.pending)
        assert statistics.doomed_blocks == len(self.doomed)
        for name in (
            "refused_stores",
            "evicted",
            "stored",
            "failed_stores",
            "failed_loads",
            "loads",
            "reset_blocks",
        ):
            assert getattr(statistics.counts, name) == self.counts[name], name

    def teardown(self) -> None:
        self.follow_events()


class ArcMachine(TierMachine):
    policy = "arc"


class PlugInMachine(TierMachine):
    policy = plug_in.NAME


often = settings(max_examples=120, stateful_step_count=50)
TestLruTier = TierMachine.TestCase
TestArcTier = ArcMachine.TestCase
TestPlugInTier = PlugInMachine.TestCase
TestLruTier.settings = TestArcTier.settings = TestPlugInTier.settings = often


# --- read by another thread -----------------------------------------------------------------------


def test_a_hit_is_read_and_what_is_none_is_not() -> None:
    """Another engine asks for anything."""
    tier = CPUOffloadingManager(2)
    store(tier, 1)
    assert tier.holds(key(1))
    assert tier.read(key(1), lambda block_id: b"block %d" % block_id) == b"block 0"
    agreed = tier.prepare_store(keys(2), REQUEST)
    assert agreed is not None
    for absent in (key(2), key(3)):
        assert not tier.holds(absent), "stored not yet, or never"
        assert tier.read(absent, lambda _: b"bytes") is None
    assert tier.statistics().counts.lookup_hits == 0, "what others read is no use of one's own"


def test_what_was_evicted_while_it_was_read_is_not_passed_on() -> None:
    """Its slot may have been given to another block, so the bytes may be that one's."""
    tier = CPUOffloadingManager(1)
    store(tier, 1)

    def evicting(_block_id: int) -> bytes:
        store(tier, 2)
        return b"half one, half the other"

    assert tier.read(key(1), evicting) is None
    assert tier.holds(key(2))


def test_what_failed_while_it_was_read_is_not_passed_on() -> None:
    """A block whose own load failed is bad."""
    tier = CPUOffloadingManager(1)
    store(tier, 1)
    tier.prepare_load(keys(1), REQUEST)

    def failing(_block_id: int) -> bytes:
        tier.complete_load(keys(1), REQUEST, success=False)
        return b"bad"

    assert tier.read(key(1), failing) is None
    assert not tier.holds(key(1))
