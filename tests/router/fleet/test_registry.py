"""The registry against real HTTP servers: discovery, health, load, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from async_timeout import timeout
from hypothesis import given
from hypothesis import strategies as st

from router.config.replica import ReplicaConfig, read_replica
from router.config.values import reachable
from router.config.watch import HealthConfig
from router.errors import (
    BadRequest,
    InvalidReplicaResponse,
    ReplicaExists,
    ShuttingDown,
    UnknownReplica,
)
from router.fleet.client import UpstreamClient
from router.fleet.health import HealthRecord
from router.fleet.load import LoadTracker
from router.fleet.probes import ProbeFetch
from router.fleet.registry import MAX_REPLICAS, ReplicaListener, ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.self_description import (
    parse_models,
    parse_server_info,
    parse_sources,
)
from router.fleet.types import (
    EventSource,
    ReplicaState,
    ServedModels,
)
from router.fleet.watchers import Watchers
from router.policies import (
    Candidate,
    CandidateLoad,
    RouteRequest,
    make_policy,
)
from router.routing.planner import Known, RoutePlanner
from router.routing.question import UNREAD_RANK, RankQuestion
from tests.support.loads import in_flight
from tests.support.waiting import DEADLINE_S

FAST = HealthConfig(
    interval_s=0.25,
    timeout_s=5.0,
    unhealthy_after=2,
    discovery_interval_s=0.3,
    engine_load_stale_after_s=5,
)
HASTY = FAST.model_copy(update={"timeout_s": 0.25})
"""For replicas that hang: a busy machine keeps others from answering in time as well."""

METRICS = (
    b'vllm:num_requests_running{engine="0"} 5\nvllm:num_requests_waiting{engine="0"} 2\n'
    b"vllm:kv_cache_usage_perc 0.5\n"
)


def zmq_config(port: int, **more: object) -> dict[str, object]:
    """One rank's entry as vLLM 0.32 writes it."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1000}",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv-events",
    }
    return config | more


SGLANG = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "replay_endpoint_port_base": 6557,
    "topic": "kv-events",
    "block_size": 16,
    "dp_size": 1,
    "load_endpoint_port_base": 7557,
    "load_topic": "load",
}
"""Of `/server_info`, as SGLang 0.5.23 writes it."""


def models(*names: str, **adapters: str) -> dict[str, object]:
    base = [
        {"id": name, "object": "model", "root": name, "parent": None, "max_model_len": 1024}
        for name in names
    ]
    return {
        "object": "list",
        "data": base + [{"id": name, "parent": parent} for name, parent in adapters.items()],
    }


