"""What the demo asks engines and router while it runs: blocks, evictions, states of streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from router.demo.client import Client
from router.demo.processes import DemoFailed, Running
from router.upstream import UpstreamError

_LIVE_S = 30.0


@dataclass(slots=True)
class GroupView:
    """One KV cache group of one replica."""

    kind: str
    blocks: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """What has grown since the engine began, by the names of `_COUNTS`."""

    def count(self, name: str, base: GroupView | None = None) -> int:
        """One of the counts; since *base* was seen, if there is one."""
        return self.counts.get(name, 0) - (base.count(name) if base else 0)


SLID_OUT, EVICTED, HIT_TOKENS = "slid out", "evicted", "hit tokens"
_COUNTS = {
    ("kvroute_engine_evicted_blocks_total", "window"): SLID_OUT,
    ("kvroute_engine_evicted_blocks_total", "pressure"): EVICTED,
    ("kvroute_engine_group_hit_tokens_total", None): HIT_TOKENS,
}


@dataclass(slots=True)
class ReplicaView:
    """One replica as it is now."""

    name: str
    groups: list[GroupView] = field(default_factory=list)


async def look_at(name: str, engine: Client) -> ReplicaView:
    """What an engine says of its cache."""
    groups: dict[int, GroupView] = {}
    for family in text_string_to_metric_families((await engine.get("/metrics")).decode()):
        for sample in family.samples:
            count = _COUNTS.get((sample.name, sample.labels.get("cause")))
            if count is not None:
                _group(groups, sample.labels).counts[count] = int(sample.value)
            elif sample.name == "kvroute_engine_cached_blocks":
                _group(groups, sample.labels).blocks = int(sample.value)
    return ReplicaView(name, [groups[index] for index in sorted(groups)])


async def look_at_all(replicas: Sequence[Running], engines: Sequence[Client]) -> list[ReplicaView]:
    """Every replica, in their order."""
    pairs = zip(replicas, engines, strict=True)
    return list(await asyncio.gather(*(look_at(replica.name, client) for replica, client in pairs)))


def _group(groups: dict[int, GroupView], labels: dict[str, str]) -> GroupView:
    return groups.setdefault(int(labels["group"]), GroupView(labels["kind"]))


async def until_live(router: Client, replicas: int) -> None:
    """Until the router follows the streams of all replicas.

    Raises:
        DemoFailed: It did not in time.
    """
    deadline = time.monotonic() + _LIVE_S
    while not await _all_live(router, replicas):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{replicas} replicas were not all live within {_LIVE_S:.0f} s")
        await asyncio.sleep(0.05)


async def _all_live(router: Client, replicas: int) -> bool:
    try:
        found = (await router.get_json("/replicas"))["replicas"]
    except (UpstreamError, DemoFailed):
        return False
    feeds = [
        source["feed"]
        for replica in found
        if replica["state"] == "healthy"
        for source in replica["sources"]
    ]
    return len(feeds) == replicas and all(feed and feed["state"] == "live" for feed in feeds)


async def empty_caches(engines: Sequence[Client]) -> None:
    """Every phase starts from nothing."""
    for engine in engines:
        await engine.post("/reset_prefix_cache")
