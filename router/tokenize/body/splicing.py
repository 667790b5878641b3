"""Fields of a JSON body, replaced or taken out. All other bytes stay: the body is neither decoded
nor encoded again, whatever it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*")
_MARK = re.compile(rb'["\[\]{}]')
_END = re.compile(rb"[,}]")


class _Member(NamedTuple):
    """One field of an object: where its name begins, and where its value begins and ends."""

    name_start: int
    value_start: int
    value_end: int


def with_model(body: bytes, name: str) -> bytes:
    """Return the body with another `model`; the same object if it names none.

    A name that appears twice is replaced twice: parsers disagree on which one counts.

    Args:
        body: A JSON object that was parsed before.
        name: The model's new name.
    """
    replacement = msgspec.json.encode(name)
    pieces, at = [], 0
    for _, start, end in _members(body, "model"):
        pieces += [body[at:start], replacement]
        at = end
    return b"".join([*pieces, body[at:]]) if pieces else body


def without_field(body: bytes, name: str) -> bytes:
    """Return the body without a field, however often it is there; the same object if it is not.

    Args:
        body: A JSON object that was parsed before.
        name: Of the field.
    """
    pieces, at, is_last = [], 0, False
    for start, _, end in _members(body, name):
        pieces.append(body[at:start])
        comma = _skip_space(body, end)
        is_last = body[comma : comma + 1] != b","
        at = end if is_last else comma + 1
    if not pieces:
        return body
    kept = b"".join(pieces)
    return (kept.rstrip().removesuffix(b",") if is_last else kept) + body[at:]


def _members(body: bytes, name: str) -> Iterator[_Member]:
    """Where a field of the outermost object stands."""
    plain = b'"%b"' % name.encode()
    at = body.find(b"{") + 1
    while at:
        at = _skip_space(body, at)
        key = _STRING.match(body, at)
        if key is None:
            return
        start = _skip_space(body, _skip_space(body, key.end()) + 1)
        end = _value_end(body, start)
        if key[0] == plain or (b"\\" in key[0] and json.loads(key[0]) == name):
            yield _Member(at, start, end)
        at = body.find(b",", end) + 1


def _skip_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    return at if found is None else found.end()


def _value_end(body: bytes, start: int) -> int:
    """Behind the value that begins at *start*."""
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
