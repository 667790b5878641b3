"""The policy that delays least: this request, those behind it, and those that would have found in
a cache what it evicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from typing_extensions import override

from router.policies import (
    Candidate,
    Order,
    RouteRequest,
    Standings,
    Weights,
    Why,
)
from router.policies.types import KEY_TOKENS
from tests.oracle.scoring.standings import (
    RanksByOrder,
    fewest_requests,
    lower_cost,
    share_that_counts,
    speed_of,
    standings_of,
)

MOST_BUSY = 0.9
"""Queues have no length in the mean when a server is always busy: at most this share counts."""


WORK = 0.2
"""What computing a token costs beside the time that it takes: the machine is busy with it, even
where rates of the past say that nobody will wait. It decides between replicas that would respond
about as soon, and keeps equal prompts together."""
EQUAL = 64.0
"""Costs that differ by no more, for another reason than the hit, are taken for equal where a prompt
has a home: that is less than an engine's step takes."""


class Delays(NamedTuple):
    """What one placement costs, in prefill tokens. Their sum is the cost."""

    ahead: float
    """What has to be done before this prompt's prefill."""
    own: float
    """This prompt's uncached tokens, those of a junction left out."""
    work: float
    """That the machine is busy with them."""
    behind: float
    """What later requests wait longer there."""
    evicted: float
    """What will be computed again since this prompt takes its place."""


class LeastDelayPolicy(RanksByOrder):
    """The replica where this request, and all others for its sake, wait least.

    For x tokens to compute behind u others, where requests arrive at the rate r, R tokens are
    computed per second, and the share b of the time is busy:

        cost = u + x + w * x + 2 * k * u * x + sqrt(k * m) * x**2 + (y + m * y**2) * S

        k = r / (2 * R * (1 - b))

    The share w is `WORK`: of two replicas that would respond as soon, the one that has to compute
    less. The parts with k are what this prompt adds to the waiting of those that arrive before
    the queue is empty again (of an M/G/1 queue; one step of policy iteration). For k, r and b are
    those of the replica, so that a prefix that everybody asks for gets a second home before its
    first one is overrun; for m they are those of the mean replica. What is cold brings its own
    future there, so the rate that it will meet is between the two, and halfway between rates is
    their geometric mean: with k alone a quiet replica is flooded with copies of what others hold,
    which drive out what they do not; with m alone nothing gets a second home in time. S is the
    probability that what is evicted will be used again: then it will be computed again, wherever
    that may be, and delay others there. What counts is y: of the tokens that come onto the GPU,
    the share that it takes to bring as many back, all where nothing below holds what the GPU gives
    up, a tenth where a tier does that loads ten times as fast as the GPU computes. Nothing in it
    is a tuned weight. A token below the GPU, in a tier or a store that the replica reads, counts in
    x at the price of loading it, which is measured; where nearly everything can be loaded anywhere,
    load alone decides.
    A junction counts as cached. This prompt computes it wherever it goes; but there it makes a hit
    for all later ones, elsewhere a second copy that nobody can hit either, and the next one has the
    same choice again: so it goes where it would go if the hit were there already.
    Among equals the home of what is cached nowhere: prompts that begin alike have the same one, so
    that they meet before events tell of the first, also when different routers get them. Prompts
    too short for that go to the one with the fewest requests, then anywhere.
    """

    needs_outlook = True

    def __init__(self, weights: Weights, random: Random) -> None:
        self.weights = weights
        self._random = random.random

    @override
    def order(self, request: RouteRequest, standings: Standings) -> Order:
        weights, tokens, speed = self.weights, request.prompt_tokens, request.prefill_tokens_per_s
        mean = _mean_congestion(standings, speed)
        costs = _costs(tokens, standings, speed, weights, mean)
        home = _home(request.keys, standings)
        if home is None:
            tie: Callable[[int], Any] = fewest_requests(standings, self._random)
        else:
            _equalize(costs, standings)
            tie = home
        return Order(costs, tie, self.why(request, mean))

    def why(self, request: RouteRequest, mean_congestion: float) -> Why:
        """Why candidates are in their places."""
        tokens, speed = request.prompt_tokens, request.prefill_tokens_per_s
        return partial(_reason, tokens, speed, self.weights, mean_congestion)


def _equalize(costs: list[float], standings: Standings) -> None:
    """Make the least cost that of all who cost nearly as little, with no less in the cache."""
    least = min(costs)
    most = least + EQUAL
    near = [number for number, cost in enumerate(costs) if cost <= most]
    if len(near) > 1:
        cached, recent = standings.cached_tokens, standings.recent_tokens
        best = costs.index(least)
        held = max(cached[best], recent[best])
        for number in near:
            if cached[number] >= held or recent[number] >= held:
                costs[number] = least


