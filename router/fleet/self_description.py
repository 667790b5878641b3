"""Reads a replica's reports about itself. Pure; the result is bounded.

`GET /kv_event_sources` (vLLM 0.32) returns an object, data-parallel rank -> its publisher's
configuration:

    {"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
           "replay_endpoint": "tcp://*:6557", "buffer_steps": 10000, "hwm": 100000,
           "max_queue_size": 100000, "topic": "kv-events"}}

with the port offset of the rank already in the addresses, `null` for no replay endpoint, and `{}`
where there are no events. Development branches of vLLM returned a list whose entries carry
`data_parallel_rank`; both are read. So is `snapshot_endpoint`, which is proposed there.

SGLang (0.5.17 and newer) has it in `GET /server_info`, under `kv_events`, once for all ranks; rank
r is r ports further, and null stands for no events. Up to 0.5.21 the replay port stands only in
the flag that it was started with, `kv_events_config`:

    {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
                   "replay_endpoint_port_base": 6557, "topic": "kv-events", "dp_size": 2,
                   "block_size": 16, "load_endpoint_port_base": 7557, "load_topic": "load"},
     "kv_events_config": "{\\"replay_endpoint\\": \\"tcp://*:6557\\", ...}", ...}

`GET /v1/models` lists base models, and LoRA adapters as entries with a `parent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec

from kvevents.errors import UNREADABLE
from router.config.section import PriorityOrder
from router.config.values import is_endpoint, is_local_endpoint, is_local_host, reachable
from router.errors import InvalidReplicaResponse
from router.fleet.load_topic import LoadTopic
from router.fleet.types import EventSource, ServedModels

SOURCES_PATH = "/kv_event_sources"
SERVER_INFO_PATH = "/server_info"
MODELS_PATH = "/v1/models"
MAX_RESPONSE_BYTES = 1024 * 1024
MAX_RANKS = 1024
MAX_RANK = 65_535
MAX_PORT = 65_535
MAX_MODELS = 4096
MAX_NAME_CHARS = 256
MAX_TOPIC_CHARS = 1024


class _SourceEntry(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    snapshot_endpoint: str | None = None
    publisher: str | None = "zmq"
    data_parallel_rank: int | None = None


class _SglangPublisher(msgspec.Struct):
    endpoint_port_base: int
    endpoint_host: str = "*"
    replay_endpoint_port_base: int | None = None
    topic: str = ""
    publisher: str | None = "zmq"
    dp_size: int = 1
    load_endpoint_port_base: int | None = None
    load_topic: str = ""


class _ServerInfo(msgspec.Struct):
    kv_events: _SglangPublisher | None = None
    kv_events_config: str | None = None
    retention_hints: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    scheduling_policy: Any = None
    enable_priority_scheduling: Any = False
    schedule_low_priority_values_first: Any = False

    @property
    def priority_order(self) -> PriorityOrder | None:
        if self.enable_priority_scheduling is True:  # SGLang
            is_low = self.schedule_low_priority_values_first is True
            return "lower_first" if is_low else "higher_first"
        return "lower_first" if self.scheduling_policy == "priority" else None


class _SglangFlag(msgspec.Struct):
    replay_endpoint: str | None = None


class _ModelEntry(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_ModelEntry]


def parse_sources(body: bytes, host: str) -> tuple[EventSource, ...]:
    """The event sources in a response to `GET /kv_event_sources`, by rank; empty if the engine
    publishes nothing.

    Args:
        host: The replica's own, which replaces wildcards.
    Raises:
        InvalidReplicaResponse: The body has another form, or names an address that cannot be
            connected to.
    """
    found: dict[str, _SourceEntry] | list[_SourceEntry] = _decode(
        SOURCES_PATH, body, dict[str, _SourceEntry] | list[_SourceEntry]
    )
    _expect_at_most(MAX_RANKS, SOURCES_PATH, len(found), "{} ranks")
    entries = found.items() if isinstance(found, dict) else _numbered(found)
    sources = [_source(rank, entry, host) for rank, entry in entries if entry.publisher == "zmq"]
    sources.sort(key=lambda source: source.dp_rank)
    for before, after in pairwise(sources):
        if before.dp_rank == after.dp_rank:
            raise InvalidReplicaResponse(SOURCES_PATH, f"rank {after.dp_rank} appears twice")
    return tuple(sources)


class ServerInfo(NamedTuple):
    """Holds the answer to `GET /server_info`: what SGLang publishes, each empty if it publishes
    nothing or does not report it; what kvroute's engine takes; the order of both."""

    sources: tuple[EventSource, ...] = ()
    """By rank."""
    load_topics: tuple[LoadTopic, ...] = ()
    """By rank."""
    retention_hints: int = 0
    """Version of the retention hints that it takes; 0: none."""
    priority_order: PriorityOrder | None = None
    """The priority number that goes first, where it orders its queue by priorities."""


