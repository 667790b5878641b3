"""Makes a running engine of a configuration."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, cast

from kvevents.curve import CurveServer
from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.publisher import EventPublisher, NullEventPublisher, create_publisher
from kvevents.publisher_config import PublisherConfig
from kvevents.sealing import HashKey
from kvroute_engine.core.batch import ModelRunner
from kvroute_engine.core.engine import Engine
from kvroute_engine.core.model_config import TransformerConfig
from kvroute_engine.core.presets import preset
from kvroute_engine.core.scheduler import Scheduler, SchedulerConfig, most_blocks_held
from kvroute_engine.core.serving_order import SchedulingPolicy
from kvroute_engine.core.simulated import SimulatedBackend
from kvroute_engine.core.time_model import Clock, RealClock, TimeModel
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.connector.connector import OffloadingConnector
from offload.errors import CacheConfigError
from offload.request import RETENTION_HINTS, RequestHasher
from offload.tiers import MadeTier, TierConfig, TierHost, TransferBackend, create_tiers

EOS_TOKEN_ID = 257
"""End of sequence of the engine's own byte tokenizer."""


@dataclass(frozen=True)
class EngineConfig:
    """One replica of the small engine; sizes that are None are the preset's."""

    preset: str = "gemma"
    simulate: bool = False
    """Without tensors: the same scheduler and cache, and a time model instead of a model."""
    model_name: str | None = None
    """The clients' name of the model; the preset's name if None."""
    num_blocks: int = 512
    """Blocks of the GPU's cache, shared by all groups."""
    block_size: int | None = None
    """The size in tokens."""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    max_model_len: int | None = None
    vocab_size: int | None = None
    eos_token_id: int = EOS_TOKEN_ID
    seed: int = 0
    """Seeds the weights."""
    enable_caching: bool = True
    retention_interval: int | None = 0
    """See `CacheConfig.retention_interval`."""
    cpu_blocks: int = 0
    """Blocks of the tier in memory; 0 for no such tier."""
    cpu_cache_policy: str = "lru"
    disk_directory: Path | None = None
    disk_bytes: int = 1 << 30
    tiers: tuple[TierConfig, ...] = ()
    """Lower tiers by name, the fastest first, behind those that the four fields above describe."""
    promote: bool = True
    """True to store what a load brought back in the tiers that lack it."""
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_curve: CurveServer | None = None
    """Encrypts the events; None: plain text."""
    kv_events_hash_key: HashKey | None = None
    """Blocks are announced under it, without token ids; None: with token ids."""
    kv_events_topic: str = "kv-events"
    data_parallel_rank: int = 0
    device: str | None = None
    """Where the model runs; None means a GPU if there is one."""
    cpu_threads: int = 1
    """Threads that compute the model on a CPU."""
    time_model: TimeModel = field(default_factory=TimeModel)
    """Used with `simulate`."""

    def model(self) -> TransformerConfig:
        """Return the preset with this configuration's changes."""
        changes = {
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
        }
        changed = {name: value for name, value in changes.items() if value is not None}
        return preset(self.preset, seed=self.seed, **changed)

    @property
    def lower_tiers(self) -> tuple[TierConfig, ...]:
        """Return all lower tiers, the fastest first."""
        memory = {"num_blocks": self.cpu_blocks, "cache_policy": self.cpu_cache_policy}
        disk: dict[str, Any] = {"directory": self.disk_directory, "max_bytes": self.disk_bytes}
        return (
            *((TierConfig("cpu", memory),) if self.cpu_blocks else ()),
            *((TierConfig("fs", disk),) if self.disk_directory else ()),
            *self.tiers,
        )


class Backend(TransferBackend, Protocol):
    """The parts that compute and copy: a model and its pages, or the time they would take."""

    runner: ModelRunner


def build_engine(
    config: EngineConfig, clock: Clock | None = None, publisher: EventPublisher | None = None
) -> Engine:
    """Build an engine with its publisher bound and its pages allocated.

    Args:
        clock: A simulated engine's; the machine's own if left out.
        publisher: Gets the events; if left out, the one that *config* describes.

    Raises:
        CacheConfigError: Sizes contradict each other, or torch is missing where it is needed.
    """
    model = _fitting(config.model(), config)
    publishes = publisher is not None or config.kv_events_endpoint is not None
    cache = CacheManager(_cache_config(config, model, publishes), model.block_size)
    clock = clock or RealClock()
    backend = _backend(config, model, clock)
    tiers = create_tiers(config.lower_tiers, _tier_host(model, cache, publishes, backend))
    with ExitStack() as unfinished:
        for made in tiers:
            unfinished.callback(made.close)
        connector = _connector(config, cache, tiers)
        chain = HashChain.from_seed()
        limits = SchedulerConfig(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            model.max_model_len,
            config.scheduling_policy,
        )
        hasher = RequestHasher(chain, model.block_size)
        engine = Engine(
            model=model,
            cache=cache,
            scheduler=Scheduler(limits, cache, hasher, config.eos_token_id, connector),
            runner=backend.runner,
            publisher=publisher or _publisher(config, cache.config.layout, chain),
            connector=connector,
            tiers=tiers,
            clock=clock if config.simulate else None,
        )
        unfinished.pop_all()
    return engine


