"""The reasons of candidates' places, as sentences for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from router._core import Policy as CorePolicy
from router.policies.types import Candidate, CandidateLoad, RouteRequest

Why: TypeAlias = Callable[[Candidate, float, int], str]
"""The reason of a candidate with its cost in a place, 0 for the first, as a sentence for people."""

_TERMS = (
    "ahead of it",
    "to compute",
    "for the machine's time",
    "for those behind it",
    "for what it evicts",
)
"""The parts of a delay, as the core has them."""


def reasons_of(name: str, core: CorePolicy, request: RouteRequest, mean_congestion: float) -> Why:
    """Return the reasons of a built-in policy.

    Args:
        core: Knows the parts of a cost.
    """
    if name == "least_delay":
        return partial(_delay, core, request, mean_congestion)
    if name == "prefix":
        return partial(_wait, core, request.prompt_tokens)
    if name == "session" and request.session:
        return _session
    return {"random": _random, "round_robin": _turn}.get(name, _load)


def empty_reason(excluded: Iterable[Candidate]) -> str:
    """Return why no replica could be ranked: the number of excluded ones by reason."""
    counts = Counter(candidate.obstacle for candidate in excluded)
    reasons = ", ".join(f"{count} {obstacle}" for obstacle, count in counts.most_common())
    return reasons or "none that the request may go to serves it"


def _delay(
    core: CorePolicy, request: RouteRequest, mean: float, candidate: Candidate, *_: object
) -> str:
    tokens = request.prompt_tokens
    delays = core.delays(tokens, candidate, request.prefill_tokens_per_s, mean)
    parts = candidate.hit_in_words(tokens)
    if candidate.junction_tokens:
        parts.append(f"{candidate.junction_tokens:,} more are worth as much to later prompts")
    if candidate.recent_tokens > candidate.gpu_cached_tokens:
        parts.append(f"{candidate.recent_tokens:,} being computed there")
    parts += [
        f"{delay:,.0f} {what}" for delay, what in zip(delays, _TERMS, strict=True) if delay >= 0.5
    ]
    return f"{'; '.join(parts)}: a delay of {sum(delays):,.0f} prefill tokens"


def _wait(
    core: CorePolicy, prompt_tokens: int, candidate: Candidate, cost: float, _place: int
) -> str:
    uncached = core.uncached(prompt_tokens, candidate)
    parts = [*_parts_of_hit(prompt_tokens, candidate, uncached), *_parts_of_load(candidate.load)]
    return f"{'; '.join(parts)}: an estimated wait of {cost:,.0f} prefill tokens"


def _parts_of_hit(prompt_tokens: int, candidate: Candidate, uncached: float) -> list[str]:
    parts, counted = candidate.hit_in_words(prompt_tokens), ""
    if not prompt_tokens:
        return parts
    if candidate.recent_tokens > candidate.gpu_cached_tokens:
        parts.append(f"{candidate.recent_tokens:,} expected from what was just sent there")
        counted = "counted as "
    return [*parts, f"{counted}{uncached:,.0f} to compute"]


def _parts_of_load(load: CandidateLoad) -> list[str]:
    counts = (
        (load.queued_prefill_tokens, "tokens of other prompts ahead"),
        (load.decoding_requests, "in decode"),
        (load.foreign_requests, "from elsewhere"),
        (load.waiting_requests, "waiting in the engine"),
    )
    return [f"{count:,} {what}" for count, what in counts if count] or ["nothing ahead"]


def _load(candidate: Candidate, cost: float, _place: int) -> str:
    return f"{candidate.load.requests:,} requests there, a wait of {cost:,.0f} prefill tokens"


def _random(_candidate: Candidate, _cost: float, _place: int) -> str:
    return "drawn at random"


def _turn(_candidate: Candidate, _cost: float, place: int) -> str:
    return "its turn" if place == 0 else f"{place} after the one whose turn it is"


def _session(_candidate: Candidate, _cost: float, place: int) -> str:
    return (
        "the replica of this session"
        if place == 0
        else f"{place} after the replica of this session"
    )
