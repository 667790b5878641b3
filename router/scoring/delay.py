"""The policy that delays least: this request, those behind it, and those that would have found in
a cache what it evicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from random import Random
from typing import NamedTuple

from router.scoring.types import Candidate, Ranked, RouteRequest, Traffic, Weights

MOST_BUSY = 0.9
"""Queues have no length in the mean when a server is always busy: at most this share counts."""


class Delays(NamedTuple):
    """What one placement costs, in prefill tokens. Their sum is the cost."""

    ahead: float
    """What has to be done before this prompt's prefill."""
    own: float
    """This prompt's uncached tokens."""
    behind: float
    """What later requests wait longer."""
    decoding: float
    """What the responses under way there wait longer."""
    evicted: float
    """What will be computed again since this prompt takes its place."""
    follow_up: float
    """What the requests that continue this one will wait, since they will come here too."""


class LeastDelayPolicy:
    """The replica where this request, and all others for its sake, wait least."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random.random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by the delay that a placement causes.

        Args:
            request: Its prompt's length, and what is known of the model's requests.
            candidates: With their hits and loads, and what they evict next.
        """
        weights, tokens = self._weights, request.prompt_tokens
        delay = congestion(request.traffic, len(candidates))
        order = []
        for candidate in candidates:
            delays = delays_of(tokens, candidate, request.traffic, delay, weights)
            why = partial(_reason, tokens, candidate, delays)
            found = Ranked(candidate, sum(delays), why)
            order.append((found.cost, candidate.load.requests, self._random(), found))
        order.sort(key=_BEFORE_THE_RANKED)
        return [found for *_, found in order]


_BEFORE_THE_RANKED = itemgetter(0, 1, 2)


def congestion(traffic: Traffic, replicas: int) -> float:
    """How many tokens of delay a token of work causes to later requests, for each token that it
    lengthens a queue: the `k` of `k * (x**2 + 2 * u * x)`, which is what x tokens behind u others
    add to the waiting of those that arrive before the queue is empty again.

    Args:
        traffic: What is known of the model's requests.
        replicas: How many they are spread over.
    """
    speed, arrivals = traffic.prefill_tokens_per_s, traffic.arrivals_per_s / max(replicas, 1)
    busy = min(arrivals * traffic.uncached_tokens / speed, MOST_BUSY)
    return arrivals / (2 * speed * (1 - busy))


def delays_of(
    prompt_tokens: int, candidate: Candidate, traffic: Traffic, k: float, weights: Weights
) -> Delays:
    """What it costs to send a prompt to a candidate.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        candidate: Where it would go.
        traffic: What is known of the model's requests.
        k: From `congestion`.
        weights: What else costs how much.
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
        k * own * (own + 2 * ahead),
        own * load.decoding_requests * DECODE_DELAY,
        new * candidate.reuse_probability / speed,
        follow_ups(candidate, traffic),
    )


DECODE_DELAY = 0.0
FOLLOW_UPS = 0.0


def follow_ups(candidate: Candidate, traffic: Traffic) -> float:
    """What the turns that will follow this request wait at the candidate.

    Args:
        candidate: How busy it was lately.
        traffic: What is known of the model's requests.
    """
    if not FOLLOW_UPS:
        return 0.0
    busy = candidate.uncached_tokens_per_s / (traffic.prefill_tokens_per_s * candidate.speed)
    busy = min(busy, MOST_BUSY)
    turns = traffic.continued / max(1 - traffic.continued, 0.02)
    return FOLLOW_UPS * turns * traffic.uncached_tokens * busy / (1 - busy) / candidate.speed


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
    "for responses under way",
    "for what it evicts",
    "for the turns that follow",
)
