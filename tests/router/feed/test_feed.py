"""The feed: every source into the index of its model, and a word on how far each can be trusted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from kvevents.codec import encode
from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared, BlockStored, Event, EventBatch
from kvevents.hashing import DEFAULT_SEED
from kvevents.replay import ReplayLimits
from kvevents.stream_state import SourceState
from router.feed.feed import Feed
from router.fleet.types import EventSource
from router.index.base import Hit, SourceId, SourceLimits
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from tests.support.blocks import FULL, Prefix, copies_held
from tests.support.following import QUICK
from tests.support.publishing import until
from tests.support.vllm_publisher import VllmPublisher, seq_frame
from tests.support.waiting import eventually

A, B = SourceId("replica-a"), SourceId("replica-b")
PROMPT = list(range(1, 130))
TOPIC = "kv-events"


class Models:
    """Two models' indexes."""

    def __init__(self) -> None:
        self.indexes = {"one": PrefixIndex(), "two": PrefixIndex()}

    def __call__(self, model: str) -> PrefixIndex:
        return self.indexes[model]

    def hit(self, source: SourceId, model: str = "one") -> Hit:
        return self.indexes[model].match(PROMPT)[source]


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
async def feed(models: Models) -> AsyncIterator[Feed]:
    made = Feed(models, QUICK)
    yield made
    await made.close()


def batch(*events: Event) -> bytes:
    return encode(EventBatch(1.0, list(events), 0))


def stored(tokens: int, start: int = 0, medium: str = "GPU") -> bytes:
    """The blocks of `PROMPT` in `[start, tokens)`."""
    return batch(Prefix(PROMPT).stored(0, FULL, start, tokens, medium))


def follow(feed: Feed, source: SourceId, publisher: VllmPublisher, model: str = "one") -> None:
    feed.add(
        source.replica,
        EventSource(source.dp_rank, publisher.endpoint, publisher.replay_endpoint, TOPIC),
        model,
    )


async def until_live(feed: Feed, source: SourceId, last_seq: int | None) -> None:
    await until_state(feed, source, SourceState.LIVE, last_seq)


async def until_state(
    feed: Feed, source: SourceId, state: SourceState, last_seq: int | None
) -> None:
    def is_there() -> bool:
        statistics = feed.statistics()[source]
        return statistics.state is state and statistics.stream.last_seq == last_seq

    await eventually(is_there, f"{source} {state}", show=lambda: feed.statistics()[source])


async def test_batches_go_into_the_index_of_their_model(feed: Feed, models: Models) -> None:
    """Two models may have equal tokens and equal hashes."""
    with VllmPublisher() as first, VllmPublisher() as second:
        follow(feed, A, first, "one")
        follow(feed, B, second, "two")
        first.publish(stored(64))
        second.publish(stored(32))
        await until_live(feed, A, 0)
        await until_live(feed, B, 0)
        assert (models.hit(A, "one"), models.hit(B, "two")) == (Hit(64, 64), Hit(32, 32))
        assert not models("one").holds(B)
        statistics = feed.statistics()
        assert (
            statistics[A].stored,
            statistics[A].model,
            statistics[B].stored,
        ) == (4, "one", 2)


async def test_two_ranks_of_a_replica_are_two_sources(feed: Feed, models: Models) -> None:
    """Each data-parallel rank has a cache, an endpoint and numbers of its own."""
    ranks = [SourceId("replica-a", 0), SourceId("replica-a", 1)]
    with VllmPublisher() as first, VllmPublisher() as second:
        follow(feed, ranks[0], first)
        follow(feed, ranks[1], second)
        first.publish(stored(64))
        await until_live(feed, ranks[0], 0)
        await until_live(feed, ranks[1], None)
        assert [models.hit(rank).gpu_cached_tokens for rank in ranks] == [64, 0]


