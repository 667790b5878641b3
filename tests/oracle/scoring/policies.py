"""The built-in policies in plain Python, which say why they order as they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any, Protocol, TypeAlias

from typing_extensions import override

from router.policies import (
    Candidate,
    CandidateLoad,
    Order,
    PolicySettings,
    Ranked,
    RouteRequest,
    Standings,
    Weights,
    Why,
)
from tests.oracle.scoring.delay import LeastDelayPolicy
from tests.oracle.scoring.standings import (
    RanksByOrder,
    fewest_requests,
    lower_cost,
    share_that_counts,
    standings_of,
    state_of,
)


class Reference(Protocol):
    """One of them: as a plug-in that orders standings."""

    needs_outlook: bool

    def order(self, request: RouteRequest, standings: Any) -> Order:
        """See `router.policies.OrdersStandings`."""

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """See `router.policies.Policy`."""


# --- by the estimated wait, in prefill tokens -----------------------------------------------------


def estimate(prompt_tokens: int, candidate: Candidate, weights: Weights) -> Ranked:
    """The wait of a prompt at a candidate, with what it consists of.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        candidate: Where it would wait.
        weights: What each part costs.
    """
    (cost,) = waits(prompt_tokens, standings_of((candidate,)), weights)
    return Ranked(candidate, cost, partial(_parts, prompt_tokens, weights, candidate, cost, 0))


def waits(prompt_tokens: int, standings: Standings, weights: Weights) -> list[float]:
    """The wait of a prompt at each of several candidates, in prefill tokens.

    Args:
        prompt_tokens: Length of the prompt; hits beyond it do not count.
        standings: Where it would wait.
        weights: What each part costs.
    """
    recent_trust, busy = weights.recent_trust, busynesses(standings, weights)
    columns = standings.gpu_cached_tokens, standings.cached_tokens, standings.recent_tokens
    found: list[float] = []
    for state, ahead, gpu, total, recent in zip(standings.states, busy, *columns, strict=True):
        if state[3] or total > gpu:
            price = lower_cost(standings, len(found), weights) if total > gpu else 0.0
            hit = gpu, total, recent
            uncached, below = _uncached(prompt_tokens, hit, price, state[3], weights)
            found.append((uncached + below + ahead) / state[2])
            continue
        # The same of what is on the GPU only, and certain.
        cached = recent * recent_trust if recent else 0.0
        if cached < gpu:
            cached = gpu
        found.append(
            ((prompt_tokens - cached if cached < prompt_tokens else 0.0) + ahead) / state[2]
        )
    return found


_Hit: TypeAlias = tuple[int, int, int]
"""Of a candidate, `gpu_cached_tokens`, `cached_tokens` and `recent_tokens`."""


def _uncached(
    prompt_tokens: int, hit: _Hit, price: float, doubt: bool | float, weights: Weights
) -> tuple[float, float]:
    """How many tokens count as uncached, and what those in lower tiers cost at *price* each."""
    gpu_tokens, total, recent = hit
    trust = share_that_counts(doubt, weights.suspect_trust) if doubt else 1.0
    gpu = min(max(gpu_tokens * trust, recent * weights.recent_trust), prompt_tokens)
    lower = min(max(total * trust - gpu, 0.0), prompt_tokens - gpu)
    return prompt_tokens - gpu - lower, lower * price


def _parts(
    prompt_tokens: int, weights: Weights, candidate: Candidate, cost: float, _place: int
) -> str:
    """The parts of a wait as a sentence."""
    hit = candidate.gpu_cached_tokens, candidate.cached_tokens, candidate.recent_tokens
    uncached, _ = _uncached(prompt_tokens, hit, 0.0, state_of(candidate)[3], weights)
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


def busynesses(standings: Standings, weights: Weights) -> list[float]:
    """The work ahead of any new request at each candidate, in prefill tokens at speed 1.

    Args:
        standings: With what is there.
        weights: What each part costs.
    """
    token, context_token = weights.queued_prefill_token, weights.decode_context_token
    decode, foreign_one = weights.decode_request, weights.foreign_request
    waiting_one = weights.waiting_request
    found = []
    for _, _, _, _, queued, _, decoding, context, foreign, waiting in standings.states:
        busy = queued * token + decoding * decode + context * context_token
        if foreign:
            busy += foreign * foreign_one
        if waiting:
            busy += waiting * waiting_one
        found.append(busy)
    return found


class PrefixPolicy(RanksByOrder):
    """The replica where this request waits least, given its cache and its load.

    A hot prefix stays on the replica that has it as long as waiting there is cheaper than computing
    it again elsewhere, and then spills over by itself: no threshold, only costs. Among equals the
    one with the fewest requests, then at random.
    """

    needs_outlook = False

    def __init__(self, weights: Weights, random: Random) -> None:
        self.weights = weights
        self._random = random.random

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        return Order(
            waits(request.prompt_tokens, standings, self.weights),
            fewest_requests(standings, self._random),
            self.why(request, 0.0),
        )

    def why(self, request: RouteRequest, _mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        return partial(_parts, request.prompt_tokens, self.weights)


# --- without a look at the cache ------------------------------------------------------------------


class RoundRobinPolicy(RanksByOrder):
    """Each replica in its turn, per model.

    With one turn for all models, two whose requests alternate would each always meet the same
    replica.
    """

    MAX_MODELS = 1024
    needs_outlook = False

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        """Begin with the candidate whose turn it is, by id."""
        by_id = [state[0] for state in standings.states]
        numbers = sorted(range(len(by_id)), key=by_id.__getitem__)
        start = self._next_turn(request.model) % len(by_id)
        return _in_order(numbers[start:] + numbers[:start], _turn_reason)

    def why(self, _request: RouteRequest, _mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        return _turn_reason

    def _next_turn(self, model: str) -> int:
        turn = self._turns.get(model, 0)
        if turn == 0 and len(self._turns) >= self.MAX_MODELS:
            self._turns.clear()
        self._turns[model] = turn + 1
        return turn


class RandomPolicy(RanksByOrder):
    """Any order, each as likely as the others."""

    needs_outlook = False

    def __init__(self, random: Random) -> None:
        self._random = random

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        numbers = list(range(len(standings)))
        self._random.shuffle(numbers)
        return _in_order(numbers, _random_reason)

    def why(self, _request: RouteRequest, _mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        return _random_reason


class LeastLoadedPolicy(RanksByOrder):
    """The replica with the least to do first, whatever is cached there; ties at random."""

    needs_outlook = False

    def __init__(self, weights: Weights, random: Random) -> None:
        self.weights = weights
        self._random = random.random

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        return Order(
            _waits_in_line(standings, self.weights),
            fewest_requests(standings, self._random),
            _load_reason,
        )

    def why(self, _request: RouteRequest, _mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        return _load_reason


def _waits_in_line(standings: Standings, weights: Weights) -> list[float]:
    busy = busynesses(standings, weights)
    return [ahead / state[2] for ahead, state in zip(busy, standings.states, strict=True)]


def _load_reason(candidate: Candidate, cost: float, _place: int) -> str:
    return f"{candidate.load.requests:,} requests there, a wait of {cost:,.0f} prefill tokens"


def _in_order(numbers: Sequence[int], why: Callable[[Candidate, float, int], str]) -> Order:
    """The order of candidates whose cost is their place."""
    costs = [0] * len(numbers)
    for place, number in enumerate(numbers):
        costs[number] = place
    return Order(costs, costs.__getitem__, why)


def _random_reason(_candidate: Candidate, _cost: float, _place: int) -> str:
    return "drawn at random"


def _turn_reason(_candidate: Candidate, _cost: float, place: int) -> str:
    return "its turn" if place == 0 else f"{place} after the one whose turn it is"


# --- by session -----------------------------------------------------------------------------------


class SessionPolicy(RanksByOrder):
    """One session, one replica, as long as it can serve; without a session, the least loaded.

    Rendezvous hashing (Thaler & Ravishankar, 1998): every replica draws a number from (session,
    replica), and the lowest wins. When a replica is removed, only its own sessions move, each to
    the replica with its next lowest number; one that is added takes only what it wins. No ring,
    nothing to rebuild, the same choice in every router. Speeds enter as in weighted rendezvous
    (Schindelhauer & Schomaker, 2005): with exponentially distributed numbers a replica of speed 2
    wins twice as often.
    """

    needs_outlook = False

    def __init__(self, weights: Weights, random: Random) -> None:
        self.weights = weights
        self._without_session = LeastLoadedPolicy(weights, random)

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        """By the numbers that the candidates draw for the session."""
        if not request.session:
            return self._without_session.order(request, standings)
        # A client may send a lone surrogate.
        session, states = request.session.encode("utf-8", "surrogatepass"), standings.states
        draws = [draw(session, state[0], state[2]) for state in states]
        return Order(draws, lambda number: states[number][0], _session_reason)

    def why(self, request: RouteRequest, _mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        return _session_reason if request.session else _load_reason


def draw(session: bytes, replica_id: str, speed: float) -> float:
    """The number that a candidate draws: exponentially distributed, at the rate of its speed.

    Args:
        session: What the client calls its session.
        replica_id: The candidate's.
        speed: The candidate's.
    """
    name = replica_id.encode()
    digest = blake2b(b"%d:%b%b" % (len(name), name, session), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 1) / 2**64
    return -math.log(uniform) / speed


def _session_reason(_candidate: Candidate, _cost: float, place: int) -> str:
    return (
        "the replica of this session"
        if place == 0
        else f"{place} after the replica of this session"
    )


# --- by name --------------------------------------------------------------------------------------

LEAST_DELAY = "least_delay"
REFERENCES: dict[str, Callable[[PolicySettings], Reference]] = {
    "prefix": lambda settings: PrefixPolicy(settings.weights, settings.random),
    LEAST_DELAY: lambda settings: LeastDelayPolicy(settings.weights, settings.random),
    "round_robin": lambda _settings: RoundRobinPolicy(),
    "random": lambda settings: RandomPolicy(settings.random),
    "least_loaded": lambda settings: LeastLoadedPolicy(settings.weights, settings.random),
    "session": lambda settings: SessionPolicy(settings.weights, settings.random),
}


def make_reference(name: str, settings: PolicySettings | None = None) -> Reference:
    """The readable form of a built-in policy: it can be used as a plug-in.

    Args:
        name: The policy's.
        settings: What it is made from; None: the defaults.
    """
    return REFERENCES[name](settings or PolicySettings())
