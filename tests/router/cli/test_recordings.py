"""Recordings: what is written is read again, and what is damaged is refused with its line."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvevents.events import GroupSpec
from kvevents.layout import GroupKind, KVCacheGroup
from router.cli.recordings import (
    Header,
    Query,
    Record,
    RecordingError,
    RecordingReader,
    RecordingWriter,
    ReplaySummary,
    replay,
)
from router.index.layout_learner import LayoutHints

HEADER = Header(
    [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 64)],
    16,
    32,
    True,
    "a name",
    "vllm 0.33.0",
)
HEADER_LINE = '{"groups": [{"kind": "full_attention", "block_size": 16}]}'
QUERY = Query([1, 2, 3], 2, "tenant-a", "sql", [["sql", "tenant-a"]])


def read(path: Path) -> tuple[Header, list[Record]]:
    with RecordingReader(path) as reader:
        return reader.header, list(reader)


@pytest.fixture(params=["recording.jsonl", "recording.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


# --- written and read -----------------------------------------------------------------------------


def test_what_is_written_is_read_again(path: Path) -> None:
    """Frames byte for byte, queries field by field, in order; plain and gzipped."""
    with RecordingWriter(path, HEADER) as writer:
        writer.frame(b"\x93\x00\xff frame")
        writer.query(QUERY)
        writer.frame(b"")
        writer.query(Query([], 0))
    assert read(path) == (HEADER, [b"\x93\x00\xff frame", QUERY, b"", Query([], 0)])


def test_every_line_is_in_the_file_before_the_next_one_is_taken(tmp_path: Path) -> None:
    """A capture that is killed has recorded everything up to then."""
    with RecordingWriter(tmp_path / "live.jsonl", HEADER) as writer:
        writer.frame(b"one")
        assert read(tmp_path / "live.jsonl") == (HEADER, [b"one"])
        writer.query(QUERY)
        assert read(tmp_path / "live.jsonl") == (HEADER, [b"one", QUERY])


def test_a_gzipped_recording_that_was_cut_off_gives_all_whole_lines_and_then_says_so(
    tmp_path: Path,
) -> None:
    """The writer flushes the compressor with every line, too."""
    with RecordingWriter(tmp_path / "live.jsonl.gz", HEADER) as writer:
        writer.frame(b"one")
        writer.frame(b"two")
        with RecordingReader(tmp_path / "live.jsonl.gz") as reader:
            records = iter(reader)
            assert [next(records), next(records)] == [b"one", b"two"]
            with pytest.raises(RecordingError, match="line 4: the file is cut off or damaged"):
                next(records)


def test_the_line_number_is_that_of_the_record_last_read(path: Path) -> None:
    """A wrong prediction is reported with it."""
    with RecordingWriter(path, HEADER) as writer:
        writer.frame(b"one")
        writer.frame(b"two")
    with RecordingReader(path) as reader:
        assert [(reader.line, record) for record in reader] == [(2, b"one"), (3, b"two")]


def test_fields_of_other_recorders_are_ignored(tmp_path: Path) -> None:
    """They note seeds, counts, drafts of tomorrow."""
    lines = [
        '{"groups": [{"kind": "mamba", "block_size": 8, "colour": 1}], "queries": 50, "note": "x"}',
        '{"frame": "aGk=", "at": 1.5}',
        '{"query": [1], "hit": 0, "took_s": 2}',
    ]
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    header, records = read(tmp_path / "other.jsonl")
    assert header.groups == [GroupSpec("mamba", 8)]
    assert records == [b"hi", Query([1], 0)]


# --- the header's layout --------------------------------------------------------------------------


def test_a_headers_layout_is_a_fact_or_only_what_no_event_says() -> None:
    """`--learn-layout` takes kinds where events have none, chunk sizes and eagle, and no group that
    was not seen."""
    groups = (KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.SLIDING_WINDOW, 16, 64))
    assert HEADER.hints(learn_layout=False) == LayoutHints(
        groups, 16, 32, eagle=True, authoritative=True
    )
    assert HEADER.hints(learn_layout=True) == LayoutHints(groups, eagle=True, assume_unseen=False)


@pytest.mark.parametrize(
    ("line", "eagle"),
    [
        ('{"eagle": true}', True),
        ('{"eagle": [1]}', (1,)),
        ('{"eagle": true, "eagle_groups": [0]}', (0,)),
        ("{}", False),
    ],
)
def test_a_header_says_which_groups_hold_a_drafters_layers(
    tmp_path: Path, line: str, eagle: bool | tuple[int, ...]
) -> None:
    """As a list, or in the form of `CacheLayout`."""
    (tmp_path / "recording.jsonl").write_text(line + "\n")
    header, _ = read(tmp_path / "recording.jsonl")
    assert header.hints(learn_layout=False).eagle == eagle


def test_a_header_without_groups_leaves_them_to_the_events() -> None:
    """A live capture knows no layout."""
    assert Header().hints(learn_layout=False) == LayoutHints()


def test_a_header_with_groups_that_contradict_themselves_is_refused() -> None:
    """In the file's words: line, group, value, rule."""
    with pytest.raises(
        RecordingError, match=r"line 1, header: group 0 \(sliding_window\): sliding_window None"
    ):
        Header([GroupSpec("sliding_window", 16)]).hints(learn_layout=True)