async def test_a_source_is_suspect_until_it_is_live(feed: Feed) -> None:
    """Until the past is known, a hit of nothing means nothing."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        assert A in feed.suspects
        assert feed.state(A) is SourceState.CONNECTING
        await until_live(feed, A, None)
        assert A not in feed.suspects


async def test_a_source_says_since_when_it_has_not_been_whole(feed: Feed) -> None:
    """After a while an estimate replaces what is doubtful; one stretch has one beginning."""
    assert feed.lost_since(A) == float("-inf")
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        lost_since = feed.lost_since(A)
        assert lost_since is not None
        assert lost_since <= time.monotonic()
        await until_live(feed, A, None)
        assert feed.lost_since(A) is None
        feed.rebuild(A)
        await until_live(feed, A, None)
        assert feed.lost_since(A) is None
    await eventually(lambda: feed.lost_since(A) is not None, "the loss of the connection")
    assert (feed.lost_since(A) or 0) > lost_since


async def test_a_source_is_rebuilt_on_demand(feed: Feed, models: Models) -> None:
    """Its hits were wrong although no batch is missing; everything is asked for once more."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        models.indexes["one"].clear(A)
        feed.rebuild(A)
        await eventually(lambda: models.hit(A).gpu_cached_tokens == 64, "the rebuild")
        await until_live(feed, A, 0)
        assert feed.statistics()[A].cleared == 1
        feed.rebuild(B)


async def test_a_source_that_is_not_followed_is_dead_and_has_no_hits_to_suspect(feed: Feed) -> None:
    """A replica that was just removed, or that publishes nothing, can still be asked about."""
    assert feed.state(A) is SourceState.DEAD
    assert A not in feed.suspects


async def test_a_removed_source_leaves_the_index(feed: Feed, models: Models) -> None:
    """A replica that disappears must not be chosen for what it had."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        await feed.remove(A)
        assert not models("one").holds(A)
        assert feed.statistics() == {}
        await feed.remove(A)
        follow(feed, A, publisher)
        await until_live(feed, A, 0)
        assert models.hit(A) == Hit(64, 64)


async def test_a_batch_that_comes_as_its_source_is_removed_does_not_bring_it_back(
    feed: Feed, models: Models
) -> None:
    """Until the subscriber's task has ended, the loop gives it what arrives. A source that came
    back so would stay in the index for good."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(32))
        await until_live(feed, A, 0)
        subscriber = feed._sources[A]._subscriber
        assert subscriber is not None

        def waits_for_batches() -> bool:
            live = subscriber._live
            take = live and live.connection.on_readable
            return take is not None and take.__name__ == "_on_readable"

        await eventually(waits_for_batches, "the end of the first look at the ring")
        assert subscriber._live is not None
        connection = subscriber._live.connection
        removing = asyncio.ensure_future(feed.remove(A))
        await asyncio.sleep(0)
        publisher.publish(stored(64, 32))
        until(connection.has_more, "the batch has arrived")
        assert connection.on_readable is not None
        connection.on_readable()
        await removing
        assert not models("one").holds(A)


