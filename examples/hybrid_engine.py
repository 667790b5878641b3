"""An engine without a model: a hybrid KV cache with a tier in memory and one on disk.

Every change is published. It reads a prompt per line as a JSON list, and prints how many tokens of
it were reused: from the GPU, and in total with those that the tiers brought back.
"""

import json
import sys
from itertools import count
from pathlib import Path

import torch

from kvevents import (
    EventPublisher,
    GroupKind,
    HashChain,
    KVCacheGroup,
    PublisherConfig,
    create_publisher,
)
from offload import (
    CacheConfig,
    CacheManager,
    CacheRequest,
    ComputedBlocks,
    ExternalHit,
    OffloadingConnector,
    RequestHasher,
    Tier,
)
from offload.cpu.manager import CPUOffloadingManager
from offload.cpu.worker import CPUTransferWorker
from offload.fs.manager import FileOffloadingManager
from offload.fs.store import BlockStore
from offload.fs.worker import FileTransferWorker
from offload.transfer.canonical import CanonicalKVCache, DataRef

BLOCK_SIZE, PAGE_BYTES, STEP_TOKENS = 16, 4096, 256
GROUPS = [
    KVCacheGroup(GroupKind.FULL, BLOCK_SIZE),
    KVCacheGroup(GroupKind.SLIDING_WINDOW, BLOCK_SIZE, sliding_window=64),
]
CHAIN = HashChain.from_seed("sha256")


class Engine:
    def __init__(self, publisher: EventPublisher, config: CacheConfig, directory: Path) -> None:
        self._publisher = publisher
        self._cache = CacheManager(config, config.scheduler_block_size)
        # On a GPU: device="cuda".
        pages = torch.zeros((config.num_blocks, PAGE_BYTES), dtype=torch.int8)
        canonical = CanonicalKVCache([pages], [[DataRef(0, PAGE_BYTES)] for _ in GROUPS])
        store = BlockStore(
            directory, [PAGE_BYTES for _ in GROUPS], identity="the model and its revision"
        )
        self._connector = OffloadingConnector(
            self._cache,
            [
                Tier(CPUOffloadingManager(100, enable_events=True), GROUPS),
                Tier(FileOffloadingManager(store, 8_000_000, enable_events=True), GROUPS),
            ],
        )
        self._workers = [CPUTransferWorker(canonical, 100), FileTransferWorker(canonical, store)]
        self._hasher = RequestHasher(CHAIN, config.layout.hash_block_size)
        self._serial = count()
        self._end_step()  # reports what an earlier process left on disk

    def prefill(self, token_ids: list[int]) -> dict[str, int]:
        request = CacheRequest(str(next(self._serial)), token_ids, self._hasher)
        computed = self._cache.get_computed_blocks(request)
        hit = self._connector.find_external_hit(request, computed)
        assert hit is not None, "one request at a time: no other loads the same blocks"
        is_loaded = hit.num_external_tokens > 0 and self._load(request, computed, hit)
        self._compute(request, None if is_loaded else computed)
        self._connector.forget(request.request_id)
        self._cache.free(request.request_id)
        self._end_step()
        return {
            "gpu_cached_tokens": computed.num_tokens,
            "cached_tokens": hit.num_tokens if is_loaded else computed.num_tokens,
        }

    def _load(self, request: CacheRequest, computed: ComputedBlocks, hit: ExternalHit) -> bool:
        external = hit.num_external_tokens
        blocks = self._cache.allocate_slots(
            request, 0, computed, num_external_tokens=external, delay_caching=True
        )
        assert blocks is not None, "one request at a time fits"
        self._connector.start_load(request, hit)
        failed: set[str] = set()
        while self._connector.is_loading(request.request_id):
            failed |= self._end_step()
        if request.request_id in failed:  # a file that does not verify: compute instead
            self._cache.free(request.request_id)
            return False
        request.num_computed_tokens = min(hit.num_tokens, request.num_tokens - 1)
        return True

    def _compute(self, request: CacheRequest, computed: ComputedBlocks | None) -> None:
        done = computed.num_tokens if computed else request.num_computed_tokens
        while done < request.num_tokens:
            self._cache.start_step()
            new = min(STEP_TOKENS, request.num_tokens - done)
            assert self._cache.allocate_slots(request, new, computed) is not None, (
                "one request at a time fits"
            )
            computed, done = None, done + new
            # Here a model reads and writes the pages that
            # self._cache.block_tables(request.request_id) names.
            request.num_computed_tokens = done
            self._connector.store(request)
            self._end_step()

    def _end_step(self) -> set[str]:
        failed: set[str] = set()
        for worker, jobs in zip(self._workers, self._connector.take_jobs(), strict=True):
            for job in jobs:
                worker.submit(job)
            # An engine with a model goes on and polls get_finished.
            worker.wait([job.job_id for job in jobs])
            failed |= set(self._connector.complete(worker.get_finished()).failed)
        self._publisher.publish(self._cache.take_events() + self._connector.take_events())
        return failed


if __name__ == "__main__":
    config = CacheConfig.build(
        GROUPS,
        num_blocks=120,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        max_model_len=800,
        enable_events=True,
    )
    addresses = PublisherConfig(
        endpoint=sys.argv[1], replay_endpoint=sys.argv[2], topic="kv-events"
    )
    with create_publisher(addresses, config.layout, CHAIN) as publisher:
        engine = Engine(publisher, config, Path(sys.argv[3]))
        for line in sys.stdin:
            print(json.dumps(engine.prefill(json.loads(line))), flush=True)
