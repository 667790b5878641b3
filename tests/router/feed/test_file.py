"""The index over a restart: what is known already is not read again, and what is wrong is not
believed."""

from __future__ import annotations

import logging
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvevents.codec import encode
from kvevents.errors import EndpointError
from kvevents.events import Event, EventBatch
from kvevents.listener import LISTENED_TO
from kvroute_engine.demo.blind import GroupBlindIndex
from router.errors import RouterError
from router.feed import snapshot_file, snapshot_records
from router.feed.feed import Feed
from router.feed.snapshot_file import FILE_NAME, SnapshotKeeper
from router.feed.snapshot_records import SnapshotError
from router.fleet.types import EventSource
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import FULL, Prefix
from tests.support.following import QUICK
from tests.support.vllm_publisher import VllmPublisher
from tests.support.waiting import eventually

A = SourceId("replica-a")
PROMPT = list(range(1, 130))


def batch(*events: Event) -> bytes:
    return encode(EventBatch(1.0, list(events), 0))


def stored(start: int, end: int) -> bytes:
    return batch(Prefix(PROMPT).stored(0, FULL, start, end))


class Router:
    """As much of a router as follows one cache."""

    def __init__(self, directory: Path, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex()
        self.feed = Feed(lambda model: self.index, QUICK)
        self.keeper = SnapshotKeeper(self.feed, directory, 60.0)
        found = snapshot_file.read_file(directory, 900.0)
        if found is not None:
            for saved in snapshot_records.restore(found, "m", self.index):
                self.feed.expect(saved)

    def follow(self, publisher: VllmPublisher, source: SourceId = A) -> None:
        self.feed.add(
            source.replica,
            EventSource(source.dp_rank, publisher.endpoint, publisher.replay_endpoint, "kv-events"),
            "m",
        )

    def hit(self, source: SourceId = A) -> Hit:
        return self.index.match(PROMPT).get(source, Hit(0, 0))

    async def until_live(self, last_seq: int) -> None:
        def is_there() -> bool:
            found = self.feed.statistics()[A]
            return found.state.value == "live" and found.stream.last_seq == last_seq

        await eventually(is_there, "it is live", show=lambda: self.feed.statistics()[A])


@asynccontextmanager
async def router(directory: Path, index: PrefixIndex | None = None) -> AsyncIterator[Router]:
    made = Router(directory, index)
    try:
        yield made
    finally:
        await made.feed.close()


async def saved_by_one_that_knew(publisher: VllmPublisher, directory: Path, tokens: int) -> None:
    async with router(directory) as before:
        before.follow(publisher)
        publisher.publish(stored(0, tokens))
        await before.until_live(0)
        await before.keeper.save()
        assert (before.keeper.saved, before.keeper.failures) == (1, 0)


async def test_a_router_goes_on_from_a_snapshot_and_asks_only_for_what_came_since(
    tmp_path: Path,
) -> None:
    """With 64 full replicas, everything else is minutes of replay."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        publisher.publish(stored(64, 96))
        async with router(tmp_path) as after:
            assert after.hit() == Hit(64, 64), "before a word from the engine"
            assert not after.feed.sources()
            after.follow(publisher)
            assert A in after.feed.suspects, "nobody has confirmed it yet"
            await after.until_live(1)
            assert after.hit() == Hit(96, 96)
            assert after.feed.resumed == 1
            found = after.feed.statistics()[A]
            assert (found.stream.batches, found.cleared) == (1, 0)


async def test_blocks_of_an_engine_that_restarted_meanwhile_are_forgotten(tmp_path: Path) -> None:
    """Its cache is empty: every hit would be wrong."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
    with VllmPublisher() as other:
        other.publish(stored(0, 32))
        async with router(tmp_path) as after:
            # At the address of the first one, as a restarted engine is.
            saved = after.feed._saved[A]
            after.feed._saved[A] = type(saved)(
                saved.model,
                saved.source,
                repr((other.endpoint, other.replay_endpoint, "kv-events", None)),
                saved.position,
                saved.has_had_lower_tiers,
            )
            after.follow(other)
            assert after.feed.resumed == 1
            await after.until_live(0)
            assert after.hit() == Hit(32, 32)


async def test_a_source_at_another_address_begins_from_nothing(tmp_path: Path) -> None:
    """A replica of the same name may be another engine now."""
    with VllmPublisher() as publisher, VllmPublisher() as other:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        other.publish(stored(0, 16))
        async with router(tmp_path) as after:
            after.follow(other)
            assert after.hit() == Hit(0, 0)
            await after.until_live(0)
            assert (after.hit(), after.feed.resumed) == (Hit(16, 16), 0)


async def test_what_nobody_names_any_more_is_forgotten(tmp_path: Path) -> None:
    """Its memory would be held for ever."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        async with router(tmp_path) as after:
            after.feed.forget_expected()
            assert not after.index.holds(A)


async def test_what_was_restored_of_a_source_that_cannot_be_followed_is_forgotten(
    tmp_path: Path,
) -> None:
    """Its engine goes on, and nobody would hear what it evicts."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        async with router(tmp_path) as after:
            saved = after.feed._saved[A]
            stream = repr((LISTENED_TO, publisher.replay_endpoint, None, None))
            after.feed.expect(type(saved)(saved.model, A, stream, saved.position, False))
            asked = EventSource(0, LISTENED_TO, publisher.replay_endpoint)
            with pytest.raises(EndpointError, match="nothing listens for it"):
                after.feed.add(A.replica, asked, "m")
            assert (after.hit(), after.index.holds(A), after.feed.resumed) == (Hit(0, 0), False, 0)


async def test_a_source_that_has_lost_its_replay_endpoint_is_not_taken_for_one_that_is_gone(
    tmp_path: Path,
) -> None:
    """What the router forgets of replicas that never came back would go from under its feed."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        async with router(tmp_path) as after:
            after.feed.add(A.replica, EventSource(0, publisher.endpoint, None, "kv-events"), "m")
            assert after.hit() == Hit(0, 0), "nothing proves that it is still true"
            after.index.apply(A, stored(0, 32))
            after.feed.forget_expected()
            assert after.hit() == Hit(32, 32)


async def test_another_implementation_of_the_index_begins_from_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its records are not for us."""
    with VllmPublisher() as publisher:
        async with router(tmp_path, GroupBlindIndex()) as before:
            before.follow(publisher)
            publisher.publish(stored(0, 64))
            await before.until_live(0)
            await before.keeper.save()
        async with router(tmp_path) as after:
            assert after.hit() == Hit(0, 0)
            assert "is not used" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
async def test_a_damaged_file_is_not_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk may be full, and a machine may lose its power."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it tells of prompts"
    if damage == "cut":
        del data[-20:]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "foreign":
        data[:4] = b"what"
    else:
        data.clear()
    path.write_bytes(data)
    caplog.set_level(logging.WARNING)
    assert snapshot_file.read_file(tmp_path, 900.0) is None
    assert "is not used" in caplog.text


async def test_an_old_snapshot_is_not_used(tmp_path: Path) -> None:
    """Its engines have gone on beyond what they can replay."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
    data = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(SnapshotError):
        snapshot_records.read(data, 900.0, now=2e10)
    with pytest.raises(RouterError):
        snapshot_records.read(data, 900.0, now=0.0)


async def test_a_snapshot_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """An old one is better than none."""
    with VllmPublisher() as publisher:
        await saved_by_one_that_knew(publisher, tmp_path, 64)
        before = (tmp_path / FILE_NAME).read_bytes()
        (tmp_path / "file").write_bytes(b"")
        async with router(tmp_path) as one:
            keeper = SnapshotKeeper(one.feed, tmp_path / "file" / "below", 60.0)
            await keeper.save()
            assert (keeper.saved, keeper.failures) == (0, 1)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", FILE_NAME]
