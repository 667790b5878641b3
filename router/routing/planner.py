"""The decision: a tokenised request and everything known of the replicas in, a ranking with hits
and reasons out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.index import Hit, PrefixIndex, PreparedPrompt, SourceId
from router.replicas import Replica
from router.replicas.load import LoadTracker
from router.routing.recent_prefixes import RecentPrefixes
from router.scoring import Candidate, Policy, Ranking, RouteRequest, rank
from router.tokenize import TokenizedPrompt

RECENT_STEP = 64
"""Tokens between two keys of the short memory of what was sent where; one step for all, as it asks
for."""
MAX_MATCHED_PROMPTS = 64
"""Prompts of one batch that are looked up; the rest counts as uncached."""


_NO_HIT = Hit(0, 0)
_ONE_RANK = [0]


class PredictedHit(NamedTuple):
    """What one replica would reuse of a request, in tokens, summed over its prompts."""

    source: SourceId
    gpu_cached_tokens: int
    cached_tokens: int
    suspect: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request should go, and why."""

    model: str
    policy: str
    prompt_tokens: int
    ranking: Ranking
    hits: dict[str, PredictedHit]
    """By replica id."""
    recent_tokens: dict[str, int]
    """Prompt tokens that were sent there just now, by replica id; only where there are any."""
    recent_keys: tuple[Sequence[int], ...]
    seconds: float

    def uncached_tokens(self, replica_id: str) -> int:
        """Prompt tokens that the replica will have to compute. What it is computing for another
        request, it need not again: counted twice, a burst of equal prompts would look like a queue
        and scatter."""
        reused = max(self.hits[replica_id].cached_tokens, self.recent_tokens.get(replica_id, 0))
        return max(self.prompt_tokens - reused, 0)

    def hit_of(self, replica_id: str) -> PredictedHit:
        """The prediction for one replica of the ranking."""
        return self.hits[replica_id]


class RoutePlanner:
    """Makes decisions. No I/O; the clock is passed in."""

    def __init__(
        self,
        policy: Policy,
        policy_name: str,
        load: LoadTracker,
        recent: RecentPrefixes,
        is_suspect: Callable[[SourceId], bool],
        engine_load_stale_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._policy_name = policy_name
        self._load = load
        self._recent = recent
        self._is_suspect = is_suspect
        self._engine_load_stale_after_s = engine_load_stale_after_s
        self._clock = clock

    def decide(
        self,
        request: RouteRequest,
        index: PrefixIndex,
        prompts: Sequence[PreparedPrompt],
        replicas: Iterable[Replica],
        seconds_before: float = 0.0,
    ) -> Decision:
        """Rank *replicas* for a request.

        Args:
            request: What the policy may know.
            index: The model's index.
            prompts: From `prepare`.
            replicas: All that serve the model, whatever their state.
            seconds_before: Time already spent on this decision, for its figure.
        Raises:
            PolicyError: A plug-in broke the rules of a policy.
        """
        started = time.perf_counter()
        found = _sum([index.match_prompt(prompt) for prompt in prompts])
        keys = tuple(prompt.prefix_keys(RECENT_STEP) for prompt in prompts)
        recent = self._recent_tokens(keys)
        hits: dict[str, PredictedHit] = {}
        candidates = []
        for replica in replicas:
            hits[replica.id] = hit = self._hit(replica, found)
            candidates.append(self._candidate(replica, hit, recent.get(replica.id, 0)))
        ranking = rank(self._policy, request, candidates)
        seconds = seconds_before + time.perf_counter() - started
        return Decision(
            request.model,
            self._policy_name,
            request.prompt_tokens,
            ranking,
            hits,
            recent,
            keys,
            seconds,
        )

    def remember(self, decision: Decision, replica_id: str) -> None:
        """The request is on its way to this replica: its prefixes will be there soon."""
        now = self._clock()
        for keys in decision.recent_keys:
            self._recent.remember(replica_id, keys, now)

    def forget(self, replica_id: str) -> None:
        """What was sent to this replica is void."""
        self._recent.forget(replica_id)

    def _recent_tokens(self, keys: Sequence[Sequence[int]]) -> dict[str, int]:
        now = self._clock()
        tokens: dict[str, int] = {}
        for prompt_keys in keys:
            for replica_id, found in self._recent.match(prompt_keys, RECENT_STEP, now).items():
                tokens[replica_id] = tokens.get(replica_id, 0) + found
        return tokens

    def _hit(self, replica: Replica, found: Mapping[SourceId, Hit]) -> PredictedHit:
        """The best rank of a replica; of equal ones the first."""
        ranks = [source.dp_rank for source in replica.sources] or _ONE_RANK
        best = SourceId(replica.id, ranks[0])
        hit = found.get(best, _NO_HIT)
        for dp_rank in ranks[1:]:
            source = SourceId(replica.id, dp_rank)
            other = found.get(source, _NO_HIT)
            if (other.cached_tokens, other.gpu_cached_tokens) > (
                hit.cached_tokens,
                hit.gpu_cached_tokens,
            ):
                best, hit = source, other
        return PredictedHit(best, hit.gpu_cached_tokens, hit.cached_tokens, self._is_suspect(best))

    def _candidate(self, replica: Replica, hit: PredictedHit, recent_tokens: int) -> Candidate:
        has_choice = len(replica.sources) > 1 and hit.cached_tokens > 0
        return replica.candidate(
            self._load.load_of(replica.id),
            self._clock(),
            self._engine_load_stale_after_s,
            gpu_cached_tokens=hit.gpu_cached_tokens,
            cached_tokens=hit.cached_tokens,
            recent_tokens=recent_tokens,
            suspect=hit.suspect,
            dp_rank=hit.source.dp_rank if has_choice else None,
        )


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


def prepare(index: PrefixIndex, tokenized: Sequence[TokenizedPrompt]) -> list[PreparedPrompt]:
    """Prompts ready for matching; those whose ids are not known are left out.

    Hashing a long prompt takes milliseconds (a million tokens: some 40), so callers do it in a
    thread.
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
