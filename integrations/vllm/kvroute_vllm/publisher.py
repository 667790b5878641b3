"""vLLM's events through the publisher of `kvevents`, as `"publisher": "kvroute"`.

vLLM makes its publisher before its cache, and its root of the chain of hashes after its scheduler.
Ours announces the cache's layout and that root, so it opens once vLLM has all of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import vllm.envs
from pydantic.dataclasses import rebuild_dataclass
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core as engine_core

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CurveServer,
    Event,
    PublisherConfig,
    ZmqEventPublisher,
    read_hash_key,
)
from kvevents.curve import read_clients, read_keys
from kvevents.errors import KVEventsError
from kvroute_vllm.hints import RETENTION_HINTS
from kvroute_vllm.layout import describe, hash_chain
from kvroute_vllm.recognition import UnknownVllm, check_parameters

logger = logging.getLogger("vllm.plugins.kvroute")

NAME = "kvroute"
_KNOWN = Literal["null", "zmq"]
_WIDENED = Literal["null", "zmq", "kvroute"]
_CREATE = "config data_parallel_rank"
_INIT_ROOT = "hash_fn"


class PublisherOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that vLLM's own configuration has no place for: `kvroute` of
    `--additional-config`."""

    curve_key: str | None = None
    """File of the publisher's secret key; None: plain text."""
    curve_clients: str | None = None
    """Directory of the public keys that may subscribe; None: all that know the publisher's."""
    hash_key: str | None = None
    """File of the key under which blocks are announced, without token ids; None: with them."""

    def apply(self, config: PublisherConfig) -> PublisherConfig:
        """Return the configuration with what the options name.

        Raises:
            KVEventsError: A file cannot be read, or holds something else.
        """
        if self.curve_key is not None:
            clients = None if self.curve_clients is None else read_clients(Path(self.curve_clients))
            curve = CurveServer(read_keys(Path(self.curve_key)), clients)
            config = replace(config, curve=curve)
        if self.hash_key is not None:
            key = read_hash_key(Path(self.hash_key))
            config = replace(config, hash_key=key, include_token_ids=False)
        return config


class KvroutePublisher:
    """The publisher whose `publish`, `shutdown` and `get_publisher_config` vLLM's scheduler calls.

    Args:
        data_parallel_rank: Ports move along by it.
        endpoint: As in `KVEventsConfig`, as for the other arguments.
        replay_endpoint: None: neither replays nor snapshots.
        buffer_steps: Most batches kept for replay.
        hwm: Most batches that wait for one subscriber.
        max_queue_size: Most batches that wait for the publisher's thread.
        topic: Of the stream.
    """

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str,
        replay_endpoint: str | None,
        buffer_steps: int,
        hwm: int,
        max_queue_size: int,
        topic: str,
    ) -> None:
        self._rank = data_parallel_rank
        self._config = PublisherConfig(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=topic,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
        )
        self._publisher: ZmqEventPublisher | None = None

    def open(self, scheduler: Any, release: tuple[int, int], takes_hints: bool) -> None:
        """Announce the scheduler's cache and publish from now on.

        Args:
            scheduler: Whose publisher this is.
            release: Of vLLM.
            takes_hints: Whether its cache keeps what requests name.

        Raises:
            KVEventsError: The cache cannot be announced, or an address or file not be used.
        """
        if scheduler.vllm_config.kv_transfer_config is not None:
            raise KVEventsError(
                'publisher "kvroute": what a KV connector keeps is announced in vLLM\'s own form, '
                'which does not go with an announced layout; use "zmq"'
            )
        options = _options(scheduler.vllm_config)
        config = replace(
            options.apply(self._config), retention_hints=RETENTION_HINTS if takes_hints else 0
        )
        if config.hash_key is not None and vllm.envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
            raise KVEventsError(
                "hash_key: needs whole digests; start with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
            )
        _announce_blocks_once(scheduler)
        layout, chain = describe(scheduler, release), hash_chain(scheduler)
        self._publisher = ZmqEventPublisher(config, layout, chain, self._rank)

    @property
    def opened(self) -> ZmqEventPublisher:
        """Return the publisher behind this one."""
        assert self._publisher is not None, "the scheduler was not made"
        return self._publisher

    def publish(self, batch: Any) -> None:
        """Publish one step's events, a `KVEventBatch`."""
        self.opened.publish(tuple(converted(batch.events)))

    def shutdown(self) -> None:
        """Send what is queued, and end."""
        if self._publisher is not None:
            self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        """Return where to subscribe, for `GET /kv_event_sources`: over ZMQ, as with vLLM's own."""
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self.opened.endpoint,
            replay_endpoint=self.opened.replay_endpoint,
            buffer_steps=self._config.buffer_steps,
            hwm=self._config.hwm,
            max_queue_size=self._config.max_queue_size,
            topic=self._config.topic,
        )


