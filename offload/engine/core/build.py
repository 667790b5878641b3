"""From a configuration to a running engine."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol, cast

from kvevents.hashing import HashChain
from kvevents.layout import KVCacheLayout
from kvevents.publisher import EventPublisher, NullEventPublisher, create_publisher
from kvevents.publisher_config import PublisherConfig
from offload.base import OffloadingWorker
from offload.cache_manager import CacheManager
from offload.config import CacheConfig
from offload.connector import OffloadingConnector, Tier
from offload.cpu.manager import CPUOffloadingManager
from offload.engine.core.batch import ModelRunner
from offload.engine.core.engine import Engine
from offload.engine.core.model_config import TransformerConfig
from offload.engine.core.presets import preset
from offload.engine.core.scheduler import Scheduler, SchedulerConfig
from offload.engine.core.simulated import (
    SimulatedBlockFiles,
    SimulatedRunner,
    SimulatedTransferWorker,
)
from offload.engine.core.time_model import Clock, RealClock, TimeModel
from offload.errors import CacheConfigError
from offload.fs.manager import FileOffloadingManager
from offload.fs.store import BlockFiles
from offload.groups.base import blocks_for
from offload.request import RequestHasher

EOS_TOKEN_ID = 257
"""Of the engine's own byte tokenizer."""


@dataclass(frozen=True)
class EngineConfig:
    """One replica of the small engine. Sizes that are left out are the preset's, or follow from
    it."""

    preset: str = "gemma"
    simulate: bool = False
    """Without tensors: the same scheduler and cache, and time in place of a model."""
    model_name: str | None = None
    num_blocks: int = 512
    """Of the cache, for all groups together."""
    block_size: int | None = None
    """In tokens."""
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    vocab_size: int | None = None
    eos_token_id: int = EOS_TOKEN_ID
    seed: int = 0
    """Of the weights."""
    enable_caching: bool = True
    retention_interval: int | None = None
    cpu_blocks: int = 0
    """Blocks of the tier in memory; 0: none."""
    cpu_cache_policy: str = "lru"
    disk_directory: Path | None = None
    disk_bytes: int = 1 << 30
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = "kv-events"
    data_parallel_rank: int = 0
    device: str | None = None
    """Of the model; left out: a GPU where there is one."""
    cpu_threads: int = 1
    """Of the model on a CPU."""
    time_model: TimeModel = field(default_factory=TimeModel)
    """With `simulate`."""

    def model(self) -> TransformerConfig:
        """The preset with what this configuration changes of it."""
        changes = {
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
        }
        changed = {name: value for name, value in changes.items() if value is not None}
        return preset(self.preset, seed=self.seed, **changed)


class Backend(Protocol):
    """What computes and copies."""

    runner: ModelRunner

    def cpu_worker(self, num_blocks: int) -> OffloadingWorker: ...

    def disk(
        self, directory: Path, payload_bytes: Sequence[int], identity: str
    ) -> tuple[BlockFiles, OffloadingWorker]: ...


def build_engine(
    config: EngineConfig, clock: Clock | None = None, publisher: EventPublisher | None = None
) -> Engine:
    """An engine, its publisher bound and its pages allocated.

    Args:
        config: The replica.
        clock: Where a simulated engine's time comes from; the machine's own if left out.
        publisher: Where its events go; if left out, what the configuration says.

    Raises:
        CacheConfigError: Sizes contradict each other, or torch is missing where it is needed.
    """
    model = _fitting(config.model(), config)
    cache = CacheManager(_cache_config(config, model), model.block_size)
    clock = clock or RealClock()
    backend = (
        SimulatedBackend(config, model, clock) if config.simulate else _torch_backend(config, model)
    )
    tiers, workers, stores = _tiers(config, model, cache.config.layout, backend)
    connector = OffloadingConnector(cache, tiers) if tiers else None
    chain = HashChain.from_seed()
    limits = SchedulerConfig(
        config.max_num_batched_tokens, config.max_num_seqs, model.max_model_len
    )
    return Engine(
        model=model,
        cache=cache,
        scheduler=Scheduler(
            limits, cache, RequestHasher(chain, model.block_size), config.eos_token_id, connector
        ),
        runner=backend.runner,
        publisher=publisher or _publisher(config, cache.config.layout, chain),
        connector=connector,
        workers=workers,
        clock=clock if config.simulate else None,
        stores=stores,
    )


