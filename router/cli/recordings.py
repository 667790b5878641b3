"""Recorded event streams: their format, JSON lines, plain or gzip; and how well the index predicts
one.

The first line is the header: `groups`, `hash_block_size`, `scheduler_block_size`, `eagle` (a flag,
or a list of groups), and whatever else the recorder noted. Frames and queries follow in the order
in which they happened:

- `{"frame": base64}`: the third frame of a message, as the publisher sent it.
- `{"query": [token ids], "salt"?, "lora"?, "extra_keys"?, "hit": n}`: at this point the engine
  would reuse n tokens of this prompt.

What a router recorded has three more:

- `{"state": [base64 ...]}`: what its index knew of the cache, as the records of one source.
- a query with a `number` instead of its hit: it was sent to the engine at this point.
- `{"number": n, "hit": n}`: what the engine has reported of it since.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeAlias

import msgspec

from kvevents.errors import UNREADABLE, LayoutError, MalformedBatch
from kvevents.events import GroupSpec
from kvevents.layout import KVCacheGroup, group_from_spec
from router.errors import RouterError
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.layout_learner import LayoutHints
from router.index.sources import DumpError

MAX_LINE_BYTES = 256 * 2**20
_SOURCE = SourceId("recording")


class RecordingError(RouterError):
    """A file that is not a recording, or a damaged one."""


class Header(msgspec.Struct):
    """The recorder's facts about the engine."""

    groups: list[GroupSpec] = []
    """The groups, by index."""
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    eagle: bool | list[int] = False
    """The groups that drop EAGLE's block, or whether all do."""
    name: str | None = None
    """The name of the recording."""
    source: str | None = None
    """The engine, as in `vllm 0.33.0`."""
    eagle_groups: list[int] | None = None
    """The groups where *eagle* is true of some, as in `CacheLayout`."""
    prefix_replay_tokens: int = 0

    def hints(self, learn_layout: bool) -> LayoutHints:
        """Return the layout of the header; or, if it is to be learned, only what no event shows of
        it.

        Raises:
            RecordingError: The groups contradict themselves.
        """
        groups = self._groups()
        eagle = self.eagle if self.eagle_groups is None else self.eagle_groups
        common = LayoutHints(
            groups,
            eagle=eagle if isinstance(eagle, bool) else tuple(eagle),
            eagle_sees_last_token=self._is_recent_vllm(),
            prefix_replay_tokens=self.prefix_replay_tokens,
        )
        if learn_layout:
            return dataclasses.replace(common, assume_unseen=False)
        return dataclasses.replace(
            common,
            hash_block_size=self.hash_block_size,
            scheduler_block_size=self.scheduler_block_size,
            authoritative=bool(groups),
        )

    def _is_recent_vllm(self) -> bool:
        """Return False for vLLM before 0.32, whose EAGLE look-ups end one token earlier. No event
        carries the version."""
        version = re.match(r"vllm (\d+)\.(\d+)", self.source or "")
        return version is None or tuple(map(int, version.groups())) >= (0, 32)

    def _groups(self) -> tuple[KVCacheGroup, ...]:
        try:
            return tuple(
                group_from_spec(index, _known(spec)) for index, spec in enumerate(self.groups)
            )
        except LayoutError as error:
            raise RecordingError(f"line 1, header: {error}") from None


def _known(spec: GroupSpec) -> GroupSpec:
    """vLLM calls a group `unknown` that is scratch space of a request, and is never shared."""
    return msgspec.structs.replace(spec, kind="not_cached") if spec.kind == "unknown" else spec


_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Query(msgspec.Struct):
    """A prompt and how many of its tokens the engine reused."""

    query: list[_Token]
    """The prompt's token ids."""
    hit: int | None
    """Tokens reused; None where a `Report` follows."""
    salt: str | None = None
    lora: str | None = None
    extra_keys: list[Any] | None = None
    number: int | None = None
    """Names it for its report."""


class Report(NamedTuple):
    """The engine's hit of an earlier query."""

    number: int
    hit: int


class IndexState(NamedTuple):
    """A source as the records of an index."""

    records: list[bytes]