class Engine:
    """A small HTTP server with an engine's endpoints. It can hang, die, and return at the same
    address."""

    def __init__(self) -> None:
        self.port = 0
        self.responses: dict[str, tuple[int, bytes]] = {}
        self.hanging: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.keys: set[str | None] = set()
        self.most_at_once: Counter[str] = Counter()
        self._at_once: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.respond("/health", b"")
        self.respond("/v1/models", models("gemma", sql="gemma"))
        self.respond("/kv_event_sources", {"0": zmq_config(5557)})
        self.respond("/metrics", METRICS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def respond(self, path: str, body: object, status: int = 200) -> None:
        self.responses[path] = (
            status,
            body if isinstance(body, bytes) else json.dumps(body).encode(),
        )

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: connections break, new ones are refused."""
        if self._server is not None:
            self._server.close()
            for _ in range(3):  # what was just being accepted comes a turn later
                for writer in tuple(self._writers):
                    writer.transport.abort()
                await asyncio.sleep(0)
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._reply(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _reply(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = head.split(" ", 2)[1]
        self.asked[path] += 1
        self.keys.update(
            line.partition(": ")[2]
            for line in head.split("\r\n")
            if line.startswith("authorization:")
        )
        self._at_once[path] += 1
        self.most_at_once[path] = max(self.most_at_once[path], self._at_once[path])
        if path in self.hanging:
            await reader.read()  # until the client gives up
        self._at_once[path] -= 1
        status, body = self.responses.get(path, (404, b"{}"))
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()


class Diary:
    """A listener that records what it hears."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.unresponsive: list[tuple[str, float]] = []

    def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:
        self.entries.append(("state", replica.id, before.value, replica.state.value))

    def on_unresponsive(self, replica: Replica, for_s: float) -> None:
        self.unresponsive.append((replica.id, for_s))

    def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
        self.entries.append(("models", replica.id, before.models, replica.served.models))

    def on_sources_changed(self, replica: Replica, before: tuple[EventSource, ...]) -> None:
        self.entries.append(("sources", replica.id, len(before), len(replica.sources)))

    def on_removed(self, replica: Replica) -> None:
        self.entries.append(("removed", replica.id))


class Setting:
    """A registry on the router's own HTTP client, and engines to put into it."""

    def __init__(self, probes: ProbeFetch, health: HealthConfig) -> None:
        self.load = LoadTracker()
        self.diary = Diary()
        self.registry = ReplicaRegistry(Watchers(probes, health, self.load), health, self.load)
        self.registry.subscribe(self.diary)
        self.engines: list[Engine] = []

    async def engine(self) -> Engine:
        engine = Engine()
        await engine.start()
        self.engines.append(engine)
        return engine

    def add(self, engine: Engine, replica_id: str, **more: Any) -> Replica:
        return self.registry.add(ReplicaConfig(url=engine.url, id=replica_id, **more))


@asynccontextmanager
async def setting(health: HealthConfig = FAST) -> AsyncIterator[Setting]:
    client = UpstreamClient()
    probes = ProbeFetch(client)
    this = Setting(probes, health)
    try:
        yield this
    finally:
        await this.registry.close()
        probes.close()
        await client.close()
        for engine in this.engines:
            await engine.stop()


async def until(condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    """Wait until *condition* holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "did not come true"
        await asyncio.sleep(0.002)


def is_in(replica: Replica, state: ReplicaState) -> Callable[[], bool]:
    return lambda: replica.state is state


# --- discovery ------------------------------------------------------------------------------------


async def test_a_replica_needs_only_its_url() -> None:
    """Models, adapters, event addresses and load all come from the engine itself."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.registry.add(ReplicaConfig(url=engine.url))
        assert replica.state is ReplicaState.STARTING
        await until(lambda: replica.sources and replica.engine_load)
        assert replica.id == f"127.0.0.1:{engine.port}"
        assert replica.state is ReplicaState.HEALTHY
        assert replica.served == ServedModels(("gemma",), (("sql", "gemma"),))
        assert replica.sources == (
            EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557", "kv-events"),
        )
        assert here.registry.serving("gemma") == here.registry.serving("sql") == (replica,)
        assert here.registry.serving("other") == ()
        assert here.registry.models() == {"gemma": None, "sql": "gemma"}


async def test_models_are_announced_before_sources_and_sources_never_without_models() -> None:
    """A source is put into its model's index, so the model must be known first."""
    async with setting() as here:
        engine = await here.engine()
        engine.respond("/v1/models", b"", status=500)
        replica = here.add(engine, "r")
        await until(lambda: engine.asked["/kv_event_sources"] >= 2)
        assert replica.sources == ()
        assert replica.notes == ("GET /v1/models: returned 500",)
        engine.respond("/v1/models", models("gemma"))
        await until(lambda: replica.sources)
        assert here.diary.entries == [
            ("state", "r", "starting", "healthy"),
            ("models", "r", (), ("gemma",)),
            ("sources", "r", 0, 1),
        ]
        assert replica.notes == ()


async def test_every_listener_hears_of_changes_in_the_order_of_subscription() -> None:
    """A part that uses another one subscribes after it."""
    async with setting() as here:
        heard: list[str] = []

        class Second(ReplicaListener):
            def on_models_changed(self, replica: Replica, before: ServedModels) -> None:
                heard.append(f"{replica.id} after {here.diary.entries[-1][0]}")

        here.registry.subscribe(Second())
        here.add(await here.engine(), "r", models=("gemma",))
        assert heard == ["r after models"]


async def test_what_is_configured_is_not_asked() -> None:
    """Engines without these endpoints are configured by hand, and what is configured holds."""
    async with setting() as here:
        engine = await here.engine()
        source = {"endpoint": "tcp://0.0.0.0:7000", "dp_rank": 1}
        config = read_replica(
            {"url": engine.url, "id": "r", "models": ["gemma"], "kv_events": [source]}
        )
        replica = here.registry.add(config)
        assert replica.sources == (EventSource(1, "tcp://127.0.0.1:7000"),)
        assert here.diary.entries == [("models", "r", (), ("gemma",)), ("sources", "r", 0, 1)]
        await until(lambda: replica.discoveries)
        assert engine.asked["/kv_event_sources"] == 0
        assert replica.sources == (EventSource(1, "tcp://127.0.0.1:7000"),)
        assert replica.served.adapters == (("sql", "gemma"),), (
            "adapters come at run time, so they are asked for all the same"
        )


async def test_configured_sources_wait_for_discovered_models() -> None:
    """Half of it configured, half of it discovered."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.registry.add(
            read_replica({"url": engine.url, "kv_events": [{"endpoint": "tcp://*:7000"}]})
        )
        assert replica.sources == ()
        await until(lambda: replica.sources)
        assert replica.sources == (EventSource(0, "tcp://127.0.0.1:7000"),)
        assert [entry[0] for entry in here.diary.entries] == ["state", "models", "sources"]


async def test_an_engine_that_does_not_know_the_question_has_no_sources() -> None:
    """vLLM before 0.32: it serves, its cache stays unknown, and the notes say what to do."""
    async with setting() as here:
        engine = await here.engine()
        del engine.responses["/kv_event_sources"]
        replica = here.add(engine, "r")
        await until(lambda: replica.discoveries)
        assert here.registry.serving("gemma") == (replica,)
        assert replica.sources == ()
        assert replica.notes == (
            "GET /kv_event_sources returned 404: configure kv_events, or its cache stays unknown",
        )
        assert replica.failed_discoveries == 0


async def test_the_sources_of_an_sglang_are_found_in_its_server_info() -> None:
    """It has no `/kv_event_sources`; a URL is all that has to be configured."""
    async with setting() as here:
        engine = await here.engine()
        del engine.responses["/kv_event_sources"]
        engine.respond("/server_info", {"tp_size": 1, "kv_events": SGLANG | {"dp_size": 2}})
        replica = here.add(engine, "r")
        await until(lambda: replica.sources)
        assert replica.sources == (
            EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557", "kv-events"),
            EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558", "kv-events"),
        )
        assert replica.notes == ()


@pytest.mark.parametrize("body", [{"kv_events": None}, {"tp_size": 1}])
async def test_an_sglang_without_events_has_no_sources_and_says_how_to_get_them(
    body: object,
) -> None:
    """It must be started with a flag, or is too old to say."""
    async with setting() as here:
        engine = await here.engine()
        del engine.responses["/kv_event_sources"]
        engine.respond("/server_info", body)
        replica = here.add(engine, "r")
        await until(lambda: replica.discoveries)
        assert replica.sources == ()
        assert replica.notes == (
            "GET /server_info names no kv_events: start it with --kv-events-config, or configure"
            " kv_events",
        )
        assert replica.failed_discoveries == 0


async def test_a_server_info_that_cannot_be_had_now_is_asked_for_again() -> None:
    """An engine that is busy has not lost its sources."""
    async with setting() as here:
        engine = await here.engine()
        del engine.responses["/kv_event_sources"]
        engine.respond("/server_info", {"kv_events": SGLANG})
        replica = here.add(engine, "r")
        await until(lambda: replica.sources)
        engine.respond("/server_info", {}, status=500)
        await until(lambda: replica.failed_discoveries)
        assert len(replica.sources) == 1


async def test_a_restart_on_other_ports_is_discovered() -> None:
    """Event ports may be chosen by the system; the old ones would be silent for ever."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: replica.sources)
        await engine.stop()
        await until(is_in(replica, ReplicaState.UNHEALTHY))
        assert replica.sources[0].endpoint == "tcp://127.0.0.1:5557", (
            "while it is away, the streams may still come back"
        )
        engine.respond("/kv_event_sources", {"0": zmq_config(6001), "1": zmq_config(6002)})
        engine.respond("/v1/models", models("bamba"))
        await engine.start()
        await until(lambda: len(replica.sources) == 2)
        assert [source.endpoint for source in replica.sources] == [
            "tcp://127.0.0.1:6001",
            "tcp://127.0.0.1:6002",
        ]
        await until(lambda: here.registry.serving("bamba") == (replica,))
        assert here.registry.serving("gemma") == ()


async def test_an_adapter_loaded_later_is_found_without_a_restart() -> None:
    """LoRA adapters are loaded into running engines."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: here.registry.serving("gemma"))
        engine.respond("/v1/models", models("gemma", poems="gemma"))
        await until(lambda: here.registry.serving("poems"))
        assert here.registry.serving("sql") == ()
        assert replica.state is ReplicaState.HEALTHY


@pytest.mark.parametrize(
    "nonsense",
    [
        b"[",
        b"[" * 500_000,
        b'{"data": []}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "m", "x": 1e999}]}',
        b'{"data": [{"id": "m", "x": "\xff"}]}',
        b"x" * 2_000_000,
    ],
)
async def test_nonsense_about_itself_changes_nothing_that_is_known(nonsense: bytes) -> None:
    """A proxy's error page with status 200 must not take a model out of service."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: replica.sources)
        engine.respond("/v1/models", nonsense)
        engine.respond("/kv_event_sources", nonsense)
        await until(lambda: replica.failed_discoveries)
        assert len(replica.notes) == 2
        assert max(map(len, replica.notes)) <= 300
        assert here.registry.serving("gemma") == (replica,)
        assert len(replica.sources) == 1
        assert replica.state is ReplicaState.HEALTHY


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ()),
        ([], ()),
        ({"0": zmq_config(5557, publisher="null")}, ()),
        (
            {"0": zmq_config(5557, replay_endpoint=None, topic="")},
            (EventSource(0, "tcp://host:5557"),),
        ),
        (
            {
                "1": {"endpoint": "tcp://0.0.0.0:2"},
                "0": {"endpoint": "tcp://[::]:1", "new_field": 1},
            },
            (EventSource(0, "tcp://host:1"), EventSource(1, "tcp://host:2")),
        ),
        (
            [
                {
                    "data_parallel_rank": 3,
                    "endpoint": "tcp://10.0.0.1:5557",
                    "replay_endpoint": None,
                    "topic": "",
                }
            ],
            (EventSource(3, "tcp://10.0.0.1:5557"),),
        ),
        (
            {"0": {"endpoint": "tcp://*:1", "snapshot_endpoint": "tcp://*:3"}},
            (EventSource(0, "tcp://host:1", snapshot_endpoint="tcp://host:3"),),
        ),
        (
            {"0": {"endpoint": "tcp://*:1", "snapshot_endpoint": None}},
            (EventSource(0, "tcp://host:1"),),
        ),
    ],
)
def test_event_sources_of_every_form_are_read(
    body: object, expected: tuple[EventSource, ...]
) -> None:
    """As vLLM 0.32 returns them, without events, with the address that port 0 became, and as its
    development branches did."""
    assert parse_sources(json.dumps(body).encode(), "host") == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "cannot be read"),
        (b"null", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 500_000, "cannot be read"),
        (b'{"0": {"x": ' + b"[" * 400_000 + b"]" * 400_000 + b"}}", "cannot be read"),
        ({"0": {}}, "cannot be read: Object missing required field `endpoint`"),
        ({"-1": {"endpoint": "tcp://a:1"}}, "rank '-1'; expected a number up to 65535"),
        ({"²": {"endpoint": "tcp://a:1"}}, "expected a number"),
        ({"9" * 5000: {"endpoint": "tcp://a:1"}}, "expected a number"),
        ({"0": {"endpoint": "tcp://a:1"}, "00": {"endpoint": "tcp://a:2"}}, "rank 0 appears twice"),
        ({"0": {"endpoint": "inproc://x"}}, "rank 0 endpoint: 'inproc://x'; expected tcp"),
        (
            {"0": {"endpoint": "tcp://a:1", "replay_endpoint": "http://b"}},
            "rank 0 replay_endpoint: 'http://b'",
        ),
        (
            {"0": {"endpoint": "tcp://a:1", "snapshot_endpoint": "inproc://snapshots"}},
            "rank 0 snapshot_endpoint: 'inproc://snapshots'",
        ),
        ({"0": {"endpoint": "tcp://a:1" + "1" * 2000}}, "rank 0 endpoint"),
        ({"0": {"endpoint": "tcp://a:1", "topic": "t" * 2000}}, "topic of 2000 characters"),
        ([{"endpoint": "tcp://a:1"}] * 1025, "1025 ranks; at most 1024"),
    ],
)
def test_event_sources_that_make_no_sense_are_refused_with_their_place(
    body: object, message: str
) -> None:
    """The text goes to the operator; sockets are opened for what passes."""
    with pytest.raises(InvalidReplicaResponse, match="/kv_event_sources.*" + message):
        parse_sources(body if isinstance(body, bytes) else json.dumps(body).encode(), "host")