class SlowlyTidied(PrefixIndex):
    """What is dropped takes three steps to go."""

    left = 0

    @override
    def drop(self, source: SourceId) -> None:
        super().drop(source)
        self.left = 3

    @override
    def tidy(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left > 0


async def test_what_a_removed_source_held_goes_a_step_in_each_pass_of_the_loop(
    feed: Feed, models: Models
) -> None:
    """All of a million blocks at once would hold up every stream for a third of a second."""
    index = models.indexes["one"] = SlowlyTidied()
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        removing = asyncio.get_running_loop().create_task(feed.remove(A))
        await asyncio.sleep(0)
        assert index.left == 2
        await removing
        await eventually(lambda: index.left == 0, "the last step")


async def test_a_source_that_is_removed_and_added_at_once_is_followed(
    feed: Feed, models: Models
) -> None:
    """A replica is replaced in one go; a task that ends late must not take the new one's blocks."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        removing = asyncio.ensure_future(feed.remove(A))
        await asyncio.sleep(0)
        hints = LayoutHints(eagle=True)
        feed.add(
            A.replica,
            EventSource(A.dp_rank, publisher.endpoint, publisher.replay_endpoint, TOPIC),
            "one",
            hints,
        )
        await removing
        await until_live(feed, A, 0)
        assert models("one")._sources[A].learner.hints is hints
        assert models.hit(A) == Hit(48, 48)


async def test_what_the_configuration_says_of_a_layout_survives_a_restart(
    feed: Feed, models: Models
) -> None:
    """A cleared source starts from the same hints as a new one."""
    hints = LayoutHints(eagle=True)
    with VllmPublisher() as publisher:
        feed.add(
            A.replica,
            EventSource(A.dp_rank, publisher.endpoint, publisher.replay_endpoint, TOPIC),
            "one",
            hints,
        )
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
    with VllmPublisher(port=publisher.port, replay_port=publisher.replay_port) as again:
        again.publish(stored(48))
        await eventually(lambda: feed.statistics()[A].cleared == 1, "the clear")
        await until_live(feed, A, 0)
    assert models("one")._sources[A].learner.hints is hints
    assert models.hit(A) == Hit(32, 32)


async def test_what_goes_over_a_limit_makes_the_source_suspect(models: Models) -> None:
    """An index that had to refuse blocks is incomplete, however well the stream is followed."""
    models.indexes["one"] = PrefixIndex(limits=SourceLimits(blocks=5))
    feed = Feed(models, QUICK)
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        publisher.publish(stored(128, 64))
        await until_state(feed, A, SourceState.SUSPECT, 1)
        assert feed.statistics()[A].overflow == 3
        publisher.publish(batch(AllBlocksCleared()))
        publisher.publish(stored(64))
        await until_live(feed, A, 3)
        await feed.close()


async def test_a_parent_that_never_comes_makes_the_source_suspect(models: Models) -> None:
    """A run that was given up can be found by no prompt."""
    models.indexes["one"] = PrefixIndex(limits=SourceLimits(waiting_batches=3))
    feed = Feed(models, QUICK)
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        await until_live(feed, A, None)
        publisher.publish(stored(64, 32))
        await until_live(feed, A, 0)
        for _ in range(5):
            publisher.publish(batch())
        await until_state(feed, A, SourceState.SUSPECT, 5)
        await feed.close()


async def test_a_run_given_up_is_no_loss_where_the_hash_function_is_known(models: Models) -> None:
    """Every look-up then hashes the prompt as the engine does; an overflow that was cleared long
    ago must not be held against the source again."""
    models.indexes["one"] = PrefixIndex(limits=SourceLimits(blocks=6, waiting_batches=3))
    feed = Feed(models, QUICK)
    orphan = Prefix(list(range(500, 564)), seed=DEFAULT_SEED)
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(128))
        await until_state(feed, A, SourceState.SUSPECT, 0)
        publisher.publish(batch(AllBlocksCleared()))
        publisher.publish(batch(orphan.stored(0, FULL, 32)))
        publisher.publish(batch(orphan.stored(0, FULL, 0, 16)))
        for _ in range(5):
            publisher.publish(batch())
        await until_live(feed, A, 8)
        assert models("one").statistics()[A].waiting.given_up == 1
        assert models("one").statistics()[A].hash_algorithm == "sha256"
        await feed.close()


async def test_a_cleared_cache_makes_a_suspect_source_known_unless_it_has_a_lower_tier(
    feed: Feed,
) -> None:
    """`AllBlocksCleared` says nothing of what a lower tier stored while we did not hear."""
    with VllmPublisher(ring=1) as plain, VllmPublisher(ring=1) as tiered:
        for source, publisher in ((A, plain), (B, tiered)):
            follow(feed, source, publisher)
            await until_live(feed, source, None)
        hashes = Prefix(PROMPT).hashes
        tiered.publish(batch(BlockStored([hashes[0]], None, [], "CPU", 0)))
        plain.publish(stored(16))
        for publisher in (plain, tiered):
            for _ in range(3):
                publisher.publish(stored(32), on_wire=False)
            publisher.publish(stored(48))
        await until_state(feed, A, SourceState.SUSPECT, 4)
        await until_state(feed, B, SourceState.SUSPECT, 4)
        for publisher in (plain, tiered):
            publisher.publish(batch(AllBlocksCleared()))
        await until_live(feed, A, 5)
        await until_state(feed, B, SourceState.SUSPECT, 5)


async def test_a_malformed_batch_is_logged_once_a_replica_and_without_its_contents(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    """Token ids are prompts, and a broken engine sends thousands of broken batches."""
    caplog.set_level(logging.WARNING)
    ranks = [SourceId("replica-a", 0), SourceId("replica-a", 1)]
    with VllmPublisher() as first, VllmPublisher() as second:
        for rank, publisher in zip(ranks, (first, second), strict=True):
            follow(feed, rank, publisher)
            for _ in range(5):
                publisher.publish(b"\x93\x01\xa6secret\xc0")
        for rank in ranks:
            await eventually(lambda: feed.statistics()[rank].stream.last_seq == 4, "all of them")  # noqa: B023
            assert feed.statistics()[rank].stream.malformed >= 5
            assert rank in feed.suspects
    warnings = [
        record.getMessage() for record in caplog.records if "only counted" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "replica-a" in warnings[0]
    assert "secret" not in caplog.text


async def test_an_event_that_breaks_the_format_is_counted_and_logged_and_its_batch_is_applied(
    feed: Feed, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay brings the same bytes again: refused as a whole, they would make the source suspect
    for good, and one client with a new kind of request could do that to every replica."""
    bad = {"type": "BlockStored", "block_hashes": "secret", "token_ids": [1]}
    good = msgspec.to_builtins(Prefix(PROMPT).stored(0, FULL, 0, 64))
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(msgspec.msgpack.encode([0.0, [bad, good, bad], 0]))
        await until_live(feed, A, 0)
        assert models.hit(A) == Hit(64, 64)
        assert feed.statistics()[A].unreadable == 2
        assert feed.statistics()[A].stream.malformed == 0
    assert "events[0] (BlockStored)" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockRemoved", "block_hashes": 5, "medium": "GPU"},
        {"type": "TierBlocksCleared"},
        {"type": "PrefixCacheReset"},
    ],
    ids=lambda event: event["type"],
)
async def test_a_source_is_suspect_once_a_removal_could_not_be_read(
    feed: Feed, models: Models, event: dict[str, Any]
) -> None:
    """Nobody knows which blocks went: the hits are not to be trusted until everything is known
    again."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        await until_live(feed, A, 0)
        publisher.publish(msgspec.msgpack.encode([0.0, [event], 0]))
        await until_state(feed, A, SourceState.SUSPECT, 1)
        assert models("one").statistics()[A].is_incomplete
        publisher.publish(batch(AllBlocksCleared()))
        await until_live(feed, A, 2)
        assert not models("one").statistics()[A].is_incomplete


async def test_a_cleared_lower_tier_makes_nothing_known_again(feed: Feed) -> None:
    """What was lost of the GPU is lost still."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(64))
        publisher.publish(msgspec.msgpack.encode([0.0, [["BlockRemoved", 5]], 0]))
        await until_state(feed, A, SourceState.SUSPECT, 1)
        publisher.publish(batch(AllBlocksCleared("CPU")))
        await until_state(feed, A, SourceState.SUSPECT, 2)


