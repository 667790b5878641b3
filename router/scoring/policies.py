"""The policies, and how one is found by name.

A plug-in is a callable that takes a `PolicySettings` and returns a `Policy`:

    [project.entry-points."kvroute.policies"]
    cheapest = "my_package:CheapestPolicy"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from random import Random
from typing import Any

from kvevents.plugins import PlugIns
from router.errors import PolicyError
from router.scoring.delay import LeastDelayPolicy
from router.scoring.types import Candidate, CandidateLoad, Policy, Ranked, RouteRequest, Weights

# --- by the estimated wait, in prefill tokens -----------------------------------------------------


def estimate(prompt_tokens: int, candidate: Candidate, weights: Weights) -> Ranked:
    """The wait of a prompt at a candidate, with what it consists of.

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
    lower_cost = lower * weights.of_lower(candidate.by_tier) if lower else 0.0
    cost = (uncached + lower_cost + busyness(candidate.load, weights)) / candidate.speed
    return Ranked(candidate, cost, partial(_parts, prompt_tokens, candidate, uncached, cost))


def _parts(prompt_tokens: int, candidate: Candidate, uncached: float, cost: float) -> str:
    """The parts of a wait as a sentence."""
    parts = [*_parts_of_hit(prompt_tokens, candidate, uncached), *_parts_of_load(candidate.load)]
    return f"{'; '.join(parts)}: an estimated wait of {cost:,.0f} prefill tokens"


def _parts_of_hit(prompt_tokens: int, candidate: Candidate, uncached: float) -> list[str]:
    if not prompt_tokens:
        return ["the prompt's length is unknown"]
    lower = candidate.cached_tokens - candidate.gpu_cached_tokens
    where = ", ".join(f"{tokens:,} {name}" for name, tokens in candidate.by_tier)
    offloaded = f" and {lower:,} offloaded" + (f" ({where})" if where else "") if lower else ""
    parts = [f"{candidate.gpu_cached_tokens:,} of {prompt_tokens:,} tokens cached{offloaded}"]
    if candidate.suspect:
        parts.append("discounted, since events were lost")
    counted = ""
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


_BEFORE_THE_ESTIMATE = itemgetter(0, 1, 2)


class PrefixPolicy:
    """The default: the replica where this request waits least, given its cache and its load.

    A hot prefix stays on the replica that has it as long as waiting there is cheaper than computing
    it again elsewhere, and then spills over by itself: no threshold, only costs. Among equals the
    one with the fewest requests, then at random.
    """

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random.random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by estimated wait.

        Args:
            request: Only the prompt's length matters.
            candidates: With their hits and loads.
        """
        draw, tokens, weights = self._random, request.prompt_tokens, self._weights
        estimates = [estimate(tokens, candidate, weights) for candidate in candidates]
        order = [(found.cost, found.candidate.load.requests, draw(), found) for found in estimates]
        order.sort(key=_BEFORE_THE_ESTIMATE)
        return [found for *_, found in order]


# --- without a look at the cache ------------------------------------------------------------------


class RoundRobinPolicy:
    """Each replica in its turn, per model.

    With one turn for all models, two whose requests alternate would each always meet the same
    replica.
    """

    MAX_MODELS = 1024

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Begin with the candidate whose turn it is, by id.

        Args:
            request: Only its model matters.
            candidates: In any order.
        """
        if not candidates:
            return []
        ordered = sorted(candidates, key=_by_id)
        start = self._next_turn(request.model) % len(ordered)
        turn = ordered[start:] + ordered[:start]
        return [
            Ranked(candidate, index, _turn_reason(index)) for index, candidate in enumerate(turn)
        ]

    def _next_turn(self, model: str) -> int:
        turn = self._turns.get(model, 0)
        if turn == 0 and len(self._turns) >= self.MAX_MODELS:
            self._turns.clear()
        self._turns[model] = turn + 1
        return turn


