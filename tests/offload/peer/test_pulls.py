"""Two engines, one of which pulls from the other's memory: over real sockets, with real pages."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvevents.endpoints import Socket
from kvevents.events import Event, EventBatch
from kvevents.hashing import HashChain
from kvevents.publisher import EventPublisher, PublisherStatistics, announce
from kvevents.stream import StreamStatistics
from kvroute_engine.core.build import EngineConfig, build_engine
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import EngineRequest, SamplingParams
from offload.base import OffloadKey
from offload.errors import CacheConfigError, EngineRequestError, TransferError
from offload.peer import client, worker
from offload.peer.client import PeerClient
from offload.peer.manager import PeerManager
from offload.peer.server import PeerServer
from offload.peer.wire import PeerFetch, encode
from offload.request import PeerBlocks, PeerSource
from offload.tiers import PeerTierSpec, TierConfig
from router.index.base import SourceId
from router.index.index import PrefixIndex
from tests.support.index import match_source, match_tier
from tests.support.waiting import DEADLINE_S

CONFIG = EngineConfig(
    preset="gemma", num_blocks=600, max_num_batched_tokens=100, cpu_blocks=600, device="cpu"
)
PROMPT = [random.Random(3).randrange(256) for _ in range(300)]
HOLDER = SourceId("holder")


class Collected(EventPublisher):
    """Keeps what an engine publishes."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, events: Sequence[Event]) -> bool:
        self.events += events
        return True

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Nothing runs."""

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(StreamStatistics(sent=len(self.events)))


@dataclass
class Peer:
    """One engine."""

    engine: Engine
    published: Collected

    @property
    def spec(self) -> PeerTierSpec:
        spec = self.engine.tiers[-1].spec
        assert isinstance(spec, PeerTierSpec)
        return spec

    @property
    def pulls(self) -> PeerManager:
        manager = self.engine.tiers[-1].tier.manager
        assert isinstance(manager, PeerManager)
        return manager

    @property
    def address(self) -> dict[str, Any]:
        assert self.spec.server is not None
        return {"remote_host": "127.0.0.1", "remote_port": self.spec.server.port}

    def serve(
        self, name: str, prompt: list[int], source: dict[str, Any] | None = None
    ) -> tuple[list[int], int]:
        """What it generates, and how much of the prompt it did not compute."""
        return self.finish(self.ask(name, prompt, source))

    def ask(self, name: str, prompt: list[int], source: dict[str, Any] | None) -> EngineRequest:
        params = None if source is None else {"remote_kv_source": {"kv_request_id": "r"} | source}
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        return self.engine.ask_peer(
            EngineRequest(name, prompt, sampling, kv_transfer_params=params)
        )

    def finish_all(self, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
        """What it generates for requests that are there at the same time."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add_request(request)
        while self.engine.has_work:
            for output in self.engine.step():
                tokens[output.request_id] += output.new_token_ids
        return tokens

    def finish(self, request: EngineRequest) -> tuple[list[int], int]:
        self.engine.add_request(request)
        tokens: list[int] = []
        cached = 0
        while self.engine.has_work:
            for output in self.engine.step():
                tokens += output.new_token_ids
                cached = output.num_cached_tokens
        self.engine.step()  # what the last copies changed
        return tokens, cached


Start = Callable[..., Peer]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon an engine answers on a busy machine is no matter here."""
    monkeypatch.setattr(PeerClient, "FETCH_S", 60.0)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def started(serves: bool = True, answer_s: float = 60, **changes: Any) -> Peer:
            options = {"answer_s": answer_s} | ({"port": 0} if serves else {})
            config = replace(CONFIG, tiers=(TierConfig("p2p", options),), **changes)
            published = Collected()
            engine = build_engine(config, publisher=published)
            published.publish([announce(engine.cache.config.layout, HashChain.from_seed())])
            stack.callback(engine.close)
            return Peer(engine, published)

        yield started


@pytest.mark.parametrize("preset", ["full", "gemma", "gptoss", "llama4", "mamba-hybrid"])
def test_what_is_pulled_is_what_would_be_computed_and_what_events_promise(
    start: Start, preset: str
) -> None:
    """Over every kind of group: the same response, and just as many cached tokens as an index says
    that the other engine's memory would give."""
    holder, puller = start(preset=preset), start(False, preset=preset)
    expected, _ = holder.serve("first", PROMPT)
    longer = [*PROMPT[:290], *range(40)]
    reference, _ = holder.serve("longer", longer)
    index = PrefixIndex()
    index.apply(HOLDER, EventBatch(0.0, tuple(holder.published.events)))
    for name, prompt, wanted in (("same", PROMPT, expected), ("longer", longer, reference)):
        fresh = start(False, preset=preset)
        promised = match_tier(index, index.prepare(prompt), HOLDER, "CPU")
        tokens, cached = fresh.serve(name, prompt, holder.address)
        assert tokens == wanted
        # Of a prompt that is held as a whole, the last token is computed again.
        assert cached == promised > 0
        assert fresh.pulls.statistics().pulled > 0
    assert puller.serve("alone", PROMPT) == (expected, 0), "nobody was named"


