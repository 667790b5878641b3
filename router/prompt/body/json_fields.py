"""Reading values of a parsed body, with errors that name the place, a JSON path, and the rule but
never the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import BadRequest
from router.prompt.errors import describe
from router.prompt.limits import MAX_MESSAGES, MAX_NESTING, MAX_VALUES

_ENCODER = msgspec.json.Encoder()
_COUNT = re.compile(r"\s*\+?([0-9]{1,15})(?:\.0+)?\s*")


def encode_json(value: object) -> bytes:
    """Encode as JSON; raises MemoryError where there is no memory for it.

    `msgspec.json.encode` crashes the process (0.22) where it finds no room for a long string; into
    a buffer it raises.
    """
    buffer = bytearray()
    _ENCODER.encode_into(value, buffer)
    return bytes(buffer)


def required(fields: Mapping[str, Any], name: str, place: str, rule: str) -> Any:
    """Return a field that must be present and not null.

    Raises:
        BadRequest: It is missing or null.
    """
    value = fields.get(name)
    if value is None:
        found = "null" if name in fields else "missing"
        raise BadRequest(f"{place}.{name}", found, rule)
    return value


def optional_text(
    fields: Mapping[str, Any], name: str, place: str, max_chars: int | None = None
) -> str | None:
    """Return a string field; None if it is absent or null.

    Args:
        max_chars: Longest string allowed; None sets no bound.
    Raises:
        BadRequest: It is not a string, or is too long.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name}", describe(value), "must be a string")
    if max_chars is not None and len(value) > max_chars:
        raise BadRequest(
            f"{place}.{name}", describe(value), f"must have at most {max_chars} characters"
        )
    return value


def optional_object(fields: Mapping[str, Any], name: str, place: str) -> dict[str, Any] | None:
    """Return an object field; None if it is absent or null.

    Raises:
        BadRequest: It is not an object.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{place}.{name}", describe(value), "must be an object")
    return value


def object_list(value: object, place: str) -> list[dict[str, Any]]:
    """Check that a value is a list of objects within the bounds, and return it.

    Raises:
        BadRequest: It is not such a list.
    """
    if not isinstance(value, list):
        raise BadRequest(place, describe(value), "must be a list of objects")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(place, describe(value), f"must have at most {MAX_MESSAGES} items")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequest(f"{place}[{index}]", describe(item), "must be an object")
    check_shape(value, place)
    return value


def check_shape(value: object, place: str) -> None:
    """Refuse a value that is nested too deep or holds too many values.

    Templates and JSON encoders recurse over what a client sends, and every value costs a look or
    two in the event loop; both must be known before they start.

    Raises:
        BadRequest: A bound is exceeded.
    """
    level, left = [value], MAX_VALUES
    for _ in range(MAX_NESTING + 2):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return
        left -= sum(map(len, containers))
        if left < 0:
            raise BadRequest(place, "too many values", f"at most {MAX_VALUES} values are allowed")
        level = [
            child
            for item in containers
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    rule = f"at most {MAX_NESTING} levels of objects and lists are allowed"
    raise BadRequest(place, "nested too deep", rule)


def check_int64(value: object, place: str) -> None:
    """Refuse a number that has no room in 64 bits: some engines answer it with 500. Other values
    are left to the engine.

    Args:
        value: A number, or the text of one.
    Raises:
        BadRequest: It is out of range.
    """
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return
    if isinstance(value, (int, float)) and not -(2**63) <= value < 2**63:
        found = f"{value:g}" if isinstance(value, float) else f"{value.bit_length()} bits"
        raise BadRequest(place, found, "must be an integer of 64 bits, from -2^63 to 2^63-1")


def is_true(value: object) -> bool:
    """Read a flag the lenient way an engine does: `true`, 1 and `"true"` alike."""
    return (
        value is True
        or value == 1
        or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))
    )


def as_count(value: object) -> int | None:
    """Read a count that only informs the router; None unless it is a whole number >= 0, or the text
    of one, as pydantic takes it.

    The engine refuses what is wrong with it.
    """
    if isinstance(value, str):
        found = _COUNT.fullmatch(value)
        return int(found[1]) if found else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if 0 <= value < 2**53 and float(value).is_integer() else None
