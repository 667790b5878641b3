"""Another engine's batches on a source's connection: an address that is used again, a Service in
front of several pods, a relay that mixes two streams up. Afterwards the index holds what the
source's own engine holds, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace

import pytest

from kvevents.publisher import PublisherConfig, ZmqEventPublisher
from kvevents.replay import ReplayLimits
from kvevents.stream_state import SourceState
from router.feed.feed import Feed
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import copies_held
from tests.support.following import QUICK
from tests.support.random_engine import LAYOUT, RandomEngine
from tests.support.relay import CrossingRelay, CuttingRelay
from tests.support.vllm_publisher import VllmPublisher
from tests.support.waiting import eventually

SOURCE = SourceId("replica-a")
TOPIC = "kv-events"
OPTIONS = replace(QUICK, patience_s=2.0, replay=ReplayLimits(silence_s=0.5))
LOOKS = 4
"""At the replay endpoint, by which every doubt is settled."""


class VllmEngine:
    """A cache with a publisher like vLLM's: numbers say nothing of who sent a batch."""

    def __init__(self, seed: int, first_seq: int = 0) -> None:
        self.cache = RandomEngine(seed)
        self.publisher = VllmPublisher(TOPIC, first_seq=first_seq)
        self.payloads: list[bytes] = []
        self.sent = 0
        self.replay_endpoint = self.publisher.replay_endpoint
        self.endpoint = self.publisher.endpoint

    @property
    def last_seq(self) -> int:
        return self.publisher.last_seq

    def run(self, steps: int, on_wire: bool = True) -> None:
        for _ in range(steps):
            self.payloads.append(self.cache.payload(self.cache.step()))
            self.publisher.publish(self.payloads[-1], on_wire=on_wire)
            self.sent += on_wire
        self.publisher.flush()

    def run_to(self, seq: int) -> None:
        """Go on until the next batch has the number *seq*."""
        with self.publisher.lock:
            self.publisher._next_seq = seq

    def close(self) -> None:
        self.publisher.close()


class OurEngine:
    """A cache with our publisher, which makes snapshots and sends heartbeats."""

    def __init__(self, seed: int, first_seq: int = 0) -> None:
        self.cache = RandomEngine(seed)
        heartbeat_s = (1000.0, 0.15)[seed // 2 % 2]
        config = PublisherConfig(
            "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", TOPIC, heartbeat_s=heartbeat_s
        )
        self.publisher = ZmqEventPublisher(config, LAYOUT)
        self.payloads: list[bytes] = []
        assert self.publisher.replay_endpoint is not None
        self.replay_endpoint = self.publisher.replay_endpoint
        self.endpoint = self.publisher.endpoint
        self.run(first_seq)

    @property
    def last_seq(self) -> int:
        """Without the heartbeats, behind the layout."""
        return len(self.payloads)

    def run(self, steps: int, on_wire: bool = True) -> None:
        del on_wire
        for _ in range(steps):
            events = self.cache.step()
            self.payloads.append(self.cache.payload(events))
            self.publisher.publish(events)

    def run_to(self, seq: int) -> None:
        self.run(max(0, seq - 1 - self.last_seq))

    def close(self) -> None:
        self.publisher.shutdown()


Engine = VllmEngine | OurEngine


@dataclass
class Lines:
    """How a router reaches the two endpoints of an engine."""

    mixing: CrossingRelay
    events: CuttingRelay
    replays: CuttingRelay


class Crossing:
    """A router that follows *own*, on lines that lead to *other* for a while."""

    def __init__(self, own: Engine, other: Engine, lines: Lines, rng: random.Random) -> None:
        self.own, self.other, self.lines, self.rng = own, other, lines, rng
        self.paces: tuple[int, ...] = (1,)
        """Batches an engine publishes in a step; with only one, both go on at the same pace."""
        self.were_replays_foreign = False
        self.index = PrefixIndex(secret=b"test")
        self.feed = Feed(lambda model: self.index, OPTIONS)
        self.feed.add(
            SOURCE.replica,
            EventSource(SOURCE.dp_rank, lines.events.endpoint, lines.replays.endpoint, TOPIC),
            "a model",
        )

    def is_live(self) -> bool:
        return self.feed.state(SOURCE) is SourceState.LIVE

    def held_by(self, engine: Engine) -> object:
        true = PrefixIndex(secret=b"test")
        true.add(SOURCE)
        for payload in engine.payloads:
            true.apply(SOURCE, payload)
        return copies_held(true)

    async def run(self, steps: int) -> None:
        """Both engines go on, in turns."""
        for _ in range(steps):
            for engine in (self.own, self.other):
                engine.run(self.rng.choice(self.paces))
            await asyncio.sleep(self.rng.choice((0, 0, 0.005)))

    async def cross(self, way: str, steps: int) -> None:
        """Lead the router astray while both engines run *steps* steps."""
        lines, rng = self.lines, self.rng
        self.paces = rng.choice(((1,), (1,), (0, 1, 1, 2)))
        if way == "mixed":
            await self._settle()
            lines.mixing.is_crossed = True
        else:
            lines.events.lead_to(self.other.endpoint)
        if way == "address" or rng.random() < 0.2:
            lines.replays.lead_to(self.other.replay_endpoint)
            self.were_replays_foreign = True
        if way != "mixed":
            lines.events.cut_all()
        await self.run(steps)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.3)))
        await self.run(rng.choice((0, 1, 5)))
        await self._settle()
        lines.mixing.is_crossed = False
        lines.events.lead_to(lines.mixing.endpoint)
        lines.replays.lead_to(self.own.replay_endpoint)
        if way != "mixed":
            lines.events.cut_all()

    async def _settle(self) -> None:
        """Wait until what was published has reached the relay."""
        own, other = self.own, self.other
        if isinstance(own, VllmEngine) and isinstance(other, VllmEngine):
            mixing = self.lines.mixing
            sent = [own.sent, other.sent]
            await eventually(
                lambda: mixing.passed == sent, "the batches", show=lambda: str(mixing.passed)
            )

    async def is_right_when_quiet(self) -> None:
        """Wait for a few looks after the last batch: a live source is exact then. Where a replay
        came from the other engine, one may be suspect for good: what its ring lacked."""

        def looks() -> int:
            return self.feed.statistics()[SOURCE].stream.questions

        def is_settled() -> bool:
            is_suspect = self.feed.state(SOURCE) is SourceState.SUSPECT
            return looks() >= before + LOOKS and (
                self.is_live() or (is_suspect and self.were_replays_foreign)
            )

        expected = self.held_by(self.own)
        before = looks()
        await eventually(
            is_settled, "a live source", show=lambda: str(self.feed.statistics()[SOURCE])
        )
        if self.is_live():
            assert copies_held(self.index) == expected, self.feed.statistics()[SOURCE]


