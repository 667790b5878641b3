"""vLLM's own scheduler, cache manager and offloading connector, without a model.

Transfers are reported as done in the step after the one that asked for them, as vLLM's worker does.
What the scheduler would publish is kept, encoded as its publisher encodes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, SchedulerConfig
from vllm.config.observability import ObservabilityConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tests.interop.layouts import Layout
from tests.interop.vllm_cache import MAX_MODEL_LEN, cache_config

_CHUNK_BYTES = 4096
"""vLLM rounds a chunk up to this, and those of these small layouts are smaller."""


@dataclass(frozen=True)
class Offloading:
    """How an engine offloads."""

    blocks_per_chunk: int
    cpu_chunks: int
    """Chunks of any group that the CPU holds."""
    self_describing: bool


class OffloadingEngine:
    """Args: layout: Groups and sizes. gpu_blocks: Size of the GPU's pool. offloading: The tier."""

    def __init__(self, layout: Layout, gpu_blocks: int, offloading: Offloading) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self.scheduler = make_scheduler(
            layout,
            gpu_blocks,
            Steps(max_num_seqs=8, max_num_batched_tokens=8 * layout.scheduler_block_size),
            _transfers(offloading),
        )
        self.frames: list[bytes] = []
        """Published since the caller last took them."""
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self.frames.append(msgspec.msgpack.encode(batch)),
            shutdown=lambda: None,
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(
            layout.hash_block_size, hash_function
        )
        self._unfinished: set[int] = set()
        self._names = 0

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> None:
        """Serve prompts together until all are done and nothing is being copied."""
        for prompt in prompts:
            self.scheduler.add_request(self._request(prompt, max_tokens))
        for _ in range(10_000):
            self._step()
            if self._is_idle():
                # What the last copies changed is published with the next step.
                self._step()
                return
        raise RuntimeError(f"{len(prompts)} prompts: not done after 10,000 steps")

    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that would be reused now, from the GPU and the tier."""
        request = self._request(prompt, 1)
        connector = self.scheduler.connector
        connector.on_new_request(request)
        _, local, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        external, _ = connector.get_num_new_matched_tokens(request, local)
        connector.scheduler._release_step()
        del connector.scheduler._req_status[request.request_id]
        assert external is not None
        return int(local) + int(external)

    def reset(self) -> None:
        """Empty the GPU; the tier keeps what it has."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        # Published with the next step.
        self._step()

    def _request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        self._names += 1
        return Request(
            request_id=f"r{self._names}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _is_idle(self) -> bool:
        return not (
            self.scheduler.has_requests()
            or self._unfinished
            or self.scheduler.connector.scheduler._jobs
        )

    def _step(self) -> None:
        output = self.scheduler.schedule()
        done, self._unfinished = self._unfinished, set()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        loaded = {job.req_id for job in metadata.load_jobs.values() if not job.sync}
        done |= set(metadata.load_jobs)
        for job_id in metadata.store_jobs:
            (done if job_id in (metadata.jobs_to_flush or ()) else self._unfinished).add(job_id)
        for job_id in metadata.jobs_to_flush or ():
            self._unfinished.discard(job_id)
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[self._sampled(name) for name in names],
                kv_connector_output=KVConnectorOutput(
                    finished_recving=loaded or None,
                    kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys(done, 1)),
                ),
            ),
        )

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []


@dataclass(frozen=True)
class Steps:
    """What a step may compute, and in which order requests wait."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0


def make_scheduler(
    layout: Layout,
    gpu_blocks: int,
    steps: Steps,
    transfers: KVTransferConfig | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler with its cache manager; without *transfers* it has no connector. *settings* are
    further fields of its `VllmConfig`."""
    config = _config(layout, gpu_blocks, steps, transfers)
    vars(config).update(settings)
    return Scheduler(
        config,  # type: ignore[arg-type]
        cache_config(layout, gpu_blocks),
        structured_output_manager=SimpleNamespace(  # type: ignore[arg-type]
            accept_tokens=lambda *_: True, should_advance=lambda *_, **__: False
        ),
        block_size=layout.scheduler_block_size,
        hash_block_size=layout.hash_block_size,
        log_stats=False,
    )


def _transfers(offloading: Offloading) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={
            "cpu_bytes_to_use": offloading.cpu_chunks * _CHUNK_BYTES,
            "blocks_per_chunk": offloading.blocks_per_chunk,
            "self_describing_kv_events": offloading.self_describing,
            "offload_prompt_only": False,
        },
    )


def _config(
    layout: Layout, gpu_blocks: int, steps: Steps, transfers: KVTransferConfig | None
) -> SimpleNamespace:
    """What the scheduler and the connector read of a `VllmConfig`, which needs a model's files."""
    cache = CacheConfig(
        block_size=math.gcd(*(group.block_size for group in layout.groups)),
        prefix_cache_retention_interval=layout.retention_interval,
        mamba_cache_mode="align" if layout.has_mamba else "none",
    )
    cache.num_gpu_blocks = gpu_blocks
    scheduler = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        enable_chunked_prefill=True,
        policy=steps.policy,
        long_prefill_token_threshold=steps.long_prefill_token_threshold,
    )
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        lora_config=None,
        speculative_config=_speculation() if layout.eagle else None,
        diffusion_config=None,
        ec_transfer_config=None,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=transfers,
        additional_config={},
        model_config=SimpleNamespace(
            uses_mrope=False,
            uses_xdrope=False,
            is_encoder_decoder=False,
            max_model_len=MAX_MODEL_LEN,
            runner_type="generate",
            is_diffusion=False,
            supports_multimodal_inputs=False,
            is_multimodal_model=False,
            return_sampling_mask=False,
            model="none",
            dtype="float16",
            use_mla=False,
            enable_return_routed_experts=False,
            get_total_num_kv_heads=lambda: 1,
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        attention_config=SimpleNamespace(hisparse_config=None),
        is_mm_encoder_only=False,
        max_concurrent_batches=1,
        max_in_flight_tokens=scheduler.max_num_batched_tokens,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=int(bool(layout.eagle)),
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=False,
    )


def _speculation() -> SimpleNamespace:
    """What the scheduler and the connector ask of a `SpeculativeConfig` for EAGLE. With a connector
    the engine keeps hashes that do not look ahead, and so drops a block."""
    return SimpleNamespace(
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0,
        disable_eagle_block_drop=False,
        use_eagle=lambda: True,
        needs_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
        use_eagle_block_drop=lambda: True,
    )
