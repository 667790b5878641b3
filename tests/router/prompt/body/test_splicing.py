"""A body with another model's name, or without a field, is the same body otherwise, byte for
byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.body.splicing import with_changed, with_members, with_model, without_fields

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
SPACES = st.text(" \t\r\n", max_size=3)


def _name(member: tuple[str, Any]) -> str:
    return member[0]


@given(st.dictionaries(st.text(), VALUES), VALUES, st.text(), SPACES, st.booleans())
def test_only_the_name_changes(
    fields: dict[str, Any], before: Any, name: str, space: str, escapes: bool
) -> None:
    """Also a `model` that is deeper, in a text, or no string, and whatever else is there."""
    fields["model"] = before
    body = json.dumps(fields, ensure_ascii=escapes, separators=(f"{space},", f":{space}"))
    fields["model"] = name
    renamed = with_model(f"{space}{body}{space}".encode("utf-8", "surrogatepass"), name)
    assert json.loads(renamed.decode("utf-8", "surrogatepass")) == fields
    assert renamed.startswith(space.encode() + b"{")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a","prompt":"\\"model\\":"}', b'{"model":"new","prompt":"\\"model\\":"}'),
        (b'{"prompt": [1, 2],\n "model" : "a" }', b'{"prompt": [1, 2],\n "model" : "new" }'),
        (b'{"mod\\u0065l": "a", "n": 1.50}', b'{"mod\\u0065l": "new", "n": 1.50}'),
        (b'{"model": "a", "model": null}', b'{"model": "new", "model": "new"}'),
        (b'{"x": {"model": "a"}, "y": [{"model": 1}]}', None),
        (b'{"x":[[],{}],"model":"a\\\\"}', b'{"x":[[],{}],"model":"new"}'),
        (b"{}", None),
        (b"", None),
        (b'{"x": [1, 2', None),
        (b'{"x": "no end', None),
    ],
)
def test_what_it_looks_like(body: bytes, expected: bytes | None) -> None:
    """Nothing is decoded; what cannot be read is left for the engine to refuse."""
    assert with_model(body, "new") == (body if expected is None else expected)


def test_a_name_is_written_as_json() -> None:
    """An operator chose it; it may need escapes."""
    assert with_model(b'{"model": "a"}', 'q"\n') == b'{"model": "q\\"\\n"}'


@given(
    st.lists(st.tuples(st.sampled_from(["priority", "a", "b"]), VALUES), max_size=6),
    SPACES,
    st.booleans(),
)
def test_a_field_is_taken_out_and_nothing_else(
    members: list[tuple[str, Any]], space: str, escapes: bool
) -> None:
    """Wherever it stands, however often, and with any whitespace around it."""
    written = [
        f"{json.dumps(name)}{space}:{space}{json.dumps(value, ensure_ascii=escapes)}{space}"
        for name, value in members
    ]
    body = f"{space}{{{space}{f',{space}'.join(written)}}}{space}"
    left = without_fields(body.encode("utf-8", "surrogatepass"), "priority")
    found = json.loads(left.decode("utf-8", "surrogatepass"), object_pairs_hook=list)
    kept = [(name, value) for name, value in members if name != "priority"]
    assert [name for name, _ in found] == [name for name, _ in kept]
    assert dict(json.loads(left.decode("utf-8", "surrogatepass"))) == dict(kept)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"priority":1,"prompt":"a"}', b'{"prompt":"a"}'),
        (b'{"prompt": "a", "priority": -1 }', b'{"prompt": "a"}'),
        (b'{"priority": 1}', b"{}"),
        (b'{"priority": 1, "priority": 2}', b"{}"),
        (b'{"a": [1,  2], "pri\\u006frity": "5", "b": 1.50}', b'{"a": [1,  2],  "b": 1.50}'),
        (b'{"x": {"priority": 1}, "y": ["priority"]}', None),
    ],
)
def test_what_is_left_looks_as_before(body: bytes, expected: bytes | None) -> None:
    """Spaces, numbers and escapes of the others stay: an engine reads what its client wrote."""
    assert without_fields(body, "priority") == (body if expected is None else expected)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), VALUES), max_size=4, unique_by=_name),
    st.none() | st.dictionaries(st.sampled_from(["x", "keep"]), VALUES) | st.integers(),
    st.booleans(),
    SPACES,
)
def test_members_are_put_in_and_taken_out_again(
    others: list[tuple[str, Any]], before: Any, is_there: bool, space: str
) -> None:
    """Whatever else the field holds, and whatever stands around it."""
    fields = dict(others) | ({"params": before} if is_there else {})
    fields = fields or {"prompt": "a"}
    body = json.dumps(fields, ensure_ascii=False, separators=(f"{space},", f":{space}"))
    sent = with_members(body.encode("utf-8", "surrogatepass"), "params", b'{"new":[1,2]}')
    found = json.loads(sent.decode("utf-8", "surrogatepass"))
    if isinstance(before, int) and is_there:
        assert found == fields
        return
    assert found["params"] == {"new": [1, 2], **((before or {}) if is_there else {})}
    assert {**found, "params": 0} == {**fields, "params": 0}
    taken = with_changed(sent, {"params": lambda value: without_fields(value, "new")})
    left = json.loads(taken.decode("utf-8", "surrogatepass"))
    assert left["params"] == ((before or {}) if is_there else {})


def test_a_name_that_is_not_utf_8_is_passed_over() -> None:
    """Nothing reads it here, and the engine refuses it; it must not fail the router."""
    body = b'{"\xff\\n": 1, "a": 2, "model": "x"}'
    assert with_model(body, "y") == body.replace(b'"x"', b'"y"')
    assert without_fields(body, "a") == b'{"\xff\\n": 1,  "model": "x"}'
