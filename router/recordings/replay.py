"""Feeds a recording to the index and compares every prediction with what the engine reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvevents.errors import MalformedBatch
from router.index import PrefixIndex, SourceId, create_index
from router.recordings.format import Query, RecordingReader

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
    index = create_index()
    with RecordingReader(path) as reader:
        index.add(_SOURCE, reader.header.hints(learn_layout))
        for record in reader:
            if isinstance(record, Query):
                prediction = _predict(index, reader.line, record)
                summary.add(prediction)
                yield prediction
            else:
                _apply(index, record, summary)


def _predict(index: PrefixIndex, line: int, query: Query) -> Prediction:
    hit = index.match(query.query, query.lora, query.salt, query.extra_keys)[_SOURCE]
    return Prediction(line, len(query.query), hit.cached_tokens, hit.gpu_cached_tokens, query.hit)


def _apply(index: PrefixIndex, payload: bytes, summary: ReplaySummary) -> None:
    summary.frames += 1
    try:
        result = index.apply(_SOURCE, payload)
    except MalformedBatch:
        summary.malformed += 1
    else:
        summary.malformed += result.unreadable > 0
