"""YAML text to plain data: dictionaries, lists and scalars. A key that stands twice is an error,
not the last one's victory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from router.errors import ConfigError, Problem

MAX_BYTES = 4 * 1024 * 1024
"""A configuration longer than this is some other file."""

_MERGE_TAG = "tag:yaml.org,2002:merge"


def parse_document(text: str) -> object:
    """The document in *text*; None if it is empty.

    Raises:
        ConfigError: It is no YAML, or one mapping has a key twice. The message says where, and
            quotes nothing of the text.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(
            [Problem("", f"{len(text)} characters; a configuration has at most {MAX_BYTES}")]
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            [Problem(_place(error.problem_mark), error.problem or "is no YAML")]
        ) from None
    # Dates that are none raise ValueError, and too many brackets a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("", f"is no YAML: {type(error).__name__}")]) from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which would take the last of several equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = None if key_node.tag == _MERGE_TAG else self.construct_object(key_node, deep=True)
            if key is None or not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
