"""What does a gateway's question cost the router, answered by the core and by Python?

One router before stub replicas with events, one connection, questions of --kilobytes one after the
other: token ids, which the core reads by itself, and chats, whose token ids Python makes first. The
same questions with `x-vllm-priority` are Python's from the beginning to the end. What is reserved
ends at once. `router_cpu_us` is the router's CPU time per question, reports of ends included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import report
from benchmarks.peers.contestants import Kvroute
from benchmarks.peers.programs import Connection, Replicas, build
from benchmarks.peers.proxying import Prompts, id_prompts, publish_prefixes, text_prompts, tokenizer
from benchmarks.peers.publishing import Publisher

_PATHS = ("/route", "/select", "/select_and_reserve")
_BY = {"core": "", "python": "x-vllm-priority: 0\r\n"}


@dataclass(slots=True)
class _Gateway:
    """One connection to the router."""

    connection: Connection
    asked: int = 0

    def ask(self, path: str, prompts: Prompts, fields: str) -> None:
        """Ask once, about a prompt that begins like one before it; end what is reserved."""
        separator, self.asked = prompts.separator, self.asked + 1
        prefix = prompts.prefixes[self.asked % len(prompts.prefixes)]
        body = f"{prefix}{self.asked + 1000}{separator}{prompts.tail}".encode()
        answer = self._send("POST", path, body, fields)
        if "selection_id" in answer:
            self._send("DELETE", f"/reservations/{answer['selection_id']}")

    def _send(self, method: str, path: str, body: bytes = b"", fields: str = "") -> dict[str, str]:
        answer = self.connection.send(method, path, body, fields)
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.body.decode()}")
        return dict(answer.json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--questions", type=int, default=1000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=None, help="the router's CPU")
    options = parser.parse_args()
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        build(programs)
        model = stack.enter_context(tokenizer())
        replicas = stack.enter_context(Replicas(programs, options.replicas, 1, 0))
        publisher = stack.enter_context(closing(Publisher(options.replicas)))
        router = stack.enter_context(closing(Kvroute(replicas.urls, options.core, model)))
        router.follow(publisher.endpoints)
        publish_prefixes(publisher, options.kilobytes)
        router.process.wait_until_idle()
        connection = stack.enter_context(closing(Connection(router.port)))
        _measure(router, _Gateway(connection), options)


def _measure(router: Kvroute, gateway: _Gateway, options: argparse.Namespace) -> None:
    forms = {"ids": id_prompts(options.kilobytes), "chat": text_prompts(options.kilobytes)}
    for form, prompts in forms.items():
        for path in _PATHS:
            found: dict[str, list[tuple[float, float]]] = {by: [] for by in _BY}
            for _ in range(options.rounds):
                for by, fields in _BY.items():
                    before, began = router.process.cpu_s(), time.perf_counter()
                    for _ in range(options.questions):
                        gateway.ask(path, prompts, fields)
                    seconds = time.perf_counter() - began
                    found[by].append((router.process.cpu_s() - before, seconds))
            for by, each in found.items():
                cpu_s, seconds = (statistics.median(values) for values in zip(*each, strict=True))
                report(
                    "questions",
                    of=by,
                    form=form,
                    path=path,
                    kilobytes=options.kilobytes,
                    router_cpu_us=round(cpu_s / options.questions * 1e6, 1),
                    us=round(seconds / options.questions * 1e6, 1),
                )


if __name__ == "__main__":
    main()
