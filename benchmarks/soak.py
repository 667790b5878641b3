"""What do clients notice of a fleet in which something always breaks, and what does a router keep?

    python -m benchmarks.soak --minutes 30

Simulated engines, two routers over one Valkey or Redis, and a balancer in front, all of them real
processes and sockets. Requests come at random times; meanwhile one thing after another goes wrong:
engines are killed, frozen or cut off, events lost, a router killed or stopped, the board's
server killed or frozen. After every fault the load pauses until everything has recovered; then
requests are sent one by one, and each must be predicted to the token.

Every response is compared with the text that the model must generate. A failure is *excused* where
a fault took it: the connection was to a router that was killed, or the stream had begun
at an engine that was killed, frozen or cut off. All others are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import uvloop

from benchmarks.figures import report, slope
from benchmarks.soaking.clients import Clients, Fate, Sent, Workload
from benchmarks.soaking.faults import KINDS, Faults
from benchmarks.soaking.fleet import Fleet, Held, held, running
from benchmarks.soaking.quiet import Quiet, scraped, total


@dataclass
class Soak:
    """One run.

    Args:
        options: Of the command line. fleet: What is soaked.
    """

    options: argparse.Namespace
    fleet: Fleet
    at_rest: list[tuple[float, Held, float]] = field(default_factory=list)
    """The time, what the router that is never killed holds, and how many tasks it has."""
    excused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        random = Random(self.options.seed)
        self.workload = Workload(self.fleet.models, random.randrange(2**32))
        self.clients = Clients(self.fleet.balancer, self.workload)
        self.faults = Faults(self.fleet, random, tuple(self.options.hold_s))
        self.quiet = Quiet(self.fleet, self.workload)
        self.random = random
        self.spared = self.fleet.routers[0].pid

    async def run(self) -> None:
        """Cycle after cycle, until the time is over and every kind of fault has happened."""
        await self.quiet.settle()
        began = time.monotonic()
        for number, kind in enumerate(self._kinds()):
            is_over = time.monotonic() - began > self.options.minutes * 60
            if is_over and number >= len(self.options.faults):
                return
            await self._cycle(kind)
            await self._note(time.monotonic() - began)
            print(
                f"{time.monotonic() - began:7.1f} s  {kind:18} settled in "
                f"{self.quiet.settled_s[-1]:5.1f} s  {self.at_rest[-1][1:]}  "
                f"{dict(self._fates())}",
                file=sys.stderr,
                flush=True,
            )

    def _kinds(self) -> list[str]:
        """Return each as often as the others, in an order that is shuffled again and again."""
        found: list[str] = []
        while len(found) < 10_000:
            kinds = list(self.options.faults)
            self.random.shuffle(kinds)
            found += kinds
        return found

    async def _cycle(self, kind: str) -> None:
        """Load, in its midst a fault; then quiet."""
        over = asyncio.Event()
        load = asyncio.create_task(self.clients.send(self.options.rate, over))
        try:
            await asyncio.sleep(self.random.uniform(0.2, 1.0) * self.options.load_s)
            await self.faults.do(kind)
            await asyncio.sleep(self.random.uniform(0.2, 1.0) * self.options.load_s)
        finally:
            over.set()
            await load
        await self.quiet.settle()
        await self.quiet.ask(self.clients, self.options.serial)

    async def _note(self, at: float) -> None:
        text = await scraped(self.fleet.routers[0])
        tasks = total(text, "kvroute_event_loop_tasks")
        self.at_rest.append((at, held(self.spared), tasks))

    def _fates(self) -> Counter[str]:
        return Counter({fate.value: count for fate, count in self.clients.tally.fates.items()})

    def unexcused(self) -> list[Sent]:
        """Return failures that no fault explains; counts the others."""
        self.excused.clear()
        found = [*self.quiet.unserved]
        for sent in self.clients.tally.failed:
            excuse = self.faults.excuse(sent)
            if excuse is None:
                found.append(sent)
            else:
                self.excused[excuse] += 1
        return found

    def growth(self) -> dict[str, object]:
        """Return the growth of the router that is never killed, at rest: at first, at last, and by
        the hour after the first fifth, in which caches fill."""
        figures: dict[str, object] = {}
        counted = self.at_rest[len(self.at_rest) // 5 :]
        for name, value in (
            ("rss_mib", lambda now: now[1].rss_mib),
            ("descriptors", lambda now: float(now[1].descriptors)),
            ("threads", lambda now: float(now[1].threads)),
            ("tasks", lambda now: now[2]),
        ):
            points = [(now[0] / 3600, value(now)) for now in counted]
            figures[name] = [points[0][1], max(y for _, y in points), points[-1][1]]
            figures[f"{name}_per_hour"] = round(slope(points), 1)
        return figures

    def tell(self) -> bool:
        """Print the figures; whether all is as it must be."""
        unexcused, tally = self.unexcused(), self.clients.tally
        errors = [line for router in self.fleet.routers for line in router.errors()]
        for sent in [*unexcused, *self.quiet.inexact][:20]:
            print(f"not as it must be: {sent} {sent.response[-300:]!r}", file=sys.stderr)
        report(
            "soak",
            replicas=len(self.fleet.replicas),
            router_threads=self.options.threads,
            seconds_of_load=round(self.clients.sent_s),
            requests=sum(tally.fates.values()),
            requests_per_s=round(sum(tally.fates.values()) / self.clients.sent_s, 1),
            fates=dict(self._fates()),
            excused=dict(self.excused),
            unexcused=len(unexcused),
            wrong=tally.fates[Fate.WRONG],
            faults=dict(Counter(fault.kind for fault in self.faults.done)),
            settled_max_s=round(max(self.quiet.settled_s), 1),
            quiet_exact=self.quiet.exact,
            quiet_inexact=len(self.quiet.inexact),
            under_load={"exact": tally.exact, "over": tally.over, "under": tally.under},
            p50_s=round(tally.quantile(0.5), 3),
            p99_s=round(tally.quantile(0.99), 3),
            errors_logged=len(errors),
            **self.growth(),
        )
        return not unexcused and not self.quiet.inexact and not errors


async def soak(options: argparse.Namespace) -> bool:
    """Run the whole benchmark; whether all is as it must be."""
    linked = max(1, options.replicas // 4)
    async with running(
        options.replicas, options.models, options.threads, linked, options.check_s
    ) as fleet:
        run = Soak(options, fleet)
        try:
            await run.run()
        finally:
            all_is_well = run.tell()
        return all_is_well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--models", type=int, default=4, choices=range(1, 5))
    parser.add_argument("--threads", type=int, default=2, help="of each router")
    parser.add_argument("--faults", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--load-s", type=float, default=8.0, help="at most, before each fault and after it"
    )
    parser.add_argument(
        "--hold-s", type=float, nargs=2, default=[1.5, 6.0], help="how long a fault lasts"
    )
    parser.add_argument("--serial", type=int, default=16, help="requests after each fault")
    parser.add_argument(
        "--check-s",
        type=float,
        default=2.0,
        help="between health checks, and how long one may take: more on a machine with other load",
    )
    parser.add_argument("--seed", type=int, default=1)
    uvloop.install()
    sys.exit(not asyncio.run(soak(parser.parse_args())))


if __name__ == "__main__":
    main()
