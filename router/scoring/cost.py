"""The estimated wait of a request at a replica, in prefill tokens."""

from __future__ import annotations

from typing import NamedTuple

from router.scoring.types import Candidate, Weights


class Estimate(NamedTuple):
    """What makes up the wait of one request at one replica.

    *gpu_tokens* and *lower_tokens* are the hit after discounts; *cost* is the sum of the parts
    divided by the speed.
    """

    candidate: Candidate
    prompt_tokens: int
    gpu_tokens: float
    lower_tokens: float
    uncached_tokens: float
    busy: float
    cost: float

    def reason(self) -> str:
        """All of it as one sentence."""
        parts = [*self._hit(), *self._load()]
        return f"{'; '.join(parts)}: an estimated wait of {self.cost:,.0f} prefill tokens"

    def _hit(self) -> list[str]:
        candidate = self.candidate
        if not self.prompt_tokens:
            return ["the prompt's length is unknown"]
        lower = candidate.cached_tokens - candidate.gpu_cached_tokens
        offloaded = f" and {lower:,} offloaded" if lower else ""
        parts = [
            f"{candidate.gpu_cached_tokens:,} of {self.prompt_tokens:,} tokens cached{offloaded}"
        ]
        if candidate.suspect:
            parts.append("discounted, since events were lost")
        if candidate.recent_tokens > candidate.gpu_cached_tokens:
            parts.append(f"{candidate.recent_tokens:,} sent there just now")
        return [*parts, f"{self.uncached_tokens:,.0f} to compute"]

    def _load(self) -> list[str]:
        candidate = self.candidate
        counts = (
            (candidate.queued_prefill_tokens, "tokens of other prompts ahead"),
            (candidate.decoding_requests, "in decode"),
            (candidate.foreign_requests, "from elsewhere"),
            (candidate.waiting_requests, "waiting in the engine"),
        )
        return [f"{count:,} {what}" for count, what in counts if count] or ["nothing ahead"]


def estimate(prompt_tokens: int, candidate: Candidate, weights: Weights) -> Estimate:
    """The wait of a prompt of *prompt_tokens* at *candidate*."""
    trust = weights.suspect_trust if candidate.suspect else 1.0
    gpu = max(candidate.gpu_cached_tokens * trust, candidate.recent_tokens * weights.recent_trust)
    gpu = min(gpu, prompt_tokens)
    lower = min(max(candidate.cached_tokens * trust - gpu, 0.0), prompt_tokens - gpu)
    uncached = prompt_tokens - gpu - lower
    busy = busyness(candidate, weights)
    cost = (uncached + lower * weights.lower_tier_token + busy) / candidate.speed
    return Estimate(candidate, prompt_tokens, gpu, lower, uncached, busy, cost)


def busyness(candidate: Candidate, weights: Weights) -> float:
    """What stands before any new request there, in prefill tokens at speed 1."""
    return (
        candidate.queued_prefill_tokens * weights.queued_prefill_token
        + candidate.decoding_requests * weights.decode_request
        + candidate.decode_context_tokens * weights.decode_context_token
        + candidate.foreign_requests * weights.foreign_request
        + candidate.waiting_requests * weights.waiting_request
    )