LOCAL = (
    *("ipc:///run/other.sock", "tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"),
    *("tcp://127.1:5557", "tcp://0:5557", "tcp://2130706433:5557", "tcp://LOCALHOST.:5557"),
    *("tcp://[::ffff:127.0.0.1]:5557", "tcp://a.localhost:5557", "tcp://eth0;127.0.0.1:5557"),
)


@pytest.mark.parametrize("endpoint", LOCAL)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
def test_a_remote_engine_cannot_send_the_router_to_its_own_machine(
    endpoint: str, field: str
) -> None:
    """What listens there may trust whoever is there; only the operator may name it."""
    body = json.dumps({"0": {"endpoint": "tcp://*:5557", field: endpoint}}).encode()
    for host in ("10.0.0.5", "engine.example", "fd00::5"):
        with pytest.raises(InvalidReplicaResponse, match="is on the router's own machine"):
            parse_sources(body, host)
    for host in ("127.0.0.1", "localhost", "::1"):
        if "eth0" not in endpoint:
            assert parse_sources(body, host)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, EventSource(0, "tcp://host:5557", "tcp://host:6557", "kv-events")),
        (
            {"endpoint_host": "[::]"},
            EventSource(0, "tcp://host:5557", "tcp://host:6557", "kv-events"),
        ),
        (
            {"endpoint_host": "10.0.0.7", "replay_endpoint_port_base": None, "topic": ""},
            EventSource(0, "tcp://10.0.0.7:5557"),
        ),
        ({"publisher": "null"}, None),
    ],
)
def test_the_publisher_in_a_server_info_is_read(
    change: dict[str, object], expected: EventSource | None
) -> None:
    """One description stands for all ranks."""
    body = json.dumps({"version": "0.5.23", "kv_events": SGLANG | change}).encode()
    assert parse_server_info(body, "host").sources == (() if expected is None else (expected,))