def parse_server_info(body: bytes, host: str) -> ServerInfo:
    """Read SGLang's addresses of events and load, and what kvroute's engine takes, from the
    response to `GET /server_info`.

    Raises:
        InvalidReplicaResponse: The body has another form, or names an address that cannot be
            connected to.
    """
    info: _ServerInfo = _decode(SERVER_INFO_PATH, body, _ServerInfo)
    publisher = info.kv_events
    found = ServerInfo(retention_hints=info.retention_hints, priority_order=info.priority_order)
    if publisher is None or publisher.publisher != "zmq":
        return found
    place = f"{SERVER_INFO_PATH} kv_events"
    if not 1 <= publisher.dp_size <= MAX_RANKS:
        raise InvalidReplicaResponse(place, f"dp_size {publisher.dp_size}; 1 to {MAX_RANKS}")
    if publisher.replay_endpoint_port_base is None:
        publisher.replay_endpoint_port_base = _replay_port(info.kv_events_config or "")
    load_base = publisher.load_endpoint_port_base
    last = max(
        publisher.endpoint_port_base, publisher.replay_endpoint_port_base or 0, load_base or 0
    )
    if last + publisher.dp_size - 1 > MAX_PORT:
        raise InvalidReplicaResponse(
            place, f"{publisher.dp_size} ports from {last} on; the last must be at most {MAX_PORT}"
        )
    ranks = range(publisher.dp_size)
    sources = tuple(_checked(place, rank, _sglang_entry(publisher, rank), host) for rank in ranks)
    if load_base is None:
        return found._replace(sources=sources)
    topics = tuple(_load_topic(place, rank, load_base, publisher, host) for rank in ranks)
    return found._replace(sources=sources, load_topics=topics)


def parse_models(body: bytes) -> ServedModels:
    """The models and adapters in a response to `GET /v1/models`.

    Raises:
        InvalidReplicaResponse: The body has another form, or names no base model.
    """
    listed: _Models = _decode(MODELS_PATH, body, _Models)
    _expect_at_most(MAX_MODELS, MODELS_PATH, len(listed.data), "{} models")
    for index, model in enumerate(listed.data):
        if not 1 <= len(model.id) <= MAX_NAME_CHARS or len(model.parent or "") > MAX_NAME_CHARS:
            raise InvalidReplicaResponse(
                f"{MODELS_PATH} data[{index}]", f"a name must have 1 to {MAX_NAME_CHARS} characters"
            )
    models = tuple(dict.fromkeys(model.id for model in listed.data if not model.parent))
    if not models:
        raise InvalidReplicaResponse(MODELS_PATH, "no base model; there must be one")
    adapters = {
        model.id: model.parent for model in listed.data if model.parent and model.id not in models
    }
    return ServedModels(models, tuple(adapters.items()))


