"""A relay that drops, delays, reorders, repeats and cuts: afterwards the index equals one that lost
nothing, or is reported as suspect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest

from kvevents.events import Event
from kvevents.publisher import PublisherConfig, ZmqEventPublisher
from kvevents.replay import ReplayLimits
from kvevents.stream_state import SourceState
from router.feed.feed import Feed
from router.feed.source_feed import SourceFeedStatistics
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import copies_held
from tests.support.following import QUICK
from tests.support.random_engine import CHAIN, LAYOUT, RandomEngine
from tests.support.relay import CuttingRelay, Faults, LossyRelay
from tests.support.vllm_publisher import VllmPublisher, free_port
from tests.support.waiting import eventually

SOURCE = SourceId("replica-a")
TOPIC = "kv-events"
STEPS = 800
OPTIONS = replace(QUICK, patience_s=5.0, replay=ReplayLimits(silence_s=0.5))
LOOPBACK = PublisherConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", TOPIC, heartbeat_s=0.2)


class Router:
    """A feed with its index, and an index that is fed without loss."""

    def __init__(self) -> None:
        self.index = PrefixIndex(secret=b"test")
        self.true = PrefixIndex(secret=b"test")
        self.true.add(SOURCE)
        self.feed = Feed(lambda model: self.index, OPTIONS)

    def follow(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.feed.add(
            SOURCE.replica, EventSource(SOURCE.dp_rank, endpoint, replay_endpoint, TOPIC), "a model"
        )

    @property
    def statistics(self) -> SourceFeedStatistics:
        return self.feed.statistics()[SOURCE]

    async def until(self, state: SourceState, last_seq: int) -> None:
        def is_there() -> bool:
            seen = self.statistics.stream
            return (
                self.feed.state(SOURCE) is state
                and seen.last_seq is not None
                and seen.last_seq >= last_seq
            )

        await eventually(is_there, f"{state} at {last_seq}", show=lambda: self.statistics)

    async def until_live_from_the_start(self) -> None:
        """Wait until the router is connected, before the first batch."""
        await eventually(lambda: self.feed.state(SOURCE) is SourceState.LIVE, "a first connection")

    def assert_exact(self, engine: RandomEngine) -> None:
        """The same blocks, and the same hits for every prompt."""
        assert copies_held(self.index) == copies_held(self.true)
        hits = [
            (self.index.match(prompt)[SOURCE], self.true.match(prompt)[SOURCE])
            for prompt in engine.prompts
        ]
        assert [found for found, _ in hits] == [expected for _, expected in hits]
        assert any(hit.gpu_cached_tokens for hit, _ in hits)


@asynccontextmanager
async def router() -> AsyncIterator[Router]:
    made = Router()
    try:
        yield made
    finally:
        await made.feed.close()


class VllmEngine:
    """The engine with a publisher like vLLM's."""

    def __init__(self, publisher: VllmPublisher, engine: RandomEngine, true: PrefixIndex) -> None:
        self.publisher, self.engine, self.true = publisher, engine, true

    async def run(self, steps: int) -> int:
        """Run *steps* steps and prefill a prompt that stays reusable; returns the last number."""
        for step in range(steps):
            self.emit(self.engine.step())
            await asyncio.sleep(0.001 if step % 4 == 0 else 0)
        return self.emit(self.engine.prefill())

    def emit(self, events: list[Event]) -> int:
        payload = self.engine.payload(events)
        self.true.apply(SOURCE, payload)
        return self.publisher.publish(payload)


async def run_ours(
    publisher: ZmqEventPublisher, engine: RandomEngine, true: PrefixIndex, steps: int
) -> int:
    """The engine with our publisher, as `VllmEngine.run`; returns the number of the last batch."""
    for step in range(steps + 1):
        events = engine.step() if step < steps else engine.prefill()
        true.apply(SOURCE, engine.payload(events))
        publisher.publish(events)
        await asyncio.sleep(0.001 if step % 4 == 0 else 0)
    await eventually(lambda: publisher.statistics().stream.queue_depth == 0, "an empty queue")
    return publisher.statistics().stream.last_seq


# --- what the publisher can make up for -----------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_long_ring_makes_up_for_every_loss(seed: int) -> None:
    """Only by replay, from a publisher without our extensions."""
    async with router() as routing:
        with (
            VllmPublisher(with_topic=seed % 2 == 0) as publisher,
            closing(LossyRelay(publisher.endpoint, seed, Faults())) as relay,
            closing(CuttingRelay(publisher.replay_endpoint, seed, 0.05)) as replays,
        ):
            engine = VllmEngine(publisher, RandomEngine(seed), routing.true)
            routing.follow(relay.endpoint, replays.endpoint)
            last = await engine.run(STEPS)
            while relay.dropped < 10 or routing.statistics.stream.replays < 5:
                last = await engine.run(20)
            relay.heal()
            replays.cut = 0.0
            await routing.until(SourceState.LIVE, last)
            routing.assert_exact(engine.engine)
            assert routing.statistics.stream.restarts == 0


