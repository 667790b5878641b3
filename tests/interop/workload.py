"""A small scheduler with a random workload: shared prefixes, chunked prefill, decode, preemption,
evictions, resets.

It decides by the results of both caches, which `Lockstep` has found equal, so both see the same
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvevents.layout import GroupKind
from tests.interop.cache import CachedBlock, FirstStep
from tests.interop.layouts import Layout
from tests.interop.lockstep import Lockstep

SALTS = (None, None, None, "tenant")


@dataclass(frozen=True)
class Pressure:
    """How much cache and how much work there is."""

    sequences: float
    """Size of the cache in longest prompts that never slide out."""
    max_running: int = 4
    evictions: float = 0.0
    """Chance of a forced eviction after a step."""
    external: float = 0.0
    """Chance that a lower tier brings tokens to a request that is admitted."""
    resets: float = 0.01


@dataclass
class Sequence:
    """One request as the scheduler knows it."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    salt: str | None
    max_tokens: int
    num_computed_tokens: int = 0
    boundary: int = 0


class Workload:
    """Args:
    lockstep: The two caches.
    layout: The layout of both.
    seed: Decides everything.
    """

    max_prompt_scheduler_blocks = 16
    max_step_scheduler_blocks = 6
    num_probes = 10

    def __init__(self, lockstep: Lockstep, layout: Layout, pressure: Pressure, seed: int) -> None:
        self._caches = lockstep
        self._layout = layout
        self._pressure = pressure
        self._random = Random(seed)
        self._unit = layout.scheduler_block_size
        self._known: list[tuple[list[int], str | None]] = []
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._probes: list[str] = []
        self._names = 0
        # vLLM caches a state that drafts ran past and puts the right one there later; we cache none
        # that may be another's.
        self._speculative = 3 if layout.eagle and not layout.has_mamba else 0
        self.hits = 0
        self.refusals = 0

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_prompt_scheduler_blocks * self._unit

    def step(self) -> None:
        """One step of the engine: requests arrive, running ones advance, waiting ones are admitted,
        finished ones leave."""
        random = self._random
        if len(self._waiting) < 3 and random.random() < 0.6:
            self._submit()
        budget = random.choice((2, 3, self.max_step_scheduler_blocks)) * self._unit
        preempted = self._extend_running(budget)
        if not preempted:
            self._admit_waiting(budget)
        if random.random() < self._pressure.resets:
            self._reset()
        if random.random() < self._pressure.evictions:
            self._evict()

    # --- prompts ----------------------------------------------------------------------------------

    def _submit(self) -> None:
        token_ids, salt = self._prompt()
        for _ in range(2 if self._random.random() < 0.15 else 1):
            sequence = Sequence(
                self._name("r"), list(token_ids), len(token_ids), salt, self._output_length()
            )
            self._do("add", sequence.name, token_ids, salt)
            self._waiting.append(sequence)
        self._remember(token_ids, salt)
        self._add_probe(token_ids, salt)

    def _prompt(self) -> tuple[list[int], str | None]:
        """A new prompt, an old one again, or the beginning of an old one with another end; often a
        multiple of a block."""
        random = self._random
        start: list[int] = []
        salt = random.choice(SALTS)
        if self._known and random.random() < 0.8:
            start, salt = random.choice(self._known[-12:])
            if random.random() < 0.65:
                start = start[: self._length(len(start))]
        end = self._length(6 * self._unit) if not start or random.random() < 0.6 else 0
        token_ids = (start + self._tokens(end))[: self.max_prompt_tokens]
        return token_ids or self._tokens(1), salt

    def _length(self, limit: int) -> int:
        length = self._random.randint(0, limit)
        if self._random.random() < 0.5:
            grid = self._random.choice((self._unit, self._layout.hash_block_size))
            length = length // grid * grid + self._random.choice((0, 0, 0, 1, -1))
        return max(0, min(length, limit))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(count)]

    def _output_length(self) -> int:
        return int(self._random.expovariate(1 / (0.5 * self._unit))) + 1

    def _remember(self, token_ids: list[int], salt: str | None) -> None:
        self._known.append((list(token_ids), salt))
        del self._known[:-40]

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    # --- probes -----------------------------------------------------------------------------------

    def _add_probe(self, token_ids: list[int], salt: str | None) -> None:
        if self._random.random() < 0.3:
            token_ids = token_ids + self._tokens(self._length(2 * self._unit))
        name = self._name("probe")
        self._caches.do("add", name, token_ids, salt)
        self._probes.append(name)
        if len(self._probes) > self.num_probes:
            self._caches.do("forget", self._probes.pop(0))

    def _do(self, operation: str, *arguments: object) -> object:
        answer = self._caches.do(operation, *arguments)
        for name in self._random.sample(self._probes, min(2, len(self._probes))):
            self._caches.ask("hit", name)
        return answer

    # --- one step ---------------------------------------------------------------------------------

    def _extend_running(self, budget: int) -> bool:
        """Give every running request its tokens, oldest first; preempt the youngest if blocks are
        short."""
        preempted = False
        for sequence in list(self._running):
            if sequence not in self._running:
                continue
            drafts = self._drafts(sequence)
            wanted = self._chunk(sequence, sequence.num_computed_tokens, budget, drafts)
            while wanted and sequence in self._running:
                if self._do("extend", sequence.name, wanted, self._speculative):
                    self._compute(sequence, wanted, drafts)
                    break
                self.refusals += 1
                preempted = True
                self._give_way()
        return preempted

    def _drafts(self, sequence: Sequence) -> int:
        decoding = len(sequence.token_ids) > sequence.num_prompt_tokens
        return self._speculative if decoding else 0

    def _give_way(self) -> None:
        victim = self._running.pop()
        if self._running:
            self._preempt(victim)
        else:
            self._finish(victim)

    def _preempt(self, victim: Sequence) -> None:
        self._do("free", victim.name)
        victim.num_computed_tokens = 0
        self._waiting.insert(0, victim)

    def _admit_waiting(self, budget: int) -> None:
        while self._waiting and len(self._running) < self._pressure.max_running:
            sequence = self._waiting[0]
            hit = self._caches.ask("hit", sequence.name)
            self.hits += hit.num_tokens > 0
            sequence.boundary = hit.shared_prefix_boundary
            external = self._external(sequence, hit.num_tokens)
            wanted = self._chunk(sequence, hit.num_tokens + external, budget, 0)
            if external and self._layout.has_mamba:
                # As schedulers do that load while the model runs. With new tokens as well, a state
                # is needed for each; vLLM counts one, and fails if only one is free.
                wanted = 0
            step = FirstStep(wanted, self._speculative, external, self._random.random() < 0.5)
            if not (wanted or external) or not self._do("admit", sequence.name, step):
                self.refusals += 1
                self._drop_hopeless()
                return
            self._waiting.pop(0)
            self._running.append(sequence)
            sequence.num_computed_tokens = hit.num_tokens + external
            self._compute(sequence, wanted, 0)

    def _external(self, sequence: Sequence, hit: int) -> int:
        if self._random.random() >= self._pressure.external:
            return 0
        most = (len(sequence.token_ids) - 1 - hit) // self._unit
        return self._random.randint(0, most) * self._unit if most > 0 else 0

    def _drop_hopeless(self) -> None:
        if not self._running and self._random.random() < 0.5:
            self._do("forget", self._waiting.pop(0).name)

    def _compute(self, sequence: Sequence, num_tokens: int, drafts: int) -> None:
        """After the model has run, the tokens of the request are computed and, if its input is used
        up, new ones are appended."""
        end = sequence.num_computed_tokens + num_tokens
        if end < len(sequence.token_ids):
            self._set_computed(sequence, end)
            return
        rejected = self._random.randint(0, min(drafts, end - len(sequence.token_ids)))
        self._set_computed(sequence, end - rejected)
        self._append(sequence, end - rejected - len(sequence.token_ids) + 1)
        if len(sequence.token_ids) - sequence.num_prompt_tokens >= sequence.max_tokens:
            self._running.remove(sequence)
            self._finish(sequence)

    def _set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed_tokens = num_tokens
        self._caches.do("set_computed", sequence.name, num_tokens)

    def _append(self, sequence: Sequence, count: int) -> None:
        tokens = self._tokens(count)
        sequence.token_ids += tokens
        self._do("append", sequence.name, tokens)

    def _finish(self, sequence: Sequence) -> None:
        self._do("free", sequence.name)
        self._caches.do("forget", sequence.name)
        if self._random.random() < 0.6:
            self._remember(sequence.token_ids[: self.max_prompt_tokens], sequence.salt)

    def _reset(self) -> None:
        """Reset the cache, sometimes while blocks are in use, which both must refuse."""
        if self._random.random() < 0.7:
            while self._running:
                self._preempt(self._running.pop())
        self._do("reset")

    def _evict(self) -> None:
        cached = sorted(
            block for block in self._caches.mine.cached() if self._may_be_evicted(block)
        )
        if cached:
            count = max(1, len(cached) // self._random.choice((4, 8, 16)))
            self._do("evict", frozenset(self._random.sample(cached, count)))

    def _may_be_evicted(self, block: CachedBlock) -> bool:
        # vLLM caches the state at a prompt's end again in the request's next step, although it was
        # evicted as wrong.
        return not self._running or self._layout.groups[block.group].kind is not GroupKind.MAMBA

    # --- how many tokens --------------------------------------------------------------------------

    def _chunk(self, sequence: Sequence, start: int, budget: int, drafts: int) -> int:
        wanted = len(sequence.token_ids) + drafts - start
        if wanted > 1 and self._random.random() < 0.4:
            wanted = self._random.randint(1, wanted)
        wanted = min(wanted, budget)
        return self._mamba_chunk(sequence, start, wanted) if self._layout.has_mamba else wanted

    def _mamba_chunk(self, sequence: Sequence, start: int, wanted: int) -> int:
        """A state exists only where a chunk ends, so chunks of a prompt end at block boundaries,
        and once where it may be resumed."""
        size = self._unit
        total = len(sequence.token_ids)
        prefill_end = max(sequence.num_prompt_tokens, total - 1)
        if start >= prefill_end:
            return wanted
        end = start + wanted
        if end < prefill_end:
            end -= end % size
        last = (total if self._layout.eagle else total - 1) // size * size - (
            size if self._layout.eagle else 0
        )
        stops = (last, sequence.boundary // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)
