"""Defines the input and output of policies. Plain values; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Annotated, NamedTuple, Protocol

import msgspec
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

Cost = Annotated[float, Field(strict=True, ge=0, le=1_000_000, allow_inf_nan=False)]
TierName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(str.upper)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]

PEER = "PEER"
"""The tier in `Candidate.by_tier` that stands for another replica's memory."""

KEY_TOKENS = 64
"""Tokens from one key of a prompt to the next."""

_TIER_TOKENS = {PEER: 0.25, "STORAGE": 0.5, "FS": 0.5, "DISK": 0.5, "CPU_TIER2": 0.5, "OBJ": 0.85}


# Slots, since policies read eight weights for every candidate: 6 ns each, where an attribute of a
# pydantic model takes 24 ns.
@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Weights:
    """Holds the costs by which policies estimate. The unit of every cost is *the time to prefill
    one prompt token* on an otherwise idle replica.

    The defaults are rules of thumb, computed for an 8B model on one data-centre GPU: 20,000 prefill
    tokens/s (50 µs a token), 128 KiB of KV cache a token, 3 TB/s of memory and 25 GB/s of PCIe.
    They need to be right within a factor of a few: a wrong weight moves the point at which a hot
    prefix spills over, and nothing else.
    """

    lower_tier_token: Cost = 0.1
    """Change it when loading a token from the CPU, or a tier that `tier_token` does not name, is
    slower; 1 makes such a hit worth nothing. Like `tier_token` it counts until loads from that tier
    were measured at the replica."""

    tier_token: Annotated[dict[TierName, Cost], Field(max_length=64)] = field(
        default_factory=lambda: dict(_TIER_TOKENS)
    )
    """Change it when a disk or bucket is faster or slower than 3 to 5 GB/s. By a tier's name in
    events, or a store's; a store that is not named costs what its slowest tier does."""

    queued_prefill_token: Cost = 0.5
    """One prompt token sent there whose first response token is not back. Such a prompt is counted
    whole until its end, so on average half of it is done at any moment. Below 1 it also keeps a
    burst of equal prompts together: waiting for a prefix that is being computed must be cheaper
    than computing it a second time, since that work delays others too.

    Change it when hot prefixes should spill over sooner (raise) or stay together (lower); per
    prompt token whose response has not begun."""

    decode_request: Cost = 16.0
    """One request in decode: it takes a slot and a token in each of the few steps that this
    prompt's prefill lasts, plus its sampling and scheduling.

    Change it when decoding requests slow prefill more or less; per request."""

    decode_context_token: Cost = 0.01
    """One token of context of a request in decode: every step reads its 128 KiB again, 0.04 µs or a
    thousandth of a prefill token; ten such steps are what a usual prefill has to share.

    Change it when long contexts in decode cost more or less; per token of context."""

    waiting_request: Cost = 256.0
    """One request in the engine's own waiting queue. An engine that queues is full, so the new
    request waits until others end; how long is unknown, and a few hundred tokens mean "anywhere
    else first, unless the hit is large".

    Change it when replicas with a queue should be avoided more (raise); per request in the engine's
    own queue."""

    foreign_request: Cost = 64.0
    """One request that runs or waits there but was not sent by this router (another router, a
    direct client). Only their number is known: each counts as a decode with some 4,000 tokens of
    context, by the two weights above.

    Change it when other routers or direct clients use the replicas too; per request that is not
    this router's, at the data-parallel rank where the metrics have a label for it."""

    suspect_trust: Share = 0.5
    """Share of a hit that counts while events of that replica were lost and not yet recovered.

    Change it when suspect sources are predicted better (raise) or worse (lower) than that."""

    recent_trust: Share = 0.9
    """Share that counts of a prefix that was just sent there and has not shown up in events yet. It
    is nearly certain to appear; less than 1 so that a replica that really holds it wins.

    Change it when a prompt just sent to a replica often does not become a hit there (lower)."""

    def of_tier(self, name: str) -> float:
        """The cost of a token from a lower tier or a shared store."""
        return self.tier_token.get(name.upper(), self.lower_tier_token)


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the fields of a request that a policy sees."""

    model: str
    """The model's name as replicas serve it; known to exist."""
    prompt_tokens: int
    """Length of the prompt; 0 if it could not be tokenised."""
    session: str | None = None
    """The client's name for its conversation; None without one."""
    prefill_tokens_per_s: float = 10_000.0
    """The speed of a replica whose `speed` is 1, as it was learned."""
    keys: Sequence[int] = ()
    """The keys of its prefixes of `KEY_TOKENS` tokens, twice as many, and so on: equal keys, equal
    prefixes. Empty for a batch."""
    is_for_prefill: bool = False
    """True if only its prompt is computed there, for a replica that was chosen before."""

    def __repr__(self) -> str:
        # A session may be a user's name: it stays out of logs.
        return f"RouteRequest(model={self.model!r}, prompt_tokens={self.prompt_tokens})"


