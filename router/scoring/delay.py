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

        cost = u + x + k * (x**2 + 2 * u * x) + (x + k * x**2) * S

        k = r / (2 * R * (1 - b))

    The third part is what this prompt adds to the waiting of those that arrive before the queue is
    empty again (of an M/G/1 queue; one step of policy iteration): r and b are those of the replica,
    so that a prefix that everybody asks for gets a second home before its first one is overrun. S
    is the probability that what is evicted will be used again: then it will be computed again, and
    delay others then. Nothing in it is a tuned weight.
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
        draw = self._random
        order = []
        for candidate in candidates:
            ahead, own, behind, evicted = _delays(tokens, candidate, speed, weights)
            load = candidate.load
            requests = load.prefilling_requests + load.decoding_requests + load.foreign_requests
            order.append((ahead + own + behind + evicted, requests, draw(), candidate))
        order.sort(key=_BEFORE_THE_CANDIDATE)
        return [
            Ranked(candidate, cost, partial(_reason, tokens, candidate, speed, weights))
            for cost, _, _, candidate in order
        ]


_BEFORE_THE_CANDIDATE = itemgetter(0, 1, 2)


def delays_of(
    prompt_tokens: int, candidate: Candidate, prefill_tokens_per_s: float, weights: Weights
) -> Delays:
    """What it costs to send a prompt to a candidate.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        candidate: Where it would go.
        prefill_tokens_per_s: Of a replica at speed 1.
        weights: What decoding, foreign and waiting requests and lower tiers cost.
    """
    return Delays(*_delays(prompt_tokens, candidate, prefill_tokens_per_s, weights))


def _delays(
    prompt_tokens: int, candidate: Candidate, prefill_tokens_per_s: float, weights: Weights
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
    return ahead, own, k * own * (own + 2 * ahead), reuse * (new + k * new * new)


def congestion(candidate: Candidate, prefill_tokens_per_s: float) -> float:
    """The `k` of the cost: what a token of work adds to the waiting of later requests, for each
    token that is in the queue with it.

    Args:
        candidate: What was sent there lately.
        prefill_tokens_per_s: Of a replica at speed 1.
    """
    speed = prefill_tokens_per_s * candidate.speed
    busy = candidate.uncached_tokens_per_s / speed
    return candidate.arrivals_per_s / (2 * speed * (1 - (busy if busy < MOST_BUSY else MOST_BUSY)))


def _reason(
    prompt_tokens: int, candidate: Candidate, prefill_tokens_per_s: float, weights: Weights
) -> str:
    delays = delays_of(prompt_tokens, candidate, prefill_tokens_per_s, weights)
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
