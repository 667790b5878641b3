"""Sources that are asked for their events, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from async_timeout import timeout

from kvevents.errors import EndpointError
from kvevents.stream_state import SourceState
from router.feed import polled
from router.feed.feed import Feed, SourceOptions
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import IdleTimeout
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.blocks import tokens
from tests.support.engine_stub import EngineStub, Exchange
from tests.support.following import QUICK
from tests.support.trtllm_engine import BLOCK, PATH, TrtllmCache, TrtllmEvents
from tests.support.waiting import DEADLINE_S, eventually

A = SourceId("replica-a")
PROMPT = tokens(4 * BLOCK)


class Setting:
    """A feed, and an engine that it asks."""

    def __init__(self, feed: Feed, index: PrefixIndex, stub: EngineStub) -> None:
        self.feed = feed
        self.index = index
        self.stub = stub
        self.cache = TrtllmCache()
        self.events = TrtllmEvents([self.cache])
        stub.paths[PATH] = self.events
        self.key = b"k"

    @property
    def endpoint(self) -> str:
        return f"{self.stub.url}{PATH}"

    def follow(self, rank: int = 0) -> None:
        source = SourceId(A.replica, rank)
        self.feed.add(
            source.replica,
            EventSource(source.dp_rank, self.endpoint),
            "m",
            options=SourceOptions(headers=lambda: ((b"authorization", self.key),)),
        )

    async def until(self, state: SourceState, last_seq: int | None, rank: int = 0) -> None:
        source = SourceId(A.replica, rank)

        def is_there() -> bool:
            found = self.feed.statistics()[source]
            return (found.state, found.stream.last_seq) == (state, last_seq)

        await eventually(is_there, str(state), show=lambda: self.feed.statistics()[source])

    def hit(self, rank: int = 0) -> int:
        return self.index.match([*PROMPT, 1])[SourceId(A.replica, rank)].gpu_cached_tokens

    def polls(self) -> dict[str, int]:
        (found,) = self.feed.pollers()
        return found.polls


class Uncancellable(UpstreamClient):
    """Reports the end of a timeout where a request is cancelled."""

    async def fetch(self, *args: Any, **kwargs: Any) -> tuple[int, bytes]:
        try:
            return await super().fetch(*args, **kwargs)
        except asyncio.CancelledError:
            raise IdleTimeout("cancelled") from None


@pytest.fixture
async def here() -> AsyncIterator[Setting]:
    index, client = PrefixIndex(), UpstreamClient()
    feed = Feed(lambda _: index, QUICK, client=client)
    async with EngineStub("m") as stub:
        yield Setting(feed, index, stub)
        await feed.close()
        await client.close()


async def test_what_was_stored_is_known_and_what_comes_follows(here: Setting) -> None:
    """From event 0 on all is known; with the replica's key, and by POST, as trtllm-serve has it."""
    here.cache.store(PROMPT)
    here.follow()
    await here.until(SourceState.LIVE, 1)
    assert here.hit() == 4 * BLOCK
    here.cache.remove(0, *here.cache.hashes(PROMPT)[1:])
    await here.until(SourceState.LIVE, 2)
    assert here.hit() == BLOCK
    await eventually(lambda: here.polls().get("empty", 0) > 1, "requests while there is nothing")
    assert here.polls()["events"] == 2
    assert set(here.events.polls) == {"POST"}
    assert set(here.events.keys) == {"k"}


async def test_a_key_that_has_changed_is_sent_with_the_next_request(here: Setting) -> None:
    """A replica takes over another key while it runs, and its engine may know that one alone."""
    here.follow()
    await eventually(lambda: "k" in here.events.keys, "a request")
    here.key = b"new"
    await eventually(lambda: here.events.keys[-1] == "new", "a request with the new key")


async def test_a_router_that_comes_late_knows_that_something_is_missing(here: Setting) -> None:
    """Events are returned once: an engine that was asked by someone else has given them away."""
    here.cache.store(PROMPT[:BLOCK])
    here.cache.take()
    here.follow()
    await here.until(SourceState.SUSPECT, None)
    here.cache.store(PROMPT)
    await here.until(SourceState.SUSPECT, 2)


async def test_a_number_that_is_missing_is_a_loss(here: Setting) -> None:
    """The engine's buffer ran over, or somebody else asks as well."""
    here.follow()
    await here.until(SourceState.LIVE, 0)
    here.cache.store(PROMPT[: 2 * BLOCK])
    await here.until(SourceState.LIVE, 1)
    here.cache.next_id += 1
    here.cache.store(PROMPT)
    await here.until(SourceState.SUSPECT, 3)
    assert here.feed.statistics()[A].stream.gaps == 1
    assert A in here.feed.suspects


