"""Does memory stay flat? Many requests pass through a real router, whose replicas store and evict,
come and go.

    python -m benchmarks.growth --requests 1000000

Replicas and clients are programs in C, so that the router sets the pace. Completions of token ids
and chats, a fifth of each streamed, no two the same; replicas publish stored and removed blocks all
the time, and a few more come and go under ever new names, as pods do. This exercises all that a
router keeps: the index, who used which prompt last, what was sent lately, token ids of texts, the
log of requests, and the hour that the live page shows. Some of it fills for minutes before it
reaches its bound, so only the second half tells whether memory grows. With `--evict 0` nothing is
ever said to be evicted, and `policy.mirror_max_keys` fills up, the largest bound.
"""

from __future__ import annotations

import argparse
import http.client
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import report, slope
from benchmarks.peers.contestants import MODEL
from benchmarks.peers.programs import Prompts, Replicas, build, load, request
from benchmarks.peers.proxying import id_prompts, text_prompts, tokenizer
from benchmarks.peers.publishing import Publisher
from benchmarks.under_events import Events
from tests.support.router_process import RouterProcess, router_process

_MIB = 1024 * 1024
_SLICE_S = 10.0
_STREAM_SHARE = 0.2


class Slice(msgspec.Struct):
    """The figures that the requests so far left behind."""

    requests: int
    errors: int
    replicas_that_came: int
    rss_mib: float
    descriptors: int
    tasks: int


class Pods:
    """Replicas that come and go, each under a name of its own."""

    def __init__(self, port: int, urls: list[str], every_s: float) -> None:
        self._port, self._urls, self._every_s = port, urls, every_s
        self._is_over = threading.Event()
        self.came = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let them come and go while the context is open."""
        thread = threading.Thread(target=self._pass)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _pass(self) -> None:
        while self._urls and not self._is_over.wait(self._every_s):
            if self.came >= len(self._urls):
                self._go(self.came - len(self._urls))
            url = self._urls[self.came % len(self._urls)]
            pod = {"id": f"pod-{self.came}", "url": url, "models": [MODEL], "kv_events": []}
            found = request(self._port, "/replicas", pod)
            if found.status != 201:
                raise RuntimeError(f"{pod}: status {found.status}: {found.body[:200]!r}")
            self.came += 1

    def _go(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("DELETE", f"/replicas/pod-{number}")
        connection.getresponse().read()
        connection.close()


def _kinds(text_share: float) -> list[tuple[float, Prompts]]:
    """Return prompts of each kind, and the share of the time for which they are sent."""
    found = []
    for share, prompts in ((1 - text_share, id_prompts), (text_share, text_prompts)):
        found.append((share * (1 - _STREAM_SHARE), prompts(1)))
        found.append((share * _STREAM_SHARE, prompts(1, stream=True)))
    return found


def _config(
    urls: list[str], endpoints: list[str], tokenizer_path: Path | None, mirror_keys: int
) -> dict[str, Any]:
    model: dict[str, Any] = {"name": MODEL}
    if tokenizer_path is not None:
        model["tokenizer"] = str(tokenizer_path)
    return {
        "server": {"max_concurrent_requests": 10_000},
        "observability": {"log_level": "error"},
        "policy": {"mirror_max_keys": mirror_keys},
        "models": [model],
        "replicas": [
            {
                "id": f"r{number}",
                "url": url,
                "models": [MODEL],
                "kv_events": [{"endpoint": endpoints[number], "topic": ""}] if endpoints else [],
            }
            for number, url in enumerate(urls)
        ],
    }


def _run(router: RouterProcess, pods: Pods, programs: Path, options: argparse.Namespace) -> None:
    kinds, slices = _kinds(options.text_share), [_seen(router, pods, 0, 0)]
    requests = errors = 0
    while requests < options.requests:
        for share, prompts in kinds:
            found = load(programs, router.port, prompts, options.concurrency, _SLICE_S * share)
            requests += found["requests"]
            errors += found["errors"]
        slices.append(_seen(router, pods, requests, errors))
        report("growth", **msgspec.structs.asdict(slices[-1]))
    half = [each for each in slices if each.requests >= requests / 2]
    points = [(each.requests / 1e6, each.rss_mib) for each in half]
    report(
        "growth",
        requests=requests,
        errors=errors,
        replicas_that_came=pods.came,
        rss_mib_at_first=slices[0].rss_mib,
        second_half_rss_mib=[min(y for _, y in points), max(y for _, y in points)],
        second_half_mib_per_million_requests=round(slope(points), 1),
        descriptors=[slices[1].descriptors, slices[-1].descriptors],
        tasks=[slices[1].tasks, slices[-1].tasks],
    )


def _seen(router: RouterProcess, pods: Pods, requests: int, errors: int) -> Slice:
    metrics = request(router.port, "/metrics").body.decode()
    (tasks,) = (
        line for line in metrics.splitlines() if line.startswith("kvroute_event_loop_tasks ")
    )
    return Slice(
        requests,
        errors,
        pods.came,
        round(router.rss_bytes / _MIB, 1),
        len(list(Path(f"/proc/{router.process.pid}/fd").iterdir())),
        int(float(tasks.split()[1])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, default=1_000_000)
    add("--concurrency", type=int, default=32)
    add("--replicas", type=int, default=8)
    add("--text-share", type=float, default=0.2, help="of the time for which chats are sent")
    add("--evict", type=float, default=20_000, help="blocks stored and removed a second; 0: none")
    add("--pods", type=int, default=4, help="replicas that come and go")
    add("--pod-s", type=float, default=0.5, help="until the next one comes, and the oldest goes")
    add("--mirror-keys", type=int, default=1_048_576, help="the option policy.mirror_max_keys")
    options = parser.parse_args()
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        build(programs)
        replicas = stack.enter_context(Replicas(programs, options.replicas + options.pods, 4, 5))
        publisher = Publisher(options.replicas if options.evict else 0)
        stack.callback(publisher.close)
        urls, pod_urls = replicas.urls[: options.replicas], replicas.urls[options.replicas :]
        files = stack.enter_context(tokenizer())
        config = _config(urls, publisher.endpoints, files, options.mirror_keys)
        router = stack.enter_context(router_process(config))
        events = Events(publisher, options.replicas, options.evict, 16) if options.evict else None
        publisher.wait_for_subscribers()
        pods = Pods(router.port, pod_urls, options.pod_s)
        with pods.passing(), events.flowing() if events else nullcontext():
            _run(router, pods, programs, options)


if __name__ == "__main__":
    main()
