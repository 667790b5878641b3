"""What does a gateway's question cost the router, answered by the core and by Python?

One router before stub replicas with events, one connection, questions of --kilobytes one after the
other: token ids, which the core reads by itself, and chats, whose token ids Python makes first. The
same questions with `x-vllm-priority` are Python's from the beginning to the end. What is reserved
ends at once. `router_cpu_us` is the router's CPU time per question, reports of ends included.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import report
from benchmarks.peers.contestants import Kvroute
from benchmarks.peers.programs import Replicas, build
from benchmarks.peers.proxying import Prompts, id_prompts, publish_prefixes, text_prompts, tokenizer
from benchmarks.peers.publishing import Publisher

_PATHS = ("/route", "/select", "/select_and_reserve")
_BY = {"core": b"", "python": b"x-vllm-priority: 0\r\n"}


@dataclass(slots=True)
class _Gateway:
    """One connection to the router."""

    connection: socket.socket
    asked: int = 0

    def ask(self, path: str, prompts: Prompts, fields: bytes) -> None:
        """Ask once, about a prompt that begins like one before it; end what is reserved."""
        separator, self.asked = prompts.separator, self.asked + 1
        prefix = prompts.prefixes[self.asked % len(prompts.prefixes)]
        body = f"{prefix}{self.asked + 1000}{separator}{prompts.tail}".encode()
        answer = self._exchange(f"POST {path}", fields, body)
        if "selection_id" in answer:
            self._exchange(f"DELETE /reservations/{answer['selection_id']}", b"", b"")

    def _exchange(self, target: str, fields: bytes, body: bytes) -> dict[str, object]:
        head = f"{target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        self.connection.sendall(head.encode() + fields + b"\r\n" + body)
        with self.connection.makefile("rb") as answer:
            status, length = answer.readline(), 0
            while (line := answer.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            content = answer.read(length)
        if b" 200 " not in status:
            raise SystemExit(f"{target}: {content.decode()}")
        return dict(json.loads(content))


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
        connection = stack.enter_context(socket.create_connection(("localhost", router.port)))
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
