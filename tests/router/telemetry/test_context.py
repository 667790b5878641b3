"""W3C Trace Context: what is valid goes on as it came, and nothing else goes anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.telemetry.trace_context import MAX_STATE_BYTES, TraceContext, read_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()


def read(*parents: bytes, state: tuple[bytes, ...] = ()) -> TraceContext | None:
    headers = [(b"traceparent", parent) for parent in parents]
    return read_context([*headers, *((b"tracestate", each) for each in state)])


def test_a_valid_parent_is_read_and_goes_on_unchanged() -> None:
    """The standard's own example."""
    found = read(PARENT, state=(b"congo=t61rcWkgMzE",))
    assert found == TraceContext(TRACE, SPAN, True, PARENT, b"congo=t61rcWkgMzE")
    assert found.headers() == ((b"traceparent", PARENT), (b"tracestate", b"congo=t61rcWkgMzE"))
    assert read_context([]) is None


@pytest.mark.parametrize("flags", [b"00", b"02", b"fe"])
def test_only_the_first_flag_says_that_the_sender_recorded(flags: bytes) -> None:
    """Others may come with a later version of the standard."""
    found = read(PARENT[:-2] + flags)
    assert found is not None
    assert not found.is_sampled


def test_a_later_version_may_say_more() -> None:
    """3.2.4: what is known is read, what is not known is passed on."""
    for later in (b"01" + PARENT[2:], b"cc" + PARENT[2:] + b"-what-else"):
        found = read(later)
        assert found is not None
        assert found.trace_id == TRACE
        assert found.headers() == ((b"traceparent", later),)


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        PARENT[:-1],
        PARENT + b"-more",
        PARENT + b"\n",
        b" " + PARENT,
        PARENT.upper(),
        b"ff" + PARENT[2:],
        PARENT.replace(TRACE.encode(), b"0" * 32),
        PARENT.replace(SPAN.encode(), b"0" * 16),
        PARENT.replace(b"-", b"_"),
        b"cc" + PARENT[2:] + b"-" + b"x" * 65,
        b"cc" + PARENT[2:] + b"-\x1b[31m",
        b"\xff" * 55,
        b"0" * 60_000,
    ],
)
def test_what_is_no_parent_is_as_if_it_had_not_been_sent(parent: bytes) -> None:
    """It would otherwise stand in logs and reach replicas; its state belongs to nothing then."""
    assert read(parent, state=(b"a=1",)) is None


def test_two_parents_are_none() -> None:
    """It is not known which is true."""
    assert read(PARENT, PARENT) is None


@pytest.mark.parametrize(
    ("state", "passed_on"),
    [
        ((b"a=1,b=2",), b"a=1,b=2"),
        ((b"a=1", b"b=2"), b"a=1,b=2"),
        ((b"a=1 ,\t b=2",), b"a=1,b=2"),
        ((b"fw529a3039@dt=FfwAAAA", b""), b"fw529a3039@dt=FfwAAAA"),
        ((b"a=" + b"x" * 256,), b"a=" + b"x" * 256),
        ((b"a=" + b"x" * 257,), b""),
        ((b",".join(b"k%d=1" % number for number in range(33)),), b""),
        ((b"a=" + b"x" * 250, b"b=" + b"x" * 250, b"c=" + b"x" * 20), b""),
        ((b"a=\x00",), b""),
        ((b"A=1",), b""),
        ((b"a",), b""),
        ((b"a=1=2",), b""),
    ],
)
def test_a_state_goes_on_whole_or_not_at_all(state: tuple[bytes, ...], passed_on: bytes) -> None:
    """Half a list would say something that nobody said. The trace goes on without it."""
    found = read(PARENT, state=state)
    assert found is not None
    assert found.state == passed_on


@given(st.binary(max_size=200), st.lists(st.binary(max_size=300), max_size=4))
def test_nothing_unprintable_or_long_comes_out(parent: bytes, states: list[bytes]) -> None:
    """Whatever is sent."""
    for given_parent in (parent, PARENT):
        found = read(given_parent, state=tuple(states))
        if found is not None:
            sent = b"".join(value for _, value in found.headers())
            assert sent.decode("ascii").isprintable()
            assert len(sent) <= MAX_STATE_BYTES + 121