async def test_a_source_that_becomes_suspect_is_a_warning_once(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator wants to know, and not again at every gap until it is known again."""
    caplog.set_level(logging.INFO)
    with VllmPublisher(ring=1) as publisher:
        follow(feed, A, publisher)
        publisher.publish(stored(16))
        await until_live(feed, A, 0)
        for last in (4, 8, 12):
            for _ in range(3):
                publisher.publish(stored(16), on_wire=False)
            publisher.publish(stored(16))
            await until_state(feed, A, SourceState.SUSPECT, last)
        publisher.publish(batch(AllBlocksCleared()))
        await until_live(feed, A, 13)
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warnings == ["replica replica-a rank 0: suspect"]
    assert caplog.text.count("rank 0: recovering") > 3


async def test_a_silent_replay_endpoint_is_named_with_its_address(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed port is the one thing that an operator can mend, and "suspect" did not name it."""
    options = replace(QUICK, patience_s=0.2, replay=ReplayLimits(silence_s=0.05))
    made = Feed(models, options)
    try:
        with VllmPublisher(answer=lambda _self, _first: []) as publisher:
            publisher.publish(stored(16))
            follow(made, A, publisher)
            await eventually(
                lambda: made.statistics()[A].state is SourceState.SUSPECT,
                "suspect",  # whether or not the batch was sent before the router had connected
                show=made.statistics,
            )
            problem = f"its replay endpoint {publisher.replay_endpoint} does not answer"
            assert made.statistics()[A].stream.problem == problem
            publisher.answer = None
            await until_live(made, A, 0)
            assert made.statistics()[A].stream.problem is None
    finally:
        await made.close()
    assert f"replica replica-a rank 0: {problem} (" in caplog.text
    assert f"replica replica-a rank 0: suspect: {problem}" in caplog.text


async def test_another_engines_batches_make_a_source_suspect_until_its_own_come(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    """They look like a loss that the ring never fills; the log must say that two streams are mixed
    up."""
    with VllmPublisher() as publisher:
        publisher.publish(stored(16))
        follow(feed, A, publisher)
        await until_live(feed, A, 0)
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publisher.send_raw([TOPIC.encode(), seq_frame(7), stored(64)])
        foreign = "batches of another engine come over its event stream"
        await eventually(lambda: f"rank 0: suspect: {foreign}" in caplog.text, "the warning")
        publisher.publish(stored(32, start=16))
        await until_live(feed, A, 1)
        assert feed.statistics()[A].stream.discarded == 1


async def test_a_replica_that_misbehaves_does_not_slow_the_others(
    feed: Feed, models: Models
) -> None:
    """Broken batches, wrong numbers and a replay that never ends, as fast as one replica can send
    them."""

    def endless(publisher: VllmPublisher, first: int) -> list[list[bytes]]:
        return [publisher.reply(first + step, stored(64)) for step in range(2000)]

    with VllmPublisher(answer=endless) as bad, VllmPublisher() as good:
        follow(feed, A, bad)
        follow(feed, B, good)
        await until_live(feed, B, None)
        slowest = 0.0
        for step in range(50):
            for _ in range(100):
                bad.send_raw([bad.topic, seq_frame(step * 1000), b"made up"])
            started = time.process_time()
            last = good.publish(stored(64))
            await until_live(feed, B, last)
            slowest = max(slowest, time.process_time() - started)
    assert copies_held(models("one"), B)[0, "GPU"][Prefix(PROMPT).hash_at(16)] == 50
    assert slowest < 2.0


async def test_an_endpoint_that_cannot_be_one_is_refused_at_once(
    feed: Feed, models: Models
) -> None:
    """A mistake in the configuration belongs to whoever made it, not to a log."""
    for endpoint, replay_endpoint in (
        ("tcp://host", None),
        ("http://host:1", None),
        ("tcp://host:1", "tcp://*:1"),
    ):
        with pytest.raises(EndpointError):
            feed.add(A.replica, EventSource(A.dp_rank, endpoint, replay_endpoint, TOPIC), "one")
    assert feed.statistics() == {}
    assert models("one").statistics() == {}


async def test_a_source_is_followed_once(feed: Feed) -> None:
    """Two subscribers of one source would count every block twice."""
    with VllmPublisher() as publisher:
        follow(feed, A, publisher)
        with pytest.raises(ValueError, match="replica-a"):
            follow(feed, A, publisher)


async def test_a_feed_that_breaks_is_dead_and_says_where_not_what(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of ours stops one source, visibly; its message may quote a prompt."""

    class Broken(PrefixIndex):
        def apply(self, source: SourceId, payload: object) -> object:  # type: ignore[override]
            raise RuntimeError("secret")

    models.indexes["two"] = Broken()
    feed = Feed(models, QUICK)
    with VllmPublisher() as bad, VllmPublisher() as good:
        follow(feed, A, bad, "two")
        follow(feed, B, good)
        bad.publish(stored(16))
        await eventually(lambda: feed.state(A) is SourceState.DEAD, "the end")
        await until_live(feed, B, good.publish(stored(16)))
        assert A in feed.suspects
        await feed.remove(A)
        await feed.close()
    assert "RuntimeError at" in caplog.text
    assert "test_feed.py" in caplog.text
    assert "secret" not in caplog.text


async def test_many_sources_fit() -> None:
    """libzmq allows a thousand sockets by default, and each source takes
    several."""
    models = Models()
    feed = Feed(models, QUICK)
    with VllmPublisher() as publisher:
        publisher.publish(stored(16))
        sources = [SourceId(f"replica-{number}") for number in range(120)]
        for source in sources:
            follow(feed, source, publisher)
        await eventually(lambda: not feed.suspects.intersection(sources), "all of them live")
        await feed.close()
    assert all(models.hit(source) == Hit(16, 16) for source in sources)


async def test_a_snapshot_of_an_endpoint_of_its_own_leaves_the_live_state(
    feed: Feed, models: Models
) -> None:
    """It is a program: every block that must be known is stored with its tokens, those that are
    gone are removed, what is held is stored again by its hash until the counts are right, and the
    first stores are removed. Nothing of that may stay, nor be missing."""
    prompt, name = Prefix(PROMPT[:128]), bytes(16)
    evicted = [16, 32]
    program = batch(
        prompt.stored(0, FULL),
        prompt.removed(0, evicted),
        prompt.offloaded(0, [48, 64, 80, 96, 112, 128], "GPU"),
        prompt.offloaded(0, [48], "GPU"),
        prompt.offloaded(0, [16, 32], "CPU"),
        prompt.removed(0, [48, 64, 80, 96, 112, 128]),
    )

    def identified(payload: bytes) -> bytes:
        return msgspec.msgpack.encode([*msgspec.msgpack.decode(payload), name])

    with VllmPublisher(snapshots=lambda _: [b"", seq_frame(0), name, program]) as publisher:
        publisher.publish(b"long ago")
        publisher.flush()
        feed.add(
            A.replica,
            EventSource(A.dp_rank, publisher.endpoint, None, TOPIC, publisher.snapshot_endpoint),
            "one",
        )
        await until_live(feed, A, 0)
        gpu = {prompt.hash_at(end): 1 for end in (48, 64, 80, 96, 112, 128)}
        assert copies_held(models("one"), A) == {
            (0, "GPU"): gpu | {prompt.hash_at(48): 2},
            (0, "CPU"): {prompt.hash_at(end): 1 for end in evicted},
        }
        await eventually(lambda: publisher.subscribers > 0, "the subscription")
        publisher.publish(identified(batch(prompt.stored(0, FULL, 0, 32))))
        await until_live(feed, A, 1)
        assert models.hit(A) == Hit(128, 128)
        ends = [48, *range(16, 129, 16)]
        publisher.publish(identified(batch(prompt.removed(0, ends))))
        await until_live(feed, A, 2)
        assert models("one").statistics()[A].blocks == {(0, "CPU"): 2}