@pytest.mark.parametrize("seed", [4, 5, 6])
async def test_a_snapshot_makes_up_for_what_the_ring_has_forgotten(seed: int) -> None:
    """Our publisher with a ring of ten batches: most losses are beyond it."""
    async with router() as routing:
        engine = RandomEngine(seed)
        short = replace(LOOPBACK, buffer_steps=10)
        with (
            ZmqEventPublisher(short, LAYOUT, CHAIN) as publisher,
            closing(LossyRelay(publisher.endpoint, seed, Faults())) as relay,
            closing(CuttingRelay(publisher.replay_endpoint or "", seed, 0.02)) as replays,
        ):
            routing.follow(relay.endpoint, replays.endpoint)
            last = await run_ours(publisher, engine, routing.true, STEPS)
            while relay.dropped < 10 or routing.statistics.stream.snapshots < 2:
                last = await run_ours(publisher, engine, routing.true, 20)
            relay.heal()
            replays.cut = 0.0
            await routing.until(SourceState.LIVE, last)
            routing.assert_exact(engine)


async def test_a_snapshot_makes_up_for_what_the_publisher_itself_dropped() -> None:
    """An engine faster than its publisher's thread drops batches before they get on the wire; no
    ring has them."""
    async with router() as routing:
        engine = RandomEngine(7)
        with ZmqEventPublisher(replace(LOOPBACK, max_queue_size=4), LAYOUT, CHAIN) as publisher:
            routing.follow(publisher.endpoint, publisher.replay_endpoint)
            for _ in range(50):
                burst = [engine.step() for _ in range(6)]
                for events in burst:
                    routing.true.apply(SOURCE, engine.payload(events))
                    publisher.publish(events)
                await eventually(
                    lambda: publisher.statistics().stream.queue_depth == 0, "an empty queue"
                )
            assert publisher.statistics().stream.dropped > 10
            await routing.until(SourceState.LIVE, publisher.statistics().stream.last_seq)
            routing.assert_exact(engine)


