"""Describes a replica's problems in sentences for a person who has just been woken."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from enum import Enum

import msgspec

from kvevents.stream_state import SourceState
from router.feed.source_feed import SourceFeedStatistics
from router.fleet.types import ReplicaView
from router.index.base import SourceStatistics
from router.telemetry.labels import duration
from router.telemetry.self_repair import TrustStatistics

MAX_NOTES = 4
"""The most notes of the last discovery."""
_RANKS_NAMED = 8


class Level(str, Enum):
    """The level of a problem; the worst first."""

    BAD = "bad"
    """It serves nothing, or its hits are not to be trusted."""
    WARN = "warn"
    """It is not as it should be."""
    GOOD = "good"
    """Nothing is wrong."""

    @property
    def severity(self) -> int:
        """A sort key: 0 for the worst."""
        return list(Level).index(self)


class ReplicaProblem(msgspec.Struct, frozen=True):
    """One thing that is wrong with a replica."""

    level: Level
    text: str
    """A sentence whose subject is the replica: "draining: gets no new requests"."""


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One event stream in brief."""

    dp_rank: int
    state: str | None
    """A `SourceState`; None before it is followed."""
    stream_problem: str | None = None
    """From `SubscriberStatistics.problem`."""
    unplaced: int
    """Blocks that no prompt can find."""
    incomplete: bool
    """True if the replica holds blocks that the index does not know, or the reverse."""
    unreadable: int
    """Events that break the format, left out of their batches."""
    mispredicted: str | None = None
    """The error of its predicted hits, where a rebuild did not help or has to wait."""
    key_problem: str | None = None
    """The fault of its block hashes' key: then no prompt finds anything there."""


def summarize_source(
    dp_rank: int,
    feed: SourceFeedStatistics | None,
    cache: SourceStatistics | None,
    trust: TrustStatistics | None = None,
) -> SourceSummary:
    """One event stream in brief."""
    # Where the engine's hash function is known, blocks without a known prefix are found by hash.
    key_problem = None if cache is None else cache.key_problem
    is_found = cache is None or cache.hash_algorithm is not None or key_problem is not None
    unplaced = 0 if cache is None or is_found else cache.unplaced
    return SourceSummary(
        dp_rank=dp_rank,
        state=None if feed is None else feed.state.value,
        stream_problem=None if feed is None else feed.stream.problem,
        unplaced=unplaced,
        incomplete=cache is not None and cache.is_incomplete,
        unreadable=0 if feed is None else feed.unreadable,
        mispredicted=None if trust is None or trust.cause is None else trust.cause.value,
        key_problem=key_problem,
    )


_BY_SOURCE_STATE = {
    "suspect": ReplicaProblem(Level.BAD, "events were lost for good: its hits are discounted"),
    "dead": ReplicaProblem(Level.BAD, "its events are no longer followed"),
    "connecting": ReplicaProblem(Level.WARN, "nothing publishes events at its address yet"),
    "recovering": ReplicaProblem(Level.WARN, "events were lost and are being requested again"),
}


def problems_of(
    replica: ReplicaView,
    sources: Sequence[SourceSummary],
    tokenizer_disagreements: int,
    approximate_ranks: Container[int] | None = None,
) -> list[ReplicaProblem]:
    """Return a replica's problems, the worst first.

    Args:
        tokenizer_disagreements: Probes that it tokenises differently from the router.
        approximate_ranks: Those whose hits are estimates, for want of events; None where nothing is
            estimated.
    """
    found = [
        *_of_health(replica),
        *_of_streams(replica, sources, approximate_ranks),
        *_of_cache(sources),
    ]
    if tokenizer_disagreements:
        text = (
            f"tokenises {tokenizer_disagreements:,} probes differently from the router: "
            "its hits are mispredicted"
        )
        found.append(ReplicaProblem(Level.BAD, text))
    return sorted(found, key=lambda problem: problem.level.severity)


