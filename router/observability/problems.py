"""What is wrong with a replica, in sentences for a person who has just been woken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from router.feed import SourceFeedStatistics
from router.index import SourceStatistics
from router.replicas import ReplicaView

MAX_NOTES = 4
"""Of what went wrong in the last discovery."""
_RANKS_NAMED = 8


class Level(str, Enum):
    """How bad it is."""

    BAD = "bad"
    """It serves nothing, or its hits are not to be trusted."""
    WARN = "warn"
    """It is not as it should be."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    level: Level
    text: str


class SourceGlance(msgspec.Struct, frozen=True, kw_only=True):
    """One event stream in brief."""

    dp_rank: int
    state: str | None
    """As in `SourceState`; None: it is not followed yet."""
    unplaced: int
    """Blocks that no prompt can find."""
    incomplete: bool
    """Whether it holds blocks that the index does not know."""


def glance(
    dp_rank: int, feed: SourceFeedStatistics | None, known: SourceStatistics | None
) -> SourceGlance:
    """A stream in brief; None: it is not followed, nothing is known of its cache."""
    # By an engine's hash function, where it is known, blocks are found whose place is not.
    unplaced = known.unplaced if known is not None and known.hash_algorithm is None else 0
    return SourceGlance(
        dp_rank=dp_rank,
        state=None if feed is None else feed.state.value,
        unplaced=unplaced,
        incomplete=known is not None and known.is_incomplete,
    )


_OF_FEEDS = {
    "suspect": Problem(Level.BAD, "events were lost for good: its hits are discounted"),
    "dead": Problem(Level.BAD, "its events are not followed any more"),
    "connecting": Problem(Level.WARN, "nobody publishes events at its address yet"),
    "recovering": Problem(Level.WARN, "events were lost and are being asked for again"),
}


def problems_of(
    view: ReplicaView, sources: Sequence[SourceGlance], tokenizer_disagreements: int
) -> list[Problem]:
    """What is wrong with a replica, the worst first; empty if it is well.

    Args:
        view: The replica.
        sources: Its event streams.
        tokenizer_disagreements: Probes that it tokenises differently from the router.
    """
    found = [*_of_health(view), *_of_feeds(view, sources), *_of_cache(sources)]
    if tokenizer_disagreements:
        text = f"tokenises {tokenizer_disagreements:,} probes differently from the router: its hits are mispredicted"
        found.append(Problem(Level.BAD, text))
    return sorted(found, key=lambda problem: problem.level is not Level.BAD)


def _of_health(view: ReplicaView) -> Iterator[Problem]:
    why = f"{duration(view.seconds_in_health)}{f': {view.last_error}' if view.last_error else ''}"
    if view.health == "unhealthy":
        yield Problem(Level.BAD, f"unhealthy for {why}")
    if view.health == "starting":
        yield Problem(Level.WARN, f"no health check has passed yet, for {why}")
    if view.state == "draining":
        yield Problem(Level.WARN, "draining: gets no new requests")
    if view.health == "healthy" and not view.models:
        yield Problem(Level.BAD, "has not said what it serves: gets no requests")


def _of_feeds(view: ReplicaView, sources: Sequence[SourceGlance]) -> Iterator[Problem]:
    for state, problem in _OF_FEEDS.items():
        ranks = [source.dp_rank for source in sources if source.state == state]
        if ranks:
            yield Problem(problem.level, problem.text + _of_ranks(ranks, sources))
    if view.health == "healthy" and not sources and not view.sources_configured:
        yield Problem(
            Level.WARN,
            "; ".join(["no event stream: it is routed by load", *view.notes[:MAX_NOTES]]),
        )


def _of_cache(sources: Sequence[SourceGlance]) -> Iterator[Problem]:
    incomplete = [source.dp_rank for source in sources if source.incomplete]
    unplaced = sum(source.unplaced for source in sources)
    if incomplete:
        yield Problem(
            Level.WARN, f"some of its blocks are not known{_of_ranks(incomplete, sources)}"
        )
    if unplaced:
        yield Problem(
            Level.WARN, f"{unplaced:,} block{'' if unplaced == 1 else 's'} that no prompt can find"
        )


def _of_ranks(ranks: Sequence[int], sources: Sequence[SourceGlance]) -> str:
    if len(sources) < 2:
        return ""
    more = " and more" if len(ranks) > _RANKS_NAMED else ""
    return f" (rank {', '.join(map(str, ranks[:_RANKS_NAMED]))}{more})"


def duration(seconds: float) -> str:
    """A time as a person says it."""
    for limit, unit_s, word in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{int(max(0.0, seconds) // unit_s)} {word}"
    return f"{int(seconds // 86400)} days"
