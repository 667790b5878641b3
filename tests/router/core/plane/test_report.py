"""What the core notes of a gateway's report: nothing that Python would refuse."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.doors.http.request_bodies import OutputReport, ReservationEnd
from router.doors.http.selection import report_usage
from router.plane.usage import ReportedUsage, UsageReader

ID = "0123456789abcdef" * 2
COUNTS = st.one_of(
    st.integers(-2, 700), st.integers(2**39, 2**41), st.none(), st.booleans(), st.floats(0, 9)
)
DETAILS = st.one_of(
    st.none(), st.dictionaries(st.sampled_from(["cached_tokens", "audio"]), COUNTS, max_size=2)
)
USAGES = st.one_of(
    COUNTS,
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_tokens": COUNTS,
            "completion_tokens": COUNTS,
            "prompt_tokens_details": st.one_of(DETAILS, COUNTS),
            "input_tokens_details": DETAILS,
            "another": COUNTS,
        },
    ),
)
REPORTS = st.fixed_dictionaries(
    {},
    optional={
        "tokens": COUNTS,
        "cached_tokens": COUNTS,
        "usage": USAGES,
        "status": st.one_of(COUNTS, st.sampled_from([99, 100, 200, 503, 599, 600])),
        "outcome": st.sampled_from(["completed", "client_left", "failed", "lost", ""]),
        "failure": st.sampled_from(["connect", "closed", "late", "unavailable"]),
        "more": COUNTS,
    },
)


PROMPT_TOKENS = 1000


def noted(method: str, path: str, body: bytes) -> tuple[bool, bool, int, bytes] | None:
    """Whether it has begun, is whole, tokens, and the engine's report."""
    read: Any = import_module("router._core").read_report
    found: tuple[bool, bool, int, bytes] | None = read(method, path.encode(), body, PROMPT_TOKENS)
    return found


class Reported:
    """Takes what Python makes of a report; the rest of a reservation does not matter here."""

    observer = SimpleNamespace(request=SimpleNamespace(prompt_tokens=PROMPT_TOKENS))
    usage = b""

    def report(self, usage: bytes) -> None:
        self.usage = usage


def usage_of(body: bytes) -> ReportedUsage:
    reader = UsageReader()
    reader.take(True, body, b"")
    return reader.usage()


@given(REPORTS, st.sampled_from([None, 0, 2]), st.booleans())
def test_what_the_core_notes_is_what_python_reads(
    report: dict[str, Any], indent: int | None, is_end: bool
) -> None:
    """A report that is wrong must be refused, by whoever reads it."""
    body = json.dumps(report, indent=indent).encode()
    path = f"/reservations/{ID}" if is_end else f"/reservations/{ID}/output"
    found = noted("DELETE" if is_end else "POST", path, body)
    if found is None:
        return
    has_begun, is_whole, tokens, usage = found
    kind = ReservationEnd if is_end else OutputReport
    read = msgspec.json.decode(body, type=kind)
    is_completed = isinstance(read, ReservationEnd) and read.outcome == "completed"
    assert has_begun == (not is_end or is_completed or read.tokens > 0)
    assert tokens == read.tokens
    if isinstance(read, ReservationEnd):
        is_usual = read.failure is None and read.status in (None, 200)
        assert is_whole == (is_completed and is_usual)
    reported: Any = Reported()
    report_usage(reported, read)
    assert usage_of(usage) == usage_of(reported.usage)


@pytest.mark.parametrize(
    ("body", "begun"),
    [
        (b"", True),
        (b" \n", True),
        (b"{}", True),
        (b'{"outcome": "client_left"}', False),
        (b'{"outcome": "failed", "failure": "connect", "status": 503}', False),
        (b'{"outcome": "client_left", "tokens": 3}', True),
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}', True),
    ],
)
def test_usual_reports_are_noted(body: bytes, begun: bool) -> None:
    """Gateways send one for every request."""
    found = noted("DELETE", f"/reservations/{ID}", body)
    assert found is not None
    assert found[0] is begun


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/reservations/{ID}"),
        ("POST", f"/reservations/{ID}"),
        ("DELETE", f"/reservations/{ID}/output"),
        ("DELETE", f"/reservations/{ID}?x=1"),
        ("DELETE", "/reservations/"),
        ("DELETE", "/reservations/a%20b"),
        ("DELETE", f"/reservations/{'a' * 129}"),
        ("POST", f"/reservations/{ID}/output/"),
        ("POST", f"/reservations/{ID}/prefill"),
    ],
)
def test_what_is_no_report_of_a_reservation_is_left_alone(method: str, path: str) -> None:
    """Others are Python's to answer."""
    assert noted(method, path, b"") is None


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"{", b'"x"', b'{"tokens": 1,}', b"{}x", b"\xff", b"1"),
        *(b'{"\\\x00": 1}', b'{"usage": {"\\\x00": 1}}', b'{"tokens\x00": 1}'),
    ],
)
def test_what_is_no_object_is_left_to_python(body: bytes) -> None:
    """It says what is wrong."""
    assert noted("DELETE", f"/reservations/{ID}", body) is None