def test_what_was_pulled_is_a_copy_of_ones_own(start: Start) -> None:
    """It takes a place on the GPU and in memory, events tell of both, and a third engine can have
    it from there."""
    holder, second, third = start(), start(), start(False)
    expected, _ = holder.serve("a", PROMPT)
    second.serve("b", PROMPT, holder.address)
    index = PrefixIndex()
    index.apply(HOLDER, EventBatch(0.0, tuple(second.published.events)))
    assert match_source(index, index.prepare(PROMPT), HOLDER).gpu_cached_tokens >= 288
    assert second.serve("again", PROMPT)[1] >= 288, "without naming anybody"
    holder.engine.close()
    tokens, cached = third.serve("c", PROMPT, second.address)
    assert (tokens, cached >= 272) == (expected, True)


def test_a_peer_that_has_evicted_it_since_costs_one_recompute(start: Start) -> None:
    """Between the question and the fetch anything may happen there."""
    holder, puller = start(), start(False)
    expected, _ = holder.serve("a", PROMPT)
    request = puller.ask("b", PROMPT, holder.address)
    assert request.at_peer is not None
    assert request.at_peer.keys
    assert holder.engine.reset_prefix_cache()
    tokens, _ = puller.finish(request)
    assert tokens == expected
    assert puller.pulls.statistics().failed_pulls == 1
    assert puller.pulls.statistics().pulled == 0
    pool = puller.engine.statistics()
    assert (pool.kv_cache_usage, pool.copies_in_flight) == (0.0, 0)