@pytest.mark.parametrize(
    ("flag", "replay"),
    [
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:6557"}', "tcp://host:6557"),
        ('{"publisher": "zmq"}', None),
        ('{"replay_endpoint": "inproc://replay"}', None),
        ("--broken", None),
        (None, None),
    ],
)
def test_the_replay_port_that_only_the_flag_tells_is_found_there(
    flag: str | None, replay: str | None
) -> None:
    """SGLang up to 0.5.21; without replays a router that starts late stays suspect."""
    old = {name: value for name, value in SGLANG.items() if name != "replay_endpoint_port_base"}
    body = json.dumps({"kv_events": old, "kv_events_config": flag}).encode()
    (source,) = parse_server_info(body, "host").sources
    assert source == EventSource(0, "tcp://host:5557", replay, "kv-events")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint_port_base": "5557"}, "cannot be read"),
        ({"endpoint_port_base": 70_000}, "1 ports from 70000 on; the last must be at most 65535"),
        ({"endpoint_port_base": 65_535, "dp_size": 2}, "2 ports from 65535 on"),
        ({"endpoint_port_base": -5}, "kv_events endpoint"),
        ({"endpoint_host": "host/x"}, "kv_events endpoint"),
        ({"dp_size": 0}, "dp_size 0; 1 to 1024"),
        ({"dp_size": 10**9}, "dp_size 1000000000; 1 to 1024"),
        ({"topic": "t" * 2000}, "topic of 2000 characters"),
        ({"load_topic": "t" * 2000}, "load_topic of 2000 characters"),
        ({"load_endpoint_port_base": 65_535, "dp_size": 2}, "2 ports from 65535 on"),
        ({"load_endpoint_port_base": 0}, "load_endpoint_port_base 0; must be above 0"),
        ({"load_endpoint_port_base": "7"}, "cannot be read"),
    ],
    ids=str,
)
def test_a_server_info_that_makes_no_sense_is_refused_with_its_place(
    change: dict[str, object], message: str
) -> None:
    """The text goes to the operator; sockets are opened for what passes."""
    body = json.dumps({"kv_events": SGLANG | change}).encode()
    with pytest.raises(InvalidReplicaResponse, match="/server_info.*" + message):
        parse_server_info(body, "host")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"data": [{"id": "sql", "parent": "gemma"}]}, "no base model"),
        ({"data": [{"id": ""}]}, r"data\[0\]: a name must have 1 to 256 characters"),
        ({"data": [{"id": "a"}, {"id": "b" * 300}]}, r"data\[1\]: a name"),
        ({"data": [{"id": str(number)} for number in range(4097)]}, "4097 models"),
        ({"data": None}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_models_that_make_no_sense_are_refused_with_their_place(body: object, message: str) -> None:
    """Their names become metric labels and keys of indexes."""
    with pytest.raises(InvalidReplicaResponse, match="/v1/models.*" + message):
        parse_models(json.dumps(body).encode())


@pytest.mark.parametrize(
    "parse", [lambda body: parse_sources(body, "host"), parse_models], ids=["sources", "models"]
)
@given(
    body=st.binary(max_size=60)
    | st.text(alphabet='{}[]":,0123456789abdeint', max_size=60).map(str.encode)
)
def test_no_response_raises_anything_else(parse: Callable[[bytes], object], body: bytes) -> None:
    """One malformed response must not end the task that watches the replica."""
    with contextlib.suppress(InvalidReplicaResponse):
        parse(body)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.1.2.3", "tcp://10.1.2.3:5557"),
        ("tcp://0.0.0.0:5557", "replica.example", "tcp://replica.example:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://:::5557", "h", "tcp://h:5557"),
        ("tcp://10.9.9.9:5557", "h", "tcp://10.9.9.9:5557"),
        ("tcp://[fd00::2]:5557", "h", "tcp://[fd00::2]:5557"),
        ("ipc:///run/*", "h", "ipc:///run/*"),
        ("http://*:8000/kv_cache_events", "fd00::1", "http://[fd00::1]:8000/kv_cache_events"),
        ("https://*/kv_cache_events", "h", "https://h/kv_cache_events"),
        ("http://h:8000/kv_cache_events", "other", "http://h:8000/kv_cache_events"),
    ],
)
def test_a_wildcard_becomes_the_replicas_host(endpoint: str, host: str, expected: str) -> None:
    """Engines report the address that they bound; no client can connect to `*`."""
    assert reachable(endpoint, host) == expected


