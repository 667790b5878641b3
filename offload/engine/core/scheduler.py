"""Which tokens of which sequences a step computes: continuous batching, chunked prefill, preemption
by recomputation.

Running sequences come first, in the order of their admission, each with as much of its prompt as
the step's token budget leaves; then waiting ones are admitted. When blocks run out the sequence
that was admitted last gives up its blocks and starts again. A sequence whose prefix lies in a lower
tier waits for it beside the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvevents.layout import GroupKind
from offload.cache_manager import CacheManager
from offload.connector import ExternalHit, OffloadingConnector
from offload.coordinator import ComputedBlocks
from offload.engine.core.batch import SequenceChunk
from offload.engine.core.requests import EngineRequest, FinishReason, StepOutput
from offload.errors import EngineRequestError
from offload.groups.base import blocks_for
from offload.request import CacheRequest, RequestHasher


class _State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True)
class _Sequence:
    """One request on its way."""

    request: EngineRequest
    cache: CacheRequest
    max_tokens: int
    """Prompt and output."""
    state: _State = _State.WAITING
    num_cached_tokens: int | None = None
    """As of the first admission."""
    looked_up: tuple[int, tuple[int, ...]] = (-1, ())
    """Its hit when each group's own was looked up last, and those."""
    loaded_tokens: int = 0
    """Where it goes on once its load is over."""
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of what is admitted."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 4096