def _options(config: Any) -> PublisherOptions:
    given = config.additional_config
    found = given.get(NAME, {}) if isinstance(given, dict) else {}
    try:
        return msgspec.convert(found, PublisherOptions)
    except msgspec.ValidationError as error:
        raise KVEventsError(f"additional_config.{NAME}: {error}") from None


def _announce_blocks_once(scheduler: Any) -> None:
    """`"kv_cache_report_mode": "full"` of a request would announce blocks again that it reuses, and
    count as further copies. Consumers of this publisher have them already."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for manager in managers:
        manager.block_pool.emit_cached_block_events = _announce_nothing


def _announce_nothing(*_: Any, **__: Any) -> None:
    """See `_announce_blocks_once`."""


# --- events ---------------------------------------------------------------------------------------

_STORED, _REMOVED = (
    tuple(set(ours.__struct_fields__) & set(theirs.__struct_fields__))
    for ours, theirs in (
        (BlockStored, kv_events.BlockStored),
        (BlockRemoved, kv_events.BlockRemoved),
    )
)


def converted(events: Iterable[Any]) -> Iterator[Event]:
    """vLLM's events as those of `kvevents`; the fields that both have carry the same."""
    for event in events:
        if isinstance(event, kv_events.BlockStored):
            yield BlockStored(**{name: getattr(event, name) for name in _STORED})
        elif isinstance(event, kv_events.BlockRemoved):
            yield BlockRemoved(**{name: getattr(event, name) for name in _REMOVED})
        elif isinstance(event, kv_events.AllBlocksCleared):
            yield AllBlocksCleared()
        else:
            logger.error("kvroute: an event of type %s was left out", type(event).__name__)


# --- into vLLM ------------------------------------------------------------------------------------


def install(release: tuple[int, int], takes_hints: bool) -> None:
    """Offer the publisher to vLLM's configuration. A second call does nothing.

    Args:
        release: Of vLLM.
        takes_hints: Whether caches of this process keep what requests name.

    Raises:
        UnknownVllm: Something is not as expected; nothing was changed.
    """
    factory, field = kv_events.EventPublisherFactory, KVEventsConfig.__annotations__["publisher"]
    if NAME in factory._registry:
        return
    check_parameters(factory.create, _CREATE)
    check_parameters(engine_core.init_none_hash, _INIT_ROOT)
    if field not in (_KNOWN, _WIDENED):
        raise UnknownVllm(f"KVEventsConfig.publisher: {field} should be {_KNOWN}")
    _widen(KVEventsConfig)
    rebuild_dataclass(VllmConfig, force=True)
    factory.register_publisher(NAME, KvroutePublisher)
    Scheduler.__init__ = _opening(Scheduler.__init__, release, takes_hints)
    engine_core.init_none_hash = _opening_rest(engine_core.init_none_hash)


def _widen(config: Any) -> None:
    config.__annotations__["publisher"] = _WIDENED
    config.__dataclass_fields__["publisher"].type = _WIDENED
    config.__pydantic_fields__["publisher"].annotation = _WIDENED
    rebuild_dataclass(config, force=True)


_waiting: list[Callable[[], None]] = []
"""Opens the publisher of the scheduler that was made last, until its root of the chain of hashes is
there."""


def _opening(
    make: Callable[..., None], release: tuple[int, int], takes_hints: bool
) -> Callable[..., None]:
    @functools.wraps(make)
    def make_and_open(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        publisher = self.kv_event_publisher
        if not isinstance(publisher, KvroutePublisher):
            return
        if self.cache_config.enable_prefix_caching:
            _waiting[:] = [lambda: publisher.open(self, release, takes_hints)]
        else:  # nothing is hashed, and no root will come
            publisher.open(self, release, takes_hints)

    return make_and_open


def _opening_rest(init_none_hash: Callable[..., None]) -> Callable[..., None]:
    """Return what the engine calls next; it may draw another root each time."""

    @functools.wraps(init_none_hash)
    def init_and_open(hash_fn: Any) -> None:
        init_none_hash(hash_fn)
        while _waiting:
            _waiting.pop()()

    return init_and_open