# --- health ---------------------------------------------------------------------------------------


async def test_a_dead_replica_leaves_and_is_back_with_the_first_check_after_its_return() -> None:
    """Longer, and a restart of one replica costs its share of the traffic for nothing."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        checks = []
        for _ in range(3):
            await until(is_in(replica, ReplicaState.HEALTHY))
            await engine.stop()
            await until(is_in(replica, ReplicaState.UNHEALTHY))
            assert "no connection" in (replica.record.last_error or "")
            await engine.start()
            before = engine.asked["/health"]
            await until(is_in(replica, ReplicaState.HEALTHY))
            checks.append(engine.asked["/health"] - before)
        assert min(checks) == 1, "on a busy machine a second one may come before we look"
        assert replica.record.times_unhealthy == 3
        assert replica.record.last_error is None


@pytest.mark.parametrize("status", [500, 503, 404, 301])
async def test_only_a_2xx_is_healthy(status: int) -> None:
    """vLLM returns 503 when its engine has died behind a living server; a redirect speaks for
    another server."""
    async with setting() as here:
        engine = await here.engine()
        engine.respond("/health", b"", status=status)
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.UNHEALTHY))
        assert replica.record.last_error == f"GET /health returned {status}"
        assert engine.asked["/v1/models"] == 0, "it is asked nothing else before it is well"


@pytest.mark.parametrize("interval_s", [0.25, 0.05])
async def test_a_hanging_replica_is_unhealthy_and_asked_by_one_check_at_a_time(
    interval_s: float,
) -> None:
    """Checks that pile up would be a load of their own on a server that is slow already; also where
    the operator is more patient than the interval is long."""
    health = HealthConfig(
        interval_s=interval_s, timeout_s=HASTY.timeout_s, unhealthy_after=HASTY.unhealthy_after
    )
    async with setting(health) as here:
        engine = await here.engine()
        engine.hanging.add("/health")
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.UNHEALTHY))
        await until(lambda: engine.asked["/health"] >= 4)
        assert "0.25 s" in (replica.record.last_error or "")
        assert engine.most_at_once["/health"] == 1
        engine.hanging.clear()
        await until(is_in(replica, ReplicaState.HEALTHY))


async def test_every_check_that_fails_after_enough_of_them_is_reported_with_their_time() -> None:
    """What was sent to a replica meanwhile, as the last one left, must not stay there; and a stream
    that flowed at the first report may be silent at the next."""
    async with setting(HASTY) as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        assert here.diary.unresponsive == []
        engine.hanging.add("/health")
        await until(lambda: len(here.diary.unresponsive) >= 3)
        assert replica.state is ReplicaState.UNHEALTHY
        times = [for_s for _, for_s in here.diary.unresponsive]
        assert times == sorted(times)
        assert times[0] >= (HASTY.unhealthy_after - 1) * HASTY.timeout_s * 0.9
        engine.hanging.clear()
        await until(is_in(replica, ReplicaState.HEALTHY))
        assert replica.checks_fail_since is None


async def test_a_replica_that_requests_made_unhealthy_is_not_called_unresponsive() -> None:
    """One that refuses what is new, since it has enough to do, goes on with what it has."""
    slow = FAST.model_copy(update={"interval_s": 60.0, "timeout_s": 60.0, "unhealthy_after": 3})
    async with setting(slow) as here:
        replica = here.add(await here.engine(), "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        for _ in range(3):
            here.registry.report_failure("r", "unavailable")
        assert replica.state is ReplicaState.UNHEALTHY
        assert not here.registry.is_healthy("r")
        assert here.diary.unresponsive == []


async def test_one_bad_replica_does_not_slow_the_others() -> None:
    """Nor does a replica whose details hang delay its own checks."""
    patient = FAST.model_copy(update={"timeout_s": 600.0})  # a check that hangs outlasts the test
    async with setting(patient) as here:
        dead, half_dead, well = [await here.engine() for _ in range(3)]
        dead.hanging.update(dead.responses)
        half_dead.hanging.update(["/v1/models", "/kv_event_sources", "/metrics"])
        for name, engine in (("dead", dead), ("half", half_dead), ("well", well)):
            here.add(engine, name)
        await until(lambda: well.asked["/health"] >= 1)
        before = well.asked["/health"]
        await until(
            lambda: well.asked["/health"] >= before + 6 and half_dead.asked["/health"] >= before + 6
        )
        assert here.registry.get("half").state is ReplicaState.HEALTHY
        assert here.registry.get("well").sources


async def test_an_unhealthy_replica_is_asked_for_its_health_only() -> None:
    """An engine that is starting up or going down has other things to do."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: replica.engine_load)
        engine.respond("/health", b"", status=503)
        await until(is_in(replica, ReplicaState.UNHEALTHY))
        checks, others = engine.asked["/health"], engine.asked.total() - engine.asked["/health"]
        await until(lambda: engine.asked["/health"] >= checks + 4)
        assert engine.asked.total() - engine.asked["/health"] <= others + 3, (
            "at most the round that was under way"
        )


