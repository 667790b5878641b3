"""Routers that follow the engines' events: Dynamo's, llm-d's, Mooncake's, LMetric, Preble's."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from benchmarks.simulation.layouts import TIME_MODEL
from benchmarks.simulation.opponents.base import EventDriven
from benchmarks.simulation.opponents.histories import queue_scores


class Dynamo(EventDriven):
    """The KV router of NVIDIA Dynamo (documentation of v0.8, KV Cache Routing), with its defaults:
    an overlap weight of 1 and a temperature of 0.

    The lowest `weight x prefill blocks + active blocks`: what is to be computed there, this prompt
    included, and what requests hold there, this one included.
    """

    OVERLAP_SCORE_WEIGHT = 1.0

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        size = self.block_tokens
        return self.lowest(
            {
                name: self.OVERLAP_SCORE_WEIGHT
                * (load.queued_tokens + prompt_tokens - hits.get(name, 0))
                / size
                + (load.context_tokens + prompt_tokens) / size
                for name, load in self.loads.items()
            }
        )


class LlmD(EventDriven):
    """The scorers of llm-d's precise prefix cache routing (guide of v0.4): the resident share of
    the prompt x 3, queue x 2, KV cache utilisation x 2, and x 2 for prompts that nobody holds the
    replica that has waited longest for one. The highest sum wins."""

    PREFIX_WEIGHT, QUEUE_WEIGHT, USAGE_WEIGHT, NO_HIT_WEIGHT = 3.0, 2.0, 2.0, 2.0

    def begin(self) -> None:
        """See `Opponent`."""
        super().begin()
        self._cold_order = list(self.loads)
        """The replicas that were given a cold prompt last stand at the end."""

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        queues = queue_scores({name: load.waiting for name, load in self.loads.items()})
        is_cold = not any(hits.values())
        last = max(len(self._cold_order) - 1, 1)
        chosen = self.lowest(
            {
                name: -self.PREFIX_WEIGHT * hits.get(name, 0) / prompt_tokens
                - self.QUEUE_WEIGHT * queues[name]
                - self.USAGE_WEIGHT * (1 - load.usage)
                - self.NO_HIT_WEIGHT * is_cold * (1 - self._cold_order.index(name) / last)
                for name, load in self.loads.items()
            }
        )
        if is_cold:
            self._cold_order.remove(chosen)
            self._cold_order.append(chosen)
        return chosen


class Mooncake(EventDriven):
    """Cache-aware scheduling of Mooncake (arXiv 2407.00079, algorithm 1): the shortest estimated
    TTFT, the sum of what is queued there and of the prefill behind the longest match. Replicas do
    not copy prefixes from each other here, so that its second branch does not apply."""

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        return self.lowest(
            {
                name: TIME_MODEL.prefill_s(0, load.queued_tokens)
                + TIME_MODEL.prefill_s(hits.get(name, 0), prompt_tokens)
                for name, load in self.loads.items()
            }
        )


class LMetric(EventDriven):
    """LMetric (arXiv 2603.15202): the lowest product of the new prefill tokens, those in the queue
    included, and the batch size. This request counts in both, so that neither is zero."""

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        return self.lowest(
            {
                name: (load.queued_tokens + prompt_tokens - hits.get(name, 0)) * (load.requests + 1)
                for name, load in self.loads.items()
            }
        )


class Preble(EventDriven):
    """E2 of Preble (arXiv 2407.00023, section 3.2).

    If more of the prompt is cached than not: the replica with the longest match, the lightest of
    several ("exploit"). Else the lowest sum of the work assigned in the last three minutes, of what
    would have to be evicted, weighed with how often its replica's content was used, and of the
    prefill ("explore"). A replica that has more than twice the work of the lightest is relieved:
    what would exploit it explores. Evicted content is valued with its replica's mean, not node by
    node.
    """

    WINDOW_S = 180.0
    BALANCE_THRESHOLD = 2.0
    LITTLE_WORK_S = 1.0
    """No replica is relieved for less than this."""

    def begin(self) -> None:
        """See `Opponent`."""
        super().begin()
        self._assigned: deque[tuple[float, str, float, bool]] = deque()
        """The requests of the window: time, replica, seconds of work, whether it hit."""
        self._work_s = dict.fromkeys(self.loads, 0.0)
        self._uses = dict.fromkeys(self.loads, 0)
        self._held_tokens = dict.fromkeys(self.loads, 0)
        groups = len(self.replica.model().layer_groups())
        self._capacity_tokens = self.replica.num_blocks // groups * self.block_tokens

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        self._forget()
        best = max(hits.values(), default=0)
        if best > prompt_tokens - best:
            holders = {name: self._work_s[name] for name in self.loads if hits.get(name) == best}
            chosen = self.lowest(holders)
            lightest_s = min(self._work_s.values())
            if self._work_s[chosen] <= self.BALANCE_THRESHOLD * lightest_s + self.LITTLE_WORK_S:
                return chosen
        return self.lowest(
            {
                name: self._work_s[name]
                + self._eviction_s(name, prompt_tokens - hits.get(name, 0))
                + TIME_MODEL.prefill_s(hits.get(name, 0), prompt_tokens)
                for name in self.loads
            }
        )

    def sent(self, replica_id: str, token_ids: Sequence[int], hit: int) -> None:
        """See `Opponent`."""
        work_s = TIME_MODEL.prefill_s(hit, len(token_ids)) + TIME_MODEL.decode_step_s(1)
        self._assigned.append((self.clock(), replica_id, work_s, hit > 0))
        self._work_s[replica_id] += work_s
        self._uses[replica_id] += hit > 0
        held = self._held_tokens[replica_id] + len(token_ids) - hit
        self._held_tokens[replica_id] = min(held, self._capacity_tokens)

    def _eviction_s(self, name: str, new_tokens: int) -> float:
        """Return the time to compute again what makes room, times the chance that it is asked
        for."""
        evicted = max(0, self._held_tokens[name] + new_tokens - self._capacity_tokens)
        return TIME_MODEL.prefill_s(0, evicted) * self._uses[name] / max(len(self._assigned), 1)

    def _forget(self) -> None:
        oldest_s = self.clock() - self.WINDOW_S
        while self._assigned and self._assigned[0][0] < oldest_s:
            _, name, work_s, was_hit = self._assigned.popleft()
            self._work_s[name] -= work_s
            self._uses[name] -= was_hit