def parse_model_entries(body: bytes) -> dict[str, dict[str, Any]]:
    """Return the entries of a response to `GET /v1/models`, by name, without the response's own
    fields. The response must have been read by `parse_models` before, which skips most of it.

    Raises:
        InvalidReplicaResponse: There is no value for a part of it, as for `1e999`.
    """
    listed = _decode(MODELS_PATH, body, dict[str, Any])
    return {entry["id"]: entry for entry in listed["data"]}


def _decode(place: str, body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise InvalidReplicaResponse(place, f"cannot be read: {str(error)[:200]}") from None


def _expect_at_most(most: int, place: str, count: int, shown: str) -> None:
    if count > most:
        found = shown.format(count)
        raise InvalidReplicaResponse(place, f"{found}; at most {most} are taken")


def _numbered(entries: list[_SourceEntry]) -> Iterator[tuple[str, _SourceEntry]]:
    for index, entry in enumerate(entries):
        yield str(index if entry.data_parallel_rank is None else entry.data_parallel_rank), entry


def _source(rank: str, entry: _SourceEntry, host: str) -> EventSource:
    if not (rank.isascii() and rank.isdigit() and len(rank) <= 5 and int(rank) <= MAX_RANK):
        raise InvalidReplicaResponse(
            SOURCES_PATH, f"rank {rank[:40]!r}; expected a number up to {MAX_RANK}"
        )
    return _checked(f"{SOURCES_PATH} rank {rank}", int(rank), entry, host)


def _replay_port(flag: str) -> int | None:
    """Return the port of rank 0's replay endpoint in SGLang's `--kv-events-config`; None without
    one."""
    try:
        endpoint = msgspec.json.decode(flag, type=_SglangFlag).replay_endpoint or ""
    except UNREADABLE:
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else None


def _sglang_entry(publisher: _SglangPublisher, rank: int) -> _SourceEntry:
    address = f"tcp://{publisher.endpoint_host}"
    replay = publisher.replay_endpoint_port_base
    return _SourceEntry(
        f"{address}:{publisher.endpoint_port_base + rank}",
        # The replay socket is always bound, wherever the other one connects to.
        None if replay is None else f"tcp://*:{replay + rank}",
        publisher.topic,
    )


def _load_topic(
    place: str, rank: int, base: int, publisher: _SglangPublisher, host: str
) -> LoadTopic:
    length = len(publisher.load_topic)
    _expect_at_most(MAX_TOPIC_CHARS, place, length, "load_topic of {} characters")
    if base < 1:
        raise InvalidReplicaResponse(place, f"load_endpoint_port_base {base}; must be above 0")
    # This socket is always bound, to a wildcard.
    endpoint = _address(f"{place} load_endpoint_port_base", f"tcp://*:{base + rank}", host)
    return LoadTopic(rank, endpoint, publisher.load_topic)


def _checked(place: str, rank: int, entry: _SourceEntry, host: str) -> EventSource:
    _expect_at_most(MAX_TOPIC_CHARS, place, len(entry.topic), "topic of {} characters")
    replay, snapshots = entry.replay_endpoint, entry.snapshot_endpoint
    return EventSource(
        rank,
        _address(f"{place} endpoint", entry.endpoint, host),
        _address(f"{place} replay_endpoint", replay, host) if replay else None,
        entry.topic,
        _address(f"{place} snapshot_endpoint", snapshots, host) if snapshots else None,
    )


def _address(place: str, endpoint: str, host: str) -> str:
    # inproc:// has the right form, but only the engine's own process can reach it.
    if not is_endpoint(endpoint) or endpoint.startswith("inproc://"):
        raise InvalidReplicaResponse(
            place, f"{endpoint[:100]!r}; expected tcp://host:port or ipc://path"
        )
    if is_local_endpoint(endpoint) and not is_local_host(host):
        raise InvalidReplicaResponse(
            place,
            f"{endpoint[:100]!r}; is on the router's own machine, and the replica is not: only"
            " replicas[].kv_events may name such an address",
        )
    return reachable(endpoint, host)