async def test_failed_requests_take_a_replica_out_before_its_next_check() -> None:
    """Between two checks lie seconds, and in them hundreds of requests that would all be
    retried."""
    slow = FAST.model_copy(update={"interval_s": 60.0, "timeout_s": 60.0, "unhealthy_after": 3})
    async with setting(slow) as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        for _ in range(2):
            here.registry.report_failure("r", "connection refused")
        assert replica.state is ReplicaState.HEALTHY
        here.registry.report_failure("r", "connection refused")
        assert replica.state is ReplicaState.UNHEALTHY
        assert replica.record.last_error == "connection refused"
        assert here.diary.entries[-1] == ("state", "r", "healthy", "unhealthy")


async def test_a_failed_request_asks_for_a_check_soon() -> None:
    """Whether the replica is dead or one connection was unlucky is known in a moment, not in an
    interval."""
    rare = FAST.model_copy(update={"interval_s": 60.0, "timeout_s": 60.0})
    async with setting(rare) as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        here.registry.report_failure("r", "connection reset")
        await until(lambda: engine.asked["/health"] == 2)
        assert replica.record.failed_requests == 1


async def test_a_4xx_response_counts_for_the_replica() -> None:
    """One client with a bad request could otherwise take every replica out of service."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        for _ in range(50):
            here.registry.report_failure("r", "connection reset")
            here.registry.report_served("r")
        assert replica.state is ReplicaState.HEALTHY
        assert replica.record.failed_requests == 50


async def test_reports_about_a_removed_replica_are_ignored() -> None:
    """Requests outlive their replica's entry."""
    async with setting() as here:
        here.registry.report_failure("gone", "connection reset")
        here.registry.report_served("gone")


def test_a_replica_is_starting_until_it_is_healthy_or_has_failed_often_enough() -> None:
    """It gets no requests in this state, and raises no alarm."""
    record = HealthRecord(unhealthy_after=3, healthy_after=2)
    assert [
        record.check_failed("x"),
        record.check_passed(),
        record.check_failed("x"),
        record.check_passed(),
    ] == [False] * 4
    assert record.health is ReplicaState.STARTING
    assert record.check_passed() is True
    assert record.health is ReplicaState.HEALTHY


def test_failures_count_in_a_row_and_checks_apart_from_requests() -> None:
    """Now and then one check is lost, and a server whose health page works may still fail every
    request."""
    record = HealthRecord(unhealthy_after=2, healthy_after=1)
    assert record.check_passed()
    for _ in range(5):
        assert not record.check_failed("x")
        assert not record.check_passed()
    assert not record.request_failed("y")
    assert not record.check_passed()
    assert record.request_failed("y"), "good checks in between do not hide failing requests"
    assert not record.request_failed("y")
    assert record.check_passed(), "and one check brings it back"
    assert record.health is ReplicaState.HEALTHY


# --- the operator ---------------------------------------------------------------------------------


def test_a_record_serves_requests_until_a_tenth_of_the_last_ones_failed() -> None:
    """A retry to a replica that fails requests itself would be the beginning of a storm; and a
    failure an hour ago says nothing."""
    record = HealthRecord(unhealthy_after=100, healthy_after=1)
    assert not record.serves_requests
    record.check_passed()
    for _ in range(3):
        record.request_failed("closed")
    assert record.serves_requests
    record.request_failed("closed")
    assert not record.serves_requests
    for _ in range(28):
        record.request_served()
    assert not record.serves_requests
    record.request_served()
    assert record.serves_requests


async def test_a_replica_is_at_ease_while_it_serves_and_nothing_waits_there() -> None:
    """An engine with a queue, a full one and one that fails have no room for what failed
    elsewhere."""
    async with setting() as here:
        engine = await here.engine()
        here.registry.add(ReplicaConfig(url=engine.url, id="r", max_concurrent_requests=1))
        await until(lambda: here.registry.get("r").engine_load)
        assert not here.registry.is_at_ease("r")  # two requests wait in the engine
        engine.respond("/metrics", METRICS.replace(b'waiting{engine="0"} 2', b"waiting 0"))
        await until(lambda: here.registry.is_at_ease("r"))
        with in_flight(here.load, "r", 1, 1):
            assert not here.registry.is_at_ease("r")
        for _ in range(4):
            here.registry.get("r").record.request_failed("closed")
            here.registry.get("r").record.check_passed()
        assert not here.registry.is_at_ease("r")
        assert not here.registry.is_at_ease("unknown")


