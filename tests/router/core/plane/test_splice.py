"""Fields of a body, replaced in the core as in Python."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.body.splicing import with_field, with_model

NAMES = st.one_of(st.sampled_from(["model", "prompt", "m"]), st.text(max_size=5))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Objects with spaces anywhere, and names that appear twice."""
    space = st.text(" \n\t\r", max_size=2)
    fields = draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    escaped = draw(st.booleans())
    parts = [
        f"{draw(space)}{json.dumps(name, ensure_ascii=escaped)}{draw(space)}:{draw(space)}"
        f"{json.dumps(value, ensure_ascii=escaped)}{draw(space)}"
        for name, value in fields
    ]
    return (draw(space) + "{" + ",".join(parts) + "}" + draw(space)).encode()


@given(bodies(), st.text(max_size=6))
def test_a_model_is_renamed_as_in_python(body: bytes, name: str) -> None:
    """The engine reads the name that it knows, and every other byte as the client sent it."""
    core = pytest.importorskip("router._core")
    found = core.with_model(body, name)
    if found is not None:
        assert _fields(found) == _fields(with_model(body, name))


@given(bodies(), st.sampled_from(["model", "m", "priority"]), st.integers(-(2**62), 2**62))
def test_a_field_is_set_as_in_python(body: bytes, name: str, number: int) -> None:
    """Engines that order by it must find it once, or as often as the client wrote it."""
    core = pytest.importorskip("router._core")
    value = b"%d" % number
    found = core.with_field(body, name, value)
    if found is not None and _fields(body):
        assert _fields(found) == _fields(with_field(body, name, value))


def _fields(body: bytes) -> list[tuple[str, Any]]:
    """All of them, in their order."""
    return json.loads(body, object_pairs_hook=list)  # type: ignore[no-any-return]


def test_a_name_in_escapes_is_left_to_who_reads_it() -> None:
    """It may be the model's."""
    core = pytest.importorskip("router._core")
    assert core.with_model(b'{"\\u006dodel": "a", "model": "b"}', "c") is None
