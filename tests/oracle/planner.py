"""A decision in plain Python: what each cache would reuse, what each has to do, and the policy. The
compiled core's is tested to equal it; `router.routing.planner` says what each method is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvevents.events import CPU
from router.fleet.replica import Replica
from router.index.base import NO_HIT, Hit, SourceId
from router.index.index import PrefixIndex
from router.index.prompt import HashedPrompt
from router.policies import (
    PEER,
    Candidate,
    Lower,
    Outlook,
    PlugIn,
    Ranked,
    RouteRequest,
    State,
    Weights,
)
from router.routing.question import RankChoice, RankQuestion
from router.routing.recent_prefixes import RECENT_STEP
from tests.oracle.load import ReferenceLoad
from tests.oracle.recent_prefixes import ReferenceRecent
from tests.oracle.scoring.policies import Reference, waits
from tests.oracle.scoring.standings import IDLE, LEAST_TRUST, ChangingStandings
from tests.oracle.states import States, sort_out, state_of_rank
from tests.support.index import Coming, match_tier, token_columns

LEAST_PULL = 512
"""Tokens that a pull must save; fewer are computed in a step."""


class _Prefix(NamedTuple):
    """The longest one that some replica's memory holds for others."""

    tokens: int
    source: Replica


class _Found(msgspec.Struct, frozen=True):
    """What is known of a request's prompts, by cache."""

    hits: Mapping[SourceId, Hit]
    recent: Mapping[SourceId, int]
    now: float
    is_remembered: bool = False
    """Whether the next prompt like it will be found where this one goes."""
    keys: Sequence[Sequence[int]] = ()
    """Of each prompt, every `RECENT_STEP` tokens."""
    runs: Mapping[SourceId, int] = {}
    """With what will be there of full attention only."""