class Scheduler:
    """Sequences of one engine. Without I/O: `schedule` says what to compute, `update` takes what
    came of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        hasher: RequestHasher,
        eos_token_id: int,
        connector: OffloadingConnector | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._connector = connector
        self._hasher = hasher
        self._eos_token_id = eos_token_id
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        # A state must end with a block to be worth keeping, so chunks end there.
        self._has_states = any(
            group.kind is GroupKind.MAMBA for group in cache.config.layout.groups
        )
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.group_hit_tokens = [0] * len(cache.config.layout.groups)
        """Prompt tokens that each group alone could have served, over all that were admitted."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Also those that wait for a load."""
        return len(self._sequences) - len(self._running)

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            EngineRequestError: It can never be served; the message says why.
        """
        prompt = len(request.prompt_token_ids)
        if request.request_id in self._sequences:
            raise EngineRequestError(f"request_id {request.request_id!r}: in use")
        if not 1 <= prompt < self._config.max_model_len:
            raise EngineRequestError(
                f"prompt: {prompt} tokens must be 1 to {self._config.max_model_len - 1}"
            )
        longest = min(prompt + request.sampling.max_tokens, self._config.max_model_len)
        blocks = self._most_blocks(longest)
        if blocks > self._cache.config.num_blocks - 1:
            raise EngineRequestError(
                f"prompt and max_tokens: {longest} tokens need {blocks} cache blocks of {self._cache.config.num_blocks - 1}"
            )
        cached = CacheRequest(
            request.request_id,
            request.prompt_token_ids,
            self._hasher,
            request.lora_name,
            request.cache_salt,
        )
        sequence = _Sequence(request, cached, longest)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        self.prompt_tokens += prompt

    def abort(self, request_id: str) -> None:
        """Drop a request; no error if it is unknown."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._remove(sequence)

    def _most_blocks(self, num_tokens: int) -> int:
        managers = self._cache.coordinator.managers
        return sum(
            min(blocks_for(num_tokens, manager.block_size), manager.max_held_blocks())
            for manager in managers
        )

    def _remove(self, sequence: _Sequence) -> None:
        self._give_up_blocks(sequence)
        del self._sequences[sequence.request.request_id]
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _give_up_blocks(self, sequence: _Sequence) -> None:
        if sequence.state is _State.RUNNING:
            self._running.remove(sequence)
        if self._connector:
            self._connector.forget(sequence.request.request_id)
        self._cache.free(sequence.request.request_id)
        sequence.cache.num_computed_tokens = 0
        sequence.state = _State.WAITING

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> list[SequenceChunk]:
        """What the next step computes; empty if nothing fits or there is nothing to do."""
        self._cache.start_step()
        budget = self._config.max_num_batched_tokens
        counts: dict[str, int] = {}
        preempted = False
        for sequence in list(self._running):
            if sequence.state is _State.RUNNING and budget > 0:
                count = self._next_count(sequence, sequence.cache.num_computed_tokens, budget)
                while (
                    sequence.state is _State.RUNNING
                    and self._cache.allocate_slots(sequence.cache, count) is None
                ):
                    preempted = True
                    self._preempt(self._running[-1], counts)
                if sequence.state is _State.RUNNING:
                    counts[sequence.request.request_id] = count
                    budget -= count
        while (
            not preempted
            and budget > 0
            and self._waiting
            and self._num_held < self._config.max_num_seqs
        ):
            admitted = self._admit(self._waiting[0], budget)
            if admitted is None:
                break
            sequence = self._waiting.popleft()
            if admitted:
                counts[sequence.request.request_id] = admitted
                budget -= admitted
        return [
            self._chunk(sequence, counts[id_])
            for sequence in self._running
            if (id_ := sequence.request.request_id) in counts
        ]

    def update(
        self, chunks: Sequence[SequenceChunk], tokens: Sequence[int | None]
    ) -> list[StepOutput]:
        """Take a step's tokens; says what it brought each request that said something."""
        outputs: list[StepOutput] = []
        for chunk, token in zip(chunks, tokens, strict=True):
            sequence = self._sequences[chunk.request_id]
            sequence.cache.num_computed_tokens = chunk.stop
            if self._connector:
                self._connector.store(sequence.cache)
            if token is not None:
                outputs.append(self._append_token(sequence, token))
        return outputs

    def loads_ended(self, loaded: Sequence[str], failed: Sequence[str]) -> None:
        """Requests whose prefix has come, and those for which it could not."""
        for request_id in loaded:
            sequence = self._sequences[request_id]
            sequence.cache.num_computed_tokens = sequence.loaded_tokens
            sequence.state = _State.RUNNING
            self._running.append(sequence)
        for request_id in failed:
            sequence = self._sequences[request_id]
            sequence.num_cached_tokens = None
            self._give_up_blocks(sequence)
            self._waiting.appendleft(sequence)

    @property
    def _num_held(self) -> int:
        """Sequences that run or load."""
        return len(self._sequences) - len(self._waiting)

    def _preempt(self, victim: _Sequence, counts: dict[str, int]) -> None:
        self._give_up_blocks(victim)
        counts.pop(victim.request.request_id, None)
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _admit(self, sequence: _Sequence, budget: int) -> int | None:
        """Tokens a waiting sequence computes now, 0 if it loads first; None if it cannot come
        in."""
        cached = sequence.cache
        is_first = sequence.num_cached_tokens is None
        computed = self._cache.get_computed_blocks(cached)
        if is_first and computed.num_tokens != sequence.looked_up[0]:
            # Before it has blocks of its own, which would count as found; and not in every step
            # that it waits.
            by_group = self._cache.coordinator.group_hits(cached, cached.num_tokens - 1)
            sequence.looked_up = (computed.num_tokens, by_group)
        hit = (
            self._connector.find_external_hit(cached, computed)
            if self._connector
            else ExternalHit(computed.num_tokens, 0)
        )
        if hit is None:
            return None
        count = (
            0
            if hit.num_external_tokens
            else self._next_count(sequence, computed.num_tokens, budget, computed)
        )
        blocks = self._cache.allocate_slots(
            cached,
            count,
            computed,
            num_external_tokens=hit.num_external_tokens,
            delay_caching=hit.num_external_tokens > 0,
            full_sequence_must_fit=True,
        )
        if blocks is None:
            return None
        if is_first:
            sequence.num_cached_tokens = min(hit.num_tokens, len(sequence.request.prompt_token_ids))
            _, by_group = sequence.looked_up
            self.group_hit_tokens = [
                sum(both) for both in zip(self.group_hit_tokens, by_group, strict=True)
            ]
        if hit.num_external_tokens:
            self._start_load(sequence, hit)
        else:
            cached.num_computed_tokens = computed.num_tokens
            sequence.state = _State.RUNNING
            self._running.append(sequence)
        return count

    def _start_load(self, sequence: _Sequence, hit: ExternalHit) -> None:
        assert self._connector is not None
        sequence.loaded_tokens = min(hit.num_tokens, sequence.cache.num_tokens - 1)
        sequence.state = _State.LOADING
        self._connector.start_load(sequence.cache, hit)
        if not self._connector.is_loading(sequence.request.request_id):
            self.loads_ended([sequence.request.request_id], [])

    def _next_count(
        self, sequence: _Sequence, start: int, budget: int, computed: ComputedBlocks | None = None
    ) -> int:
        """How many tokens behind *start* the step computes: at most *budget*, with states to where
        one is worth keeping."""
        total = sequence.cache.num_tokens
        end = min(total, start + budget)
        if not self._has_states or end - start == 1:
            return end - start
        size = self._cache.config.scheduler_block_size
        junction = (
            computed.shared_prefix_boundary if computed else sequence.cache.shared_prefix_boundary
        )
        # The same prompt again resumes at the last block before its last token; one that parts from
        # it, at the junction.
        stops = [(total - 1) // size * size, junction, end if end == total else end // size * size]
        return min((stop for stop in stops if start < stop <= end), default=end) - start

    def _chunk(self, sequence: _Sequence, count: int) -> SequenceChunk:
        cached = sequence.cache
        start = cached.num_computed_tokens
        return SequenceChunk(
            request_id=cached.request_id,
            token_ids=cached.token_ids[start : start + count],
            start=start,
            block_tables=self._cache.block_tables(cached.request_id),
            is_last=start + count == cached.num_tokens,
            sampling=sequence.request.sampling,
            num_output_tokens=len(sequence.output),
        )

    def _append_token(self, sequence: _Sequence, token: int) -> StepOutput:
        sequence.cache.append([token])
        sequence.output.append(token)
        self.generation_tokens += 1
        reason = self._finish_reason(sequence, token)
        if reason:
            self._remove(sequence)
        return StepOutput(
            request_id=sequence.request.request_id,
            new_token_ids=[token],
            num_prompt_tokens=len(sequence.request.prompt_token_ids),
            num_cached_tokens=sequence.num_cached_tokens or 0,
            finish_reason=reason,
        )

    def _finish_reason(self, sequence: _Sequence, token: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token in sampling.stop_token_ids or (
            token == self._eos_token_id and not sampling.ignore_eos
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.cache.num_tokens >= sequence.max_tokens else None
