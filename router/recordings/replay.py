"""Feeds a recording to the index and compares every prediction with what the engine reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvevents.errors import MalformedBatch
from router.index import DumpError, LayoutHints, SourceId, create_index
from router.recordings.format import (
    IndexState,
    Query,
    Record,
    RecordingError,
    RecordingReader,
    Report,
)

_SOURCE = SourceId("recording")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One query of a recording."""

    line: int
    """Of the file."""
    tokens: int
    """Length of the prompt."""
    predicted: int
    """Tokens the index predicts to be reused, from any tier."""
    predicted_gpu: int
    """Of these, from the GPU."""
    hit: int
    """Tokens the engine reused."""


@dataclass(slots=True)
class ReplaySummary:
    """The score of one recording."""

    stream: str
    learn_layout: bool
    frames: int = 0
    malformed: int = 0
    queries: int = 0
    exact: int = 0
    hit_tokens: int = 0
    predicted_tokens: int = 0

    @property
    def is_exact(self) -> bool:
        """Every prediction was right, and every frame readable."""
        return self.exact == self.queries and not self.malformed

    def add(self, prediction: Prediction) -> None:
        """Count one query."""
        self.queries += 1
        self.exact += prediction.predicted == prediction.hit
        self.hit_tokens += prediction.hit
        self.predicted_tokens += prediction.predicted


def replay(path: Path, learn_layout: bool, summary: ReplaySummary) -> Iterator[Prediction]:
    """Predict every query of a recording.

    Args:
        path: The file, plain or `.gz`.
        learn_layout: Learn the layout from the events; else it is the header's.
        summary: Filled in along the way, and complete when the iterator ends.
    Raises:
        RecordingError: The file is not a recording.
    """
    with RecordingReader(path) as reader:
        replayed = _Replay(reader.header.hints(learn_layout), summary)
        for record in reader:
            prediction = replayed.take(reader.line, record)
            if prediction is not None:
                summary.add(prediction)
                yield prediction


class _Replay:
    """The index as it was at each line of a recording."""

    def __init__(self, hints: LayoutHints, summary: ReplaySummary) -> None:
        self._index = create_index()
        self._index.add(_SOURCE, hints)
        self._source = _SOURCE
        self._summary = summary
        self._unreported: dict[int, Prediction] = {}
        """Predictions by the numbers of their queries, until the engine's report is read."""

    def take(self, line: int, record: Record) -> Prediction | None:
        """Take the next record; returns the prediction that it completes."""
        if isinstance(record, bytes):
            self._apply(record)
        elif isinstance(record, IndexState):
            self._restore(line, record)
        elif isinstance(record, Report):
            sent = self._unreported.pop(record.number, None)
            return None if sent is None else replace(sent, hit=record.hit)
        else:
            prediction = self._predict(line, record)
            if record.number is None:
                return prediction
            self._unreported[record.number] = prediction
        return None

    def _predict(self, line: int, query: Query) -> Prediction:
        hits = self._index.match(query.query, query.lora, query.salt, query.extra_keys)
        hit = hits[self._source]
        tokens = len(query.query)
        return Prediction(line, tokens, hit.cached_tokens, hit.gpu_cached_tokens, query.hit or 0)

    def _restore(self, line: int, state: IndexState) -> None:
        try:
            self._index.restore(state.records)
        except DumpError as error:
            raise RecordingError(f"line {line}, state: {error}") from None
        sources = list(self._index.statistics())
        if len(sources) != 1:
            raise RecordingError(f"line {line}, state: {len(sources)} sources; it must be one")
        self._source = sources[0]

    def _apply(self, payload: bytes) -> None:
        self._summary.frames += 1
        try:
            result = self._index.apply(self._source, payload)
        except MalformedBatch:
            self._summary.malformed += 1
        else:
            self._summary.malformed += result.unreadable > 0
