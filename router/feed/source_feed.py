"""One source's event stream, applied to the index of its model."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Annotated

import msgspec

from kvevents.delivery import Effect
from kvevents.errors import KVEventsError, MalformedBatch, NoAnswer
from kvevents.field_docs import counter
from kvevents.messages import Batch
from kvevents.sequence import StreamPosition
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberStatistics
from router.feed.taps import Taps
from router.index.base import ApplyResult, SourceId
from router.index.index import PrefixIndex

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class AppliedEvents:
    """Counts what a source's batches did to the index so far, in blocks unless stated otherwise."""

    stored: Annotated[int, counter("kvroute_blocks_stored")] = 0
    """Blocks stored, copies included."""
    removed: Annotated[int, counter("kvroute_blocks_removed")] = 0
    """Blocks removed, copies included."""
    skipped: Annotated[int, counter("kvroute_events_skipped")] = 0
    """Events of unknown type, removals of unknown blocks, blocks over the limit."""
    overflow: int = 0
    """Part of *skipped*: blocks over a bound."""
    unreadable: Annotated[int, counter("kvroute_events_unreadable")] = 0
    """Events that break the format, left out of their batch; the rest of it was applied."""
    cleared: int = 0
    """Times the source was emptied, to be rebuilt."""

    def add(self, result: ApplyResult) -> None:
        self.stored += result.stored
        self.removed += result.removed
        self.skipped += result.skipped
        self.overflow += result.overflow
        self.unreadable += result.unreadable


@dataclass(slots=True, kw_only=True)
class SourceFeedStatistics(AppliedEvents):
    """The state of one source's stream, and the counts of its events."""

    model: str
    """The model whose index it feeds."""
    state: SourceState
    """The trust in the hits of this source."""
    stream: SubscriberStatistics


class SavedSource(msgspec.Struct, frozen=True):
    """A saved source, without its blocks."""

    model: str
    source: SourceId
    stream: str
    """Its addresses, and the configuration of its cache: with others the blocks are of no use."""
    position: StreamPosition
    has_had_lower_tiers: bool