def _of_health(replica: ReplicaView) -> Iterator[ReplicaProblem]:
    error = f": {replica.last_error}" if replica.last_error else ""
    how_long = duration(replica.seconds_in_health) + error
    if replica.health == "unhealthy":
        yield ReplicaProblem(Level.BAD, f"unhealthy for {how_long}")
    if replica.health == "starting":
        yield ReplicaProblem(Level.WARN, f"no health check has passed yet, for {how_long}")
    if replica.breaker != "closed":
        text = "failed too many requests: gets none for a while, then one to try"
        yield ReplicaProblem(Level.BAD, text)
    if replica.backs_off_s:
        text = f"full: it asked for no requests for {duration(replica.backs_off_s)}"
        yield ReplicaProblem(Level.WARN, text)
    if replica.state == "draining":
        yield ReplicaProblem(Level.WARN, "draining: gets no new requests")
    if replica.health == "healthy" and not replica.models:
        yield ReplicaProblem(Level.BAD, "has not reported what it serves: gets no requests")


def _of_streams(
    replica: ReplicaView,
    sources: Sequence[SourceSummary],
    approximate_ranks: Container[int] | None,
) -> Iterator[ReplicaProblem]:
    found: dict[ReplicaProblem, list[int]] = {}
    for source in sources:
        problem = _of_stream(source)
        if problem is not None:
            found.setdefault(problem, []).append(source.dp_rank)
    for problem, ranks in found.items():
        yield ReplicaProblem(problem.level, problem.text + _name_ranks(ranks, sources))
    estimated = [one.dp_rank for one in sources if one.dp_rank in (approximate_ranks or ())]
    if estimated:
        text = "its events have been missing for long: its hits are approximate"
        yield ReplicaProblem(Level.WARN, text + _name_ranks(estimated, sources))
    if replica.health == "healthy" and not sources and not replica.sources_configured:
        how = "it is routed by load" if approximate_ranks is None else "its hits are approximate"
        reasons = [f"no event stream: {how}", *replica.notes[:MAX_NOTES]]
        yield ReplicaProblem(Level.WARN, "; ".join(reasons))


def _of_stream(source: SourceSummary) -> ReplicaProblem | None:
    if source.stream_problem is None:
        return _BY_SOURCE_STATE.get(source.state or "")
    if source.state == SourceState.SUSPECT.value:
        text = f"{source.stream_problem}: its hits are discounted"
        return ReplicaProblem(Level.BAD, text)
    text = f"{source.stream_problem}: a lost event cannot be requested again"
    return ReplicaProblem(Level.WARN, text)


def _of_cache(sources: Sequence[SourceSummary]) -> Iterator[ReplicaProblem]:
    for problem in sorted({source.key_problem for source in sources if source.key_problem}):
        ranks = [source.dp_rank for source in sources if source.key_problem == problem]
        yield ReplicaProblem(Level.BAD, problem + _name_ranks(ranks, sources))
    for cause in sorted({source.mispredicted for source in sources if source.mispredicted}):
        ranks = [source.dp_rank for source in sources if source.mispredicted == cause]
        text = f"its hits stay mispredicted after a rebuild: {cause}{_name_ranks(ranks, sources)}"
        yield ReplicaProblem(Level.BAD, text)
    incomplete = [source.dp_rank for source in sources if source.incomplete]
    unplaced = sum(source.unplaced for source in sources)
    unreadable = sum(source.unreadable for source in sources)
    if incomplete:
        text = f"some of its blocks are not known{_name_ranks(incomplete, sources)}"
        yield ReplicaProblem(Level.WARN, text)
    if unreadable:
        text = f"{unreadable:,} of its events could not be read"
        yield ReplicaProblem(Level.WARN, text)
    if unplaced:
        text = f"{unplaced:,} block{'' if unplaced == 1 else 's'} that no prompt can find"
        yield ReplicaProblem(Level.WARN, text)


def _name_ranks(ranks: Sequence[int], sources: Sequence[SourceSummary]) -> str:
    if len(sources) < 2:
        return ""
    more = " and more" if len(ranks) > _RANKS_NAMED else ""
    return f" (rank {', '.join(map(str, ranks[:_RANKS_NAMED]))}{more})"
