"""How many more requests do two threads of the data plane serve than one?

The router with one thread and with two, in turn and several times, between a load generator and
replicas in C; prompts of --kilobytes of token ids, to --path. `core`: the replicas publish events,
and the threads decide by themselves; `estimates`: they publish none, and the threads do so by
estimates; `python`: none either, and the one control loop decides, since the target has a query,
so that the threads only pass on. `router_cpu_us` is the router's CPU time per request,
`others_cpu_us` that of the generator and the replicas. Where these leave two whole cores to the
router, the requests per second tell; on a machine with few cores they do not, and then the CPU per
request does: unchanged, it says that two cores serve twice as many. Two cores are nearly enough for
long prompts to `/route`, which leave little to anyone but the router: `--path /route --kilobytes
640 --by core`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import report
from benchmarks.peers.contestants import Kvroute
from benchmarks.peers.programs import Replicas, build, load
from benchmarks.peers.proxying import id_prompts, publish_prefixes
from benchmarks.peers.publishing import Publisher

_DECIDED_BY = ("core", "estimates", "python")


class _Found(NamedTuple):
    requests_per_second: float
    router_cpu_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--kilobytes", type=int, default=1)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--by", nargs="*", choices=_DECIDED_BY, default=_DECIDED_BY)
    options = parser.parse_args()
    found: dict[tuple[str, int], list[_Found]] = {}
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        build(Path(directory))
        for number in range(options.rounds):
            for by in options.by:
                for threads in options.threads:
                    one = _measure(number, by, threads, options, Path(directory))
                    found.setdefault((by, threads), []).append(one)
    for (by, threads), each in found.items():
        rate, cpu_us = (statistics.median(values) for values in zip(*each, strict=True))
        report(
            "threads",
            median_of=options.rounds,
            of=by,
            threads=threads,
            requests_per_second=rate,
            router_cpu_us=cpu_us,
        )


def _measure(
    number: int, by: str, threads: int, options: argparse.Namespace, programs: Path
) -> _Found:
    """Measure one router that is started for it."""
    path = f"{options.path}?" if by == "python" else options.path
    prompts = replace(id_prompts(options.kilobytes), path=path)
    with ExitStack() as stack:
        replicas = stack.enter_context(Replicas(programs, options.replicas, 1, 0))
        publisher = stack.enter_context(closing(Publisher(options.replicas)))
        router = stack.enter_context(closing(Kvroute(replicas.urls, threads=threads)))
        router.follow(publisher.endpoints if by == "core" else ())
        if by == "core":
            publish_prefixes(publisher, options.kilobytes)
        # Connections, and learned rates.
        load(programs, router.port, prompts, options.concurrency, 1.0)
        before, theirs = router.process.cpu_s(), replicas.cpu_s() + _ended_cpu_s()
        done = load(programs, router.port, prompts, options.concurrency, options.seconds)
        cpu_s = router.process.cpu_s() - before
        others_s = replicas.cpu_s() + _ended_cpu_s() - theirs
    requests = max(1, done["requests"])
    found = _Found(round(requests / done["seconds"]), round(cpu_s / requests * 1e6, 1))
    report(
        "threads",
        round=number,
        of=by,
        threads=threads,
        concurrency=options.concurrency,
        replicas=options.replicas,
        kilobytes=options.kilobytes,
        path=options.path,
        errors=done["errors"],
        **found._asdict(),
        others_cpu_us=round(others_s / requests * 1e6, 1),
        cores_used=round(cpu_s / done["seconds"], 2),
    )
    return found


def _ended_cpu_s() -> float:
    """Return the CPU time of children that have ended, as the load generator has."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