async def test_a_restarted_engine_begins_anew_and_is_whole_again(here: Setting) -> None:
    """Its events begin with 0: what the process before held is forgotten, suspect or not."""
    here.follow()
    here.cache.store(PROMPT)
    here.cache.next_id += 5
    here.cache.store(tokens(BLOCK * 2, 9))
    await here.until(SourceState.SUSPECT, 7)
    await here.stub.stop()
    here.cache.begin()
    await here.stub.start()
    await here.until(SourceState.LIVE, 0)
    assert here.hit() == 0
    here.cache.store(PROMPT)
    await here.until(SourceState.LIVE, 1)
    assert here.hit() == 4 * BLOCK


async def test_a_server_that_fails_for_a_while_loses_nothing(
    here: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """Events wait in the engine; the first failure is logged, all are counted."""
    here.follow()
    await here.until(SourceState.LIVE, 0)
    here.events.status = "503 Service Unavailable"
    await eventually(lambda: here.polls().get("failed", 0) >= 2, "failures")
    here.cache.store(PROMPT)
    here.events.status = "200 OK"
    await here.until(SourceState.LIVE, 1)
    assert here.hit() == 4 * BLOCK
    assert caplog.text.count(f"replica replica-a: event streams: POST {here.endpoint} ret") == 1


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_server_that_is_gone_for_long_is_trusted_again_once_its_numbers_go_on(
    here: Setting, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Nothing tells whether it is the same process before it says more; a number that is missing
    then is a loss as ever."""
    here.follow()
    here.cache.store(PROMPT[:BLOCK])
    here.cache.store(PROMPT[: 2 * BLOCK])
    await here.until(SourceState.LIVE, 2)
    monkeypatch.setattr(polled, "_GONE_AFTER_S", 0.05)
    monkeypatch.setattr(polled, "_RETRY_S", (0.01, 0.02))
    await here.stub.stop()
    await here.until(SourceState.CONNECTING, 2)
    await here.stub.start()
    await here.until(SourceState.SUSPECT, 2)
    here.cache.next_id += lost
    here.cache.store(PROMPT)
    state = SourceState.SUSPECT if lost else SourceState.LIVE
    await here.until(state, 3 + lost)
    assert here.hit() == 4 * BLOCK
    here.cache.store(tokens(BLOCK, 9000))
    await here.until(state, 4 + lost)


async def test_ranks_have_numbers_of_their_own(
    here: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """One server returns the events of all its ranks; one that nobody follows is named."""
    here.events.caches = [TrtllmCache(rank=rank) for rank in range(3)]
    here.follow(0)
    here.follow(1)
    await here.until(SourceState.LIVE, 0, rank=0)
    await here.until(SourceState.LIVE, 0, rank=1)
    here.events.caches[1].store(PROMPT)
    here.events.caches[2].store(PROMPT)
    await here.until(SourceState.LIVE, 1, rank=1)
    assert (here.hit(0), here.hit(1)) == (0, 4 * BLOCK)
    assert "its rank 2 has events, and no entry of kv_events" in caplog.text


async def test_one_that_is_followed_already_is_refused(here: Setting) -> None:
    """The two would take each other's events away; the first goes on."""
    here.follow()
    await here.until(SourceState.LIVE, 0)
    with pytest.raises(EndpointError, match="its rank 0 is asked for already"):
        here.feed.add("replica-b", EventSource(0, here.endpoint), "m")
    here.cache.store(PROMPT)
    await here.until(SourceState.LIVE, 1)
    await here.feed.remove(A)
    assert here.feed.pollers() == []
    here.follow()  # nobody does any more


async def test_nobody_is_asked_for_a_source_that_is_gone(here: Setting) -> None:
    """A request that is under way is broken off."""
    here.follow()
    await here.until(SourceState.LIVE, 0)
    await here.feed.remove(A)
    count = len(here.events.polls)
    other = TrtllmEvents([TrtllmCache()])
    here.stub.paths["/other"] = other
    here.feed.add("b", EventSource(0, f"{here.stub.url}/other"), "m")
    await eventually(lambda: len(other.polls) > 3, "another is asked meanwhile")
    assert len(here.events.polls) <= count + 1


async def test_a_server_that_wants_get_is_asked_so(here: Setting) -> None:
    """A proxy in front of it, say, that has the path by another method."""

    async def only_get(exchange: Exchange) -> None:
        here.events.status = "200 OK" if exchange.request.method == "GET" else "405 Not Allowed"
        await here.events(exchange)

    here.stub.paths[PATH] = only_get
    here.follow()
    await here.until(SourceState.LIVE, 0)
    assert here.events.polls[:2] == ["POST", "GET"]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"<html>no</html>", "malformed"),
        (b'{"events": []}', "malformed"),
        (b"[" + b" " * (3 * 2**20) + b"]", "failed"),
        (b"[" + b"{}," * 100_000 + b"{}]", "malformed"),
        (b'[{"event_id": "x"}]', "malformed"),
    ],
    ids=["no JSON", "no array", "too long", "too many", "no number"],
)
async def test_a_response_that_is_none_is_counted_and_costs_nothing_else(
    here: Setting, monkeypatch: pytest.MonkeyPatch, body: bytes, outcome: str
) -> None:
    """What it may have held shows as a number that is missing."""
    monkeypatch.setattr(here.feed._pollers, "_max_bytes", 2**20)
    here.events.bodies = [body]
    here.follow()
    await here.until(SourceState.LIVE, 0)
    assert here.polls()[outcome] == 1