def _home(keys: Sequence[int], standings: Standings) -> Callable[[int], Any] | None:
    """Draws a number for each candidate from the first key that none of them has (rendezvous
    hashing); None where there is no such key.

    Cheaper than the draw of sessions, and without speeds, which are in the costs: in an idle fleet
    every candidate draws for every prompt.
    """
    if not keys:
        return None
    known = max(max(standings.cached_tokens), max(standings.recent_tokens)) // KEY_TOKENS
    if known >= len(keys):
        return None
    key, states = keys[known], standings.states

    def draw(number: int) -> tuple[int, str]:
        name = states[number][0]
        return (crc32(name.encode()) ^ key) * _ODD & _MASK, name

    return draw


_ODD, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


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
    parts: list[Delays] = []
    alone = standings_of((candidate,))
    _costs(prompt_tokens, alone, prefill_tokens_per_s, weights, mean, parts)
    return parts[0]


def _costs(
    prompt_tokens: int,
    standings: Standings,
    prefill_tokens_per_s: float,
    weights: Weights,
    mean: float,
    parts: list[Delays] | None = None,
) -> list[float]:
    """The sum of the `Delays` at each candidate, and these, where they are asked for. One loop with
    nothing called in it: this is most of what a decision takes."""
    decode, context_token, work = weights.decode_request, weights.decode_context_token, WORK
    foreign_one, waiting_one = weights.foreign_request, weights.waiting_request
    hits = standings.gpu_cached_tokens, standings.cached_tokens, standings.junction_tokens
    columns = standings.progress_tokens, *hits, standings.recent_tokens
    tokens, almost_all = float(prompt_tokens), float(max(prompt_tokens - 1, 0))
    found: list[float] = []
    gpu: float
    total: float
    for state, outlook, progress, gpu, total, junction, recent in zip(
        standings.states, standings.outlooks, *columns, strict=True
    ):
        _, _, speed, doubt, queued, _, decoding, context, foreign, waiting = state
        gpu += junction
        if doubt:
            trust = share_that_counts(doubt, weights.suspect_trust)
            gpu, total = gpu * trust, total * trust
        if recent > gpu:
            gpu = recent
        if gpu >= tokens:
            gpu = almost_all
        own = new = tokens - gpu
        if total > gpu:
            own += min(total - gpu, new) * (lower_cost(standings, len(found), weights) - 1)
        left = queued - progress
        ahead = (left if left > 0 else 0.0) + decoding * decode + context * context_token
        ahead += foreign * foreign_one + waiting * waiting_one
        ahead, own, new = ahead / speed, own / speed, new / speed
        _, reuse, uncached_per_s, arrivals_per_s, refill = outlook
        behind = 0.0
        if arrivals_per_s:  # as `_congestion` has it
            rate = prefill_tokens_per_s * speed
            busy = uncached_per_s / rate
            k = arrivals_per_s / (2.0 * rate * (1.0 - (busy if busy < MOST_BUSY else MOST_BUSY)))
            behind = own * (2.0 * k * ahead + sqrt(k * mean) * own)
        lost = refill * new
        evicted = reuse * (lost + mean * lost * lost)
        found.append(ahead + own + work * own + behind + evicted)
        if parts is not None:
            parts.append(Delays(ahead, own, work * own, behind, evicted))
    return found


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
    return _mean_congestion(standings_of(candidates), prefill_tokens_per_s)


def _mean_congestion(standings: Standings, prefill_tokens_per_s: float) -> float:
    if not standings.states:
        return 0.0
    count = len(standings.states)
    _, _, uncached, arrivals, _ = zip(*standings.outlooks, strict=True)
    speeds = sum(map(speed_of, standings.states))
    return _congestion(
        sum(arrivals) / count, sum(uncached) / count, prefill_tokens_per_s * speeds / count
    )


def _congestion(arrivals_per_s: float, uncached_tokens_per_s: float, speed: float) -> float:
    busy = uncached_tokens_per_s / speed
    return arrivals_per_s / (2 * speed * (1 - (busy if busy < MOST_BUSY else MOST_BUSY)))


def _reason(
    prompt_tokens: int,
    prefill_tokens_per_s: float,
    weights: Weights,
    mean: float,
    candidate: Candidate,
    _cost: float,
    _place: int,
) -> str:
    delays = delays_of(prompt_tokens, candidate, prefill_tokens_per_s, weights, mean)
    parts = candidate.hit_in_words(prompt_tokens)
    if candidate.junction_tokens:
        parts.append(f"{candidate.junction_tokens:,} more are worth as much to later prompts")
    if candidate.recent_tokens > candidate.gpu_cached_tokens:
        parts.append(f"{candidate.recent_tokens:,} being computed there")
    parts += [
        f"{delay:,.0f} {what}" for delay, what in zip(delays, _TERMS, strict=True) if delay >= 0.5
    ]
    return f"{'; '.join(parts)}: a delay of {sum(delays):,.0f} prefill tokens"


_TERMS = (
    "ahead of it",
    "to compute",
    "for the machine's time",
    "for those behind it",
    "for what it evicts",
)