async def test_draining_overrules_health_and_ends_when_the_operator_says() -> None:
    """A replica is emptied before an upgrade; its checks go on meanwhile."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(is_in(replica, ReplicaState.HEALTHY))
        here.registry.drain("r")
        here.registry.drain("r")
        assert replica.state is ReplicaState.DRAINING
        assert replica.obstacle(here.load.load_of("r")) == "draining"
        await engine.stop()
        await until(lambda: not replica.is_healthy)
        assert replica.obstacle(here.load.load_of("r")) == "not healthy"
        assert replica.state is ReplicaState.DRAINING
        here.registry.undrain("r")
        assert replica.state is ReplicaState.UNHEALTHY
        states = [entry[2:] for entry in here.diary.entries if entry[0] == "state"]
        assert states == [
            ("starting", "healthy"),
            ("healthy", "draining"),
            ("draining", "unhealthy"),
        ]


async def test_a_removed_replica_is_gone_at_once() -> None:
    """Its sources end, its id and URL are free again, and it is not asked any more."""
    async with setting() as here:
        engine = await here.engine()
        first = here.add(engine, "r")
        await until(lambda: first.sources)
        here.registry.remove("r")
        assert here.diary.entries[-2:] == [("sources", "r", 1, 0), ("removed", "r")]
        assert (
            here.registry.serving("gemma")
            == here.registry.replicas()
            == here.registry.snapshot()
            == ()
        )
        assert here.registry.models() == {}
        for act in (
            here.registry.get,
            here.registry.remove,
            here.registry.drain,
            here.registry.undrain,
        ):
            with pytest.raises(UnknownReplica, match="no replica has the id 'r'"):
                act("r")
        second = here.add(engine, "r")
        await until(lambda: second.sources)
        assert first.removed
        assert not second.removed


async def test_a_removed_replica_is_asked_nothing_more() -> None:
    """The watcher's tasks end with it."""
    async with setting() as here:
        engine, other = await here.engine(), await here.engine()
        replica = here.add(engine, "r")
        still = here.add(other, "still-there")
        await until(lambda: replica.sources and still.sources)
        here.registry.remove("r")
        asked, others = engine.asked.total(), other.asked["/health"]
        await until(lambda: other.asked["/health"] >= others + 3)
        assert engine.asked.total() <= asked + 1, "at most what was on its way"


async def test_an_id_or_url_cannot_be_taken_twice() -> None:
    """Two entries for one server would count its cache and its load twice."""
    async with setting() as here:
        engine = await here.engine()
        here.add(engine, "r")
        with pytest.raises(ReplicaExists, match=r"id: 'r' belongs to the replica 'r' already"):
            here.registry.add(ReplicaConfig(url="http://127.0.0.1:1", id="r"))
        with pytest.raises(
            ReplicaExists, match=r"url: .* belongs to the replica 'r' already"
        ) as caught:
            here.registry.add(ReplicaConfig(url=engine.url + "/", id="s"))
        assert caught.value.status == 409
        assert len(here.registry.replicas()) == 1


async def test_there_is_a_bound_on_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs two tasks and a few sockets."""
    monkeypatch.setattr("router.fleet.registry.MAX_REPLICAS", 1)
    assert MAX_REPLICAS > 256
    async with setting() as here:
        here.add(await here.engine(), "r")
        with pytest.raises(BadRequest, match="remove one before you add another"):
            here.add(await here.engine(), "s")


async def test_the_key_reaches_the_replica_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks need it where the engine was started with --api-key; views and logs do not."""
    caplog.set_level(logging.DEBUG)
    async with setting() as here:
        engine = await here.engine()
        replica = here.registry.add(
            read_replica({"url": engine.url, "id": "r", "api_key": "sk-very-secret"})
        )
        await until(lambda: replica.sources and replica.engine_load)
        assert engine.keys == {"Bearer sk-very-secret"}
        shown = (
            msgspec.json.encode(here.registry.snapshot()).decode()
            + repr(replica.config)
            + caplog.text
        )
        assert "replica r" in caplog.text
        assert "secret" not in shown


# --- load -----------------------------------------------------------------------------------------


async def test_requests_in_the_engines_load_that_are_not_ours_are_foreign() -> None:
    """The engine counts our own requests too; counted twice, a busy replica would look twice as
    busy."""
    async with setting() as here:
        engine = await here.engine()
        ours = [here.load.started("r", 100, 200) for _ in range(3)]
        replica = here.add(engine, "r", speed=2.0, max_concurrent_requests=3)
        await until(lambda: replica.engine_load)
        now = replica.engine_load_at
        assert replica.foreign_requests == 5 + 2 - 3
        load = here.load.load_of("r")
        seen = as_decisions_see_it(here, replica, now + 5)
        assert (seen.replica_id, seen.dp_rank, seen.speed, seen.suspect) == ("r", None, 2.0, False)
        assert seen.load == CandidateLoad(
            queued_prefill_tokens=300,
            prefilling_requests=3,
            foreign_requests=4,
            waiting_requests=2,
        )
        assert replica.obstacle(load) == "at its limit of requests", "healthy, but three of three"
        ours.pop().ended()
        assert replica.obstacle(here.load.load_of("r")) is None
        for flight in ours:
            flight.ended()


def as_decisions_see_it(here: Setting, replica: Replica, now: float) -> Candidate:
    """Where an engine's own load counts for 5 seconds."""
    known = Known(here.load, engine_load_stale_after_s=5)
    planner = RoutePlanner(make_policy("prefix"), known, lambda: now)
    question = RankQuestion(RouteRequest(model="m", prompt_tokens=0), choice=UNREAD_RANK)
    ranking, excluded = planner.rank(question, [replica])
    (found,) = [each.candidate for each in ranking] or excluded
    return found


