"""The usage in an answer: every form, cut anywhere, in bounded memory, and never taken from the
wrong place."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router._core import UsageCapture
from router.plane.usage import ReportedUsage, UsageReader
from tests.oracle.usage import MAX_KEPT_BYTES

CHAT_USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "total_tokens": 43,
    "prompt_tokens_details": {"cached_tokens": 32},
}
CHAT_BODY = json.dumps(
    {"id": "c", "choices": [{"message": {"content": "hi"}}], "usage": CHAT_USAGE}
).encode()


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str, **more: object) -> bytes:
    return event({"choices": [{"delta": {"content": text}}], **more})


def read(*pieces: bytes) -> ReportedUsage:
    reader = UsageReader()
    for piece in pieces:
        reader.feed(piece)
    return reader.usage()


CHAT_STREAM = (
    delta("a", usage=None)
    + delta("b")
    + event({"choices": [], "usage": CHAT_USAGE})
    + b"data: [DONE]\n\n"
)
RESPONSES_USAGE = {
    "input_tokens": 40,
    "output_tokens": 3,
    "input_tokens_details": {"cached_tokens": 32},
}
RESPONSES_STREAM = event({"type": "response.created", "response": {"usage": None}}) + event(
    {"type": "response.completed", "response": {"output": ["x"], "usage": RESPONSES_USAGE}}
)
MESSAGES_STREAM = (
    b"event: message_start\n"
    + event(
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 8, "cache_read_input_tokens": 32}},
        }
    )
    + b"event: content_block_delta\n"
    + event({"type": "content_block_delta", "delta": {"text": "hi"}})
    + b"event: message_delta\n"
    + event({"type": "message_delta", "usage": {"output_tokens": 3}})
)
MESSAGES_BODY = json.dumps(
    {"content": [], "usage": {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 3}}
).encode()
ALL_FORMS = {
    "chat": CHAT_BODY,
    "chat stream": CHAT_STREAM,
    "chat stream with CRLF": CHAT_STREAM.replace(b"\n", b"\r\n"),
    "responses": json.dumps({"output": [], "usage": RESPONSES_USAGE}).encode(),
    "responses stream": RESPONSES_STREAM,
    "messages": MESSAGES_BODY,
    "messages stream": MESSAGES_STREAM,
}


@pytest.mark.parametrize("form", ALL_FORMS)
def test_every_api_form_gives_the_same_three_numbers(form: str) -> None:
    """Predicted-versus-actual compares one number, whatever API the client speaks."""
    assert read(ALL_FORMS[form]) == ReportedUsage(
        prompt_tokens=40, completion_tokens=3, cached_tokens=32
    )


@given(form=st.sampled_from(sorted(ALL_FORMS)), cuts=st.lists(st.integers(0, 600), max_size=8))
def test_the_pieces_may_be_cut_anywhere(form: str, cuts: list[int]) -> None:
    """TCP knows no events: a usage may arrive in any number of pieces."""
    body = ALL_FORMS[form]
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(edges)]
    assert read(*pieces) == ReportedUsage(prompt_tokens=40, completion_tokens=3, cached_tokens=32)


def test_a_stream_with_a_usage_in_every_event_gives_the_last_one() -> None:
    """`continuous_usage_stats` counts up; only the end is true."""
    pieces = [
        delta("x", usage={"prompt_tokens": 9, "completion_tokens": count}) for count in (1, 2, 3)
    ]
    assert read(*pieces) == ReportedUsage(prompt_tokens=9, completion_tokens=3, cached_tokens=None)


def test_an_empty_usage_beside_a_real_one_does_not_hide_it() -> None:
    """Events that repeat parts of the answer may hold both."""
    assert (
        read(
            event({"response": {"output": [{"usage": None}], "usage": RESPONSES_USAGE}})
        ).cached_tokens
        == 32
    )


def test_a_stream_cut_before_its_last_line_end_still_counts_that_line() -> None:
    """Some servers close without a last blank line."""
    assert read(CHAT_STREAM[: CHAT_STREAM.index(b"\n\ndata: [DONE]")]).cached_tokens == 32


def test_an_answer_without_usage_says_nothing() -> None:
    """None is not zero: zero cached tokens would look like a wrong prediction."""
    assert read(b'{"choices": []}') == read(delta("a")) == read() == ReportedUsage(None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        '"usage":{"prompt_tokens":1}',
        '{"usage":{"prompt_tokens_details":{"cached_tokens":1}}}',
        'data: {"usage":{"prompt_tokens":1}}',
    ],
)
def test_a_usage_in_the_generated_text_is_not_believed(text: str) -> None:
    """A prompt could otherwise make the model spoil the metrics."""
    reader = UsageReader()
    reader.feed(delta(text) + delta("\n" + text))
    assert reader.usage() == ReportedUsage()
    assert (
        read(json.dumps({"choices": [{"text": text}], "usage": CHAT_USAGE}).encode()).prompt_tokens
        == 40
    )


def test_a_usage_inside_another_object_is_not_believed() -> None:
    """Answers echo what clients sent: metadata, tool schemas."""
    body = {
        "metadata": {"usage": {"prompt_tokens": 1}},
        "usage": CHAT_USAGE,
        "tools": [{"usage": {"prompt_tokens": 2}}],
    }
    assert read(json.dumps(body).encode()).prompt_tokens == 40
    assert read(event(body)).prompt_tokens == 40


@pytest.mark.parametrize("count", [-1, "7", 1.5, True, 2**63, None, [], {}])
def test_a_count_that_is_no_count_is_ignored(count: object) -> None:
    """A replica is not trusted to send numbers."""
    assert read(json.dumps({"usage": {"prompt_tokens": count}}).encode()).prompt_tokens is None


def test_the_usage_behind_a_body_of_megabytes_is_found_in_the_tail() -> None:
    """Embeddings are long; their usage is at the end."""
    numbers = ",".join(["0.25"] * 400_000)
    usage = '{"prompt_tokens":12,"total_tokens":12}'
    body = f'{{"data":[{{"embedding":[{numbers}]}}],"usage":{usage}}}'.encode()
    assert (
        read(*(body[start : start + 5000] for start in range(0, len(body), 5000))).prompt_tokens
        == 12
    )


def test_the_usage_behind_an_event_of_megabytes_is_found_in_the_tail() -> None:
    """`response.completed` repeats the whole output before its usage."""
    body = event({"response": {"output": "x" * 3_000_000, "usage": RESPONSES_USAGE}})
    for size in (1000, 100_000, len(body)):
        assert (
            read(*(body[start : start + size] for start in range(0, len(body), size))).cached_tokens
            == 32
        )


@pytest.mark.parametrize(
    "start", [b'{"a":"', b'data: {"a":"', b"data: ", b'"usage":{', b'data: "usage":']
)
def test_an_endless_line_is_kept_only_in_part(start: bytes) -> None:
    """A replica that never ends a line must not fill the router's memory."""
    capture = UsageCapture()
    capture.feed(start)
    for _ in range(100):
        capture.feed(b"x" * 50_000)
    _, *kept = capture.finish()
    assert len(kept[1]) + len(kept[2]) <= 3 * MAX_KEPT_BYTES
    reader = UsageReader()
    reader.take(*kept)
    assert reader.usage() == ReportedUsage()


