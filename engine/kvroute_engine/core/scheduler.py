"""Chooses the tokens of sequences that a step computes.

Continuous batching with chunked prefill and preemption by recomputation. Sequences take turns in
the order of the policy (`serving_order.py`), each with as much of its prompt as the step's token
budget leaves; a waiting one is admitted when it is its turn, if its blocks fit. When blocks run out
for one that runs, the one that would be served last gives up its blocks and starts again. A
sequence whose prefix is in a lower tier is loaded while the others run.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvevents.layout import GroupKind
from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.requests import EngineRequest, FinishReason, StepOutput
from kvroute_engine.core.sequence import SequenceInProgress, SequenceState
from kvroute_engine.core.serving_order import SchedulingPolicy, serving_order
from offload.base import OffloadKey
from offload.cache_manager import CacheManager
from offload.connector.connector import OffloadingConnector
from offload.connector.load_plan import ExternalHit
from offload.coordinator import ComputedBlocks
from offload.errors import EngineRequestError
from offload.groups.base import blocks_for
from offload.request import NO_HINTS, CacheRequest, RequestHasher, RetentionHints

_PASSED_OVER = 32
"""The most sequences that a step looks up in vain, since others are loading their blocks."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of what is admitted."""

    max_num_batched_tokens: int = 512
    """Tokens computed in one step."""
    max_num_seqs: int = 64
    """Sequences that run or load at once."""
    max_model_len: int = 4096
    """Longest sequence in tokens, prompt and output together."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS


@dataclass(slots=True)
class _Step:
    """The next step, while it is put together."""

    budget: int
    """Tokens that it can compute besides."""
    counts: dict[str, int] = field(default_factory=dict)
    """Tokens that it computes, by request id."""
    is_closed: bool = False
    """Nothing more is admitted."""
    num_passed_over: int = 0

    def compute(self, sequence: SequenceInProgress, count: int) -> None:
        self.counts[sequence.request.request_id] = count
        self.budget -= count

    def pass_over(self) -> None:
        """Let others go ahead of one that wants blocks which are being loaded for another."""
        self.num_passed_over += 1
        self.is_closed = self.num_passed_over >= _PASSED_OVER


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Sequences now, and counts since the start."""

    num_running: int
    num_waiting: int
    """Includes those that wait for a load."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    group_hit_tokens: tuple[int, ...]
    """Per group, prompt tokens that the group alone could have served, over all admitted requests.
    The hit is what all groups can serve together."""


def most_blocks_held(cache: CacheManager, num_tokens: int) -> int:
    """Count the blocks that a sequence holds at most at one time, over all groups.

    Args:
        cache: The cache with its groups; a sliding window holds no more than its window needs.
    """
    return sum(
        min(blocks_for(num_tokens, manager.block_size), manager.max_held_blocks())
        for manager in cache.coordinator.managers
    )


class Scheduler:
    """The sequences of one engine, without I/O.

    `schedule` returns the tokens to compute, `update` takes the new ones.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        hasher: RequestHasher,
        eos_token_id: int,
        connector: OffloadingConnector | None = None,
    ) -> None:
        """
        Args:
            hasher: Hashes the blocks of prompts.
            eos_token_id: Ends a sequence; -1 if the model has none.
            connector: To lower tiers, if there are any.
        """
        self._config = config
        self._cache = cache
        self._connector = connector
        self._hasher = hasher
        self._eos_token_id = eos_token_id
        self._sequences: dict[str, SequenceInProgress] = {}
        self._order = serving_order(config.policy, cache)
        self._waiting: list[SequenceInProgress] = []
        """Waiting sequences, by their places in the order."""
        self._running: list[SequenceInProgress] = []
        # A recurrent state can be reused only at the end of a block, so chunks end there.
        self._has_states = any(
            group.kind is GroupKind.MAMBA for group in cache.config.layout.groups
        )
        self._arrivals = 0
        self._computed_prompt_tokens = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._group_hit_tokens = [0] * len(cache.config.layout.groups)

    @property
    def is_idle(self) -> bool:
        """Return whether every request has ended."""
        return not self._sequences

    def statistics(self) -> SchedulerStatistics:
        """Return the sequences now, and counts since the start."""
        return SchedulerStatistics(
            num_running=len(self._running),
            num_waiting=len(self._sequences) - len(self._running),
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            group_hit_tokens=tuple(self._group_hit_tokens),
        )

    # --- arrival and departure --------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            EngineRequestError: It can never be served, or its id is in use.
        """
        prompt = len(request.prompt_token_ids)
        if request.request_id in self._sequences:
            raise EngineRequestError(f"request_id {request.request_id!r}: in use")
        if not 1 <= prompt < self._config.max_model_len:
            raise EngineRequestError(
                f"prompt: {prompt} tokens must be 1 to {self._config.max_model_len - 1}"
            )
        longest = min(prompt + request.sampling.max_tokens, self._config.max_model_len)
        blocks, usable = most_blocks_held(self._cache, longest), self._cache.config.num_blocks - 1
        if blocks > usable:
            raise EngineRequestError(
                f"prompt and max_tokens: {longest} tokens need {blocks} cache blocks of {usable}"
            )
        hints = RetentionHints.of(request.kv_transfer_params, prompt)
        cached = self._cache_request(request, hints)
        sequence = SequenceInProgress(
            request, cached, longest, self._arrivals, self._computed_prompt_tokens
        )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._wait(sequence)
        self._prompt_tokens += prompt

    def block_keys(self, request: EngineRequest, most: int) -> list[OffloadKey]:
        """Return the blocks of a prompt that a tier might hold, those at its start first; none
        without tiers.

        Args:
            request: Need not be queued. May be called from any thread.
        """
        if self._connector is None:
            return []
        return self._connector.block_keys(self._cache_request(request, NO_HINTS), most)

    def _cache_request(self, request: EngineRequest, hints: RetentionHints) -> CacheRequest:
        return CacheRequest(
            request.request_id,
            request.prompt_token_ids,
            self._hasher,
            request.lora_name,
            request.cache_salt,
            kv_transfer_params=request.kv_transfer_params,
            hints=hints,
            at_peer=request.at_peer,
        )

    def abort(self, request_id: str) -> None:
        """Drop a request; no error if it is unknown."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._remove(sequence)

    def _remove(self, sequence: SequenceInProgress) -> None:
        self._give_up_blocks(sequence)
        del self._sequences[sequence.request.request_id]
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _give_up_blocks(self, sequence: SequenceInProgress) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        if self._connector:
            self._connector.forget(sequence.request.request_id)
        self._cache.free(sequence.request.request_id)
        sequence.cache.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> list[SequenceChunk]:
        """Return the tokens of the next step; empty if nothing fits or is left to do."""
        self._cache.start_step()
        step = _Step(self._config.max_num_batched_tokens)
        for sequence in self._order.turns(self._running, self._waiting):
            if step.budget <= 0:
                break
            if sequence.state is SequenceState.RUNNING:
                self._extend(sequence, step)
            elif not step.is_closed:
                self._try_to_admit(sequence, step)
        # A single token is decoded, or as good as none.
        self._computed_prompt_tokens += sum(count for count in step.counts.values() if count > 1)
        return [
            self._chunk(sequence, step.counts[id_])
            for sequence in self._running
            if (id_ := sequence.request.request_id) in step.counts
        ]

    def _extend(self, sequence: SequenceInProgress, step: _Step) -> None:
        """Let a running sequence compute as much as the step has room for, if its blocks fit."""
        count = self._next_count(sequence, sequence.cache.num_computed_tokens, step.budget)
        while self._cache.allocate_slots(sequence.cache, count) is None:
            if self._preempt_last(step) is sequence:
                return
        step.compute(sequence, count)

    def _try_to_admit(self, sequence: SequenceInProgress, step: _Step) -> None:
        if self._num_held >= self._config.max_num_seqs:
            step.is_closed = True
            return
        count = self._admit(sequence, step)
        if count is None:
            return
        self._waiting.remove(sequence)
        if count:
            step.compute(sequence, count)

    def update(
        self, chunks: Sequence[SequenceChunk], tokens: Sequence[int | None]
    ) -> list[StepOutput]:
        """Take the tokens of a step.

        Args:
            chunks: From `schedule`. tokens: The runner's, one entry per chunk.

        Returns:
            An output for each request that got a token.
        """
        outputs: list[StepOutput] = []
        for chunk, token in zip(chunks, tokens, strict=True):
            sequence = self._sequences[chunk.request_id]
            sequence.cache.num_computed_tokens = chunk.stop
            if self._connector:
                self._connector.store(sequence.cache)
            if token is not None:
                outputs.append(self._append(sequence, token))
        return outputs

    def loads_ended(self, loaded: Sequence[str], failed: Sequence[str]) -> None:
        """Take the end of loads: a loaded request runs on, a failed one starts again.

        Args:
            loaded: Ids of requests whose prefix is on the GPU now.
            failed: Ids of requests whose prefix could not be loaded.
        """
        for request_id in loaded:
            sequence = self._sequences[request_id]
            if sequence.loads_at_first:
                self._count_group_hits(sequence)
            sequence.cache.num_computed_tokens = sequence.loaded_tokens
            sequence.state = SequenceState.RUNNING
            self._running.append(sequence)
        for request_id in failed:
            sequence = self._sequences[request_id]
            if sequence.loads_at_first:
                sequence.num_cached_tokens = None
            self._give_up_blocks(sequence)
            self._wait(sequence)

    @property
    def _num_held(self) -> int:
        """Return how many sequences run or load."""
        return len(self._sequences) - len(self._waiting)

    def _preempt_last(self, step: _Step) -> SequenceInProgress:
        """Take the blocks of the last running sequence.

        Those that the step has served keep theirs: they are findable already, and may be the hit of
        one that it has admitted. Nothing more is admitted, since that might be the victim again.
        """
        left = [each for each in self._running if each.request.request_id not in step.counts]
        victim = self._order.last(left)
        self._give_up_blocks(victim)
        self._wait(victim)
        self._preemptions += 1
        step.is_closed = True
        return victim

    def _wait(self, sequence: SequenceInProgress) -> None:
        insort(self._waiting, sequence, key=self._order.place)

    def _admit(self, sequence: SequenceInProgress, step: _Step) -> int | None:
        """Give a waiting sequence blocks if they fit; if not, nothing more is admitted.

        Returns:
            Tokens it computes in this step, 0 if it loads first; None if it has to wait.
        """
        cached = sequence.cache
        computed = self._cache.get_computed_blocks(cached)
        is_first = sequence.num_cached_tokens is None
        if is_first:
            self._look_up_groups(sequence, computed)
        hit = (
            self._connector.find_external_hit(cached, computed)
            if self._connector
            else ExternalHit(computed.num_tokens, 0)
        )
        if hit is None:
            step.pass_over()
            return None
        must_load = hit.num_external_tokens > 0
        count = (
            0
            if must_load
            else self._next_count(sequence, computed.num_tokens, step.budget, computed)
        )
        blocks = self._cache.allocate_slots(
            cached,
            count,
            computed,
            num_external_tokens=hit.num_external_tokens,
            delay_caching=must_load,
            full_sequence_must_fit=True,
        )
        if blocks is None:
            step.is_closed = True
            return None
        if is_first:
            prompt = len(sequence.request.prompt_token_ids)
            sequence.num_cached_tokens = min(hit.num_tokens, prompt)
        if must_load:
            sequence.loads_at_first = is_first
            self._start_load(sequence, hit)
        else:
            if is_first:
                self._count_group_hits(sequence)
            cached.num_computed_tokens = computed.num_tokens
            sequence.state = SequenceState.RUNNING
            self._running.append(sequence)
        return count

    def _look_up_groups(self, sequence: SequenceInProgress, computed: ComputedBlocks) -> None:
        """Record the prefix that each group alone could serve.

        This happens before the sequence has blocks of its own, which would count as found, and
        again only when its hit changes, since it may wait for many steps.
        """
        if computed.num_tokens != sequence.group_hits_at:
            cached = sequence.cache
            sequence.group_hits_at = computed.num_tokens
            sequence.group_hits = self._cache.coordinator.group_hits(cached, cached.num_tokens - 1)

    def _count_group_hits(self, sequence: SequenceInProgress) -> None:
        """Count what each group could have served, once its first admission is sure: one whose load
        fails is none, and another follows."""
        for index, tokens in enumerate(sequence.group_hits):
            self._group_hit_tokens[index] += tokens

    def _start_load(self, sequence: SequenceInProgress, hit: ExternalHit) -> None:
        assert self._connector is not None
        sequence.loaded_tokens = min(hit.num_tokens, sequence.cache.num_tokens - 1)
        sequence.state = SequenceState.LOADING
        self._connector.start_load(sequence.cache, hit)
        if not self._connector.is_loading(sequence.request.request_id):
            self.loads_ended([sequence.request.request_id], [])

    def _next_count(
        self,
        sequence: SequenceInProgress,
        start: int,
        budget: int,
        computed: ComputedBlocks | None = None,
    ) -> int:
        """Return how many tokens from *start* on the step computes, at most *budget*.

        Where layers have states, chunks end where a state is worth keeping. With blocks of 16, a
        prompt of 100 tokens of which an earlier one had the first 70 is computed in three steps:

            0                              64             96  100
            |------------------------------|--------------|---|
                                           |              last whole block before the last token
                                           last whole block of the shared prefix, or of one that
                                           the request names
        """
        total = sequence.cache.num_tokens
        end = min(total, start + budget)
        if not self._has_states or end - start == 1:
            return end - start
        size = self._cache.config.scheduler_block_size
        shared = computed or sequence.cache
        # The same prompt again resumes at the last block before its last token; a prompt that
        # diverges from it, at the end of what they share.
        named = sequence.cache.hints.boundaries
        stops = [
            (total - 1) // size * size,
            shared.shared_prefix_boundary,
            *(boundary // size * size for boundary in named),
            end if end == total else end // size * size,
        ]
        return min((stop for stop in stops if start < stop <= end), default=end) - start

    def _chunk(self, sequence: SequenceInProgress, count: int) -> SequenceChunk:
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

    def _append(self, sequence: SequenceInProgress, token: int) -> StepOutput:
        sequence.cache.append([token])
        sequence.output.append(token)
        self._generation_tokens += 1
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

    def _finish_reason(self, sequence: SequenceInProgress, token: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token in sampling.stop_token_ids or (
            token == self._eos_token_id and not sampling.ignore_eos
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.cache.num_tokens >= sequence.max_tokens else None