async def test_an_old_engine_load_is_not_believed() -> None:
    """A replica whose metrics page stopped answering would stay as busy as it last was."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: replica.engine_load)
        seen = as_decisions_see_it(here, replica, replica.engine_load_at + 5.1)
        assert (seen.load.foreign_requests, seen.load.waiting_requests) == (0, 0)
        engine.respond("/metrics", b"", status=404)
        await until(lambda: replica.failed_scrapes)
        assert replica.state is ReplicaState.HEALTHY, "metrics are no matter of health"


@pytest.mark.parametrize("page", [(b"", 404), (b"python_info 1.0\n", 200)])
async def test_an_engine_without_metrics_is_asked_for_them_as_seldom_as_for_its_models(
    page: tuple[bytes, int],
) -> None:
    """SGLang has none without an option; no answer will change before it is restarted."""
    content, status = page
    often = FAST.model_copy(update={"interval_s": 0.02})
    async with setting(often) as here:
        engine = await here.engine()
        engine.respond("/metrics", content, status)
        replica = here.add(engine, "r")
        await until(lambda: engine.asked["/health"] >= 50)
        assert 1 <= engine.asked["/metrics"] <= engine.asked["/v1/models"]
        assert replica.engine_load is None
        engine.respond("/metrics", METRICS)
        await until(lambda: replica.engine_load)


async def test_metrics_are_not_scraped_where_that_is_switched_off() -> None:
    """Some engines' metrics pages are megabytes long."""
    async with setting(FAST.model_copy(update={"scrape_metrics": False})) as here:
        engine = await here.engine()
        here.add(engine, "r")
        await until(lambda: engine.asked["/v1/models"] >= 2)
        assert engine.asked["/metrics"] == 0


async def test_the_view_shows_everything_and_can_be_written_as_json() -> None:
    """It is the response to GET /replicas."""
    async with setting() as here:
        engine = await here.engine()
        replica = here.add(engine, "r")
        await until(lambda: replica.sources and replica.engine_load)
        flight = here.load.started("r", 100, 200)
        (view,) = json.loads(msgspec.json.encode(here.registry.snapshot()))
        assert (view["id"], view["url"], view["state"], view["health"]) == (
            "r",
            engine.url,
            "healthy",
            "healthy",
        )
        assert (view["models"], view["adapters"], view["models_configured"]) == (
            ["gemma"],
            {"sql": "gemma"},
            False,
        )
        assert view["sources"][0] == {
            "dp_rank": 0,
            "endpoint": "tcp://127.0.0.1:5557",
            "replay_endpoint": "tcp://127.0.0.1:6557",
            "topic": "kv-events",
            "snapshot_endpoint": None,
            "server_key": None,
        }
        assert view["load"] == {
            "prefilling_requests": 1,
            "prefill_tokens": 100,
            "decoding_requests": 0,
            "context_tokens": 0,
            "tokenizing_requests": 0,
        }
        assert view["engine_load"] == {"running": 5, "waiting": 2, "kv_cache_usage": 0.5}
        assert view["checks"] >= 1
        assert 0 <= view["seconds_since_check"] < 10
        flight.ended()


# --- the end --------------------------------------------------------------------------------------


async def test_closing_leaves_no_task_whatever_they_were_doing() -> None:
    """SIGTERM ends the process when the tasks have ended."""
    before = asyncio.all_tasks()
    client = UpstreamClient()
    probes = ProbeFetch(client)
    registry = ReplicaRegistry(Watchers(probes, FAST, load := LoadTracker()), FAST, load)
    engines = [Engine() for _ in range(3)]
    for index, engine in enumerate(engines):
        await engine.start()
        registry.add(ReplicaConfig(url=engine.url, id=f"r{index}"))
    engines[0].hanging.add("/health")
    engines[1].hanging.add("/v1/models")
    await until(lambda: engines[1].asked["/v1/models"] and engines[0].asked["/health"])
    registry.remove("r2")
    await registry.close()
    probes.close()
    await client.close()
    with pytest.raises(ShuttingDown):
        registry.add(ReplicaConfig(url="http://127.0.0.1:1"))
    for engine in engines:
        await engine.stop()
    await until(lambda: asyncio.all_tasks() == before)


async def test_a_lost_cancellation_does_not_keep_the_router_from_ending() -> None:
    """Before Python 3.12 `wait_for` swallows a cancellation that meets the end of what it waits
    for."""
    asked = asyncio.Event()

    async def deaf_fetch(*anything: object) -> tuple[int, bytes]:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 200, b""

    health, load = HealthConfig(interval_s=600, scrape_metrics=False), LoadTracker()
    registry = ReplicaRegistry(Watchers(deaf_fetch, health, load), health, load)
    replica = registry.add(ReplicaConfig(url="http://127.0.0.1:1"))
    await asked.wait()
    async with timeout(DEADLINE_S):
        await registry.close()
    assert replica.state is ReplicaState.STARTING


async def test_a_watcher_that_crashes_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a listener would otherwise leave a replica unwatched, and nothing would say why it
    never returns."""

    class Broken(ReplicaListener):
        def on_state_changed(self, replica: Replica, before: ReplicaState) -> None:
            raise ZeroDivisionError

    client = UpstreamClient()
    engine = Engine()
    await engine.start()
    probes = ProbeFetch(client)
    registry = ReplicaRegistry(Watchers(probes, FAST, load := LoadTracker()), FAST, load)
    registry.subscribe(Broken())
    registry.add(ReplicaConfig(url=engine.url, id="r"))
    await until(
        lambda: "replica r: health ended, and the replica is not watched any more" in caplog.text
    )
    await registry.close()
    probes.close()
    await client.close()
    await engine.stop()
