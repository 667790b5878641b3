"""Files and their changes; YAML text to plain data, and pydantic's errors to ours.

A key that appears twice is an error, where YAML would let the last one win. Every problem is
reported with its path, its value unless that is secret, and the rule it breaks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.config.section import RULE, Location
from router.errors import ConfigError, ConfigProblem

MAX_BYTES = 4 * 1024 * 1024
"""A longer configuration is some other file."""

_MERGE_TAG = "tag:yaml.org,2002:merge"
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")
_EXPECTED = {
    "model_type": "expected a mapping",
    "dataclass_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
}


# --- files ----------------------------------------------------------------------------------------

Stamp = tuple[int, int, int]
"""Stands for a file's content without reading it: a change changes one of the numbers. Links are
followed, so a mounted ConfigMap that changes is noticed as well."""


def stamp_of(path: Path) -> Stamp | None:
    """Return the time, size and identity of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_text(path: Path) -> str:
    """Return the content of a configuration file, or enough of it to show that it is too long.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(
            [ConfigProblem(str(path), f"cannot be read: {error.strerror}")]
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError([ConfigProblem(str(path), f"byte {error.start} is not UTF-8")]) from None


# --- text to data ---------------------------------------------------------------------------------


def parse_document(text: str) -> object:
    """Return the document in *text*; None if it is empty.

    Raises:
        ConfigError: *text* is not YAML, or a mapping has a key twice. The message names the place,
            and quotes only the key.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(
            [ConfigProblem("", f"{len(text)} characters; a configuration has at most {MAX_BYTES}")]
        )
    try:
        return yaml.load(text, _Loader)  # a subclass of SafeLoader  # nosec B506
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            [ConfigProblem(_position(error.problem_mark), error.problem or "is not YAML")]
        ) from None
    # Invalid dates raise ValueError, deep nesting RecursionError, values that are not of their tag
    # the others.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ConfigError([ConfigProblem("", f"is not YAML: {type(error).__name__}")]) from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which by itself takes the last of several equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = None if key_node.tag == _MERGE_TAG else self.construct_object(key_node, deep=True)
            if key is None or not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _position(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"


# --- errors to problems ---------------------------------------------------------------------------


def problems_in(error: ValidationError, kind: type, root: str = "") -> list[ConfigProblem]:
    """Return every problem in the document, in the order of the model's fields.

    Unknown keys come before the other problems of their mapping: they are the likely cause.

    Args:
        kind: The model of the whole document, searched for the intended keys.
        root: The path of the document itself.
    """
    details = error.errors(include_url=False)
    return [
        ConfigProblem(_place(root, each["loc"]), _text(each, kind))
        for each in _unknown_keys_first(details)
    ]


def _unknown_keys_first(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Sort as a tree whose branches stay in their order, except that unknown keys lead theirs."""
    first: dict[Location, int] = {}
    for index, each in enumerate(details):
        for depth in range(len(each["loc"])):
            first.setdefault(each["loc"][: depth + 1], index)

    def order(each: ErrorDetails) -> list[int]:
        path = [first[each["loc"][: depth + 1]] for depth in range(len(each["loc"]))]
        return [*path[:-1], -1] if each["type"] in _UNKNOWN_KEY else path

    return sorted(details, key=order)


def _place(root: str, loc: Location) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:100]}" for step in loc)
    return (root + "".join(steps)).removeprefix(".")


def _text(each: ErrorDetails, kind: type) -> str:
    """Return the value and the rule, the latter in pydantic's words unless ours are better."""
    if each["type"] == RULE:
        return each["msg"]
    if each["type"] == "missing":
        return "is missing"
    if each["type"] in _UNKNOWN_KEY:
        return f"unknown key; {_hint(str(each['loc'][-1]), _known_keys(kind, each['loc'][:-1]))}"
    rule = _EXPECTED.get(each["type"]) or re.sub(r"^\w+ should ", "must ", each["msg"])
    return f"{_shown(each['input'])}; {rule}"


def _hint(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, 1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


def _known_keys(kind: Any, loc: Location) -> list[str]:
    """Return the keys of the mapping at *loc*, in a document of the model *kind*."""
    for step in loc:
        if isinstance(step, str):
            kind = _model_in(kind.__pydantic_fields__[step].annotation)
    return list(kind.__pydantic_fields__)


def _model_in(annotation: Any) -> Any:
    """Return the model that a field of this type holds: `X` in `tuple[X, ...] | None`."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _shown(data: object) -> str:
    """Return a value in a message: a bounded scalar; collections by type and size."""
    if isinstance(data, dict):
        return f"a mapping of {len(data)}"
    if isinstance(data, list):
        return f"a list of {len(data)}"
    if data is None:
        return "null"
    text = repr(data)
    return text if len(text) <= 100 else text[:97] + "..."
