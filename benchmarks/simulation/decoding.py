"""Steps in which sequences decode and nothing happens to the cache, taken at one stroke.

Most steps of an engine only append a token to each of a few sequences: no block is begun, filled,
cached or given back, so there is no event either. How many of them follow each other is known
beforehand. Their tokens are those that the engine would choose, and so is the state that they leave
behind.

    block of 32     |................................|................................|
    steps           ^ normal: the first token of a block and the last
                     ------------ at one stroke -----
"""

from __future__ import annotations

from offload.engine.core.engine import Engine
from offload.engine.core.requests import StepOutput
from offload.engine.core.scheduler import _Sequence, _State
from offload.engine.core.simulated import SimulatedRunner
from offload.groups.base import GroupManager
from offload.request import CacheRequest


def quiet_steps(engine: Engine) -> int:
    """How many steps follow in which every running sequence gets a token and nothing else happens;
    0 if the next one is not like that."""
    scheduler = engine.scheduler
    if engine.connector is not None or scheduler._waiting or not scheduler._running:
        return 0
    managers = engine.cache.coordinator.managers
    return min(_quiet_steps(sequence, managers) for sequence in scheduler._running)


def _quiet_steps(sequence: _Sequence, managers: tuple[GroupManager, ...]) -> int:
    cached = sequence.cache
    length = cached.num_tokens
    if sequence.state is not _State.RUNNING or cached.num_computed_tokens != length - 1:
        return 0
    if not sequence.output:
        return 0
    steps = sequence.max_tokens - length - 1  # the last token ends the request
    for manager in managers:
        size = manager.block_size
        within = length % size
        steps = min(steps, size - within)
        if within < 2 or steps <= 0 or manager.skipped_blocks(cached.request_id, length - 1):
            return 0
        skipped = manager.num_skipped_tokens(length - 1) // size
        while steps and manager.num_skipped_tokens(length - 2 + steps) // size != skipped:
            steps -= 1
    return steps


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
