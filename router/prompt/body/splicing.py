"""Fields of a JSON body, replaced or taken out. All other bytes stay: the body, an object that was
parsed before, is neither decoded nor encoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*")
_MARK = re.compile(rb'["\[\]{}]')
_END = re.compile(rb"[,}]")
Change: TypeAlias = Callable[[bytes], bytes]
"""Makes a field's new value of the old one, both as JSON; the same object leaves it."""


class _Member(NamedTuple):
    """One field of an object: where its name begins, and where its value begins and ends."""

    name: str
    name_start: int
    value_start: int
    value_end: int


def with_model(body: bytes, name: str) -> bytes:
    """Return the body with another `model`; the same object if it names none.

    A name that appears twice is replaced twice: parsers disagree on which one counts.
    """
    replacement = msgspec.json.encode(name)
    return with_changed(body, {"model": lambda _: replacement})


def with_changed(body: bytes, changes: Mapping[str, Change]) -> bytes:
    """Return the body with other values of some fields, wherever they are; the same object if none
    has changed.

    Args:
        changes: By the field's name. The body is searched once for all of them.
    """
    pieces, at = [], 0
    for name, _, start, end in _members(body, *changes):
        value = body[start:end]
        if (changed := changes[name](value)) is not value:
            pieces += [body[at:start], changed]
            at = end
    return b"".join([*pieces, body[at:]]) if pieces else body


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """Return the body with a field, in place of any that it has of that name.

    Args:
        body: A JSON object that was parsed before, and is not empty.
        value: As JSON.
    """
    if next(_members(body, name), None) is not None:
        return with_changed(body, {name: lambda _: value})
    return _with_first(body, name, value)


def without_fields(body: bytes, *names: str) -> bytes:
    """Return the body without some fields, however often they are there; the same object if they
    are not."""
    pieces, at, is_last = [], 0, False
    for _, start, _, end in _members(body, *names):
        pieces.append(body[at:start])
        comma = _skip_space(body, end)
        is_last = body[comma : comma + 1] != b","
        at = end if is_last else comma + 1
    if not pieces:
        return body
    kept = b"".join(pieces)
    return (kept.rstrip().removesuffix(b",") if is_last else kept) + body[at:]


def with_members(body: bytes, name: str, members: bytes) -> bytes:
    """Return the body with more members in a field that is an object. It is made where it is not
    there or null; a value of another kind stays, for the engine to refuse.

    Args:
        body: A JSON object that was parsed before, and is not empty.
        name: The field's; every one of that name gets them.
        members: A JSON object that is not empty, of names that the field does not have.
    """
    if next(_members(body, name), None) is not None:
        return with_changed(body, {name: lambda value: _merged(value, members)})
    return _with_first(body, name, members)


def _with_first(body: bytes, name: str, value: bytes) -> bytes:
    start = body.find(b"{") + 1
    return b'%b"%b":%b,%b' % (body[:start], name.encode(), value, body[start:])


def _merged(value: bytes, members: bytes) -> bytes:
    if value.rstrip() == b"null":
        return members
    if not value.startswith(b"{"):
        return value
    is_empty = value[_skip_space(value, 1) :].startswith(b"}")
    return members if is_empty else members[:-1] + b"," + value[1:]


def _members(body: bytes, *names: str) -> Iterator[_Member]:
    """Yield the places of some fields of the outermost object."""
    plain = {b'"%b"' % name.encode(): name for name in names}
    at = body.find(b"{") + 1
    while at:
        at = _skip_space(body, at)
        key = _STRING.match(body, at)
        if key is None:
            return
        start = _skip_space(body, _skip_space(body, key.end()) + 1)
        end = _value_end(body, start)
        name = _unescaped(key[0]) if b"\\" in key[0] else plain.get(key[0])
        if name in names:
            yield _Member(name, at, start, end)
        at = body.find(b",", end) + 1


def _unescaped(key: bytes) -> str | None:
    """Return a name; None for one that is not UTF-8, which a parser may skip unread."""
    try:
        return str(json.loads(key))
    except UnicodeDecodeError:
        return None


def _skip_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    return at if found is None else found.end()


def _value_end(body: bytes, start: int) -> int:
    """Return the position behind the value that begins at *start*."""
    string = _STRING.match(body, start)
    if string is not None:
        return string.end()
    if body[start : start + 1] not in (b"[", b"{"):
        found = _END.search(body, start)
        return len(body.rstrip()) if found is None else found.start()
    close = body.find(b"]", start) if body[start : start + 1] == b"[" else -1
    if close > 0 and not any(body.find(mark, start + 1, close) >= 0 for mark in (b'"', b"[", b"{")):
        return close + 1  # a list of numbers, which may be long
    depth, at = 0, start
    while (mark := _MARK.search(body, at)) is not None:
        if mark[0] == b'"':
            string = _STRING.match(body, mark.start())
            if string is None:
                break
            at = string.end()
            continue
        depth += 1 if mark[0] in b"[{" else -1
        at = mark.end()
        if not depth:
            return at
    return len(body)
