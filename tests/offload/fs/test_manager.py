"""The disk tier's manager over real files.

Events report what is loadable, the bound holds, and a restart continues.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.base import Direction, FileLoadStoreSpec, LookupResult, OffloadKey, RequestContext
from offload.errors import BlockFileError, CacheConfigError, TierStateError, TransferError
from offload.fs.block_file import relative_path
from offload.fs.manager import FileOffloadingManager
from offload.fs.store import BlockStore
from tests.offload.transfer.world import key_of

CONTEXT = RequestContext("r")
PAYLOADS = [100, 260]
A, B, C, D = (key_of(0, number) for number in range(4))
FILE_BYTES = 100 + 36 + len(A)
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "tier", PAYLOADS)


@pytest.fixture
def manager(store: BlockStore) -> FileOffloadingManager:
    return FileOffloadingManager(store, 3 * FILE_BYTES, enable_events=True)


def put(manager: FileOffloadingManager, store: BlockStore, *keys: OffloadKey) -> None:
    """Store blocks from beginning to end."""
    output = manager.prepare_store(keys, CONTEXT)
    assert output is not None
    for key in output.keys_to_store:
        store.write(key, memoryview(bytes(100)))
    manager.complete_store(output.keys_to_store, CONTEXT)


def states(manager: FileOffloadingManager, *keys: OffloadKey) -> list[LookupResult]:
    return [manager.lookup(key, CONTEXT) for key in keys]


def path_of(store: BlockStore, key: OffloadKey) -> Path:
    return store.root / relative_path(key)


def test_a_block_is_a_hit_only_after_its_store_is_complete(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """Before that its file may be missing."""
    assert states(manager, A) == [MISS]
    output = manager.prepare_store([A, A, B], CONTEXT)
    assert output is not None
    assert (output.keys_to_store, output.store_spec, output.evicted_keys) == (
        (A, B),
        FileLoadStoreSpec((A, B)),
        [],
    )
    assert states(manager, A, B) == [PENDING, PENDING]
    assert manager.take_events() == []
    again = manager.prepare_store([B, C], CONTEXT)
    assert again is not None
    assert again.keys_to_store == (C,)
    manager.complete_store([A, B], CONTEXT)
    assert states(manager, A, B, C) == [HIT, HIT, PENDING]
    (event,) = manager.take_events()
    assert (event.keys, event.medium, event.removed) == ((A, B), "STORAGE", False)


def test_the_least_recently_used_goes_first_and_its_file_with_it(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """Use is a store, a load or a touch; the deleted file is reported as removed."""
    for key in (A, B, C):
        put(manager, store, key)
    manager.touch([A, D], CONTEXT)
    manager.take_events()
    output = manager.prepare_store([D], CONTEXT)
    assert output is not None
    assert output.evicted_keys == [B]
    assert not path_of(store, B).exists()
    assert [(event.keys, event.removed) for event in manager.take_events()] == [((B,), True)]
    assert states(manager, A, B, C, D) == [HIT, MISS, HIT, PENDING]


def test_a_prompts_tail_goes_before_its_head(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """A block serves no hit without those before it."""
    put(manager, store, A, B, C)
    output = manager.prepare_store([D], CONTEXT)
    assert output is not None
    assert output.evicted_keys == [C]


def test_what_is_loaded_or_asked_for_is_not_evicted(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """A load in flight must find its file, and a prompt must not displace its own head."""
    for key in (A, B, C):
        put(manager, store, key)
    assert manager.prepare_load([A, A], CONTEXT) == FileLoadStoreSpec((A, A))
    output = manager.prepare_store([B, D], CONTEXT)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ((D,), [C])
    assert manager.prepare_store([B, C], CONTEXT) is None
    manager.complete_load([A], CONTEXT)
    assert manager.prepare_store([B, C], CONTEXT) is None
    manager.complete_load([A], CONTEXT)
    output = manager.prepare_store([B, C], CONTEXT)
    assert output is not None
    assert output.evicted_keys == [A]


def test_what_does_not_fit_is_refused_and_changes_nothing(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """Otherwise half a prompt would be stored in vain, and a warm cache emptied for it."""
    for key in (A, B):
        put(manager, store, key)
    manager.take_events()
    big = [key_of(1, number) for number in (1, 2)]
    assert manager.prepare_store(big, CONTEXT) is None
    assert (manager.take_events(), states(manager, A, B, *big)) == ([], [HIT, HIT, MISS, MISS])
    with pytest.raises(TransferError, match="a key of group 2 must belong to one of 2 groups"):
        manager.prepare_store([C, key_of(2, 1)], CONTEXT)
    assert states(manager, A, B, C) == [HIT, HIT, MISS]
    assert manager.statistics().counts.refused_stores == 1
    assert manager.statistics().used_bytes == 2 * FILE_BYTES


def test_calls_that_fit_no_state_are_refused_whole(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """A connector's mistake must not unbalance the protection of other requests' blocks."""
    put(manager, store, A)
    manager.prepare_store([B], CONTEXT)
    with pytest.raises(TierStateError, match="disk tier: prepare_load: key 2 of 2 is not a hit"):
        manager.prepare_load([A, B], CONTEXT)
    with pytest.raises(
        TierStateError,
        match="complete_load: key 1 of 1 has 0 loads in flight, 1 are reported over",
    ):
        manager.complete_load([A], CONTEXT)
    with pytest.raises(TierStateError, match="complete_store: key 2 of 2 has no store in flight"):
        manager.complete_store([B, A], CONTEXT)
    with pytest.raises(TierStateError, match="complete_load: key 1 of 1 has 0"):
        manager.complete_load([D], CONTEXT)
    assert states(manager, A, B) == [HIT, PENDING]
    assert manager.statistics().loading_blocks == 0


def test_a_failed_store_leaves_neither_block_nor_file(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """Some of its files may have been written."""
    manager.prepare_store([A, B], CONTEXT)
    store.write(A, memoryview(bytes(100)))
    manager.complete_store([A, B], CONTEXT, success=False)
    assert not path_of(store, A).exists()
    assert states(manager, A, B) == [MISS, MISS]
    assert manager.take_events() == []
    assert (manager.statistics().used_bytes, manager.statistics().counts.failed_stores) == (0, 2)


def test_a_block_that_could_not_be_loaded_is_stored_again_only_when_all_its_loads_are_over(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """Otherwise the second failed load would delete the new file."""
    put(manager, store, A)
    manager.prepare_load([A], CONTEXT)
    manager.prepare_load([A], CONTEXT)
    manager.take_events()
    manager.complete_load([A], CONTEXT, success=False)
    assert [(event.keys, event.removed) for event in manager.take_events()] == [((A,), True)]
    assert states(manager, A) == [MISS]
    output = manager.prepare_store([A], CONTEXT)
    assert output is not None
    assert output.keys_to_store == ()
    manager.complete_load([A], CONTEXT, success=False)
    assert not path_of(store, A).exists()
    put(manager, store, A)
    assert states(manager, A) == [HIT]


def test_a_reset_waits_for_what_is_in_flight(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """A store queued before the reset must neither reappear after it nor hit a newer store."""
    put(manager, store, A, B)
    manager.prepare_load([B], CONTEXT)
    manager.prepare_store([C], CONTEXT)
    manager.take_events()
    manager.reset()
    assert [(set(event.keys), event.removed) for event in manager.take_events()] == [({A, B}, True)]
    assert states(manager, A, B, C) == [MISS, MISS, MISS]
    assert (path_of(store, A).exists(), path_of(store, B).exists()) == (False, True)
    again = manager.prepare_store([A, B, C], CONTEXT)
    assert again is not None
    assert again.keys_to_store == (A,)
    store.write(C, memoryview(bytes(100)))
    manager.complete_store([C], CONTEXT)
    manager.complete_load([B], CONTEXT)
    assert not path_of(store, B).exists()
    assert not path_of(store, C).exists()
    assert states(manager, A, B, C) == [PENDING, MISS, MISS]
    assert manager.statistics().used_bytes == FILE_BYTES


def test_a_file_that_cannot_be_deleted_keeps_its_bytes_until_it_can(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """On a disk gone read-only, the bound counts the files that really exist."""
    for key in (A, B, C):
        put(manager, store, key)
    path_of(store, A).unlink()
    path_of(store, A).mkdir()  # no unlink works on it
    assert manager.prepare_store([D], CONTEXT) is None
    assert states(manager, A, B, C, D) == [HIT, HIT, HIT, MISS]
    assert manager.statistics().counts.failed_removals == 1
    output = manager.prepare_store([D], CONTEXT)  # the next call tries another file
    assert output is not None
    assert output.evicted_keys == [B]
    manager.prepare_load([A], CONTEXT)
    manager.complete_load([A], CONTEXT, success=False)
    assert states(manager, A) == [MISS]
    assert manager.statistics().used_bytes == 3 * FILE_BYTES
    path_of(store, A).rmdir()
    output = manager.prepare_store([A], CONTEXT)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ((A,), [])


@pytest.mark.parametrize("goes", [A, B], ids=["first", "second"])
def test_a_file_that_stays_holds_up_no_other_that_can_be_deleted(
    manager: FileOffloadingManager, store: BlockStore, goes: OffloadKey
) -> None:
    """Its bytes would be taken, and its key not stored again, as long as the other one stays."""
    for key in (A, B):
        put(manager, store, key)
        path_of(store, key).unlink()
        path_of(store, key).mkdir()  # no unlink works on it
    manager.prepare_load([A, B], CONTEXT)
    manager.complete_load([A, B], CONTEXT, success=False)
    assert manager.statistics().doomed_blocks == 2
    path_of(store, goes).rmdir()
    outputs = [manager.prepare_store([goes], CONTEXT) for _ in range(2)]
    assert (goes,) in [output and output.keys_to_store for output in outputs]
    assert manager.statistics().used_bytes == 2 * FILE_BYTES


def test_a_restart_keeps_the_order_of_use_and_the_bound_and_reports_the_blocks(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """The router learns what survived only from events; a smaller bound holds from the start."""
    for key in (A, B, C):
        put(manager, store, key)
    store.read(A, memoryview(bytearray(100)))
    store.close()
    smaller = BlockStore(store.root, PAYLOADS)
    again = FileOffloadingManager(smaller, 2 * FILE_BYTES, enable_events=True)
    (event,) = again.take_events()
    assert (event.keys, event.removed) == ((C, A), False)
    assert states(again, A, B, C) == [HIT, MISS, HIT]
    assert not path_of(store, B).exists()
    assert (again.statistics().counts.restored, again.statistics().used_bytes) == (
        2,
        2 * FILE_BYTES,
    )
    output = again.prepare_store([D], CONTEXT)
    assert output is not None
    assert output.evicted_keys == [C]


def test_sizes_and_owners_are_checked_at_the_start(
    manager: FileOffloadingManager, store: BlockStore
) -> None:
    """A bound below one block, and a directory in use."""
    with pytest.raises(CacheConfigError, match="max_bytes 259 must hold a block, 260 bytes"):
        FileOffloadingManager(store, 259)
    with pytest.raises(CacheConfigError, match="in use by another manager"):
        FileOffloadingManager(BlockStore(store.root, PAYLOADS), 10_000)


def test_events_are_kept_only_if_they_were_asked_for(store: BlockStore) -> None:
    """They would never be taken."""
    manager = FileOffloadingManager(store, 3 * FILE_BYTES)
    put(manager, store, A)
    manager.reset()
    assert manager.take_events() == []


@dataclass
class Copy:
    """A queued job: what it must find or leave, by version of the payload."""

    direction: Direction
    keys: list[OffloadKey]
    versions: dict[OffloadKey, int] = field(default_factory=dict)
    success: bool = True


class FileTier(RuleBasedStateMachine):
    """Manager, files, and a queue of copies.

    Copies run in order some time later, fail, or are cut off by a restart. A file's time, which
    orders the blocks after a restart, is set here: the system's clock gives two uses in a row the
    same one or not, and the same steps would then not leave the same blocks.
    """

    KEYS = tuple(key_of(number % 2, number) for number in range(8))
    MAX_BYTES = 1000

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kv-tier-"))
        self.queue: deque[Copy] = deque()
        self.ended: deque[Copy] = deque()
        self.version = 0
        self.uses = 0
        self.on_disk: dict[OffloadKey, int] = {}
        self.damaged: set[OffloadKey] = set()

    @initialize()
    def start(self) -> None:
        self.store = BlockStore(self.root, PAYLOADS)
        self.manager = FileOffloadingManager(self.store, self.MAX_BYTES, enable_events=True)
        self.announced: set[OffloadKey] = set()
        self.served: dict[OffloadKey, int] = {}
        self.take_events()
        self.served = {key: self.on_disk[key] for key in self.announced}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def payload(self, key: OffloadKey, version: int) -> bytes:
        group = key[-1]
        return bytes([version % 251]) * PAYLOADS[group]

    def take_events(self) -> None:
        for event in self.manager.take_events():
            assert event.medium == "STORAGE"
            for key in event.keys:
                assert (key in self.announced) == event.removed
                self.announced ^= {key}

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def prepare_store(self, keys: list[OffloadKey]) -> None:
        output = self.manager.prepare_store(keys, CONTEXT)
        if output is not None and output.keys_to_store:
            self.version += 1
            self.queue.append(
                Copy(Direction.STORE, list(output.keys_to_store), dict.fromkeys(keys, self.version))
            )

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def prepare_load(self, keys: list[OffloadKey]) -> None:
        if all(key in self.announced for key in keys):
            spec = self.manager.prepare_load(keys, CONTEXT)
            self.queue.append(
                Copy(Direction.LOAD, list(spec.keys), {key: self.served[key] for key in keys})
            )

    @precondition(lambda self: self.queue)
    @rule(fault=st.none() | st.integers(0, 3))
    def run_copy(self, fault: int | None) -> None:
        """The oldest copy runs; a store may break off after some files."""
        copy = self.queue.popleft()
        if copy.direction is Direction.STORE:
            written = copy.keys[:fault]
            for key in written:
                self.store.write(key, memoryview(self.payload(key, copy.versions[key])))
                self.used(key)
                self.on_disk[key] = copy.versions[key]
                self.damaged.discard(key)
            copy.success = len(written) == len(copy.keys)
        else:
            read = [self.read(key, copy.versions[key]) for key in copy.keys]
            copy.success = all(read)
        self.ended.append(copy)

    def read(self, key: OffloadKey, version: int) -> bool:
        expected = self.payload(key, version)
        payload = bytearray(len(expected))
        try:
            self.store.read(key, memoryview(payload))
        except BlockFileError:
            assert key in self.damaged
            return False
        self.used(key)
        assert payload == expected
        return True

    def used(self, key: OffloadKey) -> None:
        self.uses += 1
        os.utime(self.root / relative_path(key), ns=(self.uses, self.uses))

    @precondition(lambda self: self.ended)
    @rule()
    def complete(self) -> None:
        copy = self.ended.popleft()
        if copy.direction is Direction.LOAD:
            self.manager.complete_load(copy.keys, CONTEXT, copy.success)
            return
        self.manager.complete_store(copy.keys, CONTEXT, copy.success)
        self.served.update({key: copy.versions[key] for key in copy.keys})

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys, CONTEXT)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.take_events()
        assert self.announced == set()

    @rule(key=st.sampled_from(KEYS), place=st.integers(0, 90))
    def damage(self, key: OffloadKey, place: int) -> None:
        path = self.root / relative_path(key)
        if path.exists():
            contents = bytearray(path.read_bytes())
            contents[place] ^= 1
            path.write_bytes(contents)
            self.used(key)
            self.damaged.add(key)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.queue.clear()
        self.ended.clear()
        self.start()

    @invariant()
    def events_alone_tell_what_is_loadable(self) -> None:
        self.take_events()
        hits = {key for key in self.KEYS if self.manager.lookup(key, CONTEXT) is LookupResult.HIT}
        assert self.announced == hits
        for key in sorted(hits - self.damaged):
            assert self.read(key, self.served[key])

    @invariant()
    def the_bound_holds_on_the_disk(self) -> None:
        on_disk = sum(path.stat().st_size for path in self.root.rglob("*.block"))
        statistics = self.manager.statistics()
        assert on_disk <= statistics.used_bytes <= self.MAX_BYTES
        blocks = (statistics.idle_blocks, statistics.loading_blocks)
        assert sum(blocks) == len(self.announced)


TestFileTier = FileTier.TestCase
TestFileTier.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