def _fitting(model: TransformerConfig, config: EngineConfig) -> TransformerConfig:
    """The model with no longer sequences than the cache has blocks for, so that none is admitted
    that never fits."""
    size = model.block_size
    lengths = range(size, model.max_model_len + size, size)
    fitting = bisect_right(
        lengths, config.num_blocks - 1, key=lambda length: _blocks_at_once(model, config, length)
    )
    if not fitting:
        raise CacheConfigError(
            f"num_blocks {config.num_blocks} must hold a sequence of one block in each of {len(model.layer_groups())} groups"
        )
    return replace(model, max_model_len=min(fitting * size, model.max_model_len))


def _blocks_at_once(model: TransformerConfig, config: EngineConfig, length: int) -> int:
    """Most blocks that a sequence of *length* tokens holds at a time."""
    cache = CacheManager(
        _cache_config(replace(config, num_blocks=2), replace(model, max_model_len=length)),
        model.block_size,
    )
    managers = cache.coordinator.managers
    return sum(
        min(blocks_for(length, manager.block_size), manager.max_held_blocks())
        for manager in managers
    )


def _cache_config(config: EngineConfig, model: TransformerConfig) -> CacheConfig:
    return CacheConfig.build(
        model.cache_groups(),
        num_blocks=config.num_blocks,
        scheduler_block_size=model.block_size,
        hash_block_size=model.block_size,
        max_model_len=model.max_model_len,
        max_in_flight_tokens=min(config.max_num_batched_tokens, model.max_model_len),
        enable_caching=config.enable_caching,
        retention_interval=config.retention_interval,
    )


def _publisher(config: EngineConfig, layout: KVCacheLayout, chain: HashChain) -> EventPublisher:
    if config.kv_events_endpoint is None:
        return NullEventPublisher()
    addresses = PublisherConfig(
        endpoint=config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
    )
    return create_publisher(addresses, layout, chain, config.data_parallel_rank)


def _tiers(
    config: EngineConfig, model: TransformerConfig, layout: KVCacheLayout, backend: Backend
) -> tuple[list[Tier], list[OffloadingWorker], list[BlockFiles]]:
    tiers: list[Tier] = []
    workers: list[OffloadingWorker] = []
    stores: list[BlockFiles] = []
    if config.cpu_blocks:
        tiers.append(
            Tier(CPUOffloadingManager(config.cpu_blocks, config.cpu_cache_policy), layout.groups)
        )
        workers.append(backend.cpu_worker(config.cpu_blocks))
    if config.disk_directory:
        store, worker = backend.disk(config.disk_directory, _payload_bytes(model), _identity(model))
        tiers.append(Tier(FileOffloadingManager(store, config.disk_bytes), layout.groups))
        workers.append(worker)
        stores.append(store)
    return tiers, workers, stores


def _identity(model: TransformerConfig) -> str:
    """Of the weights, and with them of every block: all that the model is made of but the length of
    what it is asked."""
    made_of = repr(replace(model, max_model_len=0))
    return f"{model.name} {sha256(made_of.encode()).hexdigest()}"


def _payload_bytes(model: TransformerConfig) -> list[int]:
    kinds = [group.kind for group in model.layer_groups()]
    return [model.group_page_bytes(kind) * model.layers_per_group for kind in kinds]


class SimulatedBackend:
    def __init__(self, config: EngineConfig, model: TransformerConfig, clock: Clock) -> None:
        self.runner: ModelRunner = SimulatedRunner(
            config.time_model, clock, min(256, model.vocab_size)
        )
        self._config = config
        self._model = model
        self._clock = clock

    def cpu_worker(self, num_blocks: int) -> OffloadingWorker:
        del num_blocks
        return SimulatedTransferWorker(
            self._config.time_model, self._clock, self._model.block_bytes
        )

    def disk(
        self, directory: Path, payload_bytes: Sequence[int], identity: str
    ) -> tuple[BlockFiles, OffloadingWorker]:
        del directory, identity
        worker = SimulatedTransferWorker(
            self._config.time_model, self._clock, self._model.block_bytes
        )
        return SimulatedBlockFiles(payload_bytes), worker


def _torch_backend(config: EngineConfig, model: TransformerConfig) -> Backend:
    try:
        module = importlib.import_module("offload.engine.model.torch_backend")
    except ImportError as error:
        raise CacheConfigError(
            f"the engine's model needs torch: pip install '.[offload]', or use --simulate ({error.name})"
        ) from None
    return cast(
        Backend, module.TorchBackend(model, config.num_blocks, config.device, config.cpu_threads)
    )