def _connector(
    config: EngineConfig, cache: CacheManager, tiers: Sequence[MadeTier]
) -> OffloadingConnector | None:
    if not tiers:
        return None
    return OffloadingConnector(cache, [made.tier for made in tiers], promote=config.promote)


def _tier_host(
    model: TransformerConfig, cache: CacheManager, publishes: bool, backend: Backend
) -> TierHost:
    return TierHost(
        groups=cache.config.layout.groups,
        page_bytes=_page_bytes(model),
        identity=_identity(model),
        enable_events=publishes,
        backend=backend,
    )


def _fitting(model: TransformerConfig, config: EngineConfig) -> TransformerConfig:
    """Return the model with `max_model_len` cut to what the cache can hold.

    Otherwise a sequence could be admitted that never fits.
    """
    size = model.block_size
    lengths = range(size, model.max_model_len + size, size)
    fitting = bisect_right(
        lengths, config.num_blocks - 1, key=lambda length: _blocks_at_once(model, config, length)
    )
    if not fitting:
        raise CacheConfigError(
            f"num_blocks {config.num_blocks} must hold a sequence of one block in each of "
            f"{len(model.layer_groups())} groups"
        )
    return replace(model, max_model_len=min(fitting * size, model.max_model_len))


def _blocks_at_once(model: TransformerConfig, config: EngineConfig, length: int) -> int:
    """Return the most blocks that a sequence of *length* tokens holds at one time."""
    trial = _cache_config(replace(config, num_blocks=2), replace(model, max_model_len=length))
    return most_blocks_held(CacheManager(trial, model.block_size), length)


def _cache_config(
    config: EngineConfig, model: TransformerConfig, enable_events: bool = False
) -> CacheConfig:
    return CacheConfig.build(
        model.cache_groups(),
        num_blocks=config.num_blocks,
        scheduler_block_size=model.block_size,
        hash_block_size=model.block_size,
        max_model_len=model.max_model_len,
        max_in_flight_tokens=min(config.max_num_batched_tokens, model.max_model_len),
        enable_caching=config.enable_caching,
        enable_events=enable_events,
        retention_interval=config.retention_interval,
    )


def _publisher(config: EngineConfig, layout: KVCacheLayout, chain: HashChain) -> EventPublisher:
    if config.kv_events_endpoint is None:
        return NullEventPublisher()
    addresses = PublisherConfig(
        endpoint=config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
        curve=config.kv_events_curve,
        include_token_ids=config.kv_events_hash_key is None,
        hash_key=config.kv_events_hash_key,
        retention_hints=RETENTION_HINTS,
    )
    return create_publisher(addresses, layout, chain, config.data_parallel_rank)


def _identity(model: TransformerConfig) -> str:
    """Identify the weights, and so the contents of blocks.

    Everything in the configuration takes part except `max_model_len`, which changes neither.
    """
    fields = repr(replace(model, max_model_len=0))
    return f"{model.name} {sha256(fields.encode()).hexdigest()}"


def _page_bytes(model: TransformerConfig) -> list[int]:
    kinds = [group.kind for group in model.layer_groups()]
    return [model.group_page_bytes(kind) * model.layers_per_group for kind in kinds]


def _backend(config: EngineConfig, model: TransformerConfig, clock: Clock) -> Backend:
    if config.simulate:
        return SimulatedBackend(config.time_model, clock, model.vocab_size, model.block_bytes)
    try:
        # Loaded by name, since torch is optional and takes seconds to import.
        module = importlib.import_module("kvroute_engine.model.torch_backend")
    except ImportError as error:
        raise CacheConfigError(
            "the engine's model needs torch: pip install './engine[torch]', "
            f"or use --simulate ({error.name})"
        ) from None
    return cast(
        Backend, module.TorchBackend(model, config.num_blocks, config.device, config.cpu_threads)
    )
