"""The state of engines and router while the demo runs: blocks, evictions, event streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio
from async_timeout import timeout
from prometheus_client.parser import text_string_to_metric_families

from kvevents.messages import encode_start, read_reply
from kvevents.stream_state import SourceState
from kvroute_engine.demo.client import Client
from kvroute_engine.demo.processes import DemoFailed, Running
from router.doors.http.replica_views import ReplicaDetails, ReplicaList
from router.fleet.client_errors import UpstreamError

_LIVE_S = 30.0


@dataclass(slots=True)
class GroupCounts:
    """One KV cache group of one engine."""

    kind: str
    blocks: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Totals since the engine started, by the names of `_COUNTS`."""

    def count(self, name: str, base: GroupCounts | None = None) -> int:
        """Return one of the counts.

        Args:
            name: One of the names in `_COUNTS`.
            base: An earlier state; the result is the growth since. None: since the engine started.
        """
        return self.counts.get(name, 0) - (base.count(name) if base else 0)


SLID_OUT, EVICTED, HIT_TOKENS = "slid out", "evicted", "hit tokens"
_COUNTS = {
    ("kvroute_engine_evicted_blocks_total", "window"): SLID_OUT,
    ("kvroute_engine_evicted_blocks_total", "pressure"): EVICTED,
    ("kvroute_engine_group_hit_tokens_total", None): HIT_TOKENS,
}


@dataclass(slots=True)
class EngineCache:
    """One engine's cache as it is now."""

    name: str
    groups: list[GroupCounts] = field(default_factory=list)


async def look_at(name: str, engine: Client) -> EngineCache:
    """Read the state of an engine's cache from its metrics."""
    groups: dict[int, GroupCounts] = {}
    for family in text_string_to_metric_families((await engine.get("/metrics")).decode()):
        for sample in family.samples:
            count = _COUNTS.get((sample.name, sample.labels.get("cause")))
            if count is not None:
                _group(groups, sample.labels).counts[count] = int(sample.value)
            elif sample.name == "kvroute_engine_cached_blocks":
                _group(groups, sample.labels).blocks = int(sample.value)
    return EngineCache(name, [groups[index] for index in sorted(groups)])


async def look_at_all(replicas: Sequence[Running], engines: Sequence[Client]) -> list[EngineCache]:
    """Read the state of every engine's cache, in the order of *replicas*.

    Args:
        engines: A client of each.
    """
    pairs = zip(replicas, engines, strict=True)
    return list(await asyncio.gather(*(look_at(replica.name, client) for replica, client in pairs)))


def _group(groups: dict[int, GroupCounts], labels: dict[str, str]) -> GroupCounts:
    return groups.setdefault(int(labels["group"]), GroupCounts(labels["kind"]))


async def until_live(router: Client, replicas: int) -> None:
    """Wait until the router follows the event streams of all replicas.

    Raises:
        DemoFailed: It does not follow all of them in time.
    """
    deadline = time.monotonic() + _LIVE_S
    while not await _all_live(router, replicas):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{replicas} replicas were not all live within {_LIVE_S:.0f} s")
        await asyncio.sleep(0.05)


async def _all_live(router: Client, replicas: int) -> bool:
    try:
        found = msgspec.json.decode(await router.get("/replicas"), type=ReplicaList).replicas
    except (UpstreamError, DemoFailed):
        return False
    healthy = [replica for replica in found if replica.state == "healthy"]
    feeds = [source.feed for replica in healthy for source in replica.sources]
    return len(feeds) == replicas and all(
        feed is not None and feed.state is SourceState.LIVE for feed in feeds
    )


async def until_read(router: Client, replica: str) -> None:
    """Wait until the router has read everything that a replica has published.

    The replica sends what it has published before it replies to a request for later batches. So if
    no batch follows the last one that the router has read, the router is up to date.

    Raises:
        DemoFailed: It has not read everything in time.
    """
    deadline = time.monotonic() + _LIVE_S
    while True:
        found = msgspec.json.decode(await router.get(f"/replicas/{replica}"), type=ReplicaDetails)
        (source,) = found.sources
        if source.feed is not None and source.replay_endpoint is not None:
            last_seq = source.feed.stream.last_seq
            after = -1 if last_seq is None else last_seq
            if not await _has_published(source.replay_endpoint, after):
                return
        if time.monotonic() > deadline:
            raise DemoFailed(f"{replica}: its events were not read within {_LIVE_S:.0f} s")


async def _has_published(replay_endpoint: str, after: int) -> bool:
    """Return whether there is a batch with a higher number."""
    context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(replay_endpoint)
        await socket.send_multipart([b"", encode_start(after + 1)])
        async with timeout(_LIVE_S):
            return read_reply(await socket.recv_multipart(), None) is not None


async def admission_predictions(router: Client) -> tuple[int, int]:
    """Return how many of the router's predictions for the moment of admission were exact, and how
    many were compared, since it started."""
    exact, compared = 0, 0
    for family in text_string_to_metric_families((await router.get("/metrics")).decode()):
        for sample in family.samples:
            if sample.name == "kvroute_admission_predictions_total":
                compared += int(sample.value)
                exact += int(sample.value) if sample.labels["outcome"] == "exact" else 0
    return exact, compared


async def empty_caches(engines: Sequence[Client]) -> None:
    """Empty the cache of every engine, so that each phase starts from nothing."""
    for engine in engines:
        await engine.post("/reset_prefix_cache")