async def test_events_without_a_number_are_named_once_until_there_are_none(
    here: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that always sends some must not fill the log; the others count."""
    here.events.bodies = [b'[{"event_id": -1}, {"event_id": 0, "data": {"type": "x"}}]']
    here.events.bodies += [b'[{"data": 1}]'] * 3 + [b"[]", b"[7]", b"[{}, {}, {}, 8]", b"[]"]
    here.follow()
    await eventually(lambda: here.polls().get("empty", 0) > 2, "requests after these")
    await here.until(SourceState.LIVE, 0)
    assert here.polls()["malformed"] == 6
    assert caplog.text.count("events name no event_id") == 1
    assert caplog.text.count("it must be a JSON array of events") == 1


async def test_nobody_goes_on_asking_where_a_cancellation_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python 3.10 may take it for the end of a timeout; a second task would ask for ever. Nobody is
    told of an end like this one."""
    index, client, asked = PrefixIndex(), Uncancellable(), asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        asked.set()
        await exchange.gone.wait()

    feed = Feed(lambda _: index, QUICK, client=client)
    async with EngineStub("m") as stub:
        stub.paths[PATH] = hang
        endpoint = f"{stub.url}{PATH}"
        feed.add(A.replica, EventSource(A.dp_rank, endpoint), "m")
        await asked.wait()
        (task,) = (each for each in asyncio.all_tasks() if each.get_name() == endpoint)
        await feed.remove(A)
        async with timeout(DEADLINE_S):
            await asyncio.wait([task])
        assert not task.cancelled()
        assert "NoneType" not in caplog.text
        await feed.close()
        await client.close()


async def test_an_event_that_cannot_be_read_is_lost_and_the_next_ones_are_not(
    here: Setting,
) -> None:
    """The source is suspect from then on: it may have taken blocks away."""
    here.follow()
    await here.until(SourceState.LIVE, 0)
    here.cache.emit(0, {"type": "removed", "block_hashes": "all of them"})
    here.cache.store(PROMPT)
    await here.until(SourceState.SUSPECT, 2)
    assert here.hit() == 4 * BLOCK
    assert here.feed.statistics()[A].stream.malformed == 1


async def test_a_flood_waits_in_the_engine(here: Setting) -> None:
    """The next request goes out when all of the last response was taken."""
    here.cache.emit(0, {"type": "x"})
    waiting = asyncio.Event()

    async def count(exchange: Exchange) -> None:
        connections = next(iter(here.feed._pollers._pollers.values()))._connections.values()
        assert not any(each.waiting for each in connections)
        for _ in range(500):
            here.cache.emit(0, {"type": "x"})
        if here.cache.next_id > 5000:
            waiting.set()
        await here.events(exchange)

    here.stub.paths[PATH] = count
    here.follow()
    await waiting.wait()
    here.stub.paths[PATH] = here.events
    await here.until(SourceState.LIVE, here.cache.next_id - 1)
    assert json.dumps(here.cache.events) == "[]"


async def test_where_nothing_can_be_asked_it_says_so() -> None:
    """A feed without a client, as tools have."""
    index = PrefixIndex()
    feed = Feed(lambda _: index, QUICK)
    with pytest.raises(EndpointError, match="events are not polled here"):
        feed.add(A.replica, EventSource(A.dp_rank, "http://localhost:1/kv_cache_events"), "m")
    await feed.close()
