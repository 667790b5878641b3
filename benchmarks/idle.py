"""What does an idle router cost, and how soon is it ready?

    python -m benchmarks.idle --replicas 64 --seconds 30

Replicas in C answer its health checks and publish no events meanwhile. `core_share`: of one core,
the router's; `ready_s`: from the start of its process until `/readyz` says yes, all replicas up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.figures import report
from benchmarks.peers.contestants import Kvroute
from benchmarks.peers.programs import Replicas, build
from benchmarks.peers.publishing import Publisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        build(Path(directory))
        for count in options.replicas:
            _measure(count, options.seconds, Path(directory))


def _measure(count: int, seconds: float, programs: Path) -> None:
    with ExitStack() as stack:
        replicas = stack.enter_context(Replicas(programs, count, 1, 0))
        publisher = stack.enter_context(closing(Publisher(count)))
        router = stack.enter_context(closing(Kvroute(replicas.urls)))
        began = time.monotonic()
        router.follow(publisher.endpoints)
        ready_s = time.monotonic() - began
        time.sleep(15.0)  # what follows a start, and until replicas are asked less often
        before, began = router.process.cpu_s(), time.monotonic()
        time.sleep(seconds)
        share = (router.process.cpu_s() - before) / (time.monotonic() - began)
    report("idle", replicas=count, ready_s=round(ready_s, 2), core_share=round(share, 4))


if __name__ == "__main__":
    main()
