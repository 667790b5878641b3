"""The policy that delays least: this request, those behind it, and those that would have found in
a cache what it evicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from random import Random
from typing import NamedTuple

from router.scoring.types import Candidate, Ranked, RouteRequest, Weights

MOST_BUSY = 0.9
"""Queues have no length in the mean when a server is always busy: at most this share counts."""


class Delays(NamedTuple):
    """What one placement costs, in prefill tokens. Their sum is the cost."""

    ahead: float
    """What has to be done before this prompt's prefill."""
    own: float
    """This prompt's uncached tokens."""
    behind: float
    """What later requests wait longer there."""
    evicted: float
    """What will be computed again since this prompt takes its place."""


class LeastDelayPolicy:
    """The replica where this request, and all others for its sake, wait least.

    For x tokens to compute behind u others, where requests arrive at the rate r, R tokens are
    computed per second, and the share b of the time is busy:

        cost = u + x + 2 * k * u * x + (k + m) / 2 * x**2 + (x + m * x**2) * S

        k = r / (2 * R * (1 - b))

    The third and fourth part are what this prompt adds to the waiting of those that arrive before
    the queue is empty again (of an M/G/1 queue; one step of policy iteration). For k, r and b are
    those of the replica, so that a prefix that everybody asks for gets a second home before its
    first one is overrun; for m they are those of the mean replica. What is cold brings its own
    future there, so it counts halfway between: with k alone an idle replica looks free, and copies
    of what others hold drive out what they do not. S is the probability that what is evicted will
    be used again: then it will be computed again, wherever that may be, and delay others there.
    Nothing in it is a tuned weight.
    Among equals the one with the fewest requests, then at random.
    """

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random.random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by the delay that a placement causes.

        Args:
            request: Its prompt's length, and the speed of a replica.
            candidates: With their hits and loads, and what they evict next.
        """
        weights, tokens, speed = self._weights, request.prompt_tokens, request.prefill_tokens_per_s
        draw, mean = self._random, mean_congestion(candidates, speed)
        order = []
        for candidate in candidates:
            ahead, own, behind, evicted = _delays(tokens, candidate, speed, weights, mean)
            load = candidate.load
            requests = load.prefilling_requests + load.decoding_requests + load.foreign_requests
            order.append((ahead + own + behind + evicted, requests, draw(), candidate))
        order.sort(key=_BEFORE_THE_CANDIDATE)
        return [
            Ranked(candidate, cost, partial(_reason, tokens, candidate, speed, weights, mean))
            for cost, _, _, candidate in order
        ]


_BEFORE_THE_CANDIDATE = itemgetter(0, 1, 2)


def delays_of(
    prompt_tokens: int,
    candidate: Candidate,
    prefill_tokens_per_s: float,
    weights: Weights,
    mean: float | None = None,
) -> Delays:
    """What it costs to send a prompt to a candidate.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        candidate: Where it would go.
        prefill_tokens_per_s: Of a replica at speed 1.
        weights: What decoding, foreign and waiting requests and lower tiers cost.
        mean: `mean_congestion` of all candidates; None: that of this one.
    """
    if mean is None:
        mean = congestion(candidate, prefill_tokens_per_s)
    return Delays(*_delays(prompt_tokens, candidate, prefill_tokens_per_s, weights, mean))


def _delays(
    prompt_tokens: int,
    candidate: Candidate,
    prefill_tokens_per_s: float,
    weights: Weights,
    mean: float,
) -> tuple[float, float, float, float]:
    """The parts of `Delays`, without a name for each: this runs for every replica."""
    load, speed = candidate.load, candidate.speed
    gpu: float = candidate.gpu_cached_tokens
    total: float = candidate.cached_tokens
    if candidate.suspect:
        gpu, total = gpu * weights.suspect_trust, total * weights.suspect_trust
    if candidate.recent_tokens > gpu:
        gpu = candidate.recent_tokens
    if gpu >= prompt_tokens:
        gpu = max(prompt_tokens - 1, 0)
    own = new = prompt_tokens - gpu
    if total > gpu:
        lower = min(total - gpu, new)
        own += lower * (weights.of_lower(candidate.by_tier) - 1)
    queued = load.queued_prefill_tokens - candidate.progress_tokens
    ahead = (
        (queued if queued > 0 else 0.0)
        + load.decoding_requests * weights.decode_request
        + load.decode_context_tokens * weights.decode_context_token
        + load.foreign_requests * weights.foreign_request
        + load.waiting_requests * weights.waiting_request
    )
    if speed != 1.0:
        ahead, own, new = ahead / speed, own / speed, new / speed
    k, reuse = congestion(candidate, prefill_tokens_per_s), candidate.reuse_probability
    behind = own * (2 * k * ahead + (k + mean) / 2 * own)
    return ahead, own, behind, reuse * (new + mean * new * new)


def congestion(candidate: Candidate, prefill_tokens_per_s: float) -> float:
    """The `k` of the cost: what a token of work adds to the waiting of later requests, for each
    token that is in the queue with it.

    Args:
        candidate: What was sent there lately.
        prefill_tokens_per_s: Of a replica at speed 1.
    """
    speed = prefill_tokens_per_s * candidate.speed
    return _congestion(candidate.arrivals_per_s, candidate.uncached_tokens_per_s, speed)


def mean_congestion(candidates: Sequence[Candidate], prefill_tokens_per_s: float) -> float:
    """The `m` of the cost: the same of a replica that gets the mean of what all get.

    Args:
        candidates: All of them; 0 where there is none.
        prefill_tokens_per_s: Of a replica at speed 1.
    """
    arrivals = uncached = speeds = 0.0
    for candidate in candidates:
        arrivals += candidate.arrivals_per_s
        uncached += candidate.uncached_tokens_per_s
        speeds += candidate.speed
    if not candidates:
        return 0.0
    count = len(candidates)
    return _congestion(arrivals / count, uncached / count, prefill_tokens_per_s * speeds / count)


def _congestion(arrivals_per_s: float, uncached_tokens_per_s: float, speed: float) -> float:
    busy = uncached_tokens_per_s / speed
    return arrivals_per_s / (2 * speed * (1 - (busy if busy < MOST_BUSY else MOST_BUSY)))


def _reason(
    prompt_tokens: int,
    candidate: Candidate,
    prefill_tokens_per_s: float,
    weights: Weights,
    mean: float,
) -> str:
    delays = delays_of(prompt_tokens, candidate, prefill_tokens_per_s, weights, mean)
    cached, expected = candidate.cached_tokens, candidate.recent_tokens
    parts = [f"{cached:,} of {prompt_tokens:,} tokens cached"]
    if expected > candidate.gpu_cached_tokens:
        parts.append(f"{expected:,} being computed there")
    parts += [
        f"{delay:,.0f} {what}" for delay, what in zip(delays, _TERMS, strict=True) if delay >= 0.5
    ]
    return f"{'; '.join(parts)}: a delay of {sum(delays):,.0f} prefill tokens"


_TERMS = (
    "ahead of it",
    "to compute",
    "for those behind it",
    "for what it evicts",
)
