"""vLLM's own scheduler and cache manager, without a model, for requests that name what to keep."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.interop.cache import CachedBlock
from tests.interop.layouts import Layout
from tests.interop.offloading_engine import Steps, make_scheduler
from tests.interop.vllm_cache import as_cached

PROMPT_TOKENS = 700
"""Of the longest prompt that there is room for, twice."""


class HintedEngine:
    """Keeps what it would publish, unless it has a `kv_events_config`.

    Args:
        layout: Groups and sizes.
        settings: Further fields of its `VllmConfig`.
    """

    def __init__(self, layout: Layout, **settings: Any) -> None:
        gpu_blocks = 1 + 2 * layout.blocks_for(PROMPT_TOKENS)
        steps = Steps(max_num_seqs=8, max_num_batched_tokens=8 * layout.scheduler_block_size)
        self.scheduler = make_scheduler(layout, gpu_blocks, steps, **settings)
        # In the order of vLLM's `EngineCore`, and by its name there.
        hash_function = get_hash_fn_by_name("sha256")
        core.init_none_hash(hash_function)
        self.frames: list[bytes] = []
        self.asked: list[tuple[list[int], int]] = []
        """Prompts and their hits, as `ask` found them."""
        if "kv_events_config" not in settings:
            self.scheduler.kv_event_publisher = SimpleNamespace(
                publish=self._keep_frame,
                shutdown=lambda: None,
            )
        self._hasher = kv_cache_utils.get_request_block_hasher(
            layout.hash_block_size, hash_function
        )
        self._names = 0

    def _keep_frame(self, batch: Any) -> None:
        # When it was made is all that differs between two engines that do the same.
        batch.ts = 0.0
        self.frames.append(msgspec.msgpack.encode(batch))

    def run(self, *prompts: Sequence[int], max_tokens: int = 1, **extra_args: Any) -> None:
        """Serve prompts together until all are done; *extra_args* are their `vllm_xargs`."""
        for prompt in prompts:
            self.scheduler.add_request(self._request(prompt, max_tokens, extra_args or None))
        while self.scheduler.has_requests():
            self.step()

    def step(self) -> None:
        """One step of the engine; every sampled token is a 7."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[self._sampled(name) for name in names],
            ),
        )

    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that would be reused now."""
        request = self._request(prompt, 1, None)
        _, num_tokens, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        return int(num_tokens)

    def ask(self, prompt: Sequence[int]) -> None:
        """Note what would be reused of a prompt now."""
        self.asked.append((list(prompt), self.hit(prompt)))

    def take(self) -> list[bytes]:
        """The batches that were published since they were last taken, without the time."""
        taken, self.frames = self.frames, []
        return taken

    def block_hashes(self, prompt: Sequence[int]) -> list[bytes]:
        return [bytes(each) for each in self._request(prompt, 1, None).block_hashes]

    def cached(self) -> set[CachedBlock]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {as_cached(key) for key in pool.cached_block_hash_to_block._cache}

    def _request(
        self, prompt: Sequence[int], max_tokens: int, extra_args: dict[str, Any] | None
    ) -> Request:
        self._names += 1
        return Request(
            request_id=f"r{self._names}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []
