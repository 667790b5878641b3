"""What the data plane looks at in a passing response, held to the readable forms in Python."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from router.plane.usage import ReportedUsage, UsageReader
from tests.oracle.event_lines import EventLines
from tests.oracle.usage import ReferenceCapture

USAGE = b'"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}'
WORDS = (
    *(b"data: ", b"data:", b"\n", b"\n\n", b"\r\n\r\n", b"\r", b"[DONE]", b": keep-alive", b" "),
    *(b'{"id": 1, "usage": null}', b'{"choices": [], ' + USAGE + b"}", b"x" * 70_000, b"{", b"["),
    *(b"event: message_stop\n", b'{"type": "message_stop"}', b'{"type":"message_stop" }'),
    *(b'{"message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 2}}}', b"da", b"ta:"),
)


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """A body, cut anywhere."""
    body = b"".join(draw(st.lists(st.sampled_from(WORDS), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=6)))
    return [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]


@given(pieces())
def test_lines_are_let_through_as_in_python(body: list[bytes]) -> None:
    """Half a line before an error event would break the client's parser."""
    ours, theirs = import_module("router._core").EventLines(), EventLines()
    for number, piece in enumerate(body, 1):
        is_last = number == len(body)
        assert ours.release(piece, is_last) == theirs.release(piece, is_last)
        assert ours.has_finished() == theirs.finished
        assert ours.separator() == theirs.separator


@given(pieces())
@example([b"data: {" + USAGE + b'}\r{"id": 1, "usage": null}\n'])
def test_the_usage_is_read_as_in_python(body: list[bytes]) -> None:
    """It is what every prediction is compared with."""
    ours, theirs = import_module("router._core").UsageCapture(), ReferenceCapture()
    for piece in body:
        ours.feed(piece)
        theirs.feed(piece)
    events, *kept = ours.finish()
    expected_events, *expected = theirs.finish()
    assert usage_of(*kept) == usage_of(*expected)
    assert kept[0] == expected[0]
    if not kept[0]:
        assert events == expected_events
    assert ours.finish() == (0, False, b"", b""), "nothing of it is left for the next response"


def usage_of(is_json: bool, last: bytes, first: bytes) -> ReportedUsage:
    reader = UsageReader()
    reader.take(is_json, last, first)
    return reader.usage()