@dataclass(eq=False, repr=False)
class SourceFeed:
    """The consumer of one subscriber: applies its batches, and follows its state."""

    source: SourceId
    model: str
    index: PrefixIndex
    complain: Callable[[SourceId, KVEventsError], None]
    tidy: Callable[[PrefixIndex], None]
    taps: Taps
    suspects: set[SourceId]
    on_change: Callable[[], object]
    stream: str

    def __post_init__(self) -> None:
        self.state = SourceState.CONNECTING
        self.lost_since: float | None = time.monotonic()
        self.shares_stores = False
        self._applied = AppliedEvents()
        self._has_had_lower_tiers = False
        self._is_known_suspect = False
        self._is_followed = False
        self.on_left: Callable[[], object] = lambda: None
        """Called when the source is not followed any more."""
        self._subscriber: Subscriber | None = None
        self._task: asyncio.Task[None] | None = None

    def takes(self, saved: SavedSource) -> bool:
        """Go on from a saved position; return False if it is of another stream, or gone."""
        is_same = (saved.model, saved.stream) == (self.model, self.stream)
        if not is_same or not self.index.holds(self.source):
            return False
        self._has_had_lower_tiers = saved.has_had_lower_tiers
        return True

    def save(self) -> tuple[SavedSource, list[bytes]] | None:
        assert self._subscriber is not None
        position = self._subscriber.position()
        if position is None or self.shares_stores:
            return None
        saved = SavedSource(
            self.model, self.source, self.stream, position, self._has_had_lower_tiers
        )
        return saved, list(self.index.export(self.source))

    def start(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._is_followed = True
        self._enter(SourceState.CONNECTING)
        self._task = asyncio.get_running_loop().create_task(
            subscriber.run(), name=f"feed {self.source}"
        )
        self._task.add_done_callback(self._on_end)

    def rebuild(self) -> None:
        assert self._subscriber is not None
        text = "replica %s rank %d: its hits were predicted wrongly for long: it is rebuilt"
        _log.warning(text, *self.source)
        self._subscriber.rebuild()

    def cancel(self) -> None:
        """Apply nothing from now on."""
        assert self._task is not None
        self._is_followed = False
        self.suspects.discard(self.source)
        self.on_left()
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until all its sockets are closed."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def statistics(self) -> SourceFeedStatistics:
        assert self._subscriber is not None
        return SourceFeedStatistics(
            **asdict(self._applied),
            model=self.model,
            state=self.state,
            stream=self._subscriber.statistics(),
        )

    # --- what the subscriber calls ----------------------------------------------------------------

    def apply(self, batch: Batch) -> Effect:
        if not self._is_followed:
            # The loop may call for a batch before the task ends: it must not add the source again.
            return Effect.KEPT
        if self.taps:
            for tap in self.taps.of(self.source):
                tap.batch(batch.payload)
        index = self.index
        slots, searched = index.slots, index.searches
        effect = self._note(index.apply(self.source, batch.payload))
        if index.slots is not slots or index.searches != searched:
            self.on_change()
        return effect

    def _note(self, result: ApplyResult) -> Effect:
        """Count what a batch did, and return its effect."""
        self._applied.add(result)
        if result.layout_changed:
            self._look_at_key()
        if result.problem is not None:
            self.report(MalformedBatch(result.problem))
        if result.cleared:
            self.tidy(self.index)
        self._has_had_lower_tiers |= result.has_lower_tiers
        if result.is_incomplete:
            return Effect.INCOMPLETE
        # A clear empties only the GPU: what a lower tier lost or stored meanwhile stays unknown.
        return (
            Effect.KNOWN_AGAIN if result.cleared and not self._has_had_lower_tiers else Effect.KEPT
        )

    def _look_at_key(self) -> None:
        """Warn if nothing of this source will ever be found."""
        found = self.index.statistics().get(self.source)
        if found is not None and found.key_problem is not None:
            _log.error("replica %s rank %d: %s", *self.source, found.key_problem)

    def clear(self, reason: str) -> None:
        if not self._is_followed:
            return
        _log.info("replica %s rank %d: start from nothing (%s)", *self.source, reason)
        self._applied.cleared += 1
        self.taps.end(self.source, f"the stream starts from nothing: {reason}")
        self.index.clear(self.source)
        self.tidy(self.index)

    def change(self, state: SourceState) -> None:
        is_news = state is SourceState.SUSPECT and not self._is_known_suspect
        level = logging.WARNING if is_news else logging.INFO
        problem = self._subscriber and self._subscriber.statistics().problem
        why = f": {problem}" if problem and state is SourceState.SUSPECT else ""
        _log.log(level, "replica %s rank %d: %s%s", *self.source, state.value, why)
        self._enter(state)
        if state in (SourceState.SUSPECT, SourceState.LIVE):
            self._is_known_suspect = state is SourceState.SUSPECT

    def _enter(self, state: SourceState) -> None:
        self.state = state
        if not self._is_followed:
            return  # and the source may have been added again
        if state is SourceState.LIVE:
            self.lost_since = None
            self.suspects.discard(self.source)
        else:
            self.lost_since = self.lost_since or time.monotonic()
            self.suspects.add(self.source)
        self.on_change()

    def report(self, problem: KVEventsError) -> None:
        if isinstance(problem, NoAnswer):
            _log.warning("replica %s rank %d: %s", *self.source, problem)
        else:
            self.complain(self.source, problem)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A subscriber ends only when it is cancelled; anything else is our bug, and is logged."""
        self._enter(SourceState.DEAD)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Only our own errors are known not to quote a prompt.
            what = (
                str(error)
                if isinstance(error, KVEventsError)
                else f"{type(error).__name__} at {_raised_at(error)}"
            )
            _log.error("replica %s rank %d: no longer followed: %s", *self.source, what)


def _raised_at(error: BaseException) -> str:
    """Return where an error was raised, outermost first; without its message, which may quote a
    prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in frames)
