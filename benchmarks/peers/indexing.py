"""Rows of the index: events in, matches out. Ours beside Dynamo's."""

from __future__ import annotations

import array
import gc
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any, TypeVar

from benchmarks.figures import report
from benchmarks.peers.contestants import (
    DynamoIndexer,
    DynamoSelector,
    IndexServer,
    Kvroute,
    cached_blocks,
    module,
)
from benchmarks.peers.programs import (
    Connection,
    Missing,
    Prompts,
    Replicas,
    Settings,
    load,
    wait_until,
)
from benchmarks.peers.publishing import (
    BLOCK_SIZE,
    Publisher,
    batches,
    block_hashes,
    run_tokens,
    stored,
)
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints

_Made = TypeVar("_Made")

_RUN_BLOCKS = 64
"""Blocks of one prompt."""


def _ours(settings: Settings, replicas: Replicas) -> IndexServer:
    return Kvroute(replicas.urls, settings.core)


def _servers(
    settings: Settings, replicas: Replicas, peer: Callable[[int | None], IndexServer]
) -> Iterator[Callable[[], IndexServer]]:
    yield lambda: _ours(settings, replicas)
    if settings.with_peers:
        yield lambda: peer(settings.core)


@contextmanager
def _following(
    make: Callable[[], IndexServer], publisher: Publisher, sources: int
) -> Iterator[IndexServer]:
    server = make()
    try:
        server.follow(publisher.endpoints[:sources])
        publisher.wait_for_subscribers()
        yield server
    finally:
        server.close()


def _each(
    settings: Settings, row: str, sources: int, peer: Callable[[int | None], IndexServer]
) -> Iterator[tuple[IndexServer, Publisher]]:
    """Yield ours and the peer, each with publishers that it follows already."""
    with Replicas(settings.programs, sources) as replicas:
        for make in _servers(settings, replicas, peer):
            publisher = Publisher(sources)
            try:
                with _following(make, publisher, sources) as server:
                    yield server, publisher
            except Missing as missing:
                report(row, skipped=str(missing))
            finally:
                publisher.close()


# --- (a) events to index --------------------------------------------------------------------------


def events_to_index(settings: Settings) -> None:
    """CPU time per block, from the socket until it can be matched; 8 sources, nothing shared."""
    for blocks_per_event in settings.blocks_per_event:
        share = {1: 1, 8: 2}.get(blocks_per_event, 4)
        for _ in range(settings.rounds):
            for server, publisher in _each(settings, "events_to_index", 8, DynamoIndexer):
                blocks = settings.blocks * share // 8 // _RUN_BLOCKS * _RUN_BLOCKS
                us, seconds = _ingest(server, publisher, blocks, blocks_per_event)
                report(
                    "events_to_index",
                    of=server.name,
                    blocks_per_event=blocks_per_event,
                    cpu_us_per_block=round(us, 3),
                    blocks_per_second=round(8 * blocks / seconds),
                )