def test_a_peer_that_died_since_costs_one_recompute(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy gives up in its own time; the engine computes others meanwhile."""
    monkeypatch.setattr(PeerClient, "FETCH_S", 0.05)
    holder, puller = start(), start(False)
    expected, _ = holder.serve("a", PROMPT)
    request = puller.ask("b", PROMPT, holder.address)
    holder.engine.close()
    assert puller.finish(request)[0] == expected
    assert puller.pulls.statistics().failed_pulls == 1


def test_only_the_first_of_many_pulls_waits_for_a_peer_that_died_since(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulls are copied one after another: each would wait its turn, and then its whole time."""
    monkeypatch.setattr(PeerClient, "FETCH_S", 0.05)
    monkeypatch.setattr(PeerClient, "SILENT_S", 3600.0)
    holder, puller = start(), start(False)
    prompts = {name: [ord(name), *PROMPT] for name in "abc"}
    expected = {name: holder.serve(name, prompt)[0] for name, prompt in prompts.items()}
    requests = [puller.ask(name, prompt, holder.address) for name, prompt in prompts.items()]
    holder.engine.close()
    waited: list[PeerSource] = []
    exchange = PeerClient._exchange

    def counted(self: PeerClient, source: PeerSource, *rest: Any) -> list[bytes]:
        waited.append(source)
        return exchange(self, source, *rest)

    monkeypatch.setattr(PeerClient, "_exchange", counted)
    assert puller.finish_all(requests) == expected
    assert puller.pulls.statistics().failed_pulls == 3
    assert len(waited) == 1
    assert puller.spec.peers.is_silent(waited[0])


def test_a_peer_that_answers_slowly_again_and_again_holds_up_others_for_a_while_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch in time, and all of them minutes: it would be computed sooner."""
    holder, puller = start(), start(False)
    expected, _ = holder.serve("a", PROMPT)
    request = puller.ask("b", PROMPT, holder.address)
    monkeypatch.setattr(client, "MOST_FETCHED", 1)
    fetched: list[float] = []
    now = [0.0]
    exchange = PeerClient._exchange

    def slowly(
        self: PeerClient, source: PeerSource, asked: Any, within_s: float, frames: int
    ) -> list[bytes]:
        fetched.append(within_s)
        if within_s < 4.0:
            raise TransferError("did not answer")
        now[0] += 4.0
        return exchange(self, source, asked, 60.0, frames)

    monkeypatch.setattr(PeerClient, "FETCH_S", 5.0)
    monkeypatch.setattr(PeerClient, "_exchange", slowly)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr(worker, "time", clock)
    assert puller.finish(request)[0] == expected
    assert puller.pulls.statistics().failed_pulls == 1
    assert fetched == [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 2.0]


def test_a_silent_peer_is_not_asked_for_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request must not wait for each that is routed past a dead engine."""
    puller, gone = start(False, answer_s=0.01), start()
    nobody = gone.address
    gone.engine.close()
    monkeypatch.setattr(PeerClient, "SILENT_S", 3600.0)
    assert puller.serve("a", PROMPT, nobody)[1] == 0
    assert puller.spec.peers.is_silent(PeerSource("127.0.0.1", nobody["remote_port"]))
    monkeypatch.setattr(PeerClient, "_exchange", None)
    assert puller.serve("b", [1, *PROMPT], nobody)[1] == 0, "to ask would fail"


@pytest.mark.parametrize("change", [{"seed": 1}, {"block_size": 8}, {"vocab_size": 600}])
def test_an_engine_of_other_weights_gets_nothing(start: Start, change: dict[str, int]) -> None:
    """Equal tokens have equal hashes there, and other keys and values."""
    holder, other = start(), start(False, **change)
    holder.serve("a", PROMPT)
    request = other.ask("b", PROMPT, holder.address)
    assert request.at_peer is not None
    assert not request.at_peer.keys
    forced = replace(request, at_peer=PeerBlocks(request.at_peer.source, _all(other, request)))
    alone = other.serve("c", PROMPT)[0]
    other.engine.reset_prefix_cache()
    assert other.finish(forced)[0] == alone, "a fetch of what it believes to be there gets nothing"


def _all(peer: Peer, request: EngineRequest) -> frozenset[OffloadKey]:
    return frozenset(peer.engine.scheduler.block_keys(request, 1000))


def test_a_server_outlives_whatever_is_sent_to_it(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may connect; and what is no request is logged once a minute, however much comes."""
    holder, puller = start(), start(False)
    holder.serve("a", PROMPT)
    dealer: Socket
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{holder.address['remote_port']}")
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"x" * 10_000], [b"\x91\xa1\xff"]):
            dealer.send_multipart(frames)
            assert dealer.poll(int(DEADLINE_S * 1000))
            assert dealer.recv_multipart() == [b""]
    assert len([each for each in caplog.records if each.name == "offload.peer.server"]) == 1
    assert puller.serve("b", PROMPT, holder.address)[1] > 0


@pytest.mark.parametrize("leaves", [True, False], ids=["until they leave", "for a while"])
def test_what_clients_do_not_take_is_bounded(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Any number may ask for all blocks again and again; the memory is the engine's."""
    monkeypatch.setattr(PeerServer, "MOST_UNSENT_BYTES", 64 << 20)
    monkeypatch.setattr(PeerServer, "UNTAKEN_MS", 0 if leaves else 1000)
    block = bytes(1 << 20)
    reads: list[OffloadKey] = []

    class Memory:
        def holds(self, key: OffloadKey) -> bool:
            return True

        def read(self, key: OffloadKey) -> bytes:
            reads.append(key)
            return block

    server = PeerServer("127.0.0.1", 0, b"us", Memory())
    source, peers = PeerSource("127.0.0.1", server.port), PeerClient(b"us", len(block), 60.0)
    key = OffloadKey(b"key")
    with closing(server), ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(4)
        ]
        for each in clients:
            greet(each)
            each.sendall(10 * zmtp_frame(encode(PeerFetch(b"us", [key] * 40))))
        while len(reads) < 64:
            assert peers.find(source, [key]).keys, "questions are answered"
        if leaves:
            with pytest.raises(TransferError, match="evicted"):
                fetch_on(peers, source, key)
            assert len(reads) < 400
            for each in clients:
                each.close()
        while not all(peers._exchange(source, PeerFetch(b"us", [key] * 64), 60.0, 64)):
            pass


def fetch_on(peers: PeerClient, source: PeerSource, key: OffloadKey) -> None:
    """Fetch again and again: at first the kernel still takes some of what others asked for."""
    while True:
        peers.fetch(source, [key])


def greet(connection: socket.socket) -> None:
    """Shake hands by ZMTP 3.1, without security, as a DEALER."""
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    connection.sendall(b"\xff" + bytes(8) + b"\x7f")
    connection.recv(10, socket.MSG_WAITALL)
    connection.sendall(b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    connection.recv(54, socket.MSG_WAITALL)
    connection.sendall(bytes([4, len(ready)]) + ready)


def zmtp_frame(body: bytes) -> bytes:
    """A whole message."""
    return bytes([2]) + len(body).to_bytes(8, "big") + body


@pytest.mark.parametrize("key", [b"", b"abc", b"\xff" * 36])
def test_a_fetch_of_what_is_no_key_gets_nothing(start: Start, key: bytes) -> None:
    """Also from an engine of equal weights: the server goes on for all others."""
    holder, puller = start(), start(False)
    holder.serve("a", PROMPT)
    nothing = PeerFetch(holder.spec.peers._identity, [])
    dealer: Socket
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{holder.address['remote_port']}")
        dealer.send(encode(nothing))
        assert dealer.poll(int(DEADLINE_S * 1000))
        assert dealer.recv_multipart() == [b""]
        dealer.send(encode(PeerFetch(holder.spec.peers._identity, [key])))
        assert dealer.poll(int(DEADLINE_S * 1000))
        assert dealer.recv_multipart() == [b""]
    assert puller.serve("b", PROMPT, holder.address)[1] > 0


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("10.0.0.1", "remote_kv_source: str must be an object"),
        ({}, "remote_host"),
        ({"remote_host": "a b", "remote_port": 7777}, "remote_host"),
        ({"remote_host": "a/../b", "remote_port": 7777}, "remote_host"),
        ({"remote_host": "a:7", "remote_port": 7777}, "remote_host"),
        ({"remote_host": "10.0.0.1:7/", "remote_port": 7777}, "remote_host"),
        ({"remote_host": "[fd00::1", "remote_port": 7777}, "remote_host"),
        ({"remote_host": "x" * 300, "remote_port": 7777}, "remote_host"),
        ({"remote_host": "a", "remote_port": 0}, "remote_port"),
        ({"remote_host": "a", "remote_port": True}, "remote_port"),
        ({"remote_host": "a", "remote_port": "7777"}, "remote_port"),
    ],
)
def test_a_source_of_another_form_is_refused(source: object, field: str) -> None:
    """The message names place, value and rule."""
    with pytest.raises(EngineRequestError, match=field):
        PeerSource.of({"remote_kv_source": source})