def test_deep_nesting_behind_the_key_is_survived() -> None:
    """A hostile tail must not end in a RecursionError."""
    assert read(b'data: "usage":' + b'{"a":' * 10_000 + b"\n") == ReportedUsage()
    assert read(b'{"usage":' + b"[" * 30_000) == ReportedUsage()
    nested = b'"a":' + b"[" * 1500 + b"]" * 1500
    for whole in (b"{%b}", b"data: {%b}\n\n"):
        assert read(whole % (nested + b',"usage":{"prompt_tokens":3}')).prompt_tokens == 3
        assert read(whole % (b'"usage":{%b}' % nested)) == ReportedUsage()


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_survived(pieces: list[bytes]) -> None:
    """A body is whatever a replica sends."""
    reader = UsageReader()
    for piece in (b'data: {"usage":', *pieces):
        reader.feed(piece)
    reader.usage()


def test_data_events_are_counted_also_across_pieces_and_not_inside_text() -> None:
    """The count stands in for decoded tokens while a response is running."""
    reader = UsageReader()
    for piece in (
        delta("a"),
        delta("data: x\ndata: y") + delta("c"),
        b": ping\n\n",
        b"data: [DO",
        b"NE]\n\n",
    ):
        reader.feed(piece)
    assert reader.data_events == 4
