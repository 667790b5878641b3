"""Plain data to checked structs, with every problem found and not only the first.

`msgspec.convert` stops at the first problem, so it is asked for one scalar at a time; this file
walks the structs around them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from router.config.secret import Secret
from router.errors import Problem

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# What may stand in a header's value without quoting: visible ASCII (RFC 9110 5.5).
_KEY = re.compile(r"[\x21-\x7e]{1,4096}\Z")
_TYPE = re.compile(r"`([a-z]+)`")
_AT = re.compile(r" - at `\$(.*)`\Z")

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in the configuration."""

    @classmethod
    def flaw_in(cls, name: str, value: object) -> str | None:  # noqa: ARG003
        """What is wrong with *value*, of the right type, for the field *name*; None if nothing
        is."""
        return None

    def problems(self) -> Iterator[Problem]:
        """What contradicts inside, when each value by itself is right; places are relative to this
        section."""
        yield from ()


class Reader:
    """Reads one document.

    Args:
        environ: Where `${NAME}` in place of a secret is looked up; None where the data may not name
            variables.
    """

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        self._environ = environ
        self.problems: list[Problem] = []
        self.found: list[tuple[str, msgspec.Struct]] = []
        """Every struct that was read without a problem, with its path: what checks across sections
        look at."""

    def read(self, kind: type[StructT], data: object, path: str = "") -> StructT | None:
        """*data* as a *kind*; None if there was a problem, which is then in `problems`."""
        if not isinstance(data, dict):
            self._reject(path, f"{shown(data)}; expected a mapping")
            return None
        before = len(self.problems)
        self._reject_unknown_keys(kind, data, path)
        values = dict(self._fields(kind, data, path))
        return self._build(kind, values, path) if len(self.problems) == before else None

    def _build(self, kind: type[StructT], values: dict[str, Any], path: str) -> StructT | None:
        struct = kind(**values)
        own = list(struct.problems()) if isinstance(struct, Section) else []
        for place, text in own:
            self._reject(join(path, place), text)
        if own:
            return None
        self.found.append((path, struct))
        return struct

    def _fields(
        self, kind: type[msgspec.Struct], data: dict[Any, Any], path: str
    ) -> Iterator[tuple[str, Any]]:
        for field in msgspec.structs.fields(kind):
            place = join(path, field.encode_name)
            # A section whose lines are all commented out is null in YAML.
            if field.encode_name not in data or (
                data[field.encode_name] is None and _struct_in(field.type)
            ):
                if field.required:
                    self._reject(place, "is missing")
                continue
            before = len(self.problems)
            value = self._value(field.type, data[field.encode_name], place)
            if len(self.problems) == before and issubclass(kind, Section):
                self._reject_flaw(place, kind.flaw_in(field.name, value))
            yield field.name, value

    def _value(self, kind: Any, data: object, path: str) -> Any:
        options = _options(kind)
        if data is None and type(None) in options:
            return None
        struct = _struct_in(kind)
        if struct is not None:
            return self.read(struct, data, path)
        if Secret in options:
            return self._secret(data, path)
        items = next(
            (get_args(option)[0] for option in options if get_origin(option) is tuple), None
        )
        return self._scalar(kind, data, path) if items is None else self._items(items, data, path)

    def _items(self, kind: Any, data: object, path: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            self._reject(path, f"{shown(data)}; expected a list")
            return ()
        return tuple(self._value(kind, item, f"{path}[{index}]") for index, item in enumerate(data))

    def _scalar(self, kind: Any, data: object, path: str) -> Any:
        if isinstance(data, str) and _REFERENCE.search(data):
            self._reject(path, "holds a ${...}; environment variables are for API keys only")
            return None
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            rule, below = _rule(str(error))
            self._reject(path + below, f"{shown(data)}; {rule}")
            return None

    def _secret(self, data: object, path: str) -> Secret | None:
        """A key, or the `${NAME}` of the variable that holds it. Neither the key nor what looks
        like one is ever repeated."""
        if not isinstance(data, str):
            self._reject(path, f"a {type(data).__name__}; expected a key or ${{NAME}} in quotes")
            return None
        reference = _REFERENCE.fullmatch(data)
        value = data if reference is None else self._variable(reference[1], path)
        if value is None:
            return None
        if not _KEY.match(value) or (reference is None and _REFERENCE.search(value)):
            self._reject(
                path,
                "not shown; a key is 1 to 4096 visible ASCII characters, or ${NAME} and nothing around it",
            )
            return None
        return Secret(value)

    def _variable(self, name: str, path: str) -> str | None:
        if self._environ is None:
            self._reject(
                path, "a ${...}; environment variables can be named in the configuration file only"
            )
            return None
        if not _NAME.match(name):
            # It may be the key itself, put into the braces by mistake.
            self._reject(
                path, "not shown; between the braces stands the name of an environment variable"
            )
            return None
        value = self._environ.get(name)
        if not value:
            self._reject(path, f"${{{name[:100]}}}; this environment variable is not set, or empty")
        return value or None

    def _reject_unknown_keys(
        self, kind: type[msgspec.Struct], data: dict[Any, Any], path: str
    ) -> None:
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
                self._reject(join(path, str(key)[:100]), f"unknown key; {hint}")

    def _reject_flaw(self, path: str, flaw: str | None) -> None:
        if flaw is not None:
            self._reject(path, flaw)

    def _reject(self, path: str, text: str) -> None:
        self.problems.append(Problem(path, text))


def join(path: str, name: str) -> str:
    """The place called *name* below *path*."""
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def shown(data: object) -> str:
    """A value in a message: scalars as they are, bounded; what is larger by its type and size."""
    if isinstance(data, dict):
        return f"a mapping of {len(data)}"
    if isinstance(data, list):
        return f"a list of {len(data)}"
    if data is None:
        return "null"
    text = repr(data)
    return text if len(text) <= 100 else text[:97] + "..."


def _options(kind: Any) -> tuple[Any, ...]:
    """What *kind* may be, if it is a union; else itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _rule(message: str) -> tuple[str, str]:
    """msgspec's words as a rule, and the path below the value that they speak of."""
    at = _AT.search(message)
    text = message[: at.start()] if at else message
    return _TYPE.sub(r"\1", text).replace("Expected", "expected", 1), at[1] if at else ""