# --- damaged files --------------------------------------------------------------------------------

DAMAGED_HEADERS: dict[str, bytes] = {
    "empty": b"",
    "no json": b"hello\n",
    "a list": b"[1, 2]\n",
    "groups are text": b'{"groups": "full"}\n',
    "a group without a size": b'{"groups": [{"kind": "mamba"}]}\n',
    "no utf-8": b'{"name": "\xff\xfe"}\n',
    "nested without end": b'{"x": ' + b"[" * 100_000 + b"\n",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", DAMAGED_HEADERS.values(), ids=DAMAGED_HEADERS.keys())
def test_a_file_without_a_header_is_refused_by_name_and_line(
    tmp_path: Path, content: bytes
) -> None:
    """The file may simply be the wrong one, which a traceback does not say."""
    (tmp_path / "wrong.jsonl").write_bytes(content)
    with pytest.raises(
        RecordingError, match=r"wrong\.jsonl, line 1: not the header of a recording"
    ):
        RecordingReader(tmp_path / "wrong.jsonl")


DAMAGED_LINES: dict[str, bytes] = {
    "no json": b"hello",
    "an empty line": b"",
    "a list": b"[1]",
    "neither frame nor query": b"{}",
    "a query without a hit": b'{"query": [1]}',
    "a query with a hit and a number": b'{"query": [1], "hit": 1, "number": 1}',
    "a number without a hit": b'{"number": 1}',
    "a state that is not base64": b'{"state": ["a"]}',
    "a hit without a query": b'{"hit": 1}',
    "a query of text": b'{"query": "hello", "hit": 1}',
    "a hit of text": b'{"query": [1], "hit": "1"}',
    "a negative token": b'{"query": [-1], "hit": 0}',
    "a token over 32 bits": b'{"query": [4294967296], "hit": 0}',
    "a frame that is not base64": b'{"frame": "a"}',
    "a frame with other characters": b'{"frame": "aGk*"}',
    "a frame that is not ascii": '{"frame": "aGké"}'.encode(),
    "no utf-8": b'{"salt": "\xff\xfe"}',
    "nested without end": b'{"x": ' + b"[" * 100_000,
    "a number over 64 bits": b'{"query": [123456789012345678901234567890], "hit": 0}',
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES.keys())
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    """The lines before it were fine, and have been read."""
    good = b'{"frame": "aGk="}'
    (tmp_path / "damaged.jsonl").write_bytes(
        b"\n".join([HEADER_LINE.encode(), good, line, good]) + b"\n"
    )
    with RecordingReader(tmp_path / "damaged.jsonl") as reader:
        records = iter(reader)
        assert next(records) == b"hi"
        with pytest.raises(RecordingError, match="line 3: "):
            next(records)


def test_an_error_shows_nothing_of_a_prompt(tmp_path: Path) -> None:
    """Recordings hold prompts, and errors end up in tickets."""
    secret: dict[str, Any] = {
        "query": [3_141_592_653, "3141592653"],
        "hit": 0,
        "salt": "3141592653",
    }
    (tmp_path / "damaged.jsonl").write_text(HEADER_LINE + "\n" + json.dumps(secret) + "\n")
    with (
        RecordingReader(tmp_path / "damaged.jsonl") as reader,
        pytest.raises(RecordingError) as caught,
    ):
        list(reader)
    assert "3141592653" not in str(caught.value)


@pytest.mark.parametrize("place", ["from the start on", "from the middle on"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, place: str) -> None:
    """A broken disk or download: the compressor's own errors are of three kinds."""
    lines = [
        HEADER_LINE,
        *(json.dumps({"frame": base64.b64encode(bytes([i] * 300)).decode()}) for i in range(250)),
    ]
    whole = gzip.compress("\n".join(lines).encode())
    for position in range(10 if place == "from the start on" else len(whole) // 2, len(whole), 97):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
        with pytest.raises(RecordingError):
            read(tmp_path / "damaged.jsonl.gz")


def test_a_gzip_file_that_was_cut_off_is_refused_at_its_end(tmp_path: Path) -> None:
    """Half a download looks whole up to there."""
    whole = gzip.compress("\n".join([HEADER_LINE] + ['{"frame": "aGk="}'] * 5).encode())
    (tmp_path / "half.jsonl.gz").write_bytes(whole[:-10])
    with pytest.raises(RecordingError, match="cut off or damaged"):
        read(tmp_path / "half.jsonl.gz")


def test_a_plain_file_named_gz_is_refused(tmp_path: Path) -> None:
    """Renamed, not compressed."""
    (tmp_path / "plain.jsonl.gz").write_text(HEADER_LINE + "\n")
    with pytest.raises(RecordingError, match=r"plain\.jsonl\.gz, line 1"):
        RecordingReader(tmp_path / "plain.jsonl.gz")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.jsonl.gz", "missing/in.jsonl"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    """Fact and reason, for readers and writers."""
    with pytest.raises(RecordingError, match="No such file or directory") as caught:
        RecordingReader(tmp_path / name)
    assert name in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A capture must not run for an hour into nothing."""
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(RecordingError, match=r"folder\.jsonl: Is a directory"):
        RecordingWriter(tmp_path / "folder.jsonl", HEADER)


def test_a_report_is_of_the_query_with_its_number(tmp_path: Path) -> None:
    """What a router records: requests overlap, and some are never reported on. Each is predicted
    where it was sent."""
    (tmp_path / "routed.jsonl").write_text(
        HEADER_LINE
        + """
{"query": [1, 2, 3], "number": 1}
{"query": [4, 5], "number": 2}
{"query": [6], "number": 3}
{"number": 2, "hit": 0}
{"number": 1, "hit": 2}
"""
    )
    summary = ReplaySummary("routed", learn_layout=False)
    predictions = list(replay(tmp_path / "routed.jsonl", False, summary))
    assert [(one.line, one.tokens, one.hit) for one in predictions] == [(3, 2, 0), (2, 3, 2)]
    assert (summary.queries, summary.exact) == (2, 1)


@pytest.mark.parametrize("records", [[], [""], ["aGk="]])
def test_a_state_that_is_none_is_refused_with_its_line(tmp_path: Path, records: list[str]) -> None:
    """Another version's, or edited."""
    (tmp_path / "s.jsonl").write_text(HEADER_LINE + "\n" + json.dumps({"state": records}) + "\n")
    with pytest.raises(RecordingError, match="line 2, state: "):
        list(replay(tmp_path / "s.jsonl", False, ReplaySummary("s", learn_layout=False)))


# --- replayed -------------------------------------------------------------------------------------


def test_a_replay_counts_what_is_malformed_and_goes_on(tmp_path: Path) -> None:
    """A score is not exact if part of the stream could not be read."""
    with RecordingWriter(tmp_path / "stream.jsonl", HEADER) as writer:
        writer.frame(b"no msgpack \xc1")
        writer.query(Query([1] * 40, 0))
    summary = ReplaySummary("stream", learn_layout=False)
    predictions = list(replay(tmp_path / "stream.jsonl", False, summary))
    assert [(prediction.line, prediction.predicted) for prediction in predictions] == [(3, 0)]
    assert (summary.frames, summary.malformed, summary.queries, summary.exact) == (1, 1, 1, 1)
    assert not summary.is_exact
