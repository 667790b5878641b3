"""Routers that know only what they have sent where: SGLang's, the Gateway API's, AIBrix'."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from benchmarks.simulation.opponents.base import Opponent
from benchmarks.simulation.seen import STEP, known_marks, marks


class Historical(Opponent):
    """A router that remembers every prompt it has sent to a replica, and forgets none of it within
    an hour."""

    def begin(self) -> None:
        """See `Opponent`."""
        self.sent_marks: dict[str, set[int]] = {name: set() for name in self.loads}

    def hits(self, token_ids: Sequence[int]) -> dict[str, int]:
        """See `Opponent`."""
        prompt = marks(token_ids)
        found = {name: known_marks(prompt, sent) for name, sent in self.sent_marks.items()}
        return {name: known * STEP for name, known in found.items() if known}

    def sent(self, replica_id: str, token_ids: Sequence[int], hit: int) -> None:
        """See `Opponent`."""
        self.sent_marks[replica_id].update(marks(token_ids)[hit // STEP :])


class SGLangRouter(Historical):
    """The cache-aware policy of SGLang's router (documentation of the SGLang model gateway, 2026:
    cache threshold 0.3, absolute balance threshold 64, relative one 1.5).

    While the loads are balanced: the worker whose tree has the longest match if that is more than
    the threshold of the prompt, else the one with the smallest tree. Else the one with the fewest
    requests. The tree is a history; its bound of 2**26 characters is not reached here.
    """

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS_THRESHOLD = 64
    BALANCE_REL_THRESHOLD = 1.5

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        counts = [load.requests for load in self.loads.values()]
        apart = max(counts) - min(counts) > self.BALANCE_ABS_THRESHOLD
        if apart and max(counts) > self.BALANCE_REL_THRESHOLD * min(counts):
            return self.fewest_requests()
        best = max(hits.values(), default=0)
        if best > self.CACHE_THRESHOLD * prompt_tokens:
            return self.lowest({name: -hits.get(name, 0) for name in self.loads})
        return self.lowest({name: len(sent) for name, sent in self.sent_marks.items()})


class AIBrix(Historical):
    """The prefix-cache policy of AIBrix (README of its routing algorithms, v0.5.0; arXiv
    2504.03648).

    If the busiest replica has over 8 requests more than the idlest: the one with the fewest. Else
    the longest match among replicas whose requests do not exceed the mean by more than one
    standard deviation, equal ones by requests. Without any: the fewest requests.
    """

    IMBALANCE_ABS_COUNT = 8
    STANDARD_DEVIATION_FACTOR = 1.0

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:  # noqa: ARG002
        """See `Opponent`."""
        counts = [load.requests for load in self.loads.values()]
        if max(counts) - min(counts) > self.IMBALANCE_ABS_COUNT:
            return self.fewest_requests()
        most = statistics.fmean(counts) + self.STANDARD_DEVIATION_FACTOR * statistics.pstdev(counts)
        matching = sorted(hits, key=lambda name: (-hits[name], self.loads[name].requests))
        return next(
            (name for name in matching if self.loads[name].requests <= most),
            self.fewest_requests(),
        )


class GatewayApi(Opponent):
    """The approximate prefix plug-in of the Gateway API's endpoint picker, with its default
    weights: prefix 3, queue 2, KV cache utilisation 2 (Inference Extension v1.2; the plug-in takes
    block size and capacity from the engine, and matches at most 256 blocks).

    Gauges are those of the last scrape. The highest sum of scores wins.
    """

    MAX_PREFIX_BLOCKS = 256
    PREFIX_WEIGHT, QUEUE_WEIGHT, USAGE_WEIGHT = 3.0, 2.0, 2.0

    def begin(self) -> None:
        """See `Opponent`."""
        self._lru: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in self.loads}

    def hits(self, token_ids: Sequence[int]) -> dict[str, int]:
        """See `Opponent`."""
        prompt = self._marks(token_ids)
        found = {}
        for name, lru in self._lru.items():
            known = next((at for at, mark in enumerate(prompt) if mark not in lru), len(prompt))
            if known:
                found[name] = known * self.block_tokens
        return found

    def sent(self, replica_id: str, token_ids: Sequence[int], hit: int) -> None:  # noqa: ARG002
        """See `Opponent`."""
        lru = self._lru[replica_id]
        for mark in self._marks(token_ids):
            lru[mark] = None
            lru.move_to_end(mark)
        while len(lru) > self.replica.num_blocks:
            lru.popitem(last=False)

    def choose(self, prompt_tokens: int, hits: Mapping[str, int]) -> str:
        """See `Opponent`."""
        queues = queue_scores({name: load.waiting for name, load in self.loads.items()})
        whole = max(prompt_tokens // self.block_tokens * self.block_tokens, 1)
        return self.lowest(
            {
                name: -self.PREFIX_WEIGHT * hits.get(name, 0) / whole
                - self.QUEUE_WEIGHT * queues[name]
                - self.USAGE_WEIGHT * (1 - load.usage)
                for name, load in self.loads.items()
            }
        )

    def _marks(self, token_ids: Sequence[int]) -> list[int]:
        return marks(token_ids, self.block_tokens)[: self.MAX_PREFIX_BLOCKS]


def queue_scores(waiting: Mapping[str, int]) -> dict[str, float]:
    """1 for the shortest queue and 0 for the longest, in proportion; 1 for all if they are
    equal."""
    longest, shortest = max(waiting.values()), min(waiting.values())
    if longest == shortest:
        return dict.fromkeys(waiting, 1.0)
    return {name: (longest - count) / (longest - shortest) for name, count in waiting.items()}
