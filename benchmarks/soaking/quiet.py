"""Is every cache known exactly, now that nothing happens?"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from async_timeout import timeout

from benchmarks.soaking.clients import Clients, Fate, Sent, Workload
from benchmarks.soaking.fleet import Fleet, Replica, Router
from kvevents.messages import encode_start, read_reply
from tests.support.http_client import ask

_DEADLINE_S = 300.0
"""Quiet is waited for so long: on a machine with other load a router of many replicas takes more
than one minute to start."""
_IN_FLIGHT = (
    "kvroute_in_flight_requests",
    "kvroute_in_flight_prefill_tokens",
    "kvroute_in_flight_decodes",
    "kvroute_requests_under_way",
)


def total(text: str, name: str, *labels: str) -> float:
    """Sum over the samples of a metric that have all of *labels*, such as `state="live"`.

    A scrape of a large fleet is long, and of no more than this is needed.
    """
    found = 0.0
    for line in text.splitlines():
        if line.startswith(name) and line[len(name)] in "{ " and all(x in line for x in labels):
            found += float(line.rpartition(" ")[2])
    return found


async def scraped(router: Router) -> str:
    return (await ask(router.port, "GET", "/metrics")).body.decode()


@dataclass
class Quiet:
    """Wait until nothing happens any more, then ask one request after another.

    Args:
        fleet: Who is asked.
        workload: Makes requests.
    """

    fleet: Fleet
    workload: Workload
    settled_s: list[float] = field(default_factory=list)
    """The time that it took after each fault."""
    exact: int = 0
    inexact: list[Sent] = field(default_factory=list)
    unserved: list[Sent] = field(default_factory=list)

    async def settle(self) -> None:
        """Wait until every router follows all engines, knows all they have published, and receives
        from the other.

        Raises:
            TimeoutError: That takes too long; says what it waits for.
        """
        began, why = time.monotonic(), ""
        while True:
            why = await self._unsettled()
            if not why:
                break
            if time.monotonic() - began > _DEADLINE_S:
                raise TimeoutError(f"not settled within {_DEADLINE_S:g} s: {why}")
            await asyncio.sleep(0.1)
        await self.told(self.fleet.replicas)
        self.settled_s.append(time.monotonic() - began)

    async def _unsettled(self) -> str:
        for router in self.fleet.routers:
            text, everywhere = await scraped(router), len(self.fleet.replicas)
            others = len(self.fleet.routers) - 1
            wanted = {
                "healthy": (total(text, "kvroute_replica_healthy"), everywhere),
                "live": (total(text, "kvroute_source_state", 'state="live"'), everywhere),
                "in flight": (sum(total(text, name) for name in _IN_FLIGHT), 0),
                "heard": (total(text, "kvroute_board_writers", 'board="valkey"'), others),
            }
            for what, (found, right) in wanted.items():
                if found != right:
                    return f"{router.name}: {what}: {found:g} of {right:g}"
        return ""

    async def told(self, replicas: Sequence[Replica]) -> None:
        """Wait until every router has applied all that these engines have published."""
        deadline = time.monotonic() + _DEADLINE_S
        for router in self.fleet.routers:
            last = await self._last_batches(router, replicas)
            while True:
                known = await _known(router, replicas)
                if not any(_is_behind(known[name], last[name]) for name in last):
                    break
                # Perhaps it has numbers of a process that is gone.
                last = await self._last_batches(router, replicas)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{router.name} knows {known}; published: {last}")

    async def _last_batches(
        self, router: Router, replicas: Sequence[Replica]
    ) -> dict[str, int | None]:
        """Return what each engine reports, seen from where the router is."""
        known = await _known(router, replicas)
        return {
            replica.name: await last_batch(replica, known[replica.name]) for replica in replicas
        }

    async def ask(self, clients: Clients, count: int) -> None:
        """Send *count* requests, to the models in turn; each must be served and predicted."""
        by_name = {replica.name: replica for replica in self.fleet.replicas}
        models: Sequence[str] = self.fleet.models
        for number in range(count):
            sent = self.workload.next(models[number % len(models)])
            await clients.ask(sent)
            if sent.fate is not Fate.SERVED:
                self.unserved.append(sent)
                continue
            if sent.predicted == sent.cached:
                self.exact += 1
            else:
                self.inexact.append(sent)
                router = self.fleet.router(sent.router)
                known = (await ask(router.port, "GET", "/requests")).json["requests"][0]
                print(f"predicted otherwise, and known as {known}", file=sys.stderr)
            await self.told([by_name[sent.replica]])


def _is_behind(known: int | None, last: int | None) -> bool:
    if last is None:
        return known is not None
    return known is None or known < last


async def _known(router: Router, replicas: Sequence[Replica]) -> dict[str, int | None]:
    """Return the last batch of each engine, as the router has it."""
    if len(replicas) == 1:
        found = [(await ask(router.port, "GET", f"/replicas/{replicas[0].name}")).json]
    else:
        found = (await ask(router.port, "GET", "/replicas")).json["replicas"]
    return {replica["id"]: replica["sources"][0]["feed"]["stream"]["last_seq"] for replica in found}


async def last_batch(replica: Replica, known: int | None) -> int | None:
    """Return the number of the last batch that an engine has published; None: it has published
    none, or fewer than *known*, which are those of a process that is gone."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(replica.endpoints[1])
        await socket.send_multipart([b"", encode_start(known or 0)])
        last = None
        async with timeout(_DEADLINE_S):
            while (reply := read_reply(await socket.recv_multipart(), None)) is not None:
                last = reply.seq
        return last