@pytest.mark.parametrize(
    ("host", "in_url"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("engine-0.engines.svc", "engine-0.engines.svc"),
        ("[fd00::1]", "[fd00::1]"),
        ("fd00::1", "[fd00::1]"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]"),
    ],
)
def test_addresses_and_names_are_sources(host: str, in_url: str) -> None:
    """With what other engines read besides; the router writes an IPv6 address without brackets."""
    asked = {"kv_request_id": "x", "remote_host": host, "remote_port": 7777, "more": 1}
    assert PeerSource.of({"remote_kv_source": asked}) == PeerSource(in_url, 7777)
    assert PeerSource.of({}) is PeerSource.of(None) is None


def test_an_engine_without_the_tier_ignores_the_field() -> None:
    """As it does what else clients say to tiers that it lacks."""
    engine = build_engine(replace(CONFIG, simulate=True))
    request = EngineRequest("a", PROMPT, kv_transfer_params={"remote_kv_source": 7})
    assert engine.ask_peer(request) is request


@pytest.mark.parametrize(
    ("changes", "options", "rule"),
    [
        ({"cpu_blocks": 0}, {"port": 0}, "needs a cpu tier before it"),
        ({}, {"port": 70_000}, "p2p tier: port"),
        ({}, {"peer": "x"}, "option 'peer' is unknown"),
        ({}, {"port": 0, "host": "256.1.1.1"}, "cannot bind"),
        (
            {"cpu_blocks": 0},
            {"port": 0, "larger": True},
            "needs a cpu tier with blocks_per_offloaded_block 1",
        ),
    ],
)
def test_a_tier_that_cannot_be_is_refused_at_the_start(
    changes: dict[str, Any], options: dict[str, Any], rule: str
) -> None:
    """With what is wrong, and nothing left open."""
    larger = {"num_blocks": 10, "blocks_per_offloaded_block": 2}
    above = (TierConfig("cpu", larger),) if options.pop("larger", False) else ()
    tiers = (*above, TierConfig("p2p", options))
    with pytest.raises(CacheConfigError, match=rule):
        build_engine(replace(CONFIG, simulate=True, tiers=tiers, **changes))
