"""The estimated wait of a request at a replica, in prefill tokens."""

from __future__ import annotations

from typing import NamedTuple

from router.scoring.types import Candidate, CandidateLoad, Weights


class Estimate(NamedTuple):
    """What makes up the wait of one request at one replica; its `str()` says so in a sentence."""

    candidate: Candidate
    prompt_tokens: int
    gpu_tokens: float
    """Of the hit, on the GPU, after discounts."""
    lower_tokens: float
    """Of the hit, in lower tiers, after discounts."""
    uncached_tokens: float
    busy: float
    """See `busyness`."""
    cost: float
    """The sum of the parts, divided by the speed."""

    def __str__(self) -> str:
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
        load = self.candidate.load
        counts = (
            (load.queued_prefill_tokens, "tokens of other prompts ahead"),
            (load.decoding_requests, "in decode"),
            (load.foreign_requests, "from elsewhere"),
            (load.waiting_requests, "waiting in the engine"),
        )
        return [f"{count:,} {what}" for count, what in counts if count] or ["nothing ahead"]


def estimate(prompt_tokens: int, candidate: Candidate, weights: Weights) -> Estimate:
    """The wait of a prompt at a candidate.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        candidate: Where it would wait.
        weights: What each part costs.
    """
    trust = weights.suspect_trust if candidate.suspect else 1.0
    gpu = max(candidate.gpu_cached_tokens * trust, candidate.recent_tokens * weights.recent_trust)
    gpu = min(gpu, prompt_tokens)
    lower = min(max(candidate.cached_tokens * trust - gpu, 0.0), prompt_tokens - gpu)
    uncached = prompt_tokens - gpu - lower
    busy = busyness(candidate.load, weights)
    cost = (uncached + lower * weights.lower_tier_token + busy) / candidate.speed
    return Estimate(candidate, prompt_tokens, gpu, lower, uncached, busy, cost)


def busyness(load: CandidateLoad, weights: Weights) -> float:
    """The work ahead of any new request at a replica, in prefill tokens at speed 1.

    Args:
        load: What is there.
        weights: What each part costs.
    """
    return (
        load.queued_prefill_tokens * weights.queued_prefill_token
        + load.decoding_requests * weights.decode_request
        + load.decode_context_tokens * weights.decode_context_token
        + load.foreign_requests * weights.foreign_request
        + load.waiting_requests * weights.waiting_request
    )
