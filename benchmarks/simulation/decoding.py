"""Steps in which sequences decode and nothing happens to the cache, taken at one stroke.

Most steps of an engine only append a token to each of a few sequences: no block is begun, filled,
cached or given back, so there is no event either. How many of them follow each other is known
beforehand. Their tokens are those that the engine would choose, and so is the state that they leave
behind. In steps in which something does happen, sequences to which nothing happens are not asked
about.

    block of 32     |................................|................................|
    steps           ^^ normal: the first token of a block, and the last
                      ----------- at one stroke -----
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from kvroute_engine.core.engine import Engine
from kvroute_engine.core.requests import StepOutput
from kvroute_engine.core.sequence import SequenceInProgress
from kvroute_engine.core.simulated import SimulatedRunner
from offload.cache_manager import AllocatedBlocks, CacheManager
from offload.coordinator import ComputedBlocks
from offload.request import CacheRequest

_NOTHING = AllocatedBlocks(())


class QuietCache(CacheManager):
    """A cache manager that knows when a sequence in decode needs it next."""

    quiet_until: dict[str, int]
    """The length at which something happens again, by request; a lower one may be left out."""

    @override
    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
        **options: Any,
    ) -> AllocatedBlocks | None:
        length = request.num_tokens
        is_decode = num_new_tokens == 1 and request.num_computed_tokens == length - 1
        if is_decode and length < self.quiet_until.get(request.request_id, 0):
            return _NOTHING
        allocated = super().allocate_slots(request, num_new_tokens, computed, **options)
        if is_decode and allocated is not None:
            self.quiet_until[request.request_id] = self._next_change(length)
        return allocated

    @override
    def free(self, request_id: str) -> None:
        self.quiet_until.pop(request_id, None)
        super().free(request_id)

    def _next_change(self, length: int) -> int:
        """Return the next length behind this one at which a block begins, is full, or is not needed
        any more."""
        change = length + self.config.scheduler_block_size
        for manager in self.coordinator.managers:
            size = manager.block_size
            within = (length + 1) % size
            change = min(change, length + 1 if within < 2 else length + 1 + size - within)
            skipped = manager.num_skipped_tokens(length - 1) // size
            while manager.num_skipped_tokens(change - 2) // size != skipped:
                change -= 1
        return change


def make_quiet(engine: Engine) -> None:
    """Let an engine pass over what changes nothing. Not for one with lower tiers: they look at
    every step."""
    assert engine.connector is None
    engine.cache.__class__ = QuietCache
    assert isinstance(engine.cache, QuietCache)
    engine.cache.quiet_until = {}


def quiet_steps(engine: Engine) -> int:
    """Return how many steps follow in which every running sequence gets a token and nothing else
    happens; 0 if the next one is not like that."""
    scheduler, cache = engine.scheduler, engine.cache
    if scheduler._waiting or not scheduler._running or not isinstance(cache, QuietCache):
        return 0
    return min(_quiet_steps(sequence, cache.quiet_until) for sequence in scheduler._running)


def _quiet_steps(sequence: SequenceInProgress, quiet_until: dict[str, int]) -> int:
    cached = sequence.cache
    length = len(cached.token_ids)
    if cached.num_computed_tokens != length - 1:
        return 0
    # The last token ends the request.
    until = min(quiet_until.get(cached.request_id, 0), sequence.max_tokens - 1)
    return max(until - length, 0)


def take_quiet_steps(engine: Engine, steps: int) -> list[StepOutput]:
    """Take that many of `quiet_steps`; each output has all the tokens of its request."""
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(runner, SimulatedRunner)
    outputs = []
    for sequence in scheduler._running:
        cached = sequence.cache
        tokens = _tokens(runner, cached, steps, sequence.request.sampling.seed or 0)
        cached.append(tokens)
        cached.num_computed_tokens += steps
        sequence.output += tokens
        outputs.append(
            StepOutput(
                sequence.request.request_id,
                tokens,
                len(sequence.request.prompt_token_ids),
                sequence.num_cached_tokens or 0,
            )
        )
    scheduler._generation_tokens += steps * len(scheduler._running)
    return outputs


def _tokens(runner: SimulatedRunner, cached: CacheRequest, steps: int, seed: int) -> list[int]:
    tokens, last = list[int](), cached.token_ids[-1]
    for length in range(cached.num_tokens, cached.num_tokens + steps):
        last = runner.next_token(last, length, seed)
        tokens.append(last)
    return tokens