@pytest.mark.parametrize("ours", [True, False])
async def test_a_router_that_starts_late_ends_in_the_same_state(ours: bool) -> None:
    """Routers are updated while engines run."""
    async with router() as routing:
        engine = RandomEngine(8)
        with (
            ZmqEventPublisher(replace(LOOPBACK, buffer_steps=10), LAYOUT, CHAIN) as publisher,
            VllmPublisher() as plain,
        ):
            followed = publisher if ours else plain
            vllm = VllmEngine(plain, engine, routing.true)
            half = (
                run_ours(publisher, engine, routing.true, STEPS // 2)
                if ours
                else vllm.run(STEPS // 2)
            )
            await half
            routing.follow(followed.endpoint, followed.replay_endpoint)
            last = await (run_ours(publisher, engine, routing.true, 100) if ours else vllm.run(100))
            await routing.until(SourceState.LIVE, last)
            routing.assert_exact(engine)


# --- what it cannot -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [9, 10])
async def test_plain_vllm_with_a_short_ring_is_suspect_until_its_cache_is_cleared(
    seed: int,
) -> None:
    """What cannot be known is shown as such, until none of it is left."""
    async with router() as routing:
        with (
            VllmPublisher(ring=5) as publisher,
            closing(LossyRelay(publisher.endpoint, seed, Faults())) as relay,
        ):
            engine = VllmEngine(publisher, RandomEngine(seed, with_cpu=False), routing.true)
            routing.follow(relay.endpoint, publisher.replay_endpoint)
            await routing.until_live_from_the_start()
            last = await engine.run(STEPS)
            while relay.dropped < 10 or routing.feed.state(SOURCE) is SourceState.LIVE:
                last = await engine.run(20)
            relay.heal()
            await routing.until(SourceState.SUSPECT, last)
            assert SOURCE in routing.feed.suspects
            engine.emit(engine.engine.clear())
            await routing.until(SourceState.LIVE, publisher.last_seq)
            for _ in range(20):  # no more at once than the ring has: a cut may not have healed yet
                await routing.until(SourceState.LIVE, await engine.run(2))
            routing.assert_exact(engine.engine)


async def test_with_a_lower_tier_a_cleared_cache_does_not_make_all_known() -> None:
    """`AllBlocksCleared` concerns only the GPU; what the CPU tier lost meanwhile stays unknown
    until a restart."""
    async with router() as routing:
        with VllmPublisher(ring=5) as publisher:
            engine = VllmEngine(publisher, RandomEngine(11), routing.true)
            routing.follow(publisher.endpoint, publisher.replay_endpoint)
            await routing.until_live_from_the_start()
            await eventually(lambda: publisher.subscribers > 0, "the subscription")
            await routing.until(SourceState.LIVE, await engine.run(100))
            for _ in range(10):
                publisher.publish(engine.engine.payload(engine.engine.step()), on_wire=False)
            await routing.until(SourceState.SUSPECT, await engine.run(1))
            engine.emit(engine.engine.clear())
            await routing.until(SourceState.SUSPECT, await engine.run(50))
        routing.true.clear(SOURCE)
        with VllmPublisher(port=publisher.port, replay_port=publisher.replay_port) as again:
            new = VllmEngine(again, RandomEngine(12), routing.true)
            await routing.until(SourceState.LIVE, await new.run(100))
            routing.assert_exact(new.engine)


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "seed"), [(30, 13), (400, 14)], ids=["before its seq passes the old one", "after"]
)
async def test_a_restarted_engine_is_known_again_through_a_lossy_relay(
    steps: int, seed: int
) -> None:
    """At the same address, with the old sequence number still ahead or already passed when it is
    noticed."""
    async with router() as routing:
        with VllmPublisher() as publisher:
            relay = LossyRelay(publisher.endpoint, seed, Faults())
            with closing(relay):
                engine = VllmEngine(publisher, RandomEngine(seed), routing.true)
                routing.follow(relay.endpoint, publisher.replay_endpoint)
                await engine.run(200)
                await eventually(
                    lambda: routing.statistics.stream.last_seq is not None, "the first batches"
                )
                publisher.close()
                routing.true.clear(SOURCE)
                with VllmPublisher(port=publisher.port, replay_port=publisher.replay_port) as again:
                    new = VllmEngine(again, RandomEngine(seed + 100), routing.true)
                    relay.reconnect()
                    last = await new.run(steps)
                    relay.heal()
                    await routing.until(SourceState.LIVE, last)
                    await eventually(
                        lambda: routing.statistics.stream.last_seq == last, "the new numbers"
                    )
                    routing.assert_exact(new.engine)
                    assert routing.statistics.cleared >= 1


async def test_our_restarted_engine_is_known_by_its_name() -> None:
    """A new process has a new publisher id, whatever its numbers."""
    async with router() as routing:
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        config = replace(LOOPBACK, endpoint=addresses[0], replay_endpoint=addresses[1])
        with ZmqEventPublisher(config, LAYOUT, CHAIN) as publisher:
            routing.follow(publisher.endpoint, publisher.replay_endpoint)
            await routing.until(
                SourceState.LIVE, await run_ours(publisher, RandomEngine(15), routing.true, 50)
            )
        routing.true.clear(SOURCE)
        with ZmqEventPublisher(config, LAYOUT, CHAIN) as again:
            engine = RandomEngine(16)
            last = await run_ours(again, engine, routing.true, 200)
            await routing.until(SourceState.LIVE, last)
            await eventually(
                lambda: routing.statistics.stream.publisher_id == again.publisher_id, "the new name"
            )
            routing.assert_exact(engine)


# --- what is too large ----------------------------------------------------------------------------


async def test_a_frame_of_100_megabytes_is_refused_and_then_made_up_for() -> None:
    """The connection ends, the next one asks for a snapshot, and nothing is missing afterwards."""
    async with router() as routing:
        engine = RandomEngine(17)
        with ZmqEventPublisher(LOOPBACK, LAYOUT, CHAIN) as publisher, VllmPublisher() as plain:
            routing.follow(publisher.endpoint, publisher.replay_endpoint)
            await routing.until(
                SourceState.LIVE, await run_ours(publisher, engine, routing.true, 50)
            )
            vllm = SourceId("replica-b")
            routing.feed.add(
                vllm.replica,
                EventSource(vllm.dp_rank, plain.endpoint, plain.replay_endpoint, TOPIC),
                "a model",
            )
            await eventually(
                lambda: routing.feed.state(vllm) is SourceState.LIVE, "the second replica"
            )
            plain.publish(bytes(100_000_000))
            await eventually(
                lambda: routing.feed.statistics()[vllm].stream.connections > 1,
                "the end of the connection",
            )
            await routing.until(
                SourceState.LIVE, await run_ours(publisher, engine, routing.true, 50)
            )
            routing.assert_exact(engine)