class RandomPolicy:
    """Any order, each as likely as the others."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:  # noqa: ARG002
        """Shuffle.

        Args:
            request: Not looked at.
            candidates: In any order.
        """
        ordered = list(candidates)
        self._random.shuffle(ordered)
        return [
            Ranked(candidate, index, "drawn at random") for index, candidate in enumerate(ordered)
        ]


class LeastLoadedPolicy:
    """The replica with the least to do first, whatever is cached there; ties at random."""

    def __init__(self, weights: Weights, random: Random) -> None:
        self._weights = weights
        self._random = random

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:  # noqa: ARG002
        """Order by load.

        Args:
            request: Not looked at.
            candidates: With their loads.
        """
        loads = [
            (busyness(candidate.load, self._weights) / candidate.speed, candidate)
            for candidate in candidates
        ]
        loads.sort(key=lambda found: (found[0], found[1].load.requests, self._random.random()))
        return [
            Ranked(candidate, cost, partial(_load_reason, candidate.load.requests, cost))
            for cost, candidate in loads
        ]


def _load_reason(requests: int, cost: float) -> str:
    return f"{requests:,} requests there, a wait of {cost:,.0f} prefill tokens"


def _by_id(candidate: Candidate) -> str:
    return candidate.replica_id


def _turn_reason(index: int) -> str:
    return "its turn" if index == 0 else f"{index} after the one whose turn it is"


# --- by session -----------------------------------------------------------------------------------


class SessionPolicy:
    """One session, one replica, as long as it can serve; without a session, the least loaded.

    Rendezvous hashing (Thaler & Ravishankar, 1998): every replica draws a number from (session,
    replica), and the lowest wins. When a replica is removed, only its own sessions move, each to
    the replica with its next lowest number; one that is added takes only what it wins. No ring,
    nothing to rebuild, the same choice in every router. Speeds enter as in weighted rendezvous
    (Schindelhauer & Schomaker, 2005): with exponentially distributed numbers a replica of speed 2
    wins twice as often.
    """

    def __init__(self, weights: Weights, random: Random) -> None:
        self._without_session = LeastLoadedPolicy(weights, random)

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order by the numbers that the candidates draw for the session.

        Args:
            request: Its session decides.
            candidates: In any order.
        """
        if not request.session:
            return self._without_session.rank(request, candidates)
        # A client may send a lone surrogate.
        session = request.session.encode("utf-8", "surrogatepass")
        draws = sorted(
            (draw(session, candidate), candidate.replica_id, candidate) for candidate in candidates
        )
        return [
            Ranked(candidate, number, _reason(index))
            for index, (number, _, candidate) in enumerate(draws)
        ]


def draw(session: bytes, candidate: Candidate) -> float:
    """The number that a candidate draws: exponentially distributed, at the rate of its speed.

    Args:
        session: What the client calls its session.
        candidate: Its id and speed matter.
    """
    name = candidate.replica_id.encode()
    digest = blake2b(b"%d:%b%b" % (len(name), name, session), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 1) / 2**64
    return -math.log(uniform) / candidate.speed


def _reason(index: int) -> str:
    return (
        "the replica of this session"
        if index == 0
        else f"{index} after the replica of this session"
    )


# --- by name --------------------------------------------------------------------------------------


GROUP = "kvroute.policies"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy is made from."""

    weights: Weights = field(default_factory=Weights)
    """Costs, for policies that estimate."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`policy.options` of the configuration, for plug-ins; the plug-in checks it."""
    random: Random = field(default_factory=Random)
    """The source of every random choice, so that tests can repeat one."""


LEAST_DELAY = "least_delay"
BUILT_IN: dict[str, Callable[[PolicySettings], Policy]] = {
    "prefix": lambda settings: PrefixPolicy(settings.weights, settings.random),
    LEAST_DELAY: lambda settings: LeastDelayPolicy(settings.weights, settings.random),
    "round_robin": lambda _settings: RoundRobinPolicy(),
    "random": lambda settings: RandomPolicy(settings.random),
    "least_loaded": lambda settings: LeastLoadedPolicy(settings.weights, settings.random),
    "session": lambda settings: SessionPolicy(settings.weights, settings.random),
}


_policies = PlugIns(GROUP, "policy.name", BUILT_IN, ("rank",), PolicyError)


def policy_names() -> list[str]:
    """All names that `make_policy` knows, built-in ones first."""
    return _policies.names()


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Make the policy of that name.

    Args:
        name: A built-in policy or a plug-in; a built-in one wins over a plug-in of the same name.
        settings: What it is made from; None: the defaults.

    Raises:
        PolicyError: The name is unknown, its plug-in cannot be used, or a built-in policy has
            options. What a plug-in's own code raises goes through.
    """
    settings = settings or PolicySettings()
    if name in BUILT_IN and settings.options:
        raise PolicyError(
            f"policy.options: {sorted(settings.options)}; the built-in policy {name!r} takes none"
        )
    return _policies.make(name, settings)
