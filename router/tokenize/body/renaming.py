"""Another model's name in a JSON body. All other bytes stay: the body is neither decoded nor
encoded again, whatever it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*")
_MARK = re.compile(rb'["\[\]{}]')
_END = re.compile(rb"[,}]")
_MODEL = b'"model"'


def with_model(body: bytes, name: str) -> bytes:
    """Return the body with another `model`; the same object if it names none.

    A name that appears twice is replaced twice: parsers disagree on which one counts.

    Args:
        body: A JSON object that was parsed before.
        name: The model's new name.
    """
    replacement = msgspec.json.encode(name)
    pieces, at = [], 0
    for start, end in _spans(body):
        pieces += [body[at:start], replacement]
        at = end
    return b"".join([*pieces, body[at:]]) if pieces else body


def _spans(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the values of `model` begin and end, of the outermost object."""
    at = body.find(b"{") + 1
    while at:
        key = _STRING.match(body, _skip_space(body, at))
        if key is None:
            return
        start = _skip_space(body, _skip_space(body, key.end()) + 1)
        end = _value_end(body, start)
        if _is_model(key[0]):
            yield start, end
        at = body.find(b",", end) + 1


def _is_model(key: bytes) -> bool:
    return key == _MODEL or (b"\\" in key and json.loads(key) == "model")


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