class CandidateLoad(msgspec.Struct, frozen=True):
    """Holds a replica's load, as a new request would find it; the core has the same order."""

    queued_prefill_tokens: int = 0
    """Uncached prompt tokens this router sent there whose responses have not begun."""
    prefilling_requests: int = 0
    """The requests those tokens belong to."""
    decoding_requests: int = 0
    """Requests of this router whose responses are under way."""
    decode_context_tokens: int = 0
    """The context of these, in tokens."""
    foreign_requests: int = 0
    """Requests there that are not this router's, by the engine's own count."""
    waiting_requests: int = 0
    """Requests in the engine's own queue, by its own count."""

    @property
    def requests(self) -> int:
        """The number of requests known to be there."""
        return self.prefilling_requests + self.decoding_requests + self.foreign_requests


class Candidate(msgspec.Struct, frozen=True):
    """One replica, as far as choosing among replicas is concerned. The core has all fields but the
    last in the same order."""

    replica_id: str
    """Unique among the candidates."""
    gpu_cached_tokens: int = 0
    """Prompt tokens cached on the GPU."""
    cached_tokens: int = 0
    """These, and the tokens that lower tiers would bring back; at least `gpu_cached_tokens`."""
    by_tier: tuple[tuple[str, int], ...] = ()
    """Tokens that each lower tier or shared store would bring back; empty where they are not
    separated."""
    load_price: float | None = None
    """The load price of one of those tokens, in tokens to compute, as it was measured there; None:
    by the weights."""
    pull_from: str | None = None
    """The replica from whose memory the tokens of `PEER` are pulled."""
    junction_tokens: int = 0
    """Tokens behind the GPU's hit whose full attention is there and whose window or state is gone:
    sent there, the prompt computes them once more and makes a hit for all later ones; sent
    elsewhere, it makes a second copy without one."""
    recent_tokens: int = 0
    """Leading prompt tokens that were sent there so recently that events may not show them yet.
    For `least_delay` those that are being computed there for another request."""
    progress_tokens: float = 0.0
    """Queued prefill tokens that are computed by now."""
    eviction_age_s: float | None = None
    """How long the block that the cache would evict next has been idle; None while it evicts
    nothing."""
    reuse_probability: float = 0.0
    """The probability that the block evicted next will be used again."""
    uncached_tokens_per_s: float = 0.0
    """Prompt tokens it got to compute lately, per second."""
    arrivals_per_s: float = 0.0
    """Requests sent there lately, per second."""
    refill: float = 1.0
    """The cost of bringing back a token that it evicts, in tokens to compute: less than 1 where a
    tier below or a shared store holds it."""
    suspect: bool = False
    """Events of it were lost, so its hits are doubtful."""
    approximate_trust: float | None = None
    """Share of the hit that counts where no events stand behind it, but an estimate from what was
    sent there. None: it is by events."""
    load: CandidateLoad = CandidateLoad()
    speed: float = 1.0
    """Relative to the other replicas: 2 is twice as fast."""
    dp_rank: int | None = None
    """Data-parallel rank to ask the engine for; None lets it choose. Policies carry it along."""
    obstacle: str | None = None
    """Why it cannot take the request now; None if it can. Policies see only those that can."""

    @property
    def is_approximate(self) -> bool:
        """Return whether the hit is an estimate from what was sent there, without events."""
        return self.approximate_trust is not None

    def hit_in_words(self, prompt_tokens: int) -> list[str]:
        """Return how much of a prompt is cached, where, and how far that is trusted, in parts of a
        sentence.

        Args:
            prompt_tokens: Its length; 0 if it is unknown.
        """
        if not prompt_tokens:
            return ["the prompt's length is unknown"]
        lower = self.cached_tokens - self.gpu_cached_tokens
        where = ", ".join(f"{tokens:,} {name}" for name, tokens in self.by_tier)
        where += f" of {self.pull_from}" if self.pull_from else ""
        offloaded = f" and {lower:,} offloaded" + (f" ({where})" if where else "") if lower else ""
        known = "estimated to be cached" if self.is_approximate else "cached"
        parts = [f"{self.gpu_cached_tokens:,} of {prompt_tokens:,} tokens {known}{offloaded}"]
        if self.approximate_trust is not None:
            parts.append(f"counted by {self.approximate_trust:.0%}, since there are no events")
        if self.suspect:
            parts.append("discounted, since events were lost")
        return parts


class Ranked(NamedTuple):
    """A candidate's place in a ranking."""

    candidate: Candidate
    cost: float
    """Never falls along a ranking. In prefill tokens for `prefix` and `least_loaded`; elsewhere it
    only orders."""
    why: str | Callable[[], str]
    """The reason, or a function that writes it out: most are never read."""

    @property
    def reason(self) -> str:
        """Why it is in this place, as a sentence for people."""
        return self.why if isinstance(self.why, str) else self.why()


class Policy(Protocol):
    """Orders candidates. A plug-in implements this and is found through the entry point group
    `kvroute.policies`."""

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Order *candidates*, best first.

        Runs on the event loop for every request, so it must be quick and must not wait.

        Args:
            candidates: Those that can take the request now; may be empty. Not to be changed.
        Returns:
            Every candidate exactly once: a failed request is retried on the rest.
        """
