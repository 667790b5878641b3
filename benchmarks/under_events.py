"""Do many event streams hold up requests and streams?

Sources publish stored and removed blocks at a fixed rate, while requests come at a fixed rate and
streams deliver tokens at a fixed pace. Both are measured without the events too, in turn. The rise
of the requests' p99 and the longest pause of a stream beyond its pace are what a client notices;
the longest pause also holds whatever else the machine does. `behind_s` says for how long the router
still applied events when no more came: with more than a moment it cannot keep up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.figures import report
from benchmarks.peers.contestants import Kvroute
from benchmarks.peers.programs import Replicas, build, load
from benchmarks.peers.proxying import id_prompts
from benchmarks.peers.publishing import (
    BLOCK_SIZE,
    Publisher,
    batches,
    block_hashes,
    removed,
    run_tokens,
    stored,
)

_INTERVAL_MS = 20
_TICK_S = 0.005
_CYCLE_BLOCKS = 1024
"""Stored and then removed by each source, again and again."""


class Events:
    """Publishes at a fixed rate, on a thread.

    Args:
        publisher: Its sources.
        sources: How many.
        blocks_per_second: Of all of them, stored and removed ones.
        blocks_per_event: In one event; a batch has four.
    """

    def __init__(
        self, publisher: Publisher, sources: int, blocks_per_second: float, blocks_per_event: int
    ) -> None:
        self._publisher = publisher
        self._rate = blocks_per_second
        self._cycles = [_cycle(source, blocks_per_event) for source in range(sources)]
        self._batch_blocks = 4 * blocks_per_event
        self._sent = [0] * sources
        self._is_over = threading.Event()

    @contextmanager
    def flowing(self) -> Iterator[dict[str, float]]:
        """Publish while the context is open; afterwards the result holds `blocks_per_second`."""
        result: dict[str, float] = {}
        self._is_over.clear()
        thread = threading.Thread(target=self._publish, args=(result,))
        thread.start()
        try:
            yield result
        finally:
            self._is_over.set()
            thread.join()

    def _publish(self, result: dict[str, float]) -> None:
        started, ticks, sent = time.monotonic(), 0, 0
        while not self._is_over.is_set():
            due = int((time.monotonic() - started) * self._rate / self._batch_blocks) - sent
            if due > 0:
                self._publisher.send(self._next(due))
                sent += due
            ticks += 1
            time.sleep(max(0.0, started + ticks * _TICK_S - time.monotonic()))
        result["blocks_per_second"] = sent * self._batch_blocks / (time.monotonic() - started)

    def _next(self, count: int) -> list[bytes]:
        """Return the next *count* batches, spread over the sources."""
        data = []
        for source, cycle in enumerate(self._cycles):
            first = self._sent[source]
            share = count // len(self._cycles) + (source < count % len(self._cycles))
            self._sent[source] += share
            payloads = [cycle[at % len(cycle)] for at in range(first, first + share)]
            data.append(self._publisher.messages(source, payloads))
        return data


def _cycle(source: int, blocks_per_event: int) -> list[bytes]:
    tokens = run_tokens(source + 1, _CYCLE_BLOCKS * BLOCK_SIZE)
    hashes = block_hashes(tokens)
    events = stored(tokens, hashes, blocks_per_event)
    return batches(events) + batches(removed(hashes, blocks_per_event))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--sources", type=int, default=64)
    add("--blocks-per-second", type=float, nargs="+", default=[500_000])
    add("--blocks-per-event", type=int, default=64)
    add("--requests-per-second", type=float, default=50)
    add("--streams", type=int, default=64)
    add("--seconds", type=float, default=5.0, help="of each measurement")
    add("--rounds", type=int, default=3)
    add("--pin", action="store_true", help="the router on core 0, all else on core 1")
    options = parser.parse_args()
    router_core, other_core = (0, 1) if options.pin else (None, None)
    if options.pin:
        os.sched_setaffinity(0, {1})
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        build(programs)
        replicas = stack.enter_context(
            Replicas(programs, options.sources, 100, _INTERVAL_MS, other_core)
        )
        publisher = Publisher(options.sources)
        stack.callback(publisher.close)
        router = Kvroute(replicas.urls, router_core)
        router.follow(publisher.endpoints)
        stack.callback(router.close)
        publisher.wait_for_subscribers()
        router.process.wait_until_idle()
        for rate in options.blocks_per_second:
            events = Events(publisher, options.sources, rate, options.blocks_per_event)
            for kind in ("requests", "streams"):
                _measure(kind, programs, router, events, rate, options)


def _measure(
    kind: str,
    programs: Path,
    router: Kvroute,
    events: Events,
    rate: float,
    options: argparse.Namespace,
) -> None:
    prompts = id_prompts(1, stream=kind == "streams")
    connections = options.streams if kind == "streams" else 64
    per_second = 0.0 if kind == "streams" else options.requests_per_second
    unit = "gap" if kind == "streams" else "latency"
    core = 1 if options.pin else None
    quiet, busy, flows, behind, errors = [], [], [], [], 0
    for _ in range(options.rounds):
        found = load(programs, router.port, prompts, connections, options.seconds, per_second, core)
        quiet.append(found)
        with events.flowing() as flow:
            found = load(
                programs, router.port, prompts, connections, options.seconds, per_second, core
            )
        behind.append(router.process.wait_until_idle())
        busy.append(found)
        flows.append(flow["blocks_per_second"])
        errors += quiet[-1]["errors"] + busy[-1]["errors"]

    def middle(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(run[f"{unit}_{name}_us"] for run in runs) / 1e3

    beyond = _INTERVAL_MS if kind == "streams" else 0
    report(
        "under_events",
        of=kind,
        blocks_per_second=round(statistics.median(flows)),
        asked_blocks_per_second=round(rate),
        behind_s=round(statistics.median(behind), 1),
        errors=errors,
        p99_ms=round(middle(quiet, "p99") - beyond, 2),
        p99_ms_under_events=round(middle(busy, "p99") - beyond, 2),
        rise_ms=round(middle(busy, "p99") - middle(quiet, "p99"), 2),
        longest_ms=round(middle(quiet, "max") - beyond, 1),
        longest_ms_under_events=round(middle(busy, "max") - beyond, 1),
    )


if __name__ == "__main__":
    main()
