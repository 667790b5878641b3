"""Ranks replicas for a request by what each would reuse, what each has to do, and the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from router.index import HashedPrompt, Hit, PrefixIndex, SourceId
from router.replicas import Replica
from router.replicas.load import LoadTracker
from router.routing.recent_prefixes import RecentPrefixes
from router.scoring import Candidate, Policy, Ranking, RouteRequest, rank
from router.tokenize import TokenizedPrompt

RECENT_STEP = 64
"""Tokens between two keys in the memory of recent prefixes; the same for all prompts of a model."""
MAX_MATCHED_PROMPTS = 64
"""Prompts of one batch that are looked up; the rest counts as uncached."""

_NO_HIT = Hit(0, 0)


class RoutePlanner:
    """Ranks replicas. No I/O; the clock is passed in."""

    def __init__(
        self,
        policy: Policy,
        load: LoadTracker,
        recent: RecentPrefixes,
        is_suspect: Callable[[SourceId], bool],
        engine_load_stale_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the parts that a ranking is made from.

        Args:
            policy: Orders the replicas that can serve the request.
            load: What this router has in flight at each replica.
            recent: Which prefixes were just sent where.
            is_suspect: Whether events of a source were lost, so that its hits are doubtful.
            engine_load_stale_after_s: Age from which an engine's own load no longer counts.
            clock: A monotonic clock, in seconds.
        """
        self._policy = policy
        self._load = load
        self._recent = recent
        self._is_suspect = is_suspect
        self._engine_load_stale_after_s = engine_load_stale_after_s
        self._clock = clock

    def rank(
        self,
        request: RouteRequest,
        index: PrefixIndex,
        prompts: Sequence[HashedPrompt],
        replicas: Iterable[Replica],
    ) -> Ranking:
        """Rank *replicas* for a request.

        Args:
            request: What the policy may know of it.
            index: The model's index.
            prompts: The request's prompts, from `prepare`.
            replicas: All that serve the model, whatever their state.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        hits = _sum([index.match_prompt(prompt) for prompt in prompts])
        recent = self._recent_tokens(prompts)
        candidates = [
            self._candidate(replica, hits, recent.get(replica.id, 0)) for replica in replicas
        ]
        return rank(self._policy, request, candidates)

    def rank_by_load(self, request: RouteRequest, replicas: Iterable[Replica]) -> Ranking:
        """Rank *replicas* for a request whose prompt is not looked at.

        Args:
            request: What the policy may know of it.
            replicas: All that can serve it, whatever their state.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        candidates = [self._candidate(replica, {}, 0) for replica in replicas]
        return rank(self._policy, request, candidates)

    def obstacle(self, replica: Replica) -> str | None:
        """Why a replica cannot take a request at this moment; None if it can."""
        return "removed" if replica.removed else replica.obstacle(self._load.load_of(replica.id))

    def remember(self, prompts: Sequence[HashedPrompt], replica_id: str) -> None:
        """Count on the prefixes of *prompts* at a replica before its events report them.

        Args:
            prompts: From `prepare`.
            replica_id: Where the request is about to be sent.
        """
        now = self._clock()
        for prompt in prompts:
            self._recent.remember(replica_id, prompt.prefix_keys(RECENT_STEP), now)

    def forget(self, replica_id: str) -> None:
        """Count no longer on what was sent to this replica."""
        self._recent.forget(replica_id)

    def _recent_tokens(self, prompts: Sequence[HashedPrompt]) -> dict[str, int]:
        """Prompt tokens that were just sent to each replica; only where there are any."""
        now = self._clock()
        tokens: dict[str, int] = {}
        for prompt in prompts:
            keys = prompt.prefix_keys(RECENT_STEP)
            for replica_id, found in self._recent.match(keys, RECENT_STEP, now).items():
                tokens[replica_id] = tokens.get(replica_id, 0) + found
        return tokens

    def _candidate(
        self, replica: Replica, hits: Mapping[SourceId, Hit], recent_tokens: int
    ) -> Candidate:
        source, hit = _best_source(replica, hits)
        has_choice = len(replica.sources) > 1 and hit.cached_tokens > 0
        return replica.candidate(
            self._load.load_of(replica.id),
            self._clock(),
            self._engine_load_stale_after_s,
            gpu_cached_tokens=hit.gpu_cached_tokens,
            cached_tokens=hit.cached_tokens,
            recent_tokens=recent_tokens,
            suspect=self._is_suspect(source),
            dp_rank=source.dp_rank if has_choice else None,
        )


def prepare(index: PrefixIndex, tokenized: Sequence[TokenizedPrompt]) -> list[HashedPrompt]:
    """Hash the prompts whose token ids are known.

    Hashing a long prompt takes milliseconds (a million tokens: some 40), so callers do it in a
    thread.

    Args:
        index: The model's index.
        tokenized: All prompts of a request; only the first `MAX_MATCHED_PROMPTS` are hashed.
    """
    return [
        index.prepare(
            found.token_ids,
            found.lora_name,
            found.cache_salt,
            found.extra_keys,
            extra_steps=(RECENT_STEP,),
        )
        for found in tokenized[:MAX_MATCHED_PROMPTS]
        if found.token_ids
    ]


def source_of(replica: Replica, dp_rank: int | None) -> SourceId:
    """The cache whose hit a candidate stands for.

    Args:
        replica: The candidate's replica.
        dp_rank: The candidate's rank; None: the replica's first, or its only one.
    """
    if dp_rank is None:
        dp_rank = replica.sources[0].dp_rank if replica.sources else 0
    return SourceId(replica.id, dp_rank)


def uncached_tokens(prompt_tokens: int, candidate: Candidate) -> int:
    """Prompt tokens that a replica will have to compute.

    What it is already computing for another request does not count: otherwise a burst of equal
    prompts would look like a queue and scatter.

    Args:
        prompt_tokens: Length of the prompt.
        candidate: The replica, as it was ranked for this prompt.
    """
    return max(prompt_tokens - max(candidate.cached_tokens, candidate.recent_tokens), 0)


def _best_source(replica: Replica, hits: Mapping[SourceId, Hit]) -> tuple[SourceId, Hit]:
    """The data-parallel rank with the longest hit; of equal ones the first."""
    best = source_of(replica, None)
    hit = hits.get(best, _NO_HIT)
    for announced in replica.sources[1:]:
        source = SourceId(replica.id, announced.dp_rank)
        other = hits.get(source, _NO_HIT)
        if (other.cached_tokens, other.gpu_cached_tokens) > (
            hit.cached_tokens,
            hit.gpu_cached_tokens,
        ):
            best, hit = source, other
    return best, hit


def _sum(matches: Sequence[dict[SourceId, Hit]]) -> dict[SourceId, Hit]:
    """Hits over all prompts of a batch."""
    if len(matches) == 1:
        return matches[0]
    total: dict[SourceId, Hit] = {}
    for match in matches:
        for source, hit in match.items():
            before = total.get(source, _NO_HIT)
            total[source] = Hit(
                before.gpu_cached_tokens + hit.gpu_cached_tokens,
                before.cached_tokens + hit.cached_tokens,
            )
    return total