Record: TypeAlias = bytes | Query | Report | IndexState
"""A frame's payload, or another line."""


class _Line(msgspec.Struct):
    """Any line; msgspec reads and writes bytes as base64."""

    frame: bytes | None = None
    query: list[_Token] | None = None
    hit: int | None = None
    salt: str | None = None
    lora: str | None = None
    extra_keys: list[Any] | None = None
    number: int | None = None
    state: list[bytes] | None = None


_DAMAGED = (OSError, EOFError, zlib.error)

_header_decoder = msgspec.json.Decoder(Header)
_line_decoder = msgspec.json.Decoder(_Line)


class RecordingReader:
    """Reads one recording; iterate once for its records.

    Raises:
        RecordingError: The file is not a recording; the message names the line and the rule.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path, "rb")
        self.line = 1
        try:
            self.header: Header = _header_decoder.decode(self._file.readline(MAX_LINE_BYTES))
        except (*UNREADABLE, *_DAMAGED) as error:
            self._file.close()
            raise RecordingError(
                f"{path.name}, line 1: not the header of a recording ({error})"
            ) from None

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        while raw := self._next_line():
            self.line += 1
            yield self._record(raw)

    def _next_line(self) -> bytes:
        try:
            return self._file.readline(MAX_LINE_BYTES)
        except _DAMAGED as error:
            raise RecordingError(
                f"line {self.line + 1}: the file is cut off or damaged ({error})"
            ) from None

    def _record(self, raw: bytes) -> Record:
        try:
            line = _line_decoder.decode(raw)
        except UNREADABLE as error:
            raise RecordingError(f"line {self.line}: {error}") from None
        if line.frame is not None:
            return line.frame
        if line.state is not None:
            return IndexState(line.state)
        if line.query is not None and (line.hit is None) == (line.number is not None):
            given = line.salt, line.lora, line.extra_keys, line.number
            return Query(line.query, line.hit, *given)
        if line.query is None and line.number is not None and line.hit is not None:
            return Report(line.number, line.hit)
        raise RecordingError(
            f"line {self.line}: a line has either `frame`, or `query` and `hit` or `number`, or "
            "`number` and `hit`, or `state`"
        )


class RecordingWriter:
    """Writes a recording, each line to disk before the next. The file is made with its first line:
    an error before that leaves no empty file, and keeps the old one."""

    def __init__(self, path: Path, header: Header | None = None) -> None:
        """
        Args:
            path: The file; compressed where it ends in `.gz`.
            header: None: it comes as the first of the lines.
        Raises:
            RecordingError: Nothing can be written there.
        """
        is_new = not path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from None
        if is_new:
            path.unlink()
        self._path = path
        self._header = header
        self._file: IO[bytes] | None = None

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            if kind is None:  # else that has been raised already
                raise self._unwritten(error) from None

    def frame(self, payload: bytes) -> None:
        """Append the third frame of one message."""
        self.line(_encoded({"frame": payload}))

    def query(self, query: Query) -> None:
        """Append a prompt and what the engine reused of it."""
        self.line(_encoded(query))

    def line(self, line: bytes) -> None:
        """Append a line that is encoded already, with its line break.

        Raises:
            RecordingError: It cannot be written.
        """
        if self._file is None:
            self._file = _open(self._path, "wb")
            line = line if self._header is None else _encoded(self._header) + line
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: OSError) -> RecordingError:
        return RecordingError(f"{self._path}: {error.strerror}")


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _open(path: Path, mode: str) -> IO[bytes]:
    try:
        return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None


# --- a recording against the index ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """One query of a recording."""

    line: int
    """The line of the file."""
    tokens: int
    """Length of the prompt."""
    predicted: int
    """Tokens the index predicts to be reused, from any tier."""
    predicted_gpu: int
    """The part of it on the GPU."""
    hit: int
    """Tokens the engine reused."""


@dataclasses.dataclass(slots=True)
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
        """Return whether every prediction was right and every frame readable."""
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
        self._index = PrefixIndex()
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
            return None if sent is None else dataclasses.replace(sent, hit=record.hit)
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
            while result.cleared and self._index.tidy():
                continue