def _ingest(
    server: IndexServer, publisher: Publisher, blocks: int, blocks_per_event: int
) -> tuple[float, float]:
    data, last = [], []
    for source in range(8):
        events = []
        for run in range(blocks // _RUN_BLOCKS):
            tokens = run_tokens(1 + source * 100_003 + run, _RUN_BLOCKS * BLOCK_SIZE)
            events += stored(tokens, block_hashes(tokens), blocks_per_event)
        last.append(tokens)
        data.append(publisher.messages(source, batches(events)))
    server.process.wait_until_idle()
    before, started = server.process.cpu_s(), time.monotonic()
    publisher.send(data)
    for tokens in last:
        _wait_for(server, tokens, _RUN_BLOCKS)
    used, seconds = server.process.cpu_s() - before, time.monotonic() - started
    return used / (8 * blocks) * 1e6, seconds


def _wait_for(server: IndexServer, tokens: Sequence[int], blocks: int) -> None:
    def is_there() -> bool:
        found = cached_blocks(server, tokens)
        if found < blocks:
            time.sleep(0.05)
        return found >= blocks

    wait_until(is_there, f"{server.name}: the last block", timeout_s=300)


# --- (b) apply, in process ------------------------------------------------------------------------


def apply_in_process(settings: Settings) -> None:
    """Blocks applied per second of CPU time, by the bytes of an event batch."""
    for count in settings.blocks_per_event:
        makes: dict[str, Callable[[], float]] = {
            "kvroute": partial(_apply_ours, settings, count),
            "Dynamo's RadixTree": partial(_apply_dynamo, settings, count),
        }
        for _ in range(settings.rounds):
            for name, per_second in _in_process(settings, "apply", makes):
                report(
                    "apply",
                    of=name,
                    blocks_per_event=count,
                    million_blocks_per_cpu_second=round(per_second / 1e6, 3),
                )


def _in_process(
    settings: Settings, row: str, makes: dict[str, Callable[[], _Made]]
) -> Iterator[tuple[str, _Made]]:
    """Yield what ours and, where it is installed, the peer make."""
    for name, make in makes.items():
        if not name.startswith("kvroute") and not settings.with_peers:
            continue
        try:
            yield name, make()
        except Missing as missing:
            report(row, of=name, skipped=str(missing))


def _runs(settings: Settings) -> list[list[int]]:
    count = settings.blocks // _RUN_BLOCKS
    return [run_tokens(run + 1, _RUN_BLOCKS * BLOCK_SIZE) for run in range(count)]


def _apply_ours(settings: Settings, blocks_per_event: int) -> float:
    payloads = []
    for tokens in _runs(settings):
        payloads += batches(stored(tokens, block_hashes(tokens), blocks_per_event))
    index = PrefixIndex()
    source = SourceId("r0")
    index.add(source)
    seconds = _cpu_s(lambda: [index.apply(source, payload) for payload in payloads])
    assert index.match([*_runs(settings)[-1], 1])[source].cached_tokens == _RUN_BLOCKS * BLOCK_SIZE
    return settings.blocks / seconds


def _apply_dynamo(settings: Settings, blocks_per_event: int) -> float:
    """Its events are JSON, with hashes of the tokens that it computes first."""
    module("dynamo._core")
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # noqa: PLC0415 - may be missing

    prepared: list[tuple[list[int], list[int], int | None]] = []
    for tokens in _runs(settings):
        hashes = block_hashes(tokens)
        for first in range(0, _RUN_BLOCKS, blocks_per_event):
            part = tokens[first * BLOCK_SIZE : (first + blocks_per_event) * BLOCK_SIZE]
            parent = hashes[first - 1] if first else None
            prepared.append((part, hashes[first : first + blocks_per_event], parent))
    bodies = [_dynamo_event(hashes, parent) for _, hashes, parent in prepared]
    tree = RadixTree()

    def work() -> None:
        for (tokens, hashes, _), (head, tail) in zip(prepared, bodies, strict=True):
            own = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
            blocks = ",".join(
                f'{{"block_hash":{each},"tokens_hash":{key}}}'
                for each, key in zip(hashes, own, strict=True)
            )
            tree.apply_event(1, f"{head}{blocks}{tail}".encode())

    seconds = _cpu_s(work)
    found = tree.find_matches(compute_block_hash_for_seq(_runs(settings)[-1], BLOCK_SIZE)).scores
    assert max(found.values()) == _RUN_BLOCKS, found
    return settings.blocks / seconds


def _dynamo_event(hashes: Sequence[int], parent: int | None) -> tuple[str, str]:
    head = f'{{"event_id":{hashes[0] % 1_000_000},"data":{{"stored":{{"parent_hash":'
    return head + f'{json.dumps(parent)},"blocks":[', ']}},"dp_rank":0}'


def _cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()
    before = time.process_time()
    work()
    return time.process_time() - before


# --- (c) match, in process ------------------------------------------------------------------------


def match_in_process(settings: Settings) -> None:
    """CPU time of one match, from packed token ids; replica i of n holds (i + 1)/n of the prompt,
    and a branch leaves it every 16 blocks."""
    for replicas in settings.match_replicas:
        for tokens in settings.prompt_tokens:
            makes: dict[str, Callable[[], Callable[[], object]]] = {
                "kvroute, 2 groups": partial(_our_match, replicas, tokens),
                "Dynamo's RadixTree, group-blind": partial(_dynamo_match, replicas, tokens),
            }
            for name, match in _in_process(settings, "match", makes):
                us = _median_cpu_us(match, settings.rounds)
                where = {"replicas": replicas, "tokens": tokens}
                report("match", of=name, **where, cpu_us=round(us, 1))


def _held(replicas: int, tokens: int) -> Iterator[tuple[int, list[int]]]:
    whole = run_tokens(1, tokens)
    for number in range(replicas):
        yield number, whole[: tokens * (number + 1) // replicas // BLOCK_SIZE * BLOCK_SIZE]


def _our_match(replicas: int, tokens: int) -> Callable[[], object]:
    index = PrefixIndex()
    for number, held in _held(replicas, tokens):
        source = SourceId(f"r{number}")
        index.add(source, LayoutHints())
        hashes = block_hashes(held)
        for group in (0, 1):
            for payload in batches(stored(held, hashes, 64, group)):
                index.apply(source, payload)
        for branch in _branches(held):
            for payload in batches(stored(branch, block_hashes(branch), 64)):
                index.apply(source, payload)
    packed = array.array("I", [*run_tokens(1, tokens), 1])
    found = index.match(packed)
    assert max(hit.cached_tokens for hit in found.values()) == tokens, found
    return lambda: index.match(packed)


def _dynamo_match(replicas: int, tokens: int) -> Callable[[], object]:
    module("dynamo._core")
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # noqa: PLC0415 - may be missing

    tree = RadixTree()
    for number, held in _held(replicas, tokens):
        for prompt in (held, *_branches(held)):
            hashes, own = block_hashes(prompt), compute_block_hash_for_seq(prompt, BLOCK_SIZE)
            head, tail = _dynamo_event(hashes or [0], None)
            blocks = ",".join(
                f'{{"block_hash":{each},"tokens_hash":{key}}}'
                for each, key in zip(hashes, own, strict=True)
            )
            tree.apply_event(number, f"{head}{blocks}{tail}".encode())
    whole = run_tokens(1, tokens)

    def match() -> Any:
        return tree.find_matches(compute_block_hash_for_seq(whole, BLOCK_SIZE)).scores

    assert max(match().values()) == tokens // BLOCK_SIZE
    return match


def _branches(held: list[int]) -> Iterator[list[int]]:
    """Yield one other block behind every 16th; at most 8, for the sake of the set-up."""
    step = max(16 * BLOCK_SIZE, len(held) // 8 // BLOCK_SIZE * BLOCK_SIZE)
    for at in range(step, len(held), step):
        yield [*held[:at], *run_tokens(at + 7, BLOCK_SIZE)]


def _median_cpu_us(work: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds * 2 + 1):
        count, before = 0, time.process_time()
        while time.process_time() - before < 0.1:
            work()
            count += 1
        found.append((time.process_time() - before) / count * 1e6)
    return statistics.median(found)


# --- (d) a question over HTTP ---------------------------------------------------------------------


def _filled(settings: Settings, row: str) -> Iterator[tuple[IndexServer, int, list[int]]]:
    """Yield each server that has read what its sources hold, by length of prompt: the server, the
    length, and the longest prompt."""
    sources = settings.route_sources
    for tokens in settings.prompt_tokens:
        for server, publisher in _each(settings, row, sources, DynamoSelector):
            data = [
                publisher.messages(number, batches(_two_groups(held)))
                for number, held in _held(sources, tokens)
            ]
            publisher.send(data)
            whole = run_tokens(1, tokens)
            _wait_for(server, whole, tokens // BLOCK_SIZE)
            server.process.wait_until_idle()
            yield server, tokens, whole


def route_over_http(settings: Settings) -> None:
    """Latency of `/route` beside `/select`, over one connection; source i of n holds (i + 1)/n."""
    for server, tokens, whole in _filled(settings, "route"):
        before = server.process.cpu_s()
        measured = load(
            settings.programs,
            server.port,
            _question(server, whole),
            connections=1,
            seconds=settings.seconds,
            core=settings.other_core,
        )
        used = server.process.cpu_s() - before
        report(
            "route",
            of=server.name,
            sources=settings.route_sources,
            tokens=tokens,
            errors=measured["errors"],
            p50_ms=round(measured["latency_p50_us"] / 1e3, 3),
            p99_ms=round(measured["latency_p99_us"] / 1e3, 3),
            cpu_us=round(used / measured["requests"] * 1e6, 1),
        )


def reserve_over_http(settings: Settings) -> None:
    """The same of `/select_and_reserve`, each reservation ended before the next one is made. The
    CPU time is that of both requests."""
    for server, tokens, whole in _filled(settings, "reserve"):
        before = server.process.cpu_s()
        seconds = _reservations(server.port, json.dumps(server.body(whole)), settings.seconds)
        used = server.process.cpu_s() - before
        report(
            "reserve",
            of=server.name,
            sources=settings.route_sources,
            tokens=tokens,
            p50_ms=round(statistics.median(seconds) * 1e3, 3),
            cpu_us=round(used / len(seconds) * 1e6, 1),
        )


def _reservations(port: int, question: str, seconds: float) -> list[float]:
    """Return how long each took to be made."""
    found: list[float] = []
    headers = {"content-type": "application/json"}
    connection = HTTPConnection("127.0.0.1", port)
    with closing(connection):
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not found:
            before = time.perf_counter()
            connection.request("POST", "/select_and_reserve", question, headers)
            answer = json.loads(connection.getresponse().read())
            found.append(time.perf_counter() - before)
            connection.request("DELETE", f"/reservations/{answer['selection_id']}")
            assert connection.getresponse().read() is not None
    return found


def _two_groups(tokens: list[int]) -> list[Any]:
    hashes = block_hashes(tokens)
    return [*stored(tokens, hashes, 64), *stored(tokens, hashes, 64, group=1)]


def _question(server: IndexServer, tokens: Sequence[int]) -> Prompts:
    """Return the prompt, and behind it two numbers that no request shares."""
    # Where the body has the tokens, and nothing else has a bracket.
    text = json.dumps(server.body(list(tokens)), separators=(",", ":"))
    end = text.index("]")
    return Prompts(server.ask_path, [text[:end] + ","], "1" + text[end:], ",")


# --- (e) from event to answer ---------------------------------------------------------------------


def event_to_answer(settings: Settings) -> None:
    """Time from sending an event until a question over HTTP shows its block."""
    for server, publisher in _each(settings, "event_to_answer", 1, DynamoIndexer):
        prompts = [run_tokens(5000 + number, BLOCK_SIZE) for number in range(settings.events)]
        data = [
            publisher.messages(0, batches(stored(tokens, block_hashes(tokens), 1)))
            for tokens in prompts
        ]
        connection = Connection(server.port)

        def ask(tokens: list[int], server: IndexServer = server) -> int:
            answer = connection.ask(server.ask_path, server.body(tokens))  # noqa: B023 - asked now
            return server.hit(answer.json()) if answer.status == 200 else 0

        seconds = []
        for tokens, message in zip(prompts, data, strict=True):
            started = time.perf_counter()
            publisher.send([message])
            while not ask(tokens):
                pass
            seconds.append(time.perf_counter() - started)
        before = time.perf_counter()
        for tokens in prompts:
            ask(tokens)
        question_s = (time.perf_counter() - before) / len(prompts)
        report(
            "event_to_answer",
            of=server.name,
            p50_ms=round(statistics.median(seconds) * 1e3, 3),
            p99_ms=round(sorted(seconds)[len(seconds) * 99 // 100] * 1e3, 3),
            question_ms=round(question_s * 1e3, 3),
        )
        connection.close()


# --- (f) memory -----------------------------------------------------------------------------------


def memory(settings: Settings) -> None:
    """Resident bytes per (replica, block): what a second filling adds to a first one."""
    for of, sources in (("unshared", 8), ("shared", settings.route_sources)):
        for server, publisher in _each(settings, "memory", sources, DynamoIndexer):
            blocks = settings.memory_blocks // sources // _RUN_BLOCKS * _RUN_BLOCKS
            resident = []
            for filling in (0, 1):
                data, last = [], []
                for source in range(sources):
                    shared = 0 if of == "shared" else source * 1_000_003
                    runs = [
                        run_tokens(shared + (filling * blocks + at) // _RUN_BLOCKS + 1, 1024)
                        for at in range(0, blocks, _RUN_BLOCKS)
                    ]
                    last.append(runs[-1])
                    events = [
                        event
                        for tokens in runs
                        for event in stored(tokens, block_hashes(tokens), 64)
                    ]
                    data.append(publisher.messages(source, batches(events)))
                publisher.send(data)
                for tokens in last:
                    _wait_for(server, tokens, _RUN_BLOCKS)
                del data
                server.process.wait_until_idle()
                resident.append(server.process.rss_bytes())
            report(
                "memory",
                of=server.name,
                blocks=of,
                sources=sources,
                bytes_per_block=round((resident[1] - resident[0]) / (sources * blocks), 1),
            )
