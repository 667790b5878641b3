"""vLLM's own scheduler and cache manager, without a model: what its steps compute, how long they
take, and what they publish. Needs the environment of `make interop`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.simulation.layouts import TIME_MODEL
from benchmarks.simulation.timeline import Timeline
from kvevents.codec import decode
from kvevents.events import EventBatch
from tests.interop.layouts import Layout
from tests.interop.offloading_engine import Steps, make_scheduler


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request as it is sent."""

    name: str
    tokens: Sequence[int]
    output_tokens: int
    arrival_s: float
    priority: int = 0
    extra_args: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a step for one request."""

    name: str
    computed: int
    """Tokens of its prompt."""
    cached: int | None
    """Tokens of its prompt that were not computed; None unless this is its first token."""
    has_token: bool
    is_over: bool


class VllmEngine:
    """An engine whose every sampled token is a 7.

    Args:
        layout: Groups and sizes.
        blocks: Of its cache.
        steps: What a step may compute.
        publish: Gets each step's events, as they are read from the wire.
    """

    def __init__(
        self, layout: Layout, blocks: int, steps: Steps, publish: Callable[[EventBatch], None]
    ) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(
            layout.hash_block_size, hash_function
        )
        self.scheduler = make_scheduler(layout, blocks, steps)
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: publish(decode(msgspec.msgpack.encode(batch))),
            shutdown=lambda: None,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests())

    def add(self, request: VllmRequest) -> None:
        """Queue a request."""
        self.scheduler.add_request(
            Request(
                request_id=request.name,
                prompt_token_ids=list(request.tokens),
                sampling_params=SamplingParams(
                    max_tokens=request.output_tokens,
                    ignore_eos=True,
                    extra_args=request.extra_args,
                ),
                pooling_params=None,
                arrival_time=request.arrival_s,
                priority=request.priority,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> tuple[list[Stepped], float]:
        """Compute a step; return what it did and how many seconds it takes."""
        output = self.scheduler.schedule()
        counts = output.num_scheduled_tokens
        assert counts or not self.scheduler.running, "the engine is stuck"
        requests = {name: self.scheduler.requests[name] for name in counts}
        computed = {name: _prefill_tokens(requests[name], counts[name]) for name in counts}
        decoding = sum(not count for count in computed.values())
        seconds = TIME_MODEL.decode_step_s(decoding)
        for name, count in computed.items():
            start = requests[name].num_computed_tokens - counts[name]
            seconds += TIME_MODEL.prefill_s(start, start + count)
        tokens = [_sampled(requests[name]) for name in counts]
        found = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=list(counts),
                req_id_to_index={name: index for index, name in enumerate(counts)},
                sampled_token_ids=tokens,
            ),
        )
        stats = {
            each.request_id: each.prefill_stats
            for outputs in found.values()
            for each in outputs.outputs
            if each.prefill_stats is not None
        }
        stepped = [
            Stepped(
                name,
                computed[name],
                stats[name].num_cached_tokens if name in stats else None,
                bool(token),
                name not in self.scheduler.requests,
            )
            for name, token in zip(counts, tokens, strict=True)
        ]
        return stepped, seconds


def _prefill_tokens(request: Request, count: int) -> int:
    return 0 if request.num_output_tokens and count == 1 else count


def _sampled(request: Request) -> list[int]:
    return [7] if request.num_computed_tokens >= request.num_tokens else []


class VllmReplica:
    """An engine on the common timeline that steps while it has work; its events arrive a little
    later.

    Args:
        engine: Makes the engine, which publishes by what it is given.
        timeline: The time of all replicas.
        event_delay_s: From the end of a step to its events' arrival.
        take_batch: Gets the events.
        take_step: Gets what a step did when it ends.
    """

    def __init__(
        self,
        engine: Callable[[Callable[[EventBatch], None]], VllmEngine],
        timeline: Timeline,
        event_delay_s: float,
        take_batch: Callable[[EventBatch], None],
        take_step: Callable[[Sequence[Stepped]], None],
    ) -> None:
        self._batches: list[EventBatch] = []
        self.engine = engine(self._batches.append)
        self._timeline = timeline
        self._event_delay_s = event_delay_s
        self._take_batch = take_batch
        self._take_step = take_step
        self._is_stepping = False

    def add(self, request: VllmRequest) -> None:
        """Queue a request now; a step under way ends first."""
        self.engine.add(request)
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        self._is_stepping = True
        # The engine does a whole step at once; what it did shows when the step's time has passed.
        stepped, seconds = self.engine.step()
        end_s = self._timeline.now_s + seconds
        for batch in self._batches:
            self._timeline.at(end_s + self._event_delay_s, partial(self._take_batch, batch))
        self._batches.clear()
        self._timeline.at(end_s, lambda: self._end_step(stepped))

    def _end_step(self, stepped: Sequence[Stepped]) -> None:
        self._is_stepping = self.engine.has_work
        self._take_step(stepped)
        if self._is_stepping:
            self._step()
