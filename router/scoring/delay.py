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

        cost = u + x + k * (x**2 + 2 * u * x) + evicted * S       k = r / (2 * R * (1 - b))

    The third part is what this prompt adds to the waiting of those that arrive before the queue is
    empty again (of an M/G/1 queue; one step of policy iteration): r and b are those of the replica,
    so that a prefix that everybody asks for gets a second home before its first one is overrun. S
    is the probability that what is evicted will be used again. Nothing in it is a tuned weight.
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
        order = []
        for candidate in candidates:
            delays = delays_of(tokens, candidate, speed, weights)
            found = Ranked(candidate, sum(delays), partial(_reason, tokens, candidate, delays))
            order.append((found.cost, candidate.load.requests, self._random(), found))
        order.sort(key=_BEFORE_THE_RANKED)
        return [found for *_, found in order]


_BEFORE_THE_RANKED = itemgetter(0, 1, 2)


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
    load, speed = candidate.load, candidate.speed
    trust = weights.suspect_trust if candidate.suspect else 1.0
    gpu = max(candidate.gpu_cached_tokens * trust, candidate.recent_tokens)
    gpu = min(gpu, max(prompt_tokens - 1, 0))
    lower = min(max(candidate.cached_tokens * trust - gpu, 0.0), prompt_tokens - gpu)
    new = prompt_tokens - gpu
    own = new - lower + (lower * weights.of_lower(candidate.by_tier) if lower else 0.0)
    ahead = (
        max(load.queued_prefill_tokens - candidate.progress_tokens, 0.0)
        + load.decoding_requests * weights.decode_request
        + load.decode_context_tokens * weights.decode_context_token
        + load.foreign_requests * weights.foreign_request
        + load.waiting_requests * weights.waiting_request
    ) / speed
    own /= speed
    return Delays(
        ahead,
        own,
        congestion(candidate, prefill_tokens_per_s) * own * (own + 2 * ahead),
        new * candidate.reuse_probability / speed,
    )


def congestion(candidate: Candidate, prefill_tokens_per_s: float) -> float:
    """The `k` of the cost: what a token of work adds to the waiting of later requests, for each
    token that is in the queue with it.

    Args:
        candidate: What was sent there lately.
        prefill_tokens_per_s: Of a replica at speed 1.
    """
    speed = prefill_tokens_per_s * candidate.speed
    busy = min(candidate.uncached_tokens_per_s / speed, MOST_BUSY)
    return candidate.arrivals_per_s / (2 * speed * (1 - busy))


def _reason(prompt_tokens: int, candidate: Candidate, delays: Delays) -> str:
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