@asynccontextmanager
async def crossing(kind: type[VllmEngine] | type[OurEngine], seed: int) -> AsyncIterator[Crossing]:
    rng = random.Random(seed)
    with ExitStack() as stack:
        own = stack.enter_context(closing(kind(seed)))
        other = stack.enter_context(closing(kind(seed + 1000)))
        mixing = stack.enter_context(closing(CrossingRelay(own.endpoint, other.endpoint)))
        lines = Lines(
            mixing,
            stack.enter_context(closing(CuttingRelay(mixing.endpoint, seed, 0.0))),
            stack.enter_context(closing(CuttingRelay(own.replay_endpoint, seed, 0.0))),
        )
        if isinstance(own, VllmEngine) and isinstance(other, VllmEngine):
            for engine in (own, other):
                await eventually(lambda each=engine: each.publisher.subscribers > 0, "the relay")
        made = Crossing(own, other, lines, rng)
        try:
            await eventually(made.is_live, "a first connection")
            yield made
        finally:
            await made.feed.close()


def starts(own: Engine, rng: random.Random) -> Iterator[int]:
    """Where the other engine's numbers go on: just where the own ones do, ahead, or behind."""
    while True:
        yield max(0, own.last_seq + 1 + rng.choice((0, 0, 0, 0, 1, 3, 30, -1, -5, -40)))


@pytest.mark.parametrize("kind", [VllmEngine, OurEngine])
@pytest.mark.parametrize("seed", [0, 2, 16, 19, 20, 22])
async def test_in_the_quiet_after_foreign_batches_a_live_source_holds_its_own_engines_blocks(
    kind: type[VllmEngine] | type[OurEngine], seed: int
) -> None:
    """976 tokens were predicted for 0, for more than four minutes, where two seconds of another
    engine's batches had fitted in by their numbers."""
    async with crossing(kind, seed) as made:
        start = starts(made.own, made.rng)
        for _ in range(4):
            await made.run(made.rng.randrange(5, 25))
            made.other.run_to(next(start))
            if made.rng.random() < 0.3 and kind is VllmEngine:
                made.own.run(made.rng.randrange(1, 200), on_wire=False)
            way = made.rng.choice(("mixed", "mixed", "mixed", "address", "events"))
            await made.cross(way, made.rng.choice((1, 2, 5, 40)))
            await made.run(made.rng.choice((0, 1, 10)))
            if made.rng.random() < 0.5:
                await made.is_right_when_quiet()
        await made.is_right_when_quiet()


async def test_foreign_batches_whose_numbers_fit_at_both_ends_do_not_stay() -> None:
    """No number shows them: another engine's come where the own ones would, and then the own ones
    where they would."""
    async with crossing(VllmEngine, 77) as made:
        own, other, mixing = made.own, made.other, made.lines.mixing
        own.run(20)
        await made.is_right_when_quiet()
        other.run_to(own.last_seq + 1)
        mixing.is_crossed = True
        for engine in (own, other):
            engine.run(5)
        await made._settle()
        mixing.is_crossed = False
        own.run(5)
        await made.is_right_when_quiet()
        assert made.feed.statistics()[SOURCE].stream.restarts == 0