class ReferencePlanner:
    """Ranks replicas. No I/O; the clock is passed in."""

    def __init__(
        self,
        policy: Reference,
        load: ReferenceLoad,
        recent: ReferenceRecent | None,
        suspects: Collection[SourceId],
        engine_load_stale_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        weights: Weights | None = None,
        random: Random | None = None,
        mirror: Any = None,
        approximate: Any = None,
    ) -> None:
        """Keep the parts that a ranking is made from.

        Args:
            policy: Orders the replicas that can serve the request.
            load: What this router has in flight at each replica.
            recent: Which prefixes were just sent where; None: what the mirror says is in prefill.
            suspects: The sources of which events were lost, so that their hits are doubtful; it
                changes with them.
            engine_load_stale_after_s: Age from which an engine's own load no longer counts.
            clock: A monotonic clock, in seconds.
            weights: What things cost, for the choice among the ranks of a replica.
            random: Decides between equal ranks.
            mirror: What every cache is doing and evicts next; None: nobody knows.
            approximate: What caches hold without events; None: nobody estimates it.
        """
        self._ranker = PlugIn(policy)
        self._load = load
        self._recent = recent
        self._suspects = suspects
        self._engine_load_stale_after_s = engine_load_stale_after_s
        self._clock = clock
        self._weights = weights or Weights()
        self._random = (random or Random()).random
        self._mirror = mirror
        self._approximate = approximate

    def rank(
        self, question: RankQuestion, replicas: Iterable[Replica]
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        """Rank *replicas* for a request.

        Args:
            question: What is asked.
            replicas: All that can serve it, whatever their state.
        Returns:
            Those that can take it now, the best first, and the others with their obstacles.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        request, index, prompts = question.request, question.index, question.prompts
        choice, tenant = question.choice, question.tenant
        if index is None:
            return self._rank(request, _Found({}, {}, self._clock()), replicas, choice, tenant)
        found = self._find(index, prompts, request.prompt_tokens)
        replicas = list(replicas)
        may_pull = choice.may_pull and len(prompts) == 1
        prefix = self._to_pull(index, prompts, replicas, found) if may_pull else None
        return self._rank(request, found, replicas, choice, tenant, prefix)

    def remember(self, prompts: Sequence[HashedPrompt], source: SourceId) -> None:
        """Count on the prefixes of *prompts* in a cache before its events report them.

        Args:
            prompts: From `prepare`.
            source: Where the request is about to be sent.
        """
        if self._recent is not None:
            now = self._clock()
            for prompt in prompts:
                self._recent.remember(source, prompt.prefix_keys(RECENT_STEP), now)

    def _rank(
        self,
        request: RouteRequest,
        found: _Found,
        replicas: Iterable[Replica],
        choice: RankChoice,
        tenant: str,
        prefix: _Prefix | None = None,
    ) -> tuple[Sequence[Ranked], Sequence[Candidate]]:
        if self._mirror is not None and self._ranker.needs_outlook:
            request = RouteRequest(
                model=request.model,
                prompt_tokens=request.prompt_tokens,
                session=request.session,
                prefill_tokens_per_s=self._mirror.prefill_tokens_per_s(request.model),
                keys=found.keys[0] if len(found.keys) == 1 else (),
            )
        able, unable = sort_out(
            replicas,
            self._load.loads,
            found.now,
            self._engine_load_stale_after_s,
            self._suspects,
            tenant,
        )
        standings = self._standings(able, found, request, choice)
        if prefix is not None:
            self._put_pulls(standings, able.replicas, prefix)
        ranking = self._ranker.rank(request, standings)
        if not unable.replicas:
            return ranking, ()
        return ranking, self._excluded(
            unable, self._standings(unable, found, request, choice), tenant
        )

    def _excluded(
        self, unable: States, standings: ChangingStandings, tenant: str
    ) -> list[Candidate]:
        load_at = self._load.look_at
        return [
            replace(
                standings.candidate(number),
                obstacle=replica.obstacle(load_at(replica.id), tenant=tenant),
            )
            for number, replica in enumerate(unable.replicas)
        ]

    def _standings(
        self, known: States, found: _Found, request: RouteRequest, choice: RankChoice
    ) -> ChangingStandings:
        """One candidate for each replica."""
        replicas = known.replicas
        caches = [replica.cache for replica in replicas]
        standings = self._with_hits(known.states, caches, replicas, found, request)
        for number in known.with_ranks:
            standings.put(number, self._best_rank(replicas[number], found, request, choice))
        return standings

    def _with_hits(
        self,
        states: list[State],
        caches: list[SourceId],
        replicas: Sequence[Replica],
        found: _Found,
        request: RouteRequest,
    ) -> ChangingStandings:
        """The candidates whose *states* are known: each stands for one of *caches*."""
        hits, recent, mirror = found.hits, found.recent, self._mirror
        gpu, cached, junction = token_columns(hits, caches)
        if found.runs:
            _add_junctions(junction, found, caches, gpu)
        progress: list[float]
        outlooks: list[Outlook]
        if mirror is not None and self._ranker.needs_outlook:
            progress, outlooks = mirror.outlooks(
                request.model, caches, lambda number: _cache_blocks(replicas[number]), found.now
            )
        else:
            progress, outlooks = [0.0] * len(caches), [IDLE] * len(caches)
        standings = ChangingStandings(
            states,
            gpu,
            cached,
            junction,
            [recent.get(cache, 0) for cache in caches] if recent else [0] * len(caches),
            progress,
            outlooks,
            lambda number: self._lower(caches[number], hits.get(caches[number], NO_HIT)),
        )
        if self._approximate is not None and (self._suspects or self._approximate.silent):
            self._estimate(self._approximate, standings, caches, replicas, found, request)
        return standings

    def _lower(self, cache: SourceId, hit: Hit) -> Lower:
        return Lower(hit.by_tier, self._load_price(cache, hit.by_tier))

    def _load_price(self, cache: SourceId, by_tier: Sequence[tuple[str, int]]) -> float | None:
        """Of a token from below a GPU, where a mirror measures it."""
        prices = None if self._mirror is None else self._mirror.load_prices(cache)
        return None if prices is None else prices.mean(by_tier)

    def _to_pull(
        self,
        index: PrefixIndex,
        prompts: Sequence[HashedPrompt],
        replicas: Sequence[Replica],
        found: _Found,
    ) -> _Prefix | None:
        """The longest prefix of a prompt that a replica's memory holds for others, by its events;
        of equally long ones any."""
        holders = [
            (found.hits.get(replica.cache, NO_HIT).cached_tokens, self._random(), replica)
            for replica in replicas
            if replica.peer_address is not None
            and replica.is_healthy
            and replica.cache not in self._suspects
        ]
        holders.sort(key=lambda holder: holder[:2], reverse=True)
        if len(holders) < 2:
            return None
        best, most = None, holders[-1][0] + LEAST_PULL - 1
        for cached, _, replica in holders:
            if cached <= most:  # its memory holds no more than it has in all
                break
            tokens = match_tier(index, prompts[0], replica.cache, CPU)
            if tokens > most:
                best, most = _Prefix(tokens, replica), tokens
        return best

    def _put_pulls(
        self, standings: ChangingStandings, replicas: Sequence[Replica], prefix: _Prefix
    ) -> None:
        """Let each replica pull *prefix* that has less of it, and reads what peers hold."""
        for number, replica in enumerate(replicas):
            if replica is prefix.source or replica.peer_address is None:
                continue
            pulled = prefix.tokens - standings.cached_tokens[number]
            if pulled < LEAST_PULL:
                continue
            by_tier = (*standings.lower_of(number).by_tier, (PEER, pulled))
            price = self._load_price(replica.cache, by_tier)
            standings.put_pull(number, prefix.tokens, Lower(by_tier, price, prefix.source.id))

    def _estimate(
        self,
        approximate: Any,
        standings: ChangingStandings,
        caches: list[SourceId],
        replicas: Sequence[Replica],
        found: _Found,
        request: RouteRequest,
    ) -> None:
        """Put estimates where events do not tell, or have not told for long."""
        for number, source in enumerate(caches):
            if source not in self._suspects and source not in approximate.silent:
                continue
            engine = replicas[number].engine_load
            tokens = None if engine is None else engine.cache_tokens
            cache = approximate.stand_in(source, tokens, found.now)
            if cache is None:
                continue
            # An engine always computes the last token of a prompt.
            hit = cache.hit(found.keys, request.prompt_tokens - len(found.keys))
            standings.put_estimate(number, hit.tokens, max(hit.trust, LEAST_TRUST))
            age = cache.eviction_age_s(found.now)
            if age is not None and self._mirror is not None:
                reuse = self._mirror.reuse_probability(request.model, age)
                standings.put_eviction(number, age, reuse)

    def _find(
        self, index: PrefixIndex, prompts: Sequence[HashedPrompt], prompt_tokens: int
    ) -> _Found:
        now = self._clock()
        recent: dict[SourceId, int] = {}
        runs: dict[SourceId, int] = {}
        is_remembered = False
        all_keys = [prompt.prefix_keys(RECENT_STEP) for prompt in prompts]
        tokens = prompt_tokens if len(prompts) == 1 else 0
        for prompt, keys in zip(prompts, all_keys, strict=True):
            is_remembered |= len(keys) > 0
            for source, coming in self._coming(prompt, keys, tokens, now).items():
                recent[source] = recent.get(source, 0) + coming.tokens
                runs[source] = runs.get(source, 0) + coming.run
        matches = [index.match_prompt(prompt) for prompt in prompts]
        hits = matches[0] if len(matches) == 1 else _sum(matches)
        return _Found(hits, recent, now, is_remembered, all_keys, runs)

    def _coming(
        self, prompt: HashedPrompt, keys: Sequence[int], tokens: int, now: float
    ) -> Mapping[SourceId, Coming]:
        """What each cache will have, though no event says so yet."""
        if self._recent is not None:
            recent = self._recent.match(keys, RECENT_STEP, now)
            return {source: Coming(count, count) for source, count in recent.items()}
        return {} if self._mirror is None else self._mirror.in_prefill(prompt, tokens)

    def _best_rank(
        self, replica: Replica, found: _Found, request: RouteRequest, choice: RankChoice
    ) -> Candidate:
        """A replica of several ranks as the best of them."""
        now, stale_after_s = found.now, self._engine_load_stale_after_s
        ranks = [source.dp_rank for source in replica.sources]
        states, caches = [], []
        for rank, load in zip(ranks, self._load.loads_of_ranks(replica.id, ranks), strict=True):
            if choice.asked not in ranks or choice.asked == rank:
                cache = SourceId(replica.id, rank)
                is_suspect = cache in self._suspects
                states.append(state_of_rank(replica, rank, load, now, stale_after_s, is_suspect))
                caches.append(cache)
        standings = self._with_hits(states, caches, [replica] * len(caches), found, request)
        return self._choose(standings, found, request, choice)

    def _choose(
        self, standings: ChangingStandings, found: _Found, request: RouteRequest, choice: RankChoice
    ) -> Candidate:
        count, costs = len(standings), waits(request.prompt_tokens, standings, self._weights)
        if self._ranker.chooses_ranks:
            costs = list(self._ranker.costs_of_ranks(request, standings))
        order = [
            (cost, standings.requests(number), self._random(), number)
            for number, cost in enumerate(costs)
        ]
        best = standings.candidate(min(order)[-1])
        if not choice.is_read and count > 1:
            return _worst(best, [standings.candidate(number) for number in range(count)])
        matters = found.is_remembered or len(set(costs)) > 1 or choice.asked == best.dp_rank
        return best if matters else replace(best, dp_rank=None)


def _add_junctions(
    junctions: list[int], found: _Found, caches: Sequence[SourceId], gpu: Sequence[int]
) -> None:
    """Let what full attention is going to have beyond a hit count as a junction, too."""
    for number, source in enumerate(caches):
        run = found.runs.get(source, 0)
        if run > max(found.recent.get(source, 0), gpu[number] + junctions[number]):
            junctions[number] = run - gpu[number]


def _worst(best: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """*best*, with what any of *candidates* would reuse: the engine sends the request to one of
    them, whichever is asked for."""
    least = min(candidates, key=lambda candidate: candidate.cached_tokens)
    return replace(
        best,
        gpu_cached_tokens=min(candidate.gpu_cached_tokens for candidate in candidates),
        cached_tokens=least.cached_tokens,
        by_tier=least.by_tier,
        load_price=least.load_price,
        pull_from=least.pull_from,
        junction_tokens=min(candidate.junction_tokens for candidate in candidates),
        recent_tokens=min(candidate.recent_tokens for candidate in candidates),
        suspect=any(candidate.suspect for candidate in candidates),
        approximate_trust=min(
            (one.approximate_trust for one in candidates if one.approximate_trust is not None),
            default=None,
        ),
    )


def _sum(matches: Sequence[Mapping[SourceId, Hit]]) -> Mapping[SourceId, Hit]:
    """Hits over all prompts of a batch."""
    total: dict[SourceId, Hit] = {}
    for match in matches:
        for source, hit in match.items():
            before = total.get(source, NO_HIT)
            total[source] = Hit(
                before.gpu_cached_tokens + hit.gpu_cached_tokens,
                before.cached_tokens + hit.cached_tokens,
                _sum_by_tier(before, hit) if hit.by_tier else before.by_tier,
            )
    return total


def _sum_by_tier(*hits: Hit) -> tuple[tuple[str, int], ...]:
    total: dict[str, int] = {}
    for hit in hits:
        for name, tokens in hit.by_tier:
            total[name] = total.get(name, 0) + tokens
    return tuple(total.items())


def _cache_blocks(replica: Replica) -> int | None:
    return None if replica.engine_load is None else replica.engine_load.cache_blocks
