"""What processes tell each other: each counts the others' requests as it counts its own."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from router._core import Visit
from router.config.origin import Header, Origin
from router.config.replica import read_replica
from router.config.server import ClientKeyConfig
from router.config.watch import HealthConfig
from router.errors import KeyLimitReached
from router.fleet.engine_load import EngineLoad, EngineRankLoad
from router.fleet.limits import KeyLimits
from router.fleet.load import LoadTracker, ReplicaLoad
from router.fleet.quiet_moments import QuietMoments
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import KeyCounts
from router.fleet.watchers import Watchers
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.index.mirror_types import STEP
from router.index.prompt import HashedPrompt
from router.routing.models import ModelSet
from router.routing.recent_prefixes import RecentPrefixes
from router.sharing.board import MOST_DELAY_S
from router.sharing.exchange import Sharing
from router.sharing.slots import Slot, decode_slot, encode_slot
from tests.support.index import Coming, in_prefill
from tests.support.loads import in_flight
from tests.support.waiting import eventually

IDS = array("I", range(1000))
R0 = SourceId("r0")


class Party:
    """One worker, as far as it shares."""

    def __init__(self, secret: bytes = b"secret") -> None:
        self.is_up = True
        self.checks = 0
        self.now = 1000.0
        """On the clock of its registry."""
        health = HealthConfig(interval_s=0.05, timeout_s=0.05, scrape_metrics=False)
        self.load, self.mirror = LoadTracker(), Mirror()
        self.recent = RecentPrefixes(self.load.books)
        watchers = Watchers(self._fetch, health, self.load, clock=lambda: self.now)
        self.registry = ReplicaRegistry(watchers, health, self.load, clock=lambda: self.now)
        self.registry.add(read_replica({"id": "r0", "url": "http://r0", "models": ["m"]}))
        self.quiet = QuietMoments(1.0)
        self.models = ModelSet([], self._no_replica, partial(PrefixIndex, secret=secret))
        self.models.discover("m")
        key = ClientKeyConfig(name="a", key="k", requests_per_minute=2)
        self.keys = KeyLimits([key])
        self.sharing = Sharing(
            self.load,
            self.mirror,
            self.recent,
            self.registry,
            self.quiet,
            self.models.get,
            self.keys,
        )

    def prompt(self, ids: Sequence[int] = IDS) -> HashedPrompt:
        return self.models.index_of("m").prepare(array("I", ids), extra_steps=(STEP,))

    def begin(self, ids: Sequence[int] = IDS, cached: int = 0) -> Visit:
        index, prompt = self.models.index_of("m"), self.prompt(ids)
        return self.mirror.begin("m", index, R0, [prompt], len(ids), len(ids) - cached)

    def hear(self, **others: Party) -> None:
        """What the others tell, over the wire."""
        slots = {name: decode_slot(encode_slot(o.sharing.collect())) for name, o in others.items()}
        self.sharing.take(slots)

    async def _fetch(
        self, origin: Origin, path: str, headers: Sequence[Header], timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        self.checks += 1
        return (200 if self.is_up else 503), b"{}"

    async def _no_replica(self, names: Sequence[str], path: str, body: bytes) -> tuple[int, bytes]:
        raise ConnectionError


@pytest.fixture
async def parties() -> AsyncIterator[tuple[Party, Party]]:
    both = Party(), Party()
    yield both
    for party in both:
        await party.registry.close()


async def test_the_requests_of_others_are_load(parties: tuple[Party, Party]) -> None:
    """Else two workers would each send their next request to the replica that both just chose."""
    here, there = parties
    flight = there.load.started("r0", uncached_tokens=300, prompt_tokens=1000, dp_rank=1)
    own = here.load.started("r0", uncached_tokens=50, prompt_tokens=1000)
    here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(2, 350)
    assert here.load.loads_of_ranks("r0", [1])[0] == ReplicaLoad(2, 350)
    assert here.load.load_of("r0") == ReplicaLoad(1, 50), "metrics of one worker are its own"
    view = next(view for view in here.registry.snapshot() if view.id == "r0")
    assert (view.load, view.others) == (ReplicaLoad(1, 50), ReplicaLoad(1, 300))
    flight.ended()
    here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(1, 50)
    own.ended()


async def test_what_an_engine_counts_before_another_tells_of_it_is_counted_once(
    parties: tuple[Party, Party],
) -> None:
    """An engine is asked in the middle of a burst. Its requests would be both the others' and
    foreign until it is asked again, and keep the next of them from the prompt that all share."""
    here, there = parties
    replica = here.registry.get("r0")
    ranks = (EngineRankLoad(0, 1, 0), EngineRankLoad(1, 3, 1))
    replica.take_engine_load(EngineLoad(4, 1, None, ranks), 0, here.now)
    assert foreign_at(replica) == (5, {0: 1, 1: 4})
    told: list[int] = []
    replica.listeners.append(lambda _: told.append(replica.foreign_requests))
    here.now += MOST_DELAY_S
    flights = [there.load.started("r0", 300, 1000, dp_rank=1) for _ in range(3)]
    here.hear(there=there)
    assert foreign_at(replica) == (2, {0: 1, 1: 1})
    assert told == [2], "decisions know"
    for flight in flights:
        flight.ended()
    here.hear(there=there)
    assert foreign_at(replica) == (2, {0: 1, 1: 1}), "those that were there are not foreign now"
    assert told == [2]


async def test_requests_that_others_send_later_make_no_foreign_ones_theirs(
    parties: tuple[Party, Party],
) -> None:
    """What an engine counted when it was asked does not get less by what comes afterwards."""
    here, there = parties
    replica = here.registry.get("r0")
    replica.take_engine_load(EngineLoad(4, 0, None), 0, here.now)
    here.now += MOST_DELAY_S + 0.01
    with in_flight(there.load, "r0", 300, 1000):
        here.hear(there=there)
        assert foreign_at(replica) == (4, {})


def foreign_at(replica: Replica) -> tuple[int, dict[int, int]]:
    return replica.foreign_requests, replica.foreign_requests_by_rank


async def test_a_key_has_its_limit_once_over_all_routers(parties: tuple[Party, Party]) -> None:
    """Else a client would have it as often as there are workers."""
    here, there = parties
    there.keys.usages["a"].enter()
    there.keys.usages["a"].spend(500)
    here.hear(there=there)
    usage = here.keys.usages["a"]
    assert usage.elsewhere == KeyCounts(1, 500, 1)
    usage.enter()
    with pytest.raises(KeyLimitReached):
        usage.enter()
    here.hear()
    usage.enter()


async def test_the_load_of_one_that_is_gone_is_gone(parties: tuple[Party, Party]) -> None:
    """A worker that was killed never takes back what it said."""
    here, there = parties
    with in_flight(there.load, "r0", 300, 1000):
        here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(1, 300)
    here.hear()
    assert here.load.look_at("r0") == ReplicaLoad()


async def test_what_is_computed_for_others_counts_as_sent_there(
    parties: tuple[Party, Party],
) -> None:
    """A burst of equal prompts over all workers stays together, whatever the policy."""
    here, there = parties
    visit = there.begin()
    here.hear(there=there)
    prompt = here.prompt()
    assert in_prefill(here.mirror, prompt) == {R0: Coming(960, 960)}
    keys = prompt.prefix_keys(STEP)
    assert here.recent.match(R0, keys, STEP, time.monotonic()) == 960
    partly = here.prompt([*IDS[:200], *range(5000, 5800)])
    assert in_prefill(here.mirror, partly) == {R0: Coming(192, 192)}
    visit.ended()
    here.hear()
    assert in_prefill(here.mirror, prompt) == {}


async def test_a_prompt_that_two_sent_there_at_once_waits_there_once(
    parties: tuple[Party, Party],
) -> None:
    """The replica computes it once. Counted twice it would seem so busy that the rest of a burst
    went to a third."""
    here, there = parties
    both = [
        (party.load.started("r0", len(IDS), len(IDS)), party.begin()) for party in (here, there)
    ]
    here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(2, 1000 + 1), "each computes its last token"
    other = there.load.started("r0", 500, 500), there.begin(range(7000, 7500))
    here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(3, 1000 + 1 + 500), "nothing is shared"
    longer = there.load.started("r0", 440, 1400), there.begin([*IDS, *range(400)], cached=960)
    here.hear(there=there)
    assert here.load.look_at("r0") == ReplicaLoad(4, 1000 + 1 + 500 + 440), (
        "it counted on the first"
    )
    for flight, visit in (*both, other, longer):
        visit.first_token()
        flight.first_token()
    here.hear(there=there)
    assert here.load.look_at("r0").prefill_tokens == 0


async def test_keys_of_another_secret_are_left_alone_and_counted() -> None:
    """They would match by chance only; an operator should see it."""
    here, there = Party(b"one"), Party(b"another")
    there.begin()
    here.hear(there=there)
    assert in_prefill(here.mirror, here.prompt()) == {}
    assert here.sharing.foreign_prefixes == 1
    there.begin(range(2000, 3000))
    here.hear(there=there)
    assert here.sharing.foreign_prefixes == 2, "each once, though a slot has all of them"
    for party in (here, there):
        await party.registry.close()


async def test_a_replica_that_another_finds_unhealthy_is_out_after_one_check_that_fails(
    parties: tuple[Party, Party],
) -> None:
    """Each would otherwise learn it by three failures of its own."""
    here, there = parties
    for party in parties:
        await eventually(lambda party=party: party.registry.is_healthy("r0"), "it is healthy")
    there.is_up = here.is_up = False
    there.registry.get("r0").record.check_failed("down")
    there.registry.get("r0").record.check_failed("down")
    there.registry.on_check(there.registry.get("r0"), "down")
    assert not there.registry.is_healthy("r0")
    before = here.checks
    here.hear(there=there)
    await eventually(lambda: not here.registry.is_healthy("r0"), "it is out of rotation here")
    assert here.checks - before <= 2, "one of them may have been under way"


async def test_a_replica_that_only_another_cannot_reach_stays(
    parties: tuple[Party, Party],
) -> None:
    """A router that is cut off must not take the fleet from the others."""
    here, there = parties
    for party in parties:
        await eventually(lambda party=party: party.registry.is_healthy("r0"), "it is healthy")
    there.is_up = False
    await eventually(lambda: not there.registry.is_healthy("r0"), "it is out of rotation there")
    here.hear(there=there)
    before = here.checks
    await eventually(lambda: here.checks > before, "it was checked")
    await asyncio.sleep(0)
    assert here.registry.is_healthy("r0")


async def test_a_moment_with_requests_of_others_is_not_quiet(
    parties: tuple[Party, Party],
) -> None:
    """A prediction that they spoiled is no fault of the index, and must not lead to a rebuild."""
    here, there = parties
    there.quiet.began("r0", 0.0)
    here.hear(there=there)
    moment = here.quiet.began("r0", 100.0)
    there.quiet.began("r0", 100.5)
    here.hear(there=there)
    assert not here.quiet.ended(moment, 101.0)
    alone = here.quiet.began("r0", 1e9)
    here.hear(there=there)
    assert here.quiet.ended(alone, 1e9)


def test_an_idle_worker_says_nothing() -> None:
    """Its slot is as small as it can be."""
    assert len(encode_slot(Slot())) < 16
