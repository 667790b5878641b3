"""A minimal PromQL reader: which metrics, labels and values does an expression use?"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?!\s*\()\b(?!\s*\()")
_WORDS = frozenset(("and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"))


@dataclass(frozen=True)
class Asked:
    """What an expression uses."""

    matchers: tuple[tuple[str, str, str], ...]
    """Metric, label, value; the alternatives of a pattern one by one."""
    metrics: frozenset[str]
    grouping: frozenset[str]
    """Labels by which it groups or joins."""


def asked_by(expression: str) -> Asked:
    """Read *expression*, in which no label value may contain a brace."""
    grouping = {
        label.strip()
        for found in _GROUPING.findall(expression)
        for label in found.split(",")
        if label.strip()
    }
    rest = _RANGE.sub("", _GROUPING.sub("", expression))
    selectors = _SELECTOR.findall(rest)
    matchers = [
        (metric, label, value)
        for metric, inside in selectors
        for label, values in _MATCHER.findall(inside)
        for value in values.split("|")
    ]
    bare = {
        name
        for name in _NAME.findall(_SELECTOR.sub("", rest))
        if name not in _WORDS and not re.match(r"e\d|\d", name)
    }
    return Asked(
        tuple(matchers), frozenset(bare | {metric for metric, _ in selectors}), frozenset(grouping)
    )
