"""Our policy with something that it learns, or a weight, wrong by a factor: what does it cost?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from router.policies import (
    Candidate,
    Policy,
    Ranked,
    RouteRequest,
    Weights,
)

ESTIMATES = ("prefill_tokens_per_s", "arrivals_per_s", "reuse_probability")
WEIGHTS = ("decode_request", "decode_context_token")
FACTORS = (0.0, 0.5, 2.0)
_NO_RATE = "prefill_tokens_per_s"


def misjudged_name(policy: str, what: str, factor: float) -> str:
    """Return the name of a run with something misjudged.

    Args:
        policy: The name of the policy.
        what: One of `ESTIMATES` or `WEIGHTS`.
        factor: What it is multiplied by.
    """
    return f"{policy}: {what} x {factor:g}"


def misjudged_names(policy: str) -> list[str]:
    """Return all of them; a rate of 0 would be no rate."""
    return [
        misjudged_name(policy, what, factor)
        for what in (*ESTIMATES, *WEIGHTS)
        for factor in FACTORS
        if factor or what != _NO_RATE
    ]


class Misjudgment:
    """The value that is wrong, and by how much; nothing for the plain name of a policy."""

    def __init__(self, name: str) -> None:
        self.policy, _, wrong = name.partition(": ")
        self._what, _, factor = wrong.partition(" x ")
        self._factor = float(factor or 1)

    def weights(self, weights: Weights) -> Weights:
        """Return the weights, one of them wrong."""
        if self._what not in WEIGHTS:
            return weights
        return replace(weights, **{self._what: getattr(weights, self._what) * self._factor})

    def around(self, policy: Policy) -> Policy:
        """Return the policy, told something wrong."""
        return _Misled(policy, self._what, self._factor) if self._what in ESTIMATES else policy


class _Misled:
    def __init__(self, policy: Policy, what: str, factor: float) -> None:
        self._policy = policy
        self._what = what
        self._factor = factor

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Rank with one estimate wrong."""
        if self._what != _NO_RATE:
            return self._policy.rank(request, [self._mistaken(each) for each in candidates])
        rate = request.prefill_tokens_per_s * self._factor
        slow_or_fast = msgspec.structs.replace(request, prefill_tokens_per_s=rate)
        return self._policy.rank(slow_or_fast, [self._further(each) for each in candidates])

    def _mistaken(self, candidate: Candidate) -> Candidate:
        value = getattr(candidate, self._what) * self._factor
        if self._what == "reuse_probability":
            value = min(value, 1.0)
        return msgspec.structs.replace(candidate, **{self._what: value})

    def _further(self, candidate: Candidate) -> Candidate:
        # What is believed to be done of a prefill follows from the rate.
        done = candidate.progress_tokens * self._factor
        return msgspec.structs.replace(
            candidate, progress_tokens=min(done, float(candidate.load.queued_prefill_tokens))
        )
