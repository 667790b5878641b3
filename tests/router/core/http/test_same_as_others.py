"""What is read is what two other parsers read; `fuzz.py` does the same for millions of messages."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import _core as core
from tests.router.core.http.fuzz import BATCH, SIDES, Findings, Side, compare, run
from tests.router.core.http.messages import mutated
from tests.router.core.http.oracles import httptools_requests

TOKEN = st.text("abcXYZ019-_.!#$%&'*+^`|~", min_size=1, max_size=12).map(str.encode)
NAME = TOKEN.filter(
    lambda name: (
        name.lower()
        not in (b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade")
    )
)
TEXT = st.one_of(st.text(" \tabc,;:=\"'/()é", max_size=20).map(str.encode), st.binary(max_size=6))
TARGET = st.text("/abc?&=%20.-_~!#", max_size=20).map(lambda rest: b"/" + rest.encode())
METHOD = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"QUERY"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is nearly always right."""
    body = draw(st.binary(max_size=40))
    lines = [b"%b: %b" % field for field in draw(st.lists(st.tuples(NAME, TEXT), max_size=5))]
    if draw(st.booleans()):
        lines.append(b"Transfer-Encoding: chunked")
        cut = draw(st.integers(0, len(body)))
        body = b"".join(
            b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:cut], body[cut:]) if piece
        )
        body += b"0\r\n" + draw(st.sampled_from([b"", b"x: y\r\n"])) + b"\r\n"
    elif body:
        lines.append(b"Content-Length: %d" % len(body))
    lines.insert(draw(st.integers(0, len(lines))), b"Host: a")
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    first = b"%b %b HTTP/%b" % (draw(METHOD), draw(TARGET), version)
    return b"\r\n".join((first, *lines, b"", body))


def agree(side: Side, data: bytes) -> Findings:
    """Compare one input; the readers must agree."""
    findings = Findings()
    compare(side, data, findings)
    assert findings.disagreements == []
    return findings


@given(st.lists(requests(), min_size=1, max_size=3))
def test_whatever_all_accept_is_read_the_same(messages: list[bytes]) -> None:
    """Method, target, fields, body, and where it ends: a difference is a request that one of two
    servers does not see."""
    data = b"".join(messages)
    agree(SIDES[0], data)
    ours, _ = SIDES[0].ours(data)
    for _message, end in ours:
        # httptools does not say where a message ends; so it must end there, and not before.
        before = len(httptools_requests(data[: end - 1]))
        if len(httptools_requests(data[:end])) > before:
            continue
        assert b"pgrade" in data


@pytest.mark.parametrize("side", SIDES)
@given(st.integers(0, 2**32))
def test_nothing_is_accepted_that_both_others_refuse(side: Side, seed: int) -> None:
    """Mutated messages of real clients and engines."""
    random = Random(seed)
    message = random.choice(side.messages)
    agree(side, mutated(random, message, side.messages))


@pytest.mark.parametrize("side", SIDES)
def test_the_messages_themselves_are_accepted(side: Side) -> None:
    """Else the comparison would be one of refusals."""
    for message in side.messages:
        findings = agree(side, message)
        assert not findings.counts["then bad"]
        assert sum(findings.counts.values()) > findings.counts["then partial"]


@pytest.mark.parametrize("side", SIDES)
@given(st.integers(0, 2**32), st.integers(0, 400))
def test_a_verdict_stays_whatever_follows(side: Side, seed: int, size: int) -> None:
    """A head that is refused or whole when half of the next message is there must be so before."""
    random = Random(seed)
    data = mutated(random, random.choice(side.messages), side.messages)
    read: Any = core.read_request_head if side is SIDES[0] else core.read_response_head
    before = read(data[:size])
    assert before is None or read(data) == before


def test_some_thousand_inputs_of_the_fuzzer() -> None:
    """The program finds nothing, and its inputs are neither all right nor all wrong."""
    findings = run(3000, seed=BATCH)
    assert findings.disagreements == []
    assert findings.counts["the same as httptools"] > 500
    assert findings.counts["then bad"] > 500
    assert findings.counts["h11 asked"] > 10
